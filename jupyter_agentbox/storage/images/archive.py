"""Export and import images as single files, to keep them or to move them to another machine.

The file is a tar archive: ``image.json`` first, then the tree in ``rootfs/``. The import hashes the unpacked tree and
refuses an image that does not match its description.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path
from typing import IO

from jupyter_agentbox.errors import Conflict, Damaged, NotFound

from . import tree
from .store import ImageStore
from .values import MAX_TEXT, Image, Recipe


def export_image(store: ImageStore, image: Image, target: Path) -> None:
    """Write an image to a new file, compressed if its name ends with ``.gz``. The image is verified first.

    Raises
    ------
    Damaged
        It has changed since it was built.
    Conflict
        A file with that name exists.
    """
    store.verify(image)
    try:
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise Conflict(
            f"Cannot write {target}: it already exists. Choose another name, or remove it", field="file"
        ) from None
    try:
        with open(handle, "wb") as file:
            mode = "w|gz" if target.name.endswith(".gz") else "w|"
            with tarfile.open(fileobj=file, mode=mode, format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
                write_tree(tar, store.root(image), image)
    except BaseException:
        target.unlink()
        raise


def write_tree(tar: tarfile.TarFile, root: Path, image: Image) -> None:
    """Write description and tree. The same image produces the same bytes, except for the description's timestamp."""
    description = image.to_bytes()
    head = tarfile.TarInfo("image.json")
    head.size = len(description)
    tar.addfile(head, io.BytesIO(description))
    for path, info in tree.walk(root):
        member = tarfile.TarInfo(f"rootfs/{path.relative_to(root)}")
        member.mode = 0o755 if stat.S_ISDIR(info.st_mode) or info.st_mode & 0o111 else 0o644
        if stat.S_ISDIR(info.st_mode):
            member.type = tarfile.DIRTYPE
            tar.addfile(member)
        elif stat.S_ISLNK(info.st_mode):
            member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
            tar.addfile(member)
        else:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                member.size = os.fstat(file.fileno()).st_size
                tar.addfile(member, file)


def import_image(store: ImageStore, source: Path) -> Image:
    """Read an image from a file and add it to the store.

    Parameters
    ----------
    store : ImageStore
    source : Path
        A file that :func:`export_image` wrote.

    Raises
    ------
    Damaged
        The file is not an exported image, or was changed or truncated.
    InvalidRequest
        The tree cannot be the root of a sandbox.
    TooLarge
    """
    try:
        file = source.open("rb")
    except OSError as error:
        raise NotFound(f"Cannot read {source}: {error.strerror}. Check the path", field="file") from None
    with file, store.staging() as folder:
        root = folder / "rootfs"
        root.mkdir()
        image = _read_description(file)
        file.seek(0)
        unpacker = tree.Unpacker(root)
        unpacker.add(file, prefix="rootfs")
        unpacker.finish()
        return store.add(
            folder, _settings_of(image), origin=image.recipe, packages=image.packages, address=image.address
        )


def _settings_of(image: Image) -> Recipe:
    return Recipe(name=image.name, env=image.env, init=image.init, services=image.services, kernels=image.kernels)


def _read_description(file: IO[bytes]) -> Image:
    """Return the description at the beginning of an archive. Raises Damaged or InvalidRequest."""
    try:
        with tarfile.open(fileobj=file, mode="r|*", tarinfo=tree.Member) as tar:
            member = tar.next()
            if member and member.name == "image.json" and member.isreg() and member.size <= MAX_TEXT:
                data = tar.extractfile(member)
                assert data is not None
                with data:
                    return Image.from_bytes(data.read())
    except (tarfile.TarError, EOFError, UnicodeError) as error:
        raise Damaged(f"Cannot read the archive: {error}. Copy or export it again", field="image") from None
    raise Damaged(
        "Cannot import the file: it was not written by `jupyter agentbox image export`. Build an image instead, from a"
        " recipe or a Dockerfile",
        field="image",
    )
