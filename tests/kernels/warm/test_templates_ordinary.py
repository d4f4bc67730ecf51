"""Templates of an ordinary user, with subordinate ids and without."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT
from support.users import ordinary_user


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
            if ".." not in file.parts and "tests" not in file.parts and source.exists():
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target / file)  # with its time, which is in the compiled file


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
        ignored = shutil.ignore_patterns("*.pyc.*")
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


@pytest.mark.parametrize("has_ids", [False, True], ids=["without subordinate ids", "with subordinate ids"])
def test_an_ordinary_user_starts_kernels_from_templates_only_with_subordinate_ids(
    public_dir: Path, has_ids: bool
) -> None:
    with ordinary_user(has_ids=has_ids) as user:
        program = ["/usr/bin/python3", str(public_dir / "ordinary_templates.py"), str(public_dir / "lib")]
        output = user.run(program, public_dir / f"home-{has_ids:d}", str(public_dir / "lib"), 250)
    found = json.loads(output.splitlines()[-1])
    if user.has_ids:
        said = "1000 /workspace\n"
        warm = {"made": 1, "layout": "claimed", "said": said, "is_pooled": True, "said_by_pooled": said}
        assert found == {**warm, "left": []}
    else:
        assert "no subordinate ids" in str(found["refusal"])
        assert (found["layout"], found["said"], found["left"]) == ("plain", "0 /workspace\n", [])
