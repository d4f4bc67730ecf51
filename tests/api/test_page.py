"""The page to read and try the API, clicked in a real browser that can reach this server alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect, sync_playwright
from support.api import Api

#: What a person waits for at most, in milliseconds: the machine may be busy.
PATIENCE = 120_000


@pytest.fixture(autouse=True)
def jp_asyncio_loop() -> None:
    """Playwright has a loop of its own on this thread, so pytest-jupyter's is not to be made and closed here."""


@pytest.fixture(autouse=True)
def jp_server_cleanup() -> None:
    """Have no server of pytest-jupyter's to clean up after."""


@pytest.fixture
def page(api: Api) -> Iterator[Page]:
    """Open the page; whatever it fetches from elsewhere, or complains of, fails the test."""
    program = shutil.which("chromium")
    assert program, "chromium is needed: apt-get install chromium"
    own, strange, complaints = api.server.url(""), set[str](), list[str]()
    own_only = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    options = ["--no-sandbox", "--disable-dev-shm-usage", "--no-proxy-server", own_only]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=options, timeout=PATIENCE)
        page = browser.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("request", lambda request: None if request.url.startswith(own) else strange.add(request.url))
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(api.server.url(f"agentbox/docs?token={api.server.token}"))
        yield page
        browser.close()
    assert (strange, complaints) == (set(), [])


def unfold(page: Page, verb: str, path: str) -> Locator:
    """Find an operation as a person does, and unfold it."""
    page.get_by_label("Find").fill(path)
    found = page.locator("details").filter(
        has=page.get_by_text(verb, exact=True).and_(page.locator(".verb"))
    ).filter(has=page.get_by_text(path, exact=True).and_(page.locator(".path")))  # fmt: skip
    found.locator("summary").click()
    return found


def fill(form: Locator, name: str, value: str) -> None:
    """Fill in a parameter."""
    form.locator("tr").filter(has=form.page.get_by_text(name, exact=True)).locator("input").fill(value)


def test_calls_are_tried_without_a_network(api: Api, box: str, page: Page, tmp_path: Path) -> None:
    sandbox = box.rpartition("/")[2]

    form = unfold(page, "POST", "/sandboxes/{id}/exec")
    fill(form, "id", sandbox)
    form.locator("textarea").fill('{"command": "echo $((6*7))"}')
    form.get_by_role("button", name="Send").click()
    expect(form.locator("pre")).to_contain_text('"stdout": "42\\n"', timeout=PATIENCE)
    expect(form.locator("pre")).to_contain_text("200 OK", timeout=PATIENCE)

    form = unfold(page, "POST", "/sandboxes/{id}/exec/stream")
    fill(form, "id", sandbox)
    form.locator("textarea").fill('{"argv": ["echo", "streamed"]}')
    form.get_by_role("button", name="Send").click()
    expect(form.locator("pre")).to_contain_text("event: exit", timeout=PATIENCE)
    expect(form.locator("pre")).to_contain_text("streamed", timeout=PATIENCE)

    (tmp_path / "local.txt").write_text("from the page")
    form = unfold(page, "PUT", "/sandboxes/{id}/files/upload")
    fill(form, "id", sandbox)
    fill(form, "path", "from-page.txt")
    form.locator("input[type=file]").set_input_files(tmp_path / "local.txt")
    form.get_by_role("button", name="Send").click()
    expect(form.locator("pre")).to_contain_text('"path": "from-page.txt"', timeout=PATIENCE)
    found = api.ok("GET", box + "/files/content", params={"path": "from-page.txt"})
    assert found["data"] == "from the page"

    form = unfold(page, "GET", "/sandboxes/{id}/files/content")
    fill(form, "id", sandbox)
    fill(form, "path", "from-page.txt")
    form.get_by_role("button", name="Send").click()
    expect(form.locator("pre")).to_contain_text('"data": "from the page"', timeout=PATIENCE)
