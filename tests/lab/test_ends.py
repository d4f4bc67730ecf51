"""Why a kernel is no more, told above its notebook: every kind of end that there is, on real gVisor.

JupyterLab's own dialog, which knows no cause, is not to be seen where the kernel was in a sandbox.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, TimeoutError, expect
from support.harness import Env, wait_until
from support.lab import BANNER, PATIENCE, Lab, kernelspec

pytestmark = pytest.mark.timeout(900)

CELLS = {
    "memory": "[bytearray(2**26) for _ in range(16)]",
    "exit": "import os; os._exit(7)",
    "crash": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "fine": "import uuid; print('it lives', uuid.uuid4())",
}

#: What JupyterLab 4.2 says by itself whenever a notebook gets another kernel.
CHANGED = "Cannot read properties of undefined (reading 'widget')"
#: What Chromium says of calls that a killed server did not answer, be they made before its end or after.
GONE = ("ERR_CONNECTION_", "ERR_EMPTY_RESPONSE")
#: Jupyter starts a kernel that died again by itself, or gives it up at once.
RESTART, GIVE_UP = (f"--AsyncIOLoopKernelRestarter.restart_limit={limit}" for limit in (50, 0))
#: A cell that says something every second, until it is told to end.
LONG = """import pathlib, time
n = 0
while not pathlib.Path('enough').exists():
    print('at', n, flush=True)
    n += 1
    time.sleep(1)
print('that is all')"""


@pytest.fixture(scope="module")
def lab(make_lab: Callable[..., Env], browser: Browser, npm_packages: Path) -> Iterator[Lab]:
    env = make_lab(lease_timeout=300.0)  # time for a server to start on a busy machine
    kernelspec(env, "ends", "Python (ends)", memory="300 MiB", disk="64 MiB", lease_timeout=8.0)
    kernelspec(env, "private", "Python (private)", memory="300 MiB", workspace="private")
    # Here kernels die faster than Jupyter bears by itself.
    with env.server("lab", RESTART) as server:
        lab = Lab(browser, server, npm_packages / "axe-core" / "axe.min.js")
        lab.write("ends.ipynb", *CELLS.values(), kernel="ends")
        lab.open("ends.ipynb")
        lab.page.evaluate(
            """() => {
                window.seen = [];
                new MutationObserver(changes => changes.forEach(change => change.addedNodes.forEach(node => {
                    if (node.matches?.('.jp-Dialog')) window.seen.push(node.textContent);
                }))).observe(document.body, {childList: true});
            }"""
        )
        yield lab
        lab.page.close()
    env.assert_clean(150)


def sandbox_of(lab: Lab) -> str:
    """Return the id of the sandbox of the notebook's kernel, or nothing while it has none that runs."""
    found = lab.api("GET", f"/sandboxes?kernel_id={lab.kernel_of('ends.ipynb')}")["sandboxes"]
    return next((str(info["sandbox_id"]) for info in found if info["state"] == "running"), "")


def dialogs(lab: Lab) -> list[str]:
    """Return the texts of the dialogs that JupyterLab has opened since the last call."""
    return [str(text) for text in lab.page.evaluate("window.seen.splice(0)")]


def run(lab: Lab, name: str) -> None:
    """Run one of the cells by its keys."""
    lab.run_cell(list(CELLS).index(name))


def check_alive(lab: Lab) -> None:
    """Wait until the notebook's kernel answers, by whose word it is new."""
    output = lab.notebook.locator(".jp-Cell").nth(list(CELLS).index("fine")).locator(".jp-OutputArea-output")
    before = output.all_text_contents()

    def is_new() -> bool:
        now = output.all_text_contents()
        return now != before and "it lives" in "".join(now)

    for _ in range(6):  # what is run while a kernel is on its way, JupyterLab drops
        lab.page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for()
        run(lab, "fine")
        with contextlib.suppress(AssertionError):
            wait_until(is_new, 20, "the kernel answers")
            return
    raise AssertionError("the kernel does not answer")


def dismiss(lab: Lab) -> None:
    """Dismiss what stands above the notebook, by keys."""
    banner = lab.page.locator(BANNER)
    for _ in range(6):  # JupyterLab takes the focus back once the cell that was run has been scrolled to
        with contextlib.suppress(TimeoutError):  # it is gone already
            banner.get_by_role("button", name="Dismiss").press("Enter", timeout=10_000)
        with contextlib.suppress(AssertionError):
            expect(banner).to_have_count(0, timeout=10_000)
            return
    raise AssertionError("it cannot be dismissed by keys")


