"""Notebooks that need another folder: one in a home directory, and one whose data lies elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from support.harness import Env, wait_until
from support.lab import Lab

CELL = "import os; print(sorted(os.listdir()))"


@pytest.fixture(scope="module")
def lab(make_lab: Callable[..., Env], browser: Browser) -> Iterator[Lab]:
    env = make_lab()
    with env.server("lab", env={"HOME": str(env.work)}) as server:
        lab = Lab(browser, server)
        yield lab
        lab.page.close()
    env.assert_clean()


def test_a_notebook_in_a_home_starts_with_a_private_folder_and_moves_to_its_own(lab: Lab) -> None:
    home = lab.server.env.work
    (home / "secret.txt").write_text("x")
    lab.write("first.ipynb", CELL)
    lab.open("first.ipynb")
    notice = lab.notebook.locator(".ab-notice")
    expect(notice).to_contain_text("This kernel cannot see the files beside the notebook.")
    expect(notice).to_contain_text("it is a home directory")
    lab.run_cell(0)
    lab.output(0, "[]")
    lab.shoot("home")
    before = lab.kernel_of("first.ipynb")
    (home / "notebooks").mkdir()
    (home / "notebooks" / "first.ipynb").write_text("taken")
    lab.press("Move Notebook to “notebooks”", within=lab.notebook)
    notice.wait_for(state="hidden")
    wait_until(lambda: (home / "notebooks" / "first-1.ipynb").exists(), 60, "the notebook has moved")
    assert not (home / "first.ipynb").exists()
    after = lab.kernel_of("notebooks/first-1.ipynb")
    assert after != before
    lab.page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for()
    lab.run_cell(0)
    lab.output(0, "first-1.ipynb")
    [info] = lab.api("GET", "/sandboxes")["sandboxes"]
    assert (info["workspace"], info["workspace_notice"], info["suggested_folder"]) == ("folder", "", "")
    lab.check_console()
    lab.discard("notebooks/first-1.ipynb")


def test_the_notice_can_be_dismissed_and_outlives_a_restart(lab: Lab) -> None:
    lab.write("second.ipynb", CELL)
    lab.show("second.ipynb")
    notice = lab.notebook.locator(".ab-notice")
    notice.wait_for()
    kernel = lab.kernel_of("second.ipynb")
    lab.server.call("POST", f"api/kernels/{kernel}/restart")
    [info] = lab.api("GET", "/sandboxes")["sandboxes"]
    assert "home directory" in info["workspace_notice"]
    assert info["suggested_folder"] == "notebooks"
    lab.press("Dismiss", within=lab.notebook)
    notice.wait_for(state="hidden")
    lab.discard("second.ipynb")


def test_a_folder_from_outside_is_added_and_removed(lab: Lab, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "x.csv").write_text("a,b")
    (lab.server.env.work / "reports").mkdir()
    lab.write("reports/third.ipynb", f"print(open({str(data / 'x.csv')!r}).read())")
    lab.show("reports/third.ipynb")
    view = lab.show_view("Files")
    section = view.get_by_role("region", name="Folders outside the notebook’s folder")
    section.get_by_label("Folder on the server").fill(str(data))
    lab.press("Add Folder", within=section)
    expect(section.get_by_role("listitem")).to_contain_text(f"{data} read-only, for third.ipynb")
    expect(section.get_by_role("listitem")).to_contain_text("Visible after the kernel restarts.")
    lab.press("Restart Kernel…", within=section)
    lab.answer("Restart")
    expect(section).not_to_contain_text("Visible after the kernel restarts.")
    lab.shoot("folders")
    lab.run_cell(0)
    lab.output(0, "a,b")
    section.get_by_label("Folder on the server").fill("/usr/share")
    lab.press("Add Folder", within=section)
    lab.page.locator(".Toastify__toast", has_text="Cannot add /usr/share: it is a system directory").wait_for()
    lab.press(f"Remove {data}", within=section)
    expect(section.get_by_role("listitem")).to_have_count(0)
    lab.check_console("Cannot add /usr/share", "403")
    lab.close_view()
    lab.discard("reports/third.ipynb")
