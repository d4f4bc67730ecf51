"""Templates on the command line: made at setup, listed with whether they fit, and pruned when they do not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.shell import Shell

from jupyter_agentbox.storage.audit.log import AuditLog

_START = """
from jupyter_client.manager import KernelManager
manager = KernelManager(kernel_name="agentbox")
manager.start_kernel()
manager.shutdown_kernel(now=True)
"""


def read_ids(shell: Shell) -> list[tuple[str, str]]:
    """Return the ids of the templates that are listed, and whether they fit."""
    found = [(item["id"], item["fits"]) for item in json.loads(shell("warm", "--list", "--json"))]
    table = shell("warm", "--list").splitlines()[1:]
    assert [(line.split()[0], line.split(maxsplit=6)[-1]) for line in table] == found
    return found


@pytest.mark.timeout(700)
def test_setup_makes_a_template_which_kernels_start_off_until_it_fits_no_more(has_runsc: None, tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    assert "template:" not in shell("setup", "--no-template", "--dry-run")
    assert "would create the one of profile default" in shell("setup", "--dry-run")
    assert "  created in" in shell("setup")
    assert "  up to date" in shell("setup")
    ((made, fits),) = read_ids(shell)
    assert fits == "yes"
    subprocess.run([sys.executable, "-c", _START], env=shell.env, cwd=tmp_path, check=True, timeout=200)
    rows = AuditLog(tmp_path / "data/agentbox/audit.sqlite").query(kind="lifecycle")
    assert "template" in [(row.detail or {}).get("how") for row in rows]
    assert shell("prune").strip() == "nothing to remove"

    config = tmp_path / "config"
    config.mkdir(exist_ok=True)
    settings = {"Policy": {"profiles": {"default": {"preload": ["json"]}}}}
    (config / "jupyter_agentbox_config.json").write_text(json.dumps(settings))
    ((found, fits),) = read_ids(shell)
    assert (found, fits.split()[0]) == (made, "no,")
    assert "the profile's preload" in fits
    text = shell("prune")
    assert f"removed outdated template {made} of profile default" in text
    assert "preload" in text
    assert shell("warm", "--list") == ""