def close_dialogs(lab: Lab) -> Locator:
    """Have the dialogs closed in which JupyterLab tells that the server is away; return what it is undone by."""

    def close(dialog: Locator) -> None:
        with contextlib.suppress(TimeoutError):  # it is gone already
            dialog.locator(".jp-Dialog-button").last.click(timeout=10_000)

    told = lab.page.locator(".jp-Dialog")
    # The next may open as one closes, as when it could not save either: there may never be none.
    lab.page.add_locator_handler(told, close, no_wait_after=True)
    return told


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("memory", r"ran out of memory\. – limit 300 MiB.*allow more memory.*Policy\.max_memory"),
        ("exit", r"The kernel exited\. – status 7.*a call such as exit\(\)"),
        ("crash", r"crashed\. – SIGSEGV.*Check the last cell"),
        (
            "killed",
            r"was killed by a program in the sandbox or by an administrator\. – the kernel was killed \(SIGKILL\)"
            r".*Run your cells again",
        ),
    ],
    ids=["memory", "exit", "crash", "killed"],
)
def test_a_kernel_that_is_started_again(lab: Lab, cell: str, words: str) -> None:
    check_alive(lab)
    before = sandbox_of(lab)
    run(lab, cell)
    banner = lab.page.locator(BANNER)
    expect(banner).to_contain_text(re.compile(words))
    expect(banner).to_contain_text("A new kernel is starting without your variables.")
    lab.check_access(BANNER)
    if cell == "memory":
        lab.shoot("died")
    wait_until(lambda: sandbox_of(lab) not in ("", before), 120, "the kernel is started again")
    check_alive(lab)
    assert dialogs(lab) == []
    dismiss(lab)
    lab.check_console()


def test_a_full_disk_is_a_notice_and_the_kernel_continues(lab: Lab) -> None:
    address = lab.server.url(f"api/agentbox/sandboxes/{lab.kernel_of('ends.ipynb')}/code")
    code = "x = 1\nfor n in range(99): open(f'/tmp/large-{n}', 'wb').write(bytes(2**20))"
    result = lab.server.http.post(address, json={"code": code}, timeout=150).json()
    assert "No space left on device" in str(result)
    told = "ends.ipynb: disk full: 64 MiB of 64 MiB used. Delete files to continue. Setting: disk of the profile"
    notice = lab.page.locator(".Toastify__toast", has_text=told)
    notice.wait_for()
    code = "import glob, os\nfor name in glob.glob('/tmp/large-*'): os.unlink(name)\nprint(x)"
    assert lab.server.http.post(address, json={"code": code}, timeout=150).json()["stdout"] == "1\n"
    lab.press("Dismiss", within=notice) if notice.get_by_role("button", name="Dismiss").count() else None
    expect(lab.page.locator(BANNER)).to_have_count(0)
    lab.check_console()


def test_a_death_behind_another_tab_is_told_of(lab: Lab) -> None:
    lab.page.keyboard.press("Control+Shift+L")
    lab.page.locator(".jp-Launcher-content").wait_for()
    address = lab.server.url(f"api/agentbox/sandboxes/{lab.kernel_of('ends.ipynb')}/code")
    lab.server.http.post(address, json={"code": CELLS["exit"]}, timeout=150)
    notice = lab.page.locator(".Toastify__toast", has_text="ends.ipynb: The kernel exited.")
    lab.press("Show", within=notice)
    expect(lab.page.locator(BANNER)).to_contain_text("The kernel exited.")
    check_alive(lab)
    lab.press("Dismiss", within=lab.page.locator(BANNER))
    assert dialogs(lab) == []
    lab.check_console()


def test_a_kernel_that_an_operator_stops(lab: Lab) -> None:
    kernel = lab.kernel_of("ends.ipynb")
    lab.server.call("DELETE", f"api/kernels/{kernel}")
    banner = lab.page.locator(BANNER)
    expect(banner).to_contain_text(
        re.compile(r"was shut down\..*All variables are lost.*by an administrator or from another window")
    )
    lab.check_access(BANNER)
    assert dialogs(lab) == []
    lab.press("Start New Kernel", within=banner)
    expect(banner).to_have_count(0)
    check_alive(lab)
    assert lab.kernel_of("ends.ipynb") != kernel
    lab.check_console(CHANGED)


