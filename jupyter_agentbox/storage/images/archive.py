"""Images as one file: written to be kept or moved to another machine, and read again; and those of Docker.

The file is a tar archive, ``image.json`` first and then the tree in ``rootfs/``. Whoever reads one hashes what was
unpacked, so it is used only if it is what its description says. What ``docker export`` and ``docker save`` write is
taken as well; it has no address of its own to be checked.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import tarfile
from pathlib import Path
from typing import IO, Any

import msgspec

from jupyter_agentbox.errors import Conflict, Damaged, InvalidRequest, NotFound

from . import tree
from .kernelspecs import add_kernels
from .store import ImageStore
from .values import MAX_TEXT, Image, Recipe

#: Layers of an image of Docker.
MAX_LAYERS = 500


def export_image(store: ImageStore, image: Image, target: Path) -> None:
    """Write an image to a new file, compressed if its name ends with ``.gz``. It is hashed first.

    Raises
    ------
    Damaged
        It was changed since it was made.
    Conflict
        There is a file of that name.
    """
    store.verify(image)
    try:
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise Conflict(f"{target} is there already", field="file") from None
    try:
        with open(handle, "wb") as file:
            mode = "w|gz" if target.name.endswith(".gz") else "w|"
            with tarfile.open(fileobj=file, mode=mode, format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
                write_tree(tar, store.root(image), image)
    except BaseException:
        target.unlink()
        raise


def write_tree(tar: tarfile.TarFile, root: Path, image: Image) -> None:
    """Write description and tree; the same image gives the same bytes but for the description's time."""
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


def import_image(store: ImageStore, source: Path, recipe: Recipe | None = None) -> Image:
    """Read an image from a file, and keep it.

    Parameters
    ----------
    store : ImageStore
    source : Path
        Of :func:`export_image`, ``docker export`` or ``docker save``; compressed or not.
    recipe : Recipe, optional
        Name, environment and kernels of one of Docker's; required for those, and for those only.

    Raises
    ------
    Damaged
        It is no such file, was changed or cut off.
    InvalidRequest
        It holds no system that a sandbox can run on.
    TooLarge
    """
    try:
        file = source.open("rb")
    except OSError as error:
        raise NotFound(f"{source} can't be read: {error.strerror}", field="file") from None
    with file, store.staging() as folder:
        root = folder / "rootfs"
        root.mkdir()
        kind = _recognise(file)
        file.seek(0)
        unpacker = tree.Unpacker(root)
        if isinstance(kind, Image):
            if recipe is not None:
                raise InvalidRequest(f"{source} has a name of its own, {kind.name}", field="name")
            unpacker.add(file, prefix="rootfs")
            unpacker.finish()
            return store.add(folder, _settings_of(kind), origin=kind.recipe, packages=kind.packages,
                             address=kind.address)  # fmt: skip
        if recipe is None:
            raise InvalidRequest(f"{source} is Docker's: give the image a name", field="name")
        if kind == "save":
            _unpack_layers(file, unpacker)
        else:
            unpacker.add(file)
        unpacker.finish()
        return store.add(
            folder, add_kernels(recipe, root), origin={"imported": source.name, "format": f"docker {kind}"}
        )


def _settings_of(image: Image) -> Recipe:
    return Recipe(name=image.name, env=image.env, init=image.init, services=image.services, kernels=image.kernels)


def _recognise(file: IO[bytes]) -> Image | str:
    """Tell whose archive it is: the description of one of ours, ``save`` or ``export``. Raises Damaged."""
    with _archive_errors(), tarfile.open(fileobj=file, mode="r|*", tarinfo=tree.Member) as tar:
        for number, member in enumerate(tar):
            name = member.name.removeprefix("./")
            if number == 0 and name == "image.json":
                return Image.from_bytes(_read(tar, member))
            if name in ("manifest.json", "oci-layout", "index.json", "repositories") or name.startswith("blobs/"):
                return "save"
            if name.startswith(("usr/", "etc/")):
                return "export"
    raise Damaged("the file holds neither an image of ours nor one of Docker's", field="image")


def _unpack_layers(file: IO[bytes], unpacker: tree.Unpacker) -> None:
    """Unpack what ``docker save`` wrote, layer by layer."""
    with _archive_errors(), tarfile.open(fileobj=file, mode="r:*", tarinfo=tree.Member) as tar:
        try:
            manifest: Any = msgspec.json.decode(_read(tar, tar.getmember("manifest.json")))
            (entry,) = manifest
            layers = [tar.getmember(str(name)) for name in entry["Layers"]]
        except (ValueError, TypeError, KeyError):
            raise Damaged("the archive's manifest is malformed, or it holds several images", field="image") from None
        if len(layers) > MAX_LAYERS:
            raise Damaged(f"an image has {MAX_LAYERS} layers at most", field="image")
        for layer in layers:
            data = tar.extractfile(layer)
            if data is None:
                raise Damaged(f"{layer.name!r:.200} is no layer", field="image")
            with data:
                unpacker.add(data, has_whiteouts=True)


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    data = tar.extractfile(member) if member.isreg() and member.size <= MAX_TEXT else None
    if data is None:
        raise Damaged(f"{member.name!r:.200} is no description of an image", field="image")
    with data:
        return data.read()


@contextlib.contextmanager
def _archive_errors() -> Any:
    try:
        yield
    except (tarfile.TarError, EOFError, UnicodeError) as error:
        raise Damaged(f"the archive can't be read: {error}", field="image") from None
