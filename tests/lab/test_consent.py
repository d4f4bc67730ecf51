"""A person allows blocked hosts in JupyterLab, and revokes them, in Chromium on real gVisor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, expect
from support.harness import Env, wait_until
from support.lab import BANNER, Lab
from support.public_site import RESOLVE, SITE, Site

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    found = Site()
    yield found
    found.listener.close()


@pytest.fixture(scope="module")
def lab(make_lab: Callable[..., Env], browser: Browser) -> Iterator[Lab]:
    env = make_lab(profiles={"default": {"user_may_allow": ["*.test:*"], "memory": "300 MiB"}})
    (env.config_dir / "jupyter_server_config.py").write_text(RESOLVE)
    with env.server("lab") as server:
        lab = Lab(browser, server)
        yield lab
        lab.page.close()
    env.assert_clean()


def test_blocked_hosts_are_allowed_and_revoked(lab: Lab, site: Site) -> None:
    host = f"{SITE}:{site.port}"
    code = (
        "import urllib.request\n"
        "try: print(urllib.request.urlopen('http://{0}/', timeout=60).read().decode())\n"
        "except OSError as error: print(error)"
    )
    lab.write("book.ipynb", code.format(host), code.format("no.example"))
    lab.write("beside.ipynb", code.format(host))
    lab.open("book.ipynb")
    lab.run_cell(0)
    lab.output(0, f"Blocked by sandbox: {host}. Allow it in the Sandboxes panel, or add it to Policy.allowed_hosts.")
    notice = lab.page.locator(".Toastify__toast", has_text=f"A connection from book.ipynb to {host} was blocked.")
    names = ["Allow for This Kernel", "Allow for This Notebook", "Always Allow", "Show"]
    expect(notice.locator(".jp-toast-button")).to_have_text(names)
    lab.press("Allow for This Notebook", within=notice)
    lab.page.locator(".Toastify__toast", has_text=f"book.ipynb can now connect to {host}.").wait_for()
    lab.run_cell(0)
    lab.output(0, "hello")

    # Where the button would not work, there is none.
    lab.run_cell(1)
    lab.output(1, "Blocked by sandbox: no.example:80. Ask your administrator to add it to Policy.allowed_hosts.")
    other = lab.page.locator(".Toastify__toast", has_text="to no.example was blocked.")
    expect(other).to_contain_text("Ask your administrator to add it to Policy.allowed_hosts.")
    expect(other.locator(".jp-toast-button")).to_have_text(["Show"])
    lab.press("Show", within=other)
    view = lab.page.locator(".ab-view")
    blocked = view.locator(".ab-ask", has_text="no.example")
    expect(blocked).to_contain_text("Ask your administrator to add it to Policy.allowed_hosts.")
    expect(blocked.get_by_role("button")).to_have_count(0)

    rule = view.locator(".ab-rules li")
    expect(rule).to_contain_text(f"{host} for book.ipynb")
    lab.press(f"Revoke {host}", within=rule)
    expect(view).to_contain_text(f"{host} is no longer allowed. Open connections to it were closed.")
    expect(rule).to_have_count(0)
    lab.page.get_by_role("tab", name="book.ipynb", exact=True).click()
    lab.run_cell(0)
    lab.output(0, "Blocked by sandbox")

    # From the view; the next notebook has it at once.
    lab.press("Always Allow", within=view.locator(".ab-ask", has_text=host))
    expect(view).to_contain_text(f"{host} is now allowed. Run the cell again.")
    expect(view.locator(".ab-rules li")).to_contain_text(f"{host} always, with profile default")
    view.get_by_label("Another host").fill("db.test:5432")
    lab.press("Allow…", within=view)
    lab.press("Allow for This Kernel", within=view.locator(".ab-ask", has_text="db.test:5432"))
    expect(view.locator(".ab-rules li")).to_have_count(2)
    view.get_by_label("Another host").fill("10.0.0.1")
    lab.press("Allow…", within=view)
    expect(view.locator(".ab-ask", has_text="10.0.0.1").get_by_role("button")).to_have_count(0)
    view.get_by_text("API keys and more memory").press("Enter")  # a notice may cover it
    expect(view.locator(".ab-recipe pre").first).to_have_text('c.Policy.env_passthrough = ["EXAMPLE_API_KEY"]')
    expect(view.locator(".ab-recipe pre").last).to_contain_text('c.Policy.max_memory = "600 MiB"')
    lab.shoot("consent")
    lab.close_view()
    lab.show("beside.ipynb")
    lab.run_cell(0)
    lab.output(0, "hello")

    # All of them are listed in the side panel.
    panel = lab.show_sandboxes()
    panel.get_by_text("Hosts that you allowed").click()
    expect(panel.locator(".ab-rules li")).to_have_count(2)
    lab.press(f"Revoke {host}", within=panel)
    expect(panel.locator(".ab-rules li")).to_have_count(1)
    kernel = lab.kernel_of("beside.ipynb")
    wait_until(lambda: host not in lab.api("GET", f"/sandboxes/{kernel}")["allowed_hosts"], 60, "it is revoked")
    lab.run_cell(0)
    lab.output(0, "Blocked by sandbox")
    lab.check_console()


def test_a_kernel_out_of_memory_shows_the_lines_that_allow_more(lab: Lab) -> None:
    lab.write("memory.ipynb", "x = [b'x' * 2**20 for _ in range(1000)]")
    lab.show("memory.ipynb")
    lab.run_cell(0)
    recipe = lab.page.locator(BANNER).locator(".ab-recipe")
    expect(recipe).to_contain_text(str(lab.server.env.config_dir / "jupyter_agentbox_config.py"))
    expect(recipe.locator("pre")).to_have_text(
        'c.Policy.max_memory = "600 MiB"\nc.Policy.profiles.update({"default": {"memory": "600 MiB"}})'
    )
    lab.shoot("more-memory")
    lab.check_console()