def test_a_kernel_that_the_person_shuts_down(lab: Lab) -> None:
    lab.page.get_by_role("menuitem", name="Kernel", exact=True).click()
    lab.page.locator(".lm-Menu-item").get_by_text("Shut Down Kernel", exact=True).click()
    expect(lab.notebook.locator(".jp-Toolbar-kernelName")).to_have_text("No Kernel")
    expect(lab.page.locator(BANNER)).to_have_count(0)
    lab.page.get_by_role("menuitem", name="Kernel", exact=True).click()
    lab.page.locator(".lm-Menu-item").get_by_text("Restart Kernel…", exact=True).click()
    check_alive(lab)
    lab.check_console()


def test_of_kernels_outside_of_sandboxes_jupyterlab_tells_as_ever(lab: Lab) -> None:
    lab.write("plain.ipynb", CELLS["exit"], kernel="python3")
    lab.show("plain.ipynb")
    lab.run_cell(0)
    expect(lab.page.locator(".jp-Dialog")).to_contain_text("appears to have died")
    lab.answer("Ok")
    expect(lab.page.locator(BANNER)).to_have_count(0)
    lab.discard("plain.ipynb")
    lab.check_console()
    assert "appears to have died" in "".join(dialogs(lab))


def test_a_server_that_was_away_for_longer_than_the_lease(lab: Lab) -> None:
    kernel = lab.kernel_of("ends.ipynb")
    told = close_dialogs(lab)
    lab.kill_server()
    wait_until(lambda: not lab.server.env.sandboxes(), 120, "the lease is over")
    lab.start_server()
    banner = lab.page.locator(BANNER)
    expect(banner).to_contain_text(
        re.compile(r"The kernel ended while the server was unavailable\..*Policy\.lease_timeout"),
        timeout=2 * PATIENCE,
    )
    assert [text for text in dialogs(lab) if "kernel" in text.lower()] == []
    lab.press("Start New Kernel", within=banner)
    check_alive(lab)
    assert lab.kernel_of("ends.ipynb") != kernel
    lab.page.remove_locator_handler(told)
    lab.check_console(*GONE, CHANGED)


def test_a_page_goes_on_with_a_server_that_was_killed(lab: Lab) -> None:
    """The cell goes on meanwhile; the page connects again by itself, and nothing that was put out is missing."""
    lab.discard("ends.ipynb")  # its kernel need not outlive the server
    lab.write("long.ipynb", LONG, "print('n is', n)")
    lab.show("long.ipynb")
    lab.run_cell(0)
    lab.output(0, "at 2\n")
    kernel = lab.kernel_of("long.ipynb")
    told = close_dialogs(lab)
    lab.kill_server()
    lab.start_server(GIVE_UP)  # for the next test
    lab.output(0, "at 12\n")
    (lab.server.env.work / "enough").touch()
    lab.output(0, "that is all")
    lab.page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for()
    lab.page.remove_locator_handler(told)
    said = "".join(lab.notebook.locator(".jp-Cell").first.locator(".jp-OutputArea-output").all_text_contents())
    numbers = [int(number) for number in re.findall(r"at (\d+)\n", said)]
    # What the old server passed on last may come twice, but nothing is left out.
    assert sorted(set(numbers)) == list(range(numbers[-1] + 1))
    lab.run_cell(1)
    lab.output(1, f"n is {numbers[-1] + 1}")
    expect(lab.page.locator(BANNER)).to_have_count(0)
    assert lab.kernel_of("long.ipynb") == kernel
    lab.server.call("DELETE", f"api/kernels/{kernel}")
    lab.check_console(*GONE)


def test_a_kernel_that_is_given_up_is_started_again_with_its_files(lab: Lab) -> None:
    told = close_dialogs(lab)
    if GIVE_UP not in lab.server.process.args:
        lab.kill_server()
        lab.start_server(GIVE_UP)
    lab.write(
        "kept.ipynb", "open('file', 'w').write('precious')", CELLS["memory"], "print(open('file').read())",
        kernel="private",
    )  # fmt: skip
    lab.show("kept.ipynb")
    lab.run_cell(0)
    lab.output(0, "8")
    kernel = lab.kernel_of("kept.ipynb")
    lab.run_cell(1)
    banner = lab.notebook.locator(BANNER)
    expect(banner).to_contain_text(re.compile(r"ran out of memory\. – limit 300 MiB.*All variables are lost"))
    lab.press("Restart with Files", within=banner)
    expect(banner).to_have_count(0)
    lab.page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for()
    lab.run_cell(2)
    lab.output(2, "precious")
    assert lab.kernel_of("kept.ipynb") == kernel
    assert not (lab.server.env.work / "file").exists()
    lab.page.remove_locator_handler(told)
