"""Fill Python environments without a package index."""

from __future__ import annotations

import shutil
import zipfile
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


def make_wheel(folder: Path, name: str, data: bytes = b"") -> str:
    """Make a wheel of a package with a file of data, and return the wheel's name."""
    file = f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / file, "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "")
        wheel.writestr(f"{name}/data.bin", data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return file
