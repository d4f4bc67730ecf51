"""Templates of an ordinary user, with subordinate ids and without."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT


def copy_packages(target: Path) -> None:
    """Copy what kernels and the package itself need, out of an environment that only this user may be able to see."""
    todo, seen = ["ipykernel", "msgspec", "jupyter_core", "traitlets", "aiohttp", "zstandard"], set[str]()
    while todo:
        name = re.split(r"[ ;<>=!~\[(]", todo.pop(), maxsplit=1)[0].lower().replace("-", "_")
        if name in seen:
            continue
        seen.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another system or release
        todo += [item for item in found.requires or [] if "extra ==" not in item]
        for file in found.files or []:
            source = Path(str(found.locate_file(file)))
            if ".." not in file.parts and file.suffix != ".pyc" and "tests" not in file.parts and source.exists():
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target / file)


@pytest.fixture(scope="module")
def public_dir(has_runsc: None) -> Iterator[Path]:
    """A directory that everybody may enter, with packages for the system's own Python."""
    said = subprocess.run(["/usr/bin/python3", "-V"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert f" {sys.version_info[0]}.{sys.version_info[1]}." in said, "the system's Python is the environment's"
    base = Path(f"/tmp/agentbox-templates-{os.getpid()}")
    base.mkdir(mode=0o755)
    try:
        copy_packages(base / "lib")
        # Others write and rename what is compiled meanwhile.
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "jupyter_agentbox", base / "lib/jupyter_agentbox", ignore=ignored)
        about = base / "lib/jupyter_agentbox-0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: jupyter_agentbox\nVersion: 0\n")
        (about / "entry_points.txt").write_text(
            "[jupyter_agentbox.runtimes]\nrunsc = jupyter_agentbox.runtimes.runsc.runtime:RunscRuntime\n"
        )
        shutil.copy(ROOT / "tests/support/ordinary_templates.py", base)
        subprocess.run(["chmod", "-R", "a+rX", str(base)], check=True, timeout=60)
        yield base
    finally:
        shutil.rmtree(base)


def run_as(uid: int, public_dir: Path) -> dict[str, object]:
    """Run ``ordinary_templates.py`` as an ordinary user, and return what it found."""
    home = public_dir / f"home-{uid}"
    home.mkdir()
    os.chown(home, uid, uid)
    home.chmod(stat.S_IRWXU)
    user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    program = ["/usr/bin/python3", str(public_dir / "ordinary_templates.py"), str(public_dir / "lib")]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(public_dir / "lib"), "HOME": str(home)}
    ran = subprocess.run([*user, *program], env=env, cwd=home, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, object] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")
class TestOrdinaryUser:
    """Without root, without delegated control groups."""

    def test_without_subordinate_ids_kernels_start_cold_and_it_is_said_why(self, public_dir: Path) -> None:
        found = run_as(12346, public_dir)
        assert "no subordinate ids" in str(found["refusal"])
        assert (found["layout"], found["said"], found["left"]) == ("plain", "0 /workspace\n", [])

    def test_with_subordinate_ids_they_start_off_a_template_and_out_of_a_pool(self, public_dir: Path) -> None:
        name = f"agenttpl{os.getpid()}"
        subprocess.run(["useradd", "--no-create-home", "--user-group", name], check=True, timeout=60)
        try:
            uid = int(subprocess.run(["id", "-u", name], capture_output=True, text=True, check=True, timeout=60).stdout)
            found = run_as(uid, public_dir)
        finally:
            subprocess.run(["userdel", "--force", name], check=True, timeout=60)
        said = "1000 /workspace\n"
        warm = {"made": 1, "layout": "claimed", "said": said, "is_pooled": True, "said_by_pooled": said}
        assert found == {**warm, "left": []}
