"""Fill Python environments without a package index."""

from __future__ import annotations

import shutil
from importlib.metadata import distribution, requires
from pathlib import Path

from packaging.requirements import Requirement


def copy_kernel(target: Path) -> None:
    """Copy ipykernel and all that it needs into an environment, as installing it would."""
    todo, seen = ["ipykernel"], set()
    while todo:
        name = todo.pop().lower()
        if name in seen:
            continue
        seen.add(name)
        for text in requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
        found = distribution(name)
        for file in found.files or ():
            source = Path(str(found.locate_file(file)))
            if ".." not in file.parts and source.is_file():
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target / file)
