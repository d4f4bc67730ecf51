"""Provide images that are built once and cached for all runs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest

if TYPE_CHECKING:
    from contract.sandboxes import SandboxContract

from jupyter_agentbox.egress.presets import pip_environment
from jupyter_agentbox.storage import images
from jupyter_agentbox.storage.images import Image, ImageStore, values
from jupyter_agentbox.storage.images import build as builder

RECIPE = Path(__file__).with_name("languages.toml")


CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jupyter-agentbox-tests"


BUILD_TIMEOUT = 1500


MIRROR = "cran.test"


#: Server configuration with a resolver that maps the mirror's name to this machine.
RESOLVE = f"""\
import socket
find = socket.getaddrinfo
socket.getaddrinfo = lambda host, *more, **named: find("127.0.0.1" if host == "{MIRROR}" else host, *more, **named)
"""


@dataclass(frozen=True)
class Built:
    """Image in a store shared by tests. It must not be changed."""

    store: ImageStore
    image: Image

    def lend(self, state: Path) -> None:
        """Link the image into another state directory."""
        (state / "images").mkdir(mode=0o700, parents=True)
        (state / "images" / self.image.address).symlink_to(self.store.directory / self.image.address)


def build(state: Path) -> Image:
    """Build the image with the command line."""
    command = [sys.executable, "-m", "jupyter_agentbox.cli", "image", "build", str(RECIPE), "--no-kernelspec"]
    answer = subprocess.run(
        [*command, f"--cache={CACHE / 'downloads'}", f"--Policy.state_dir={state}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT,
    )
    assert answer.returncode == 0, answer.stderr[-6000:]
    image = ImageStore(state).get("languages")
    assert answer.stdout.startswith(f"{image.short}  ")
    assert "installing remaining packages" in answer.stderr, "each step is told"
    return image


def build_once(recipe: Path, build: Callable[[Path], Image]) -> Built:
    """Return the image of a recipe, from the cache if an earlier run built it in the same way."""
    sources = [*sorted(Path(images.__file__).parent.glob("*.py")), *sorted(recipe.parent.glob("*.toml"))]
    text = b"".join((recipe.name.encode(), *(path.read_bytes() for path in sources)))
    key = hashlib.sha256(text).hexdigest()[:16]
    state = CACHE / key
    state.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        store = ImageStore(state)
        image = next(iter(store.list()), None) or build(state)
    return Built(store, image)


def build_ours(name: str) -> Built:
    """Return the image of a recipe that comes with agentbox."""
    file = values.find_recipe(name)

    def make(state: Path) -> Image:
        return builder.build(
            ImageStore(state),
            values.read_recipe(file),
            print,
            pip_environment=pip_environment(),
            cache=CACHE / "downloads",
        )

    return build_once(file, make)


class OnRecipe:
    """Base that runs the suite of sandboxes on an image that comes with agentbox."""

    image: ClassVar[str]

    @pytest.fixture(scope="class")
    @classmethod
    def images(cls, has_runsc: None) -> Path:
        return build_ours(cls.image).store.state_dir


def on_every_recipe(suite: type[SandboxContract]) -> dict[str, type]:
    """Return a suite for each image that comes with agentbox, by name. Empty unless AGENTBOX_IMAGES is ``all``."""
    names = values.list_recipes() if os.environ.get("AGENTBOX_IMAGES") == "all" else []
    made = {f"{suite.__name__}On{name.capitalize()}": name for name in names}
    return {title: type(title, (OnRecipe, suite), {"image": name}) for title, name in made.items()}


@dataclass(frozen=True)
class Mirror:
    """Package site on this machine, with a host name that does not exist on the internet."""

    folder: Path
    port: int

    @property
    def host(self) -> str:
        return f"{MIRROR}:{self.port}"
