"""JupyterLab's views of sandboxes, by clicks and keys in Chromium, on real gVisor.

One server and one page serve all tests, which follow one another as a person's work does. What is looked at stands in
the page; what must have come of it is asked of the server.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po
from playwright.sync_api import Browser, Route, expect
from support.harness import Env, wait_until
from support.images import Built
from support.lab import BANNER, SOURCES, STATUS, Lab, kernelspec

# The first test to want the image may have to build it.
pytestmark = pytest.mark.timeout(1800)


#: Of the language pack.
LOCALE = "de_DE"
PLURALS = "nplurals=2; plural=(n != 1);"
#: What Jupyter's server takes a pack of that language from.
PACK = f"jupyterlab_language_pack_{LOCALE}"


def make_language_pack(base: Path) -> Path:
    """Write a Python package that is a language pack for JupyterLab, with our texts in brackets; return its path."""
    texts: dict[str, object] = {"": {"domain": "jupyter_agentbox", "language": "de-DE", "plural_forms": PLURALS}}
    with (SOURCES / "jupyter_agentbox.pot").open("rb") as file:
        catalogue = read_po(file, locale=LOCALE)
    for message in catalogue:
        if message.id:
            forms = (message.id,) if isinstance(message.id, str) else message.id
            marked = tuple(f"⟦{text}⟧" for text in forms)
            message.string = marked[0] if isinstance(message.id, str) else marked
            texts[f"{message.context}\4{forms[0]}" if message.context else forms[0]] = marked
    assert len(texts) > 150
    folder = base / PACK / "locale" / LOCALE / "LC_MESSAGES"
    folder.mkdir(parents=True)
    (folder / "jupyter_agentbox.json").write_text(json.dumps(texts))  # the page's
    with (folder / "jupyter_agentbox.mo").open("wb") as file:  # the server's
        write_mo(file, catalogue)
    (base / PACK / "__init__.py").touch()
    about = base / "agentbox_pack-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: agentbox-pack\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[jupyterlab.languagepack]\n{LOCALE} = {PACK}\n")
    return base


@pytest.fixture(scope="module")
def lab(make_lab: Callable[..., Env], browser: Browser, npm_packages: Path, built: Built) -> Iterator[Lab]:
    env = make_lab(user_may_allow=[])
    built.lend(env.state_dir)
    env.run("jupyter-agentbox", "kernelspec", "--image=languages")
    kernelspec(env, "narrow", "Python (narrow)", allowed_hosts=[], memory="300 MiB")
    paths = [str(make_language_pack(env.base / "pack")), os.environ.get("PYTHONPATH", "")]
    with env.server("lab", env={"PYTHONPATH": os.pathsep.join(filter(None, paths))}) as server:
        lab = Lab(browser, server, npm_packages / "axe-core" / "axe.min.js")
        yield lab
        lab.page.close()
    env.assert_clean()


def test_a_notebook_tells_whether_it_is_boxed_and_what_it_uses(lab: Lab) -> None:
    lab.write("plain.ipynb", "1", kernel="python3")
    lab.write(
        "boxed.ipynb",
        "x = 1\nprint('ready')",
        "print('x is', x)",
        "x = 2\nprint('set')",
        "import time; time.sleep(600)",
        "import uuid; x = uuid.uuid4().hex; print('x is', x)",
    )
    lab.open("plain.ipynb")
    toolbar = lab.notebook.locator(".jp-Toolbar .ab-indicator")
    expect(toolbar).to_have_text("Not sandboxed")
    expect(lab.page.locator(STATUS)).to_contain_text("code runs with your full permissions")
    lab.show("boxed.ipynb")
    lab.discard("plain.ipynb")
    lab.show("boxed.ipynb")
    lab.run_cell(0)
    lab.output(0, "ready")
    # Words, and an icon beside them, not a colour alone.
    expect(toolbar).to_contain_text(re.compile(r"Sandboxed · \d+ MB of 4 GB"))
    assert toolbar.locator("svg").count() == 1
    status = re.compile(r"Sandboxed · default · \d+ MB of 4 GB · CPU \d\.\d of 4 · network: allowed\.test")
    expect(lab.page.locator(STATUS)).to_have_text(status)
    lab.check_access(STATUS, ".jp-Toolbar .ab-indicator")
    lab.shoot("status")
    lab.check_console()


def test_snapshots_undo_and_fork(lab: Lab) -> None:
    view = lab.show_view("Snapshots")
    expect(view).to_contain_text("It does not include open network connections")
    lab.press("Take Snapshot…", within=view)
    lab.answer("Save", "before the change")
    expect(view.get_by_role("listitem")).to_contain_text("before the change")
    lab.run_cell(2)
    lab.output(2, "set")
    lab.press("Restore", within=view)
    lab.answer("Restore")
    expect(view).to_contain_text("Restored “before the change”.")
    lab.run_cell(1)
    lab.output(1, "x is 1")
    lab.check_access(".ab-view")
    lab.shoot("snapshots")
    lab.press("Fork", within=view.get_by_role("listitem"))
    lab.page.locator(".lm-TabBar-tab", has_text="boxed-Copy1.ipynb").wait_for()
    fork = lab.kernel_of("boxed-Copy1.ipynb")
    assert fork != lab.kernel_of("boxed.ipynb")
    assert lab.api("POST", f"/sandboxes/{fork}/code", {"code": "x"})["result"]["data"]["text/plain"] == "1"
    lab.page.locator(".lm-TabBar-tab", has_text="Sandbox:").click()
    lab.press("Delete", within=view.get_by_role("listitem"))
    lab.answer("Delete")
    expect(view).to_contain_text("No snapshots yet.")
    lab.discard("boxed-Copy1.ipynb")
    lab.check_console()


def test_files_and_a_terminal(lab: Lab, tmp_path: Path) -> None:
    lab.show("boxed.ipynb")
    view = lab.show_view("Files")
    (tmp_path / "sent.txt").write_text("sent from outside\n")
    with lab.page.expect_file_chooser() as chooser:
        lab.press("Upload…", within=view)
    chooser.value.set_files(tmp_path / "sent.txt")
    expect(view).to_contain_text("Uploaded sent.txt.")
    assert (lab.server.env.work / "sent.txt").read_text() == "sent from outside\n"
    lab.press("sent.txt", within=view)
    expect(view.locator("pre")).to_have_text("sent from outside\n")
    with lab.page.expect_download() as download:
        lab.press("Download sent.txt", within=view)
    assert download.value.path().read_text() == "sent from outside\n"
    drop = lab.page.evaluate_handle(
        "() => { const data = new DataTransfer(); data.items.add(new File(['dropped'], 'drop.txt')); return data; }"
    )
    view.locator(".ab-files").dispatch_event("drop", {"dataTransfer": drop})
    expect(view).to_contain_text("Uploaded drop.txt.")
    assert (lab.server.env.work / "drop.txt").read_text() == "dropped"
    lab.check_access(".ab-view")
    lab.shoot("files")
    lab.press("Terminal", within=lab.open_row("boxed.ipynb"))
    screen = lab.page.locator(".jp-Terminal .xterm-screen")
    screen.click()
    lab.page.keyboard.type("dmesg | grep -c gVisor > in-terminal.txt\n")
    made = lab.server.env.work / "in-terminal.txt"
    wait_until(lambda: made.exists() and made.read_text().strip(), 120, "the terminal runs what is typed")
    assert int(made.read_text()) > 0
    lab.shoot("terminal")
    lab.page.locator(".lm-TabBar-tab", has_text="Sandbox Terminal:").locator(".lm-TabBar-tabCloseIcon").click()
    lab.check_console()


def test_agents_beside_people(lab: Lab) -> None:
    kernel = lab.kernel_of("boxed.ipynb")
    made = lab.api("POST", f"/sandboxes/{kernel}/tokens", {"verbs": ["read", "execute"], "name": "helper"})
    view = lab.show_view("Activity")
    expect(view).to_contain_text("No one is using this kernel.")
    expect(view.get_by_role("listitem")).to_contain_text("helper allows read, execute; expires")
    headers = {"Authorization": f"Bearer {made['token']}"}
    address = lab.server.url(f"api/agentbox/sandboxes/{kernel}/code")
    with requests.Session() as agent:
        agent.trust_env = False
        body = {"code": "import time; time.sleep(600)", "timeout": 600}
        with agent.post(f"{address}/stream", json=body, headers=headers, stream=True, timeout=60):
            expect(view).to_contain_text("The agent with token “helper” is using this kernel: run_code")
            lab.check_access(".ab-view")
            lab.shoot("agents")
            lab.press("Revoke helper", within=view)
            lab.answer("Revoke")
            expect(view).to_contain_text("No agent has a token for this sandbox.")
        assert agent.post(address, json={"code": "1"}, headers=headers, timeout=60).status_code == 401
    expect(view.get_by_role("row", name=re.compile("run_code agent “helper”"))).to_be_visible()
    lab.api("POST", f"/sandboxes/{kernel}/contexts/default/interrupt")
    lab.close_view()
    lab.page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for()  # or else that end would be the cell's too
    lab.run_cell(3)
    view = lab.show_view("Activity")
    expect(view).to_contain_text("A notebook cell is running.")
    lab.close_view()
    lab.server.call("POST", f"api/kernels/{kernel}/interrupt")
    lab.check_console()


def test_the_side_panel(lab: Lab) -> None:
    panel = lab.show_sandboxes()
    # It was made elsewhere: an event brings it.
    lab.api("POST", "/sandboxes", {"id": "agents-own", "labels": {"task": "report"}})
    row = panel.get_by_role("listitem").filter(has_text="agents-own")
    expect(row).to_contain_text(re.compile(r"running · agent or program · created .* ago · idle for .* · gVisor"))
    expect(panel.get_by_role("listitem").filter(has_text="boxed.ipynb")).to_contain_text("notebook")
    search = panel.get_by_role("searchbox")
    search.fill("report running")
    expect(panel.get_by_role("status")).to_have_text("1 sandbox")
    lab.page.keyboard.press("ArrowDown")
    lab.page.keyboard.press("Enter")
    expect(row.locator(".ab-row-head")).to_have_attribute("aria-expanded", "true")
    search.fill("")
    lab.check_access(".ab-panel")
    lab.shoot("sandboxes")
    lab.press("Park", within=row)
    expect(row).to_contain_text("parked")
    lab.press("Wake", within=row)
    expect(row).to_contain_text("running")
    lab.press("Stop", within=row)
    lab.answer("Stop")
    expect(row).to_have_count(0)
    kernel = lab.kernel_of("boxed.ipynb")
    mine = lab.open_row("boxed.ipynb")
    before = lab.api("GET", f"/sandboxes/{kernel}")["sandbox_id"]
    lab.press("Restart", within=mine)
    lab.answer("Restart")

    def is_new() -> bool:
        found = lab.api("GET", f"/sandboxes?kernel_id={kernel}")["sandboxes"]
        return bool(found) and found[0]["sandbox_id"] != before

    wait_until(is_new, 120, "the kernel was restarted")
    expect(lab.page.locator(BANNER)).to_have_count(0)
    lab.check_console()


def test_of_hundreds_of_sandboxes_few_rows_are_drawn(lab: Lab) -> None:
    (info, *_) = lab.api("GET", "/sandboxes")["sandboxes"]
    info |= {"kind": "session", "kernels": [], "state": "running", "created": info["created"] - 90000, "last_used": 1}
    many = [{**info, "id": f"row-{n}", "sandbox_id": f"row-{n}"} for n in range(400)]

    def answer(route: Route) -> None:
        route.fulfill(json={"sandboxes": many})

    place = re.compile(r"/api/agentbox/sandboxes(\?.*)?$")
    lab.page.route(place, answer)
    try:
        panel = lab.show_sandboxes()
        rows = panel.get_by_role("listitem")
        lab.press("Refresh", within=panel)
        expect(panel.get_by_role("status")).to_have_text("400 sandboxes")
        expect(rows).to_have_count(100)
        lab.press("Show 300 More", within=panel)
        expect(rows).to_have_count(200)
        search = panel.get_by_role("searchbox")
        search.press_sequentially("row-39")
        expect(panel.get_by_role("status")).to_have_text("11 sandboxes")  # row-39 and row-390 to row-399
        expect(rows).to_have_count(11)
        lab.check_access(".ab-panel")
        search.fill("")
        expect(rows).to_have_count(100)
    finally:
        lab.page.unroute(place)
    lab.press("Refresh", within=panel)
    expect(panel.get_by_role("status")).not_to_have_text("400 sandboxes")
    lab.check_console()


def test_a_notebook_is_parked_by_hand_and_woken_by_a_cell(lab: Lab) -> None:
    kernel = lab.kernel_of("boxed.ipynb")
    lab.run_cell(4)
    lab.output(4, "x is")
    said = str(lab.notebook.locator(".jp-Cell").nth(4).locator(".jp-OutputArea-output").text_content()).strip()
    row = lab.open_row("boxed.ipynb")
    idle = lab.page.locator("#jp-main-statusbar").get_by_text("| Idle")
    idle.wait_for()
    lab.press("Park", within=row)
    expect(row).to_contain_text("parked · notebook")
    expect(lab.page.locator(STATUS)).to_contain_text("Sandboxed · parked")
    assert lab.api("GET", f"/sandboxes/{kernel}")["state"] == "parked"
    # It can be woken by hand too, and that is all that can be done with it besides its end.
    names = row.get_by_role("group").get_by_role("button").all_text_contents()
    assert names == ["Open", "Details", "Wake", "Stop"]
    lab.shoot("parked")
    lab.run_cell(1)
    lab.output(1, said)
    expect(row).to_contain_text("running · notebook")
    expect(lab.page.locator(STATUS)).not_to_contain_text("parked")
    assert lab.api("GET", f"/sandboxes/{kernel}")["state"] == "running"
    idle.wait_for()
    lab.press("Park", within=row)
    expect(row).to_contain_text("parked · notebook")
    lab.press("Wake", within=row)
    expect(row).to_contain_text("running · notebook")
    expect(lab.page.locator(BANNER)).to_have_count(0)
    lab.check_console()


def test_what_is_refused_is_told_and_can_be_allowed(lab: Lab) -> None:
    ask = (
        "import urllib.request\ntry: urllib.request.urlopen('http://{0}/', timeout=20)\nexcept Exception as e: print(e)"
    )
    lab.write("narrow.ipynb", ask.format("allowed.test"), ask.format("elsewhere.test"), kernel="narrow")
    lab.show("narrow.ipynb")
    expect(lab.page.locator(STATUS)).to_contain_text("network: none")
    lab.run_cell(0)
    notice = lab.page.locator(".Toastify__toast", has_text="to allowed.test was blocked")
    expect(notice).to_contain_text("A connection from narrow.ipynb to allowed.test was blocked.")
    lab.shoot("notice")
    lab.press("Allow for This Kernel", within=notice)
    kernel = lab.kernel_of("narrow.ipynb")
    wait_until(lambda: lab.api("GET", f"/sandboxes/{kernel}")["allowed_hosts"] == ["allowed.test"], 60, "it is allowed")
    expect(lab.page.locator(STATUS)).to_contain_text("network: allowed.test")
    lab.run_cell(1)
    other = lab.page.locator(".Toastify__toast", has_text="elsewhere.test")
    expect(other).to_contain_text("Ask your administrator to add it to Policy.allowed_hosts.")
    expect(other.locator(".jp-toast-button")).to_have_text(["Show"])
    lab.press("Show", within=other)
    view = lab.page.locator(".ab-view")
    row = view.get_by_role("row").filter(has_text="elsewhere.test")
    expect(row.get_by_role("cell").nth(1)).to_have_text(re.compile("[1-9]"))
    blocked = view.locator(".ab-ask", has_text="elsewhere.test")
    expect(blocked).to_contain_text("Ask your administrator to add it to Policy.allowed_hosts.")
    expect(blocked.get_by_role("button")).to_have_count(0)
    lab.api("PATCH", f"/sandboxes/{kernel}", {"allowed_hosts": []})
    lab.api("POST", f"/sandboxes/{kernel}/egress/asks", {"host": "allowed.test", "why": "to read the news"})
    expect(view).to_contain_text("An agent requests access to allowed.test: to read the news")
    lab.check_access(".ab-view")
    lab.shoot("egress")
    lab.press("Allow for This Kernel", within=view.locator(".ab-ask", has_text="to read the news"))
    wait_until(lambda: lab.api("GET", f"/sandboxes/{kernel}")["allowed_hosts"] == ["allowed.test"], 60, "it is allowed")
    lab.close_view()
    lab.check_console()


@pytest.mark.parametrize("theme", ["JupyterLab Dark", "JupyterLab Dark High Contrast", "JupyterLab Light"])
def test_every_theme_and_a_narrow_screen(lab: Lab, theme: str) -> None:
    lab.page.get_by_role("menuitem", name="Settings", exact=True).click()
    lab.page.locator(".lm-Menu-item", has_text="Theme").first.hover()
    lab.page.locator(".lm-Menu-item").get_by_text(theme, exact=True).click()
    expect(lab.page.locator("body")).to_have_attribute("data-jp-theme-name", theme)
    name = theme.removeprefix("JupyterLab ").lower().replace(" ", "-")
    lab.open_row("boxed.ipynb")
    # What is shown depends on the width, and not on the theme.
    for width in (1280, 800) if theme == "JupyterLab Light" else (1280,):
        lab.page.set_viewport_size({"width": width, "height": 800})
        for tab in ("Network", "Snapshots", "Files", "Activity"):
            view = lab.show_view(tab)
            expect(view.locator("[role=tabpanel]")).not_to_contain_text("Loading")
            lab.check_access(".ab-view", ".ab-panel")
        lab.shoot(f"{name}-{width}")
        lab.close_view()
    lab.page.set_viewport_size({"width": 1280, "height": 800})
    lab.check_console()


def test_launcher_palette_and_settings(lab: Lab) -> None:
    lab.open()
    section = lab.page.locator(".jp-Launcher-section", has=lab.page.get_by_text("Sandboxes", exact=True))
    expect(section.locator(".jp-LauncherCard", has_text="Python (sandboxed)")).to_have_count(1)
    card = section.locator(".jp-LauncherCard", has_text="Python (narrow)")
    assert "300 MiB" in str(card.get_attribute("title"))
    image = section.locator(".jp-LauncherCard", has_text="Bash (sandboxed) · languages")
    image.scroll_into_view_if_needed()
    lab.shoot("launcher")
    lab.page.keyboard.press("Control+Shift+C")
    lab.page.locator(".lm-CommandPalette-input, #command-palette input, .jp-search-input input").last.fill(
        "show sandboxes"
    )
    item = lab.page.locator(".lm-CommandPalette-item", has_text="Show Sandboxes")
    expect(item).to_contain_text("Alt+Shift+B")
    item.click()
    lab.page.locator("#jupyter-agentbox-sandboxes").wait_for()
    lab.page.get_by_role("menuitem", name="Settings", exact=True).click()
    lab.page.locator(".lm-Menu-item").get_by_text("Settings Editor", exact=True).click()
    lab.page.locator(".jp-SettingsPanel, #setting-editor").first.wait_for()
    lab.page.locator(".jp-PluginList-entry", has_text="Sandboxes").first.click()
    for name in ("Status bar item", "Notebook toolbar item", "Blocked connection notifications"):
        expect(lab.page.get_by_label(name, exact=True)).to_be_checked()
    lab.press("JSON Settings Editor")
    editor = lab.page.locator("#json-setting-editor")
    editor.locator(".jp-PluginList-entry", has_text="Sandboxes").click()
    text = editor.locator(".cm-content").last
    text.click()
    lab.page.keyboard.press("Control+a")
    lab.page.keyboard.type('{"statusBar": "maybe"}')
    expect(editor).to_contain_text("/statusBar must be boolean")
    text.click()
    lab.page.keyboard.press("Control+a")
    lab.page.keyboard.type('{"statusBar": false}')
    expect(editor).not_to_contain_text("must be boolean")
    lab.page.keyboard.press("Control+s")
    place = lab.server.url("lab/api/settings/jupyter-agentbox:plugin")
    wait_until(
        lambda: lab.server.http.get(place, timeout=60).json()["settings"] == {"statusBar": False}, 60, "it is saved"
    )
    lab.page.locator(".lm-TabBar-tab", has_text="Launcher").click()
    card.click()
    expect(lab.notebook.locator(".jp-Toolbar .ab-indicator")).to_contain_text("Sandboxed")
    lab.open("boxed.ipynb")
    expect(lab.notebook.locator(".jp-Toolbar .ab-indicator")).to_contain_text("Sandboxed")
    expect(lab.page.locator(STATUS)).to_be_hidden()
    lab.check_console()


def test_every_text_is_translated(lab: Lab) -> None:
    """With a language pack of marked words nothing is seen of ours that is not marked, but names."""
    for plugin, settings in (
        ("jupyter-agentbox:plugin", {}),
        ("@jupyterlab/translation-extension:plugin", {"locale": LOCALE}),
    ):
        place = lab.server.url(f"lab/api/settings/{plugin}")
        assert lab.server.http.put(place, json={"raw": json.dumps(settings)}, timeout=60).ok
    lab.page.goto(lab.server.url(f"lab/tree/boxed.ipynb?token={lab.server.token}&reset"))
    lab.page.locator(STATUS, has_text="⟦Sandboxed⟧").wait_for()
    lab.open_row("boxed.ipynb")
    lab.page.locator(STATUS).click()
    view = lab.page.locator(".ab-view")
    seen = ""
    for tab in range(4):
        view.get_by_role("tab").nth(tab).click()
        expect(view.locator("[role=tabpanel]")).not_to_contain_text("Loading")
        seen += lab.page.evaluate(
            """() => [...document.querySelectorAll('.ab-view, .ab-panel, .ab-indicator')].map(found => {
                const parts = [...found.querySelectorAll('[aria-label], [placeholder], [title]'), found]
                    .flatMap(node => ['aria-label', 'placeholder', 'title'].map(name => node.getAttribute(name)));
                return found.innerText + '\\n' + parts.join('\\n') + '\\n';
            }).join('')"""
        )
    assert seen.count("⟦") > 40
    while re.search("⟦[^⟦⟧]*⟧", seen):  # they are nested
        seen = re.sub("⟦[^⟦⟧]*⟧", "", seen)
    rows = lab.api("GET", f"/sandboxes/{lab.kernel_of('boxed.ipynb')}/audit?kind=call")["rows"]
    calls = {str(row["detail"].get(name)) for row in rows for name in ("tool", "by", "token_name")}
    names = calls | {"boxed", "narrow", "ipynb", "default", "gVisor", "workspace", "allowed", "test", "Copy"}
    names |= {path.name for path in lab.server.env.work.iterdir()}
    rest = set(re.findall("[A-Za-z]{3,}", seen))
    assert rest - {word for name in names for word in re.findall("[A-Za-z]{3,}", name)} == set()
    # The words of the settings are the server's to translate.
    schema = lab.server.call("GET", "lab/api/settings/jupyter-agentbox:plugin")["schema"]
    assert schema["title"] == "⟦Sandboxes⟧"
    assert schema["properties"]["notices"]["title"] == "⟦Blocked connection notifications⟧"
    lab.check_console()


def test_a_server_without_sandboxes_and_one_with_a_gateway(
    lab: Lab, make_lab: Callable[..., Env], browser: Browser
) -> None:
    env = make_lab()
    without = ("--ServerApp.jpserver_extensions={'jupyter_agentbox': False}",)
    gateway = (f"--gateway-url={lab.server.url('')}", f"--GatewayClient.auth_token={lab.server.token}")
    cases = {
        without: "jupyter_agentbox is not installed on this server",
        gateway: f"This server runs its kernels on the gateway {lab.server.url('').rstrip('/')}",
    }
    with env.server("lab", *without) as server:
        other = Lab(browser, server, lab.axe)
        asked: list[str] = []
        other.page.on("request", lambda request: asked.append(request.url))
        for arguments, words in cases.items():
            if arguments is gateway:  # at the same address, so that the browser has JupyterLab already
                other.page.goto("about:blank")
                other.kill_server()
                other.start_server(*gateway)
                asked.clear()
            other.open()
            panel = other.show_sandboxes()
            expect(panel.get_by_role("note")).to_contain_text(words)
            other.check_access(".ab-panel")
            other.shoot("gateway" if arguments is gateway else "absent")
            time.sleep(1)
            assert [url for url in asked if "/api/agentbox" in url] == []
            other.check_console()
        other.page.close()
