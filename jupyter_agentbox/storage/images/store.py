"""The images of a state directory: one folder each, called by its address.

A folder appears under its address only when it is whole, by renaming, so whoever finds one may use it. The state
directory is the user's own (0700), and an image is never written to again: sandboxes see it read-only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from jupyter_agentbox.errors import Conflict, Damaged, InvalidRequest, NotFound
from jupyter_agentbox.linux import GONE, NEW, remove_tree, try_lock, write_atomically

from . import tree
from .values import MAX_TEXT, Image, Recipe

_REFERENCE = re.compile(r"(?P<name>[a-z0-9][a-z0-9._-]{0,63})(@(?P<address>[0-9a-f]{12,64}))?")
#: Seconds after which an empty folder is none that was made just now.
_FRESH = 60.0


class ImageStore:
    """Keeps images.

    Parameters
    ----------
    state_dir : Path
        The state directory; images are in ``images/`` beneath it.
    """

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.directory = state_dir / "images"

    def list(self) -> list[Image]:
        """List the images, the newest first. What can't be read is left out."""
        found = []
        for path in self.directory.glob("*/image.json"):
            with contextlib.suppress(OSError, InvalidRequest, Damaged):
                found.append(self._read(path.parent.name))
        return sorted(found, key=lambda image: -image.created)

    def get(self, reference: str, is_shown: Callable[[Image], bool] = lambda image: True) -> Image:
        """Return an image by its name, ``name@address``, or address; of several with one name the newest.

        At least 12 digits of an address are needed. Those that are not shown are as good as not there.

        Raises
        ------
        InvalidRequest
            The reference is none.
        NotFound
        """
        parsed = _REFERENCE.fullmatch(reference)
        if not parsed:
            raise InvalidRequest(f"{reference[:100]!r} is no name of an image", field="image")
        name, address = parsed["name"], parsed["address"]
        shown = [image for image in self.list() if is_shown(image)]
        for image in shown:
            if image.name == name and image.address.startswith(address or ""):
                return image
            if len(reference) >= 12 and image.address.startswith(reference):
                return image
        known = ", ".join(sorted({image.name for image in shown})) or "none"
        raise NotFound(
            f"there is no image {reference!r}; images are: {known}. `jupyter agentbox image build` makes one",
            field="image",
        )

    def root(self, image: Image) -> Path:
        """Return the folder that is the root of its sandboxes."""
        return self.directory / image.address / "rootfs"

    def _read(self, address: str) -> Image:
        folder = self.directory / address
        with (folder / "image.json").open("rb") as file:
            image = Image.from_bytes(file.read(MAX_TEXT))
        if image.address != address or (folder / "rootfs").is_symlink() or not (folder / "rootfs").is_dir():
            raise Damaged(f"the image in {folder} is not the one that its description tells of", field="image")
        return image

    def verify(self, image: Image) -> None:
        """Hash the whole tree. Raises Damaged if it is not what its address says."""
        if tree.hash_tree(self.root(image), image.setup) != image.address:
            raise Damaged(
                f"image {image.short} was changed since it was made; remove it and build it again", field="image"
            )

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Make a folder for an image that is being made; it is removed unless :meth:`add` has taken it."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(self.state_dir, 0o700)
        self.clear()
        folder = Path(tempfile.mkdtemp(prefix=NEW, dir=self.directory))
        with _held(folder):
            try:
                yield folder
            finally:
                remove_tree(folder)

    def add(
        self,
        folder: Path,
        recipe: Recipe,
        *,
        origin: dict[str, Any] | None = None,
        packages: dict[str, str] | None = None,
        address: str | None = None,
    ) -> Image:
        """Take up what lies in ``rootfs`` of a :meth:`staging` folder.

        Parameters
        ----------
        folder : Path
        recipe : Recipe
            Its name, environment, services and kernels.
        origin : dict, optional
            What to keep as its recipe; the recipe itself unless given.
        packages : dict, optional
            The distribution's packages in it.
        address : str, optional
            What its address must be.

        Raises
        ------
        InvalidRequest
            No sandbox could have it as its root.
        Damaged
            Its address is another.
        """
        root = folder / "rootfs"
        tree.clean(root)
        tree.check_tree(root)
        image = Image(
            address="0" * 64,
            name=recipe.name,
            recipe=origin if origin is not None else describe(recipe),
            created=time.time(),
            size=tree.measure(root),
            env=recipe.env,
            init=recipe.init,
            services=recipe.services,
            kernels=recipe.kernels,
            packages=packages or {},
        )
        image = msgspec.structs.replace(image, address=tree.hash_tree(root, image.setup))
        if address is not None and image.address != address:
            raise Damaged(
                f"the image is not what its description says: its address is {image.address[:12]}, and should be "
                f"{address[:12]}",
                field="image",
            )
        (folder / "image.json").write_bytes(image.to_bytes())
        root.chmod(0o755)
        target = self.directory / image.address
        try:
            folder.rename(target)
        except OSError:
            # The same image is there already. Built last, it is the one that its name means.
            with contextlib.suppress(OSError, InvalidRequest, Damaged):
                self._read(image.address)
                write_atomically(target / "image.json", image.to_bytes())
                return image
            raise
        target.chmod(0o700)
        return image

    def remove(self, image: Image) -> None:
        """Remove an image.

        Raises
        ------
        Conflict
            A sandbox has it as its root.
        """
        root = str(self.root(image))
        for path in (self.state_dir / "sandboxes").glob("*/state.json"):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                if json.loads(path.read_bytes())["spec"]["root"] == root:
                    raise Conflict(f"sandbox {path.parent.name} runs on image {image.short}; end it first")
        gone = self.directory / f"{GONE}{image.address[:16]}-{os.getpid()}"
        with _held(self.directory / image.address):
            (self.directory / image.address).rename(gone)
            remove_tree(gone)

    def clear(self) -> None:
        """Remove what builds and removals that were killed have left, and nothing that one is at."""
        for path in self.directory.glob(".*-*"):
            with contextlib.suppress(OSError):
                # One that was just made has its lock in a moment.
                if any(path.iterdir()) or time.time() - path.stat().st_mtime > _FRESH:
                    with _held(path) as is_left:
                        if is_left:
                            remove_tree(path)


def _held(folder: Path) -> contextlib.AbstractContextManager[bool]:
    """Hold the lock on a folder in the block; whether nobody else did."""
    return try_lock(folder, os.O_RDONLY | os.O_DIRECTORY)


def describe(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as plain values, without what is not set."""
    values = {name: value for name, value in msgspec.to_builtins(recipe).items() if value}
    return dict(values)
