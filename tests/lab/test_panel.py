"""Sandboxes steered from the side panel, and a page whose kernel goes away, in Chromium on real gVisor.

One server and one page serve all tests, which follow one another as a person's work does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, WebSocketRoute, expect
from support.harness import Env
from support.lab import BANNER, STATUS, Lab, kernelspec

pytestmark = pytest.mark.timeout(900)

#: Seconds after which kernels of one kernelspec are taken for idle.
IDLE = 8
CULL = ("idle_timeout=3600", "interval=1", "connected=True")
#: What the page's own server is asked for is not slowed down below this, in bytes a second.
SLOW = 2 * 2**20
#: A picture of 3 by 2 points.
PICTURE = (
    "import base64; open('point.png', 'wb').write(base64.b64decode("
    "'iVBORw0KGgoAAAANSUhEUgAAAAMAAAACCAIAAAASFvFNAAAAEElEQVR42mOQLLsEQQxwFgBOeghHKJMmRQAAAABJRU5ErkJggg=='))"
)


class Lines:
    """The page's websockets for kernels and events, which can be cut."""

    def __init__(self) -> None:
        self._is_cut = False
        self._lines: list[WebSocketRoute] = []

    def follow(self, page: Page) -> None:
        """Follow those that a page opens from its next loading on."""
        page.route_web_socket(re.compile("/api/(events|kernels)/"), self._connect)

    def _connect(self, line: WebSocketRoute) -> None:
        if self._is_cut:
            line.close()
        else:
            self._lines.append(line)
            line.connect_to_server()

    def cut(self) -> None:
        """Close them all, and let none be opened again."""
        self._is_cut = True
        for line in self._lines:
            line.close()


@pytest.fixture(scope="module")
def lines() -> Lines:
    """Return the websockets of the page that all tests share."""
    return Lines()


@pytest.fixture(scope="module")
def lab(make_lab: Callable[..., Env], browser: Browser, npm_packages: Path, lines: Lines) -> Iterator[Lab]:
    env = make_lab()
    kernelspec(env, "idler", "Python (idler)", cull=IDLE)
    cull = [f"--MappingKernelManager.cull_{setting}" for setting in CULL]
    with env.server("lab", *cull) as server:
        lab = Lab(browser, server, npm_packages / "axe-core" / "axe.min.js")
        lab.write(
            "work.ipynb",
            "x = 1\nprint('x is', x)",
            "import time\ntime.sleep(600)",
            "print('x is', x)",
            "x = 2\nprint('set')",
        )
        lines.follow(lab.page)
        lab.open("work.ipynb")
        yield lab
        lab.page.close()
    env.assert_clean()


def test_a_notebook_is_steered_from_its_row(lab: Lab) -> None:
    lab.run_cell(0)
    lab.output(0, "x is 1")
    lab.page.keyboard.press("Control+Shift+L")
    lab.page.locator(".jp-Launcher-content").wait_for()
    row = lab.open_row("work.ipynb")
    lab.press("Open", within=row)
    expect(lab.notebook).to_be_visible()
    lab.run_cell(1)
    lab.page.locator("#jp-main-statusbar").get_by_text("| Busy").wait_for()
    lab.press("Interrupt", within=row)
    lab.output(1, "KeyboardInterrupt")
    lab.press("Snapshot", within=row)
    lab.answer("Save", "with one")
    lab.page.locator(".Toastify__toast", has_text="Snapshot saved.").wait_for()
    lab.run_cell(3)
    lab.output(3, "set")
    lab.press("Restore", within=row)
    view = lab.page.locator(".ab-view")
    expect(view.get_by_role("tab", name="Snapshots")).to_have_attribute("aria-selected", "true")
    # The status bar tells of what is in front, be it not the notebook.
    expect(lab.page.locator(STATUS)).to_contain_text("Sandboxed")
    lab.press("Restore", within=view.get_by_role("listitem").filter(has_text="with one"))
    lab.answer("Restore")
    expect(view).to_contain_text("Restored “with one”.")
    lab.run_cell(2)
    lab.output(2, "x is 1")
    lab.press("Files", within=row)
    expect(view.get_by_role("tab", name="Files")).to_have_attribute("aria-selected", "true")
    expect(view.get_by_role("row").filter(has_text="work.ipynb")).to_have_count(1)
    lab.close_view()
    lab.press("Fork", within=row)
    lab.page.locator(".lm-TabBar-tab", has_text="work-Copy1.ipynb").wait_for()
    fork = lab.kernel_of("work-Copy1.ipynb")
    assert lab.api("POST", f"/sandboxes/{fork}/code", {"code": "x"})["result"]["data"]["text/plain"] == "1"
    lab.check_console()


def test_shortcuts(lab: Lab) -> None:
    lab.page.locator(".lm-TabBar-tab", has_text="work.ipynb").click()
    lab.notebook.locator(".jp-Cell .cm-content").first.click()
    lab.page.keyboard.press("Escape")
    lab.page.keyboard.press("Alt+Shift+S")
    lab.answer("Save", "by keys")
    lab.page.locator(".Toastify__toast", has_text="Snapshot saved.").first.wait_for()
    lab.page.keyboard.press("Alt+Shift+D")
    view = lab.page.locator(".ab-view")
    expect(view.get_by_role("tab", name="Network")).to_have_attribute("aria-selected", "true")
    view.get_by_role("tab", name="Network").press("ArrowRight")
    expect(view.get_by_role("listitem").filter(has_text="by keys")).to_have_count(1)
    lab.close_view()
    lab.check_console()


