"""Create archives of folder trees, and images from them."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Sequence
from pathlib import Path

from jupyter_agentbox.storage.images import Image, ImageStore, tree
from jupyter_agentbox.storage.images.values import KernelEntry, Recipe

Entry = tuple[str, str, object]


def make_tar(*entries: Entry, **options: str) -> io.BytesIO:
    """Return an archive of (kind, name, content or target)."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=options.get("mode", "w")) as tar:
        for kind, name, content in entries:
            member = tarfile.TarInfo(name)
            body = b""
            if kind in ("file", "program"):
                body = content.encode() if isinstance(content, str) else bytes(content)  # type: ignore[call-overload]
                member.size, member.mode = len(body), 0o4755 if kind == "program" else 0o600
            elif kind == "folder":
                member.type, member.mode = tarfile.DIRTYPE, 0o700
            elif kind in ("link", "hard"):
                member.type = tarfile.SYMTYPE if kind == "link" else tarfile.LNKTYPE
                member.linkname = str(content)
            elif kind == "device":
                member.type, member.devmajor, member.devminor = tarfile.CHRTYPE, 1, 3
            elif kind == "pipe":
                member.type = tarfile.FIFOTYPE
            tar.addfile(member, io.BytesIO(body))
    data.seek(0)
    return data


SYSTEM: tuple[Entry, ...] = (
    ("folder", "usr/bin", None),
    ("program", "usr/bin/python3.11", "#!/bin/sh\n"),
    ("link", "usr/bin/python3", "python3.11"),
    ("program", "usr/bin/sh", "x"),
    ("link", "bin", "usr/bin"),
    ("file", "etc/machine-id", "1234"),
    ("file", "etc/os-release", "ID=x"),
    ("file", "var/log/dpkg.log", "2020"),
)


def keep(store: ImageStore, name: str, *entries: Entry, kernels: Sequence[KernelEntry] = ()) -> Image:
    """Add an image of a few files to a store."""
    with store.staging() as folder:
        root = folder / "rootfs"
        root.mkdir()
        unpacker = tree.Unpacker(root)
        unpacker.add(make_tar(*SYSTEM, *entries))
        unpacker.finish()
        return store.add(folder, Recipe(name=name, kernels=[*kernels]))


def make_device(path: Path) -> bool:
    """Create a device, or a FIFO if this user cannot create devices. Return whether it is a device."""
    if os.geteuid() == 0:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
    else:
        os.mkfifo(path)
    return os.geteuid() == 0
