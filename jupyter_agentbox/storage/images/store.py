"""Keep the images of a state directory: one folder each, named by its address.

A folder is renamed to its address only when it is complete, so every folder with an address is usable. The state
directory belongs to the user (0700), and an image is never written to again: sandboxes see it read-only.
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
#: Seconds for which an empty folder counts as just created.
_FRESH = 60.0


class ImageStore:
    """The images of one state directory.

    Parameters
    ----------
    state_dir : Path
        The state directory; images are in ``images/`` beneath it.
    """

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.directory = state_dir / "images"

    def list(self) -> list[Image]:
        """Return the images, newest first, without unreadable ones."""
        found = []
        for path in self.directory.glob("*/image.json"):
            with contextlib.suppress(OSError, InvalidRequest, Damaged):
                found.append(self._read(path.parent.name))
        return sorted(found, key=lambda image: -image.created)

    def get(self, reference: str, is_shown: Callable[[Image], bool] = lambda image: True) -> Image:
        """Return an image by its name, ``name@address``, or address. If several have the name, return the newest.

        An address needs at least 12 digits. Images that `is_shown` rejects are treated as nonexistent.

        Raises
        ------
        InvalidRequest
            The reference is malformed.
        NotFound
        """
        parsed = _REFERENCE.fullmatch(reference)
        if not parsed:
            raise InvalidRequest(f"{reference[:100]!r} is not a valid image name", field="image")
        name, address = parsed["name"], parsed["address"]
        shown = [image for image in self.list() if is_shown(image)]
        for image in shown:
            if image.name == name and image.address.startswith(address or ""):
                return image
            if len(reference) >= 12 and image.address.startswith(reference):
                return image
        known = ", ".join(sorted({image.name for image in shown})) or "none"
        raise NotFound(
            f"image {reference!r} does not exist; images are: {known}. Build one with `jupyter agentbox image build`",
            field="image",
        )

    def root(self, image: Image) -> Path:
        """Return the folder that is the root of the image's sandboxes."""
        return self.directory / image.address / "rootfs"

    def _read(self, address: str) -> Image:
        folder = self.directory / address
        with (folder / "image.json").open("rb") as file:
            image = Image.from_bytes(file.read(MAX_TEXT))
        if image.address != address or (folder / "rootfs").is_symlink() or not (folder / "rootfs").is_dir():
            raise Damaged(f"the image in {folder} does not match its description", field="image")
        return image

    def verify(self, image: Image) -> None:
        """Hash the whole tree. Raises Damaged if the hash does not match the image's address."""
        if tree.hash_tree(self.root(image), image.setup) != image.address:
            raise Damaged(
                f"image {image.short} was changed after it was built; remove it and build it again", field="image"
            )

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Create a folder for a new image, and remove it at the end of the block unless :meth:`add` has stored it."""
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
        """Add the tree in ``rootfs`` of a :meth:`staging` folder to the store.

        Parameters
        ----------
        folder : Path
        recipe : Recipe
            Provides the name, environment, services and kernels.
        origin : dict, optional
            Value to store as the image's recipe; by default the recipe itself.
        packages : dict, optional
            Packages of the distribution in the tree.
        address : str, optional
            The expected address.

        Raises
        ------
        InvalidRequest
            The tree cannot be the root of a sandbox.
        Damaged
            The address differs from the expected one.
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
                f"the image does not match its description: its address is {image.address[:12]}, not {address[:12]}",
                field="image",
            )
        (folder / "image.json").write_bytes(image.to_bytes())
        root.chmod(0o755)
        target = self.directory / image.address
        try:
            folder.rename(target)
        except OSError:
            # The same image exists already. The one built last is the one that its name refers to.
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
            A sandbox uses it as its root.
        """
        root = str(self.root(image))
        for path in (self.state_dir / "sandboxes").glob("*/state.json"):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                if json.loads(path.read_bytes())["spec"]["root"] == root:
                    raise Conflict(f"sandbox {path.parent.name} uses image {image.short}; end the sandbox first")
        gone = self.directory / f"{GONE}{image.address[:16]}-{os.getpid()}"
        with _held(self.directory / image.address):
            (self.directory / image.address).rename(gone)
            remove_tree(gone)

    def clear(self) -> None:
        """Remove what killed builds and removals have left, but nothing that a running one is using."""
        for path in self.directory.glob(".*-*"):
            with contextlib.suppress(OSError):
                # The process that has just created a folder locks it a moment later.
                if any(path.iterdir()) or time.time() - path.stat().st_mtime > _FRESH:
                    with _held(path) as is_left:
                        if is_left:
                            remove_tree(path)


def _held(folder: Path) -> contextlib.AbstractContextManager[bool]:
    """Hold the lock on a folder inside the block, and yield whether it was free."""
    return try_lock(folder, os.O_RDONLY | os.O_DIRECTORY)


def describe(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as plain values, without empty ones."""
    values = {name: value for name, value in msgspec.to_builtins(recipe).items() if value}
    return dict(values)