def run(lab: Lab, command: str) -> str:
    """Run a command in the sandbox of an agent; return what it prints."""
    answer = lab.api("POST", "/sandboxes/agents-own/exec", {"command": command})
    assert answer["exit_code"] == 0, answer
    return str(answer["stdout"])


def drop(lab: Lab, place: Locator, name: str, text: str) -> None:
    """Drag a file over a place and drop it there."""
    data = lab.page.evaluate_handle(
        "([name, text]) => { const data = new DataTransfer(); data.items.add(new File([text], name)); return data; }",
        [name, text],
    )
    place.dispatch_event("dragover", {"dataTransfer": data})
    expect(place).to_have_class(re.compile("ab-mod-over"))
    place.dispatch_event("drop", {"dataTransfer": data})
    expect(place).not_to_have_class(re.compile("ab-mod-over"))


def test_files_of_a_private_workspace(lab: Lab, tmp_path: Path) -> None:
    lab.api("POST", "/sandboxes", {"id": "agents-own"})
    lab.press("Files", within=lab.open_row("agents-own"))
    view = lab.page.locator(".ab-view")
    expect(view).to_contain_text("This folder is empty.")
    # A private one is nowhere among the files of the server.
    run(lab, f'mkdir -p deep/er && echo inner > deep/er/in.txt && python3 -c "{PICTURE}"')
    lab.press("Refresh", within=view)
    lab.press("point.png", within=view)
    picture = view.get_by_role("img", name="Image point.png")
    expect(picture).to_be_visible()
    assert picture.evaluate("image => image.decode().then(() => [image.naturalWidth, image.naturalHeight])") == [3, 2]
    lab.press("deep/", within=view)
    lab.press("er/", within=view)
    lab.press("in.txt", within=view)
    expect(view.locator("pre")).to_have_text("inner\n")
    with lab.page.expect_download() as download:
        lab.press("Download in.txt", within=view)
    assert download.value.path().read_text() == "inner\n"
    drop(lab, view.locator(".ab-files"), "dropped.txt", "by hand")
    expect(view).to_contain_text("Uploaded dropped.txt.")
    assert run(lab, "cat deep/er/dropped.txt") == "by hand"
    assert not list(lab.server.env.work.rglob("*.txt"))

    folder = view.get_by_role("navigation", name="Folder path")
    lab.press("deep", within=folder)
    (tmp_path / "large.bin").write_bytes(bytes(range(256)) * 2**15)
    lab.page.evaluate(
        """() => {
            window.shares = [];
            const look = () => {
                const bar = document.querySelector('.ab-files progress');
                if (bar) window.shares.push(bar.value);
            };
            new MutationObserver(look).observe(document.body, {subtree: true, childList: true, attributes: true});
        }"""
    )
    wire = lab.page.context.new_cdp_session(lab.page)
    slow = {"offline": False, "latency": 0, "downloadThroughput": SLOW, "uploadThroughput": SLOW}
    wire.send("Network.enable")
    wire.send("Network.emulateNetworkConditions", slow)
    try:
        with lab.page.expect_file_chooser() as chooser:
            lab.press("Upload…", within=view)
        chooser.value.set_files(tmp_path / "large.bin")
        expect(view.get_by_role("progressbar", name="large.bin")).to_be_visible()
        lab.check_access(".ab-view")
        lab.shoot("upload")
        expect(view).to_contain_text("Uploaded large.bin.")
        shares = lab.page.evaluate("window.shares.splice(0)")
        assert shares == sorted(shares)
        assert [share for share in shares if 0 < share < 1]
        with lab.page.expect_download() as download:
            lab.press("Download large.bin", within=view)
        assert [share for share in lab.page.evaluate("window.shares") if 0 < share < 1]
    finally:
        wire.send("Network.emulateNetworkConditions", slow | {"downloadThroughput": -1, "uploadThroughput": -1})
        wire.detach()
    expect(view.get_by_role("progressbar")).to_have_count(0)
    assert download.value.path().read_bytes() == (tmp_path / "large.bin").read_bytes()
    assert int(run(lab, "stat -c %s deep/large.bin")) == 2**23
    lab.press("/workspace", within=folder)
    expect(view.get_by_role("button", name="deep/", exact=True)).to_be_visible()
    lab.close_view()
    lab.check_console()


@pytest.mark.parametrize("is_away", [False, True], ids=["in front", "page away"])
def test_a_kernel_that_was_idle_for_too_long(lab: Lab, lines: Lines, is_away: bool) -> None:
    """Jupyter ends it without a word; the log knows, also for a page that was not there."""
    lab.write(f"idler-{is_away}.ipynb", "1", kernel="idler")
    lab.show(f"idler-{is_away}.ipynb")
    if is_away:
        lines.cut()
    banner = lab.notebook.locator(BANNER)
    expect(banner).to_contain_text(
        re.compile(
            rf"The kernel was shut down because it was idle\. – idle for \d+ s, limit {IDLE} s.*"
            r"All variables are lost.*Run your cells again\."
            r".*can change this setting: cull_idle_timeout of the kernelspec"
        )
    )
    lab.shoot("idle")
    lab.press("Dismiss", within=banner)
    expect(banner).to_have_count(0)
    lab.check_console()
