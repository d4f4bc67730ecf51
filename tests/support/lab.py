"""Drive JupyterLab in a real browser."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Locator, Page, Response

from support import ROOT
from support.harness import Env, Server, kill_group, wait_until

SOURCES = ROOT / "labextension"


BUILT = SOURCES / "dist"


#: Folder for screenshots; if it is not set, none are taken.
SCREENS = os.environ.get("AGENTBOX_SCREENS")


#: Timeout of each step, in milliseconds. Long, because the machine may be busy.
PATIENCE = 120_000


STATUS = "#jp-main-statusbar .ab-indicator"


BANNER = ".ab-banner"


def run_npm(*command: str) -> None:
    """Run a program in the extension's source folder."""
    answer = subprocess.run(
        command, cwd=SOURCES, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=400,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout[-8000:]


def _tab(path: str) -> str:
    """Return the selector of a notebook's tab, which those that show its sandbox are not."""
    return f'.lm-TabBar-tab:has(.lm-TabBar-tabLabel:text-is("{Path(path).name}"))'


class Lab:
    """Page of JupyterLab, and the messages of its console.

    Parameters
    ----------
    browser : Browser
    server : Server
    axe : Path, optional
        Script that checks accessibility.
    """

    def __init__(self, browser: Browser, server: Server, axe: Path | None = None) -> None:
        self.server, self.axe = server, axe
        self.complaints: list[str] = []
        self.page: Page = browser.new_page(viewport={"width": 1280, "height": 800})
        self.page.set_default_timeout(PATIENCE)
        self.page.on("console", lambda message: self._hear(message.type, message.text, str(message.location)))
        self.page.on("pageerror", lambda error: self._catch(str(error)))
        self.page.on("response", self._see)

    def _hear(self, kind: str, text: str, place: str) -> None:
        # Ignore reports of slow plugin activation, which depends on the machine.
        if kind in ("error", "warning") and "agentbox" in text + place and "activate" not in text:
            self.complaints.append(f"{kind}: {text} {place}")

    def _catch(self, error: str) -> None:
        # JupyterLab leaves such an exception behind for each request that any kernel dies with.
        if "Canceled future" not in error:
            self.complaints.append(f"exception: {error}")

    def _see(self, answer: Response) -> None:
        if answer.status >= 400 and "agentbox" in answer.url:
            self.complaints.append(f"{answer.status}: {answer.url} {answer.text()}")

    def kill_server(self) -> None:
        """Kill the server, as a reset of the machine would. Its kernels keep running until their lease expires."""
        kill_group(self.server.process)
        self.server.process.wait()

    def start_server(self, *arguments: str) -> None:
        """Restart the server at its address, with other arguments if there are any."""
        command = self.server.command("lab", arguments) if arguments else map(str, self.server.process.args)
        with self.server.log.open("a") as log:
            self.server.process = self.server.env.spawn(*command, stdout=log)
        self.server.wait_ready()

    def check_console(self, *expected: str) -> None:
        """Fail on any of the extension's messages in the console, except those that contain an expected word."""
        found = [text for text in self.complaints if not any(word in text for word in expected)]
        self.complaints.clear()
        assert found == [], found

    def open(self, path: str = "") -> None:
        """Load JupyterLab, with the notebook at this path or with the launcher."""
        place = f"lab/tree/{path}" if path else "lab"
        self.page.goto(self.server.url(f"{place}?token={self.server.token}&reset"))
        self.page.locator(".jp-NotebookPanel .jp-Cell" if path else ".jp-Launcher-content").first.wait_for()
        if path:  # JupyterLab drops cells that are run earlier
            self.page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for()

    def show(self, path: str) -> None:
        """Open a notebook in the page as it is, which takes a fraction of the time of :meth:`open`."""
        self.page.evaluate(
            """async path => {
                const panel = await window.jupyterapp.commands.execute('docmanager:open', {path});
                await panel.context.ready;
                await panel.sessionContext.ready;
                await panel.sessionContext.session.kernel.info;
            }""",
            path,
        )
        self.page.locator(f"{_tab(path)}.lm-mod-current").wait_for()
        self.notebook.locator(".jp-Cell").first.wait_for()
        self.page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for()

    def discard(self, path: str) -> None:
        """Shut down the kernel of an open notebook, and close the notebook."""
        self.page.evaluate(
            """async path => {
                const panel = await window.jupyterapp.commands.execute('docmanager:open', {path});
                await panel.sessionContext.shutdown();
                await panel.context.save();
                panel.close();
            }""",
            path,
        )
        self.page.locator(_tab(path)).wait_for(state="detached")

    def write(self, path: str, *cells: str, kernel: str = "agentbox") -> None:
        """Write a notebook into the server's folder."""
        body = {
            "nbformat": 4, "nbformat_minor": 5,
            "metadata": {"kernelspec": {"name": kernel, "display_name": kernel, "language": "python"}},
            "cells": [
                {"id": f"cell-{number}", "cell_type": "code", "source": text, "metadata": {}, "outputs": [],
                 "execution_count": None}
                for number, text in enumerate(cells)
            ],
        }  # fmt: skip
        (self.server.env.work / path).write_text(json.dumps(body))

    @property
    def notebook(self) -> Locator:
        """Notebook in the foreground."""
        return self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")

    def run_cell(self, number: int) -> None:
        """Run a cell with its keyboard shortcut."""
        self.notebook.locator(".jp-Cell .cm-content").nth(number).click()
        self.page.keyboard.press("Control+Enter")

    def output(self, number: int, text: str) -> None:
        """Wait until a cell shows this output."""
        self.notebook.locator(".jp-Cell").nth(number).locator(".jp-OutputArea", has_text=text).first.wait_for()

    def kernel_of(self, path: str) -> str:
        """Return the id of a notebook's kernel, once it has one."""

        def find() -> str:
            sessions = self.server.call("GET", "api/sessions")
            return next((str(item["kernel"]["id"]) for item in sessions if item["path"] == path), "")

        return str(wait_until(find, 120, f"{path} has a kernel"))

    def api(self, verb: str, path: str, body: Any = None) -> Any:
        """Call the agentbox REST API as another client of the same user."""
        return self.server.call(verb, f"api/agentbox{path}", body)

    def press(self, name: str, *, within: Locator | None = None) -> None:
        """Press the button with this name."""
        (within or self.page).get_by_role("button", name=name, exact=True).first.click()

    def answer(self, label: str, text: str | None = None) -> None:
        """Fill in and accept the dialog that is open."""
        dialog = self.page.locator(".jp-Dialog")
        dialog.wait_for()
        if text is not None:
            dialog.locator("input").fill(text)
        dialog.locator(".jp-Dialog-button", has_text=label).click()
        dialog.wait_for(state="detached")

    def show_sandboxes(self) -> Locator:
        """Open the side panel with its shortcut, and return it."""
        panel = self.page.locator("#jupyter-agentbox-sandboxes")
        if not panel.is_visible():
            self.page.keyboard.press("Alt+Shift+B")
        panel.wait_for()
        return panel

    def open_row(self, name: str) -> Locator:
        """Open the actions of a row of the side panel, and return the row."""
        row = self.show_sandboxes().get_by_role("listitem").filter(has_text=name).first
        head = row.locator(".ab-row-head")
        if head.get_attribute("aria-expanded") == "false":
            head.click()
        return row

    def show_view(self, tab: str) -> Locator:
        """Open a tab in the view of the notebook's sandbox, and return the view."""
        view = self.page.locator(".ab-view")
        if not view.is_visible():
            # The indicator's text changes with each measurement.
            self.page.locator("#jp-main-statusbar .ab-indicator", has_text="network:").click()
        view.wait_for()
        view.get_by_role("tab", name=tab).click()
        return view

    def close_view(self) -> None:
        """Close the view of the notebook's sandbox."""
        self.page.locator(".lm-TabBar-tab", has_text="Sandbox:").locator(".lm-TabBar-tabCloseIcon").click()

    def shoot(self, name: str) -> None:
        """Take a screenshot, if :data:`SCREENS` is set."""
        if SCREENS:
            Path(SCREENS).mkdir(parents=True, exist_ok=True)
            self.page.evaluate(  # wait until notices have slid in
                """() => Promise.all(document.getAnimations()
                    .filter(item => item.effect.target?.matches('.Toastify__toast'))
                    .map(item => item.finished.catch(() => undefined)))"""
            )
            self.page.screenshot(path=Path(SCREENS) / f"{name}.png")

    def check_access(self, *selectors: str) -> None:
        """Fail on accessibility problems that axe rates as serious or critical."""
        assert self.axe is not None
        if not self.page.evaluate("'axe' in window"):
            self.page.add_script_tag(path=self.axe)
        found = self.page.evaluate(
            """async selectors => {
                const include = selectors.map(item => [item]);
                const {violations} = await axe.run({include}, {resultTypes: ['violations']});
                const bad = violations.filter(item => ['serious', 'critical'].includes(item.impact));
                const tell = node => node.html.slice(0, 200) + ' ' + node.failureSummary;
                return bad.map(item => `${item.id}: ${item.nodes.map(tell).join(' | ')}`);
            }""",
            list(selectors),
        )
        assert found == [], found


def kernelspec(env: Env, name: str, display_name: str, *, cull: float | None = None, **request: Any) -> None:
    """Install a sandboxed kernelspec, with its own limit in seconds on idle kernels."""
    folder = env.data / "kernels" / name
    folder.mkdir(parents=True)
    stanza = {"provisioner_name": "agentbox-provisioner", "config": request}
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": display_name, "language": "python",
        "metadata": {"kernel_provisioner": stanza} | ({} if cull is None else {"cull_idle_timeout": cull}),
    }  # fmt: skip
    (folder / "kernel.json").write_text(json.dumps(spec))
