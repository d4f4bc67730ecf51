"""Unpack an image's tree from archives that may be hostile, remove what differs between builds, and hash the tree.

While a tree is being unpacked it contains no symbolic links. Links are recorded and created last, and a path through a
link is resolved by name within the tree. So nothing in an archive can lead outside, whatever it contains. Owners are
not preserved, and of the modes only whether a file is executable, because all of an image is read-only and has no
particular owner. There are no devices, no sockets and no set-user-id bits.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from jupyter_agentbox.errors import Damaged, InvalidRequest, TooLarge
from jupyter_agentbox.linux import remove_tree
from jupyter_agentbox.spec import GIB, format_size
from jupyter_agentbox.storage import trees

MAX_ENTRIES = 2_000_000
MAX_BYTES = 32 * GIB
MAX_DEPTH = 100
#: Maximum number of links that one path may go through.
_MAX_HOPS = 40
#: Maximum bytes of the headers that an archive may have for one file.
MAX_HEADER = 1 << 20
_HEADERS = (
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
)  # fmt: skip
_PIECE = 1 << 20

#: Folders whose contents are not part of an image: generated for each sandbox, or left over from the build.
_EMPTIED = (
    "dev", "proc", "sys", "run", "tmp", "workspace", "root", "home", "boot", "mnt", "media", "var/cache", "var/log",
    "var/tmp", "var/lib/apt/lists", "var/lib/systemd", "var/lib/dpkg/updates",
)  # fmt: skip
#: Files that differ between machines or builds, or reveal the accounts of the build machine.
_REMOVED = (
    ".dockerenv", "etc/machine-id", "etc/hostname", "etc/resolv.conf", "etc/hosts", "etc/.pwd.lock", "etc/shadow",
    "etc/gshadow", "etc/shadow-", "etc/gshadow-", "etc/passwd-", "etc/group-", "etc/subuid-", "etc/subgid-",
    "var/lib/dbus/machine-id", "var/lib/dpkg/lock", "var/lib/dpkg/lock-frontend", "var/lib/dpkg/triggers/Lock",
    "var/lib/apt/extended_states", "var/lib/dpkg/status-old", "var/lib/dpkg/available", "var/lib/dpkg/diversions-old",
    "var/lib/dpkg/statoverride-old",
)  # fmt: skip
#: Folders that every image has, even if empty.
_MADE = ("dev", "proc", "sys", "run", "tmp", "home", "etc", "var/cache", "var/log", "var/tmp", "var/lib")


class Member(tarfile.TarInfo):
    """A member whose headers are limited in size, because tarfile reads each of them as a whole.

    It overrides the method that every release of Python calls; newer ones bypass ``frombuf``.
    """

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Member:
        """Read the next member. Raises Damaged for a damaged header, which tarfile itself would treat as the end."""
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise Damaged(f"the archive is truncated or damaged: {error}", field="image") from None

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _HEADERS and self.size > MAX_HEADER:
            raise Damaged("the archive has a name or header that is too long", field="image")
        member: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]
        return member


class Unpacker:
    """Unpacker of archives into an empty folder.

    Parameters
    ----------
    top : Path
        The folder. No one else writes to it.
    max_bytes : int
    """

    def __init__(self, top: Path, max_bytes: int = MAX_BYTES) -> None:
        self.top = top
        self._links: dict[str, str] = {}
        self._left = max_bytes
        self._entries = 0
        self._max_bytes = max_bytes

    def add(self, archive: IO[bytes], *, prefix: str = "") -> None:
        """Unpack a tar archive, compressed or not.

        Parameters
        ----------
        archive : file
            Read once, from its current position to its end.
        prefix : str
            Name of the archive's folder to unpack. All other members are skipped.

        Raises
        ------
        Damaged
            It is not a tar archive, or contains something that no archive of a file system contains.
        TooLarge
        """
        try:
            with tarfile.open(fileobj=archive, mode="r|*", tarinfo=Member) as tar:
                for member in tar:
                    tar.members = []  # type: ignore[attr-defined]  # it would keep all of them
                    if not prefix or member.name.startswith(prefix + "/"):
                        self._add(tar, member, prefix)
        except (tarfile.TarError, EOFError, UnicodeError, ValueError, RecursionError) as error:
            raise Damaged(f"the archive cannot be read: {error}", field="image") from None

    def finish(self) -> None:
        """Create the recorded links."""
        for path, target in sorted(self._links.items()):
            place = self.top / path
            place.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(target, place)
        self._links = {}

    def _add(self, tar: tarfile.TarFile, member: tarfile.TarInfo, prefix: str) -> None:
        self._entries += 1
        if self._entries > MAX_ENTRIES:
            raise TooLarge(f"the image has more than {MAX_ENTRIES} files", field="image")
        parts = _split(member.name[len(prefix) :])
        if not parts:
            return
        parent = self._resolve("/".join(parts[:-1]))
        name = parts[-1]
        path = f"{parent}/{name}" if parent else name
        if member.isdir():
            # A folder at the path of a link goes to the link's target, as for updates of systems whose /bin is in /usr.
            self._make_folder(self._resolve(path))
        elif member.issym():
            self._remove(path)
            self._make_folder(parent)
            if len(os.fsencode(member.linkname)) > 4095 or "\0" in member.linkname or not member.linkname:
                raise Damaged(f"{path!r:.200} is a link with an invalid target", field="image")
            self._links[path] = member.linkname
        elif member.islnk():
            source = "/".join(_split(member.linkname[len(prefix) :]))
            where = self._resolve("/".join(source.split("/")[:-1]))
            real = f"{where}/{source.rsplit('/', 1)[-1]}" if where else source
            self._remove(path)
            self._make_folder(parent)
            if real in self._links:
                self._links[path] = self._links[real]
                return
            if not stat.S_ISREG(_mode(self.top / real)):
                raise Damaged(f"{path!r:.200} is a hard link to {source!r:.200}, which does not exist", field="image")
            os.link(self.top / real, self.top / path)
        elif member.isreg():
            self._left -= member.size
            if self._left < 0:
                raise TooLarge(f"the image is larger than {format_size(self._max_bytes)}", field="image")
            self._remove(path)
            self._make_folder(parent)
            data = tar.extractfile(member)
            assert data is not None
            mode = 0o755 if member.mode & 0o111 else 0o644
            with data, open(os.open(self.top / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                shutil.copyfileobj(data, file, _PIECE)
        # Otherwise a device or a FIFO. A sandbox creates those that it needs itself.

    def _resolve(self, path: str) -> str:
        """Follow the links of a path within the tree, and return a path without links."""
        todo = [part for part in path.split("/") if part][::-1]
        done: list[str] = []
        hops = 0
        while todo:
            part = todo.pop()
            if part == ".":
                continue
            if part == "..":
                done = done[:-1]
                continue
            target = self._links.get("/".join((*done, part)))
            if target is None:
                done.append(part)
                continue
            hops += 1
            if hops > _MAX_HOPS:
                raise Damaged(f"{path!r:.200} goes through a circle of links", field="image")
            if target.startswith("/"):
                done = []
            todo += [part for part in target.split("/") if part][::-1]
        if len(done) > MAX_DEPTH:
            raise Damaged(f"{path!r:.200} is nested too deeply", field="image")
        return "/".join(done)

    def _make_folder(self, path: str) -> None:
        """Create a folder and its parents, replacing a file that is in the way."""
        if not path or stat.S_ISDIR(_mode(self.top / path)):
            return
        self._make_folder(path.rpartition("/")[0])
        self._remove(path)
        os.mkdir(self.top / path, 0o755)

    def _remove(self, path: str) -> None:
        """Remove the entry at a path, with everything beneath it."""
        if self._links.pop(path, None) is not None:
            return
        mode = _mode(self.top / path)
        if stat.S_ISDIR(mode):
            remove_tree(self.top / path)
            for link in [link for link in self._links if link.startswith(path + "/")]:
                del self._links[link]
        elif mode:
            os.unlink(self.top / path)


def _split(name: str) -> list[str]:
    """Split a member's name, which must stay within the tree. Raises Damaged."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name or len(parts) > MAX_DEPTH or any(len(os.fsencode(part)) > 255 for part in parts):
        raise Damaged(f"the archive contains {name!r:.200}, which is not a valid path in an image", field="image")
    return parts


def _mode(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def clean(top: Path) -> None:
    """Remove what differs between builds or is not part of an image, and normalize all modes.

    Parameters
    ----------
    top : Path
        The tree. Only the caller may write to it.
    """
    for name in _EMPTIED:
        folder = top / name
        if is_inner_folder(top, folder):
            for entry in os.scandir(folder):
                remove_tree(Path(entry.path))
    for name in _REMOVED:
        if is_inner_folder(top, (top / name).parent) and _mode(top / name):
            (top / name).unlink()
    for name in _MADE:
        if not _mode(top / name) and is_inner_folder(top, (top / name).parent):
            (top / name).mkdir()
    for path, info in walk(top):
        if stat.S_ISLNK(info.st_mode):
            continue
        if not stat.S_ISDIR(info.st_mode) and not stat.S_ISREG(info.st_mode):
            path.unlink()
            continue
        wanted = 0o755 if stat.S_ISDIR(info.st_mode) or info.st_mode & 0o111 else 0o644
        if stat.S_IMODE(info.st_mode) != wanted:
            path.chmod(wanted)


def is_inner_folder(top: Path, folder: Path) -> bool:
    """Return whether a path beneath `top` is a folder, and no component of it is a link."""
    place = top
    for part in folder.relative_to(top).parts:
        place = place / part
        if not stat.S_ISDIR(_mode(place)):
            return False
    return True


def walk(top: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield everything beneath a folder in a fixed order, a folder before its contents, without following links."""
    with trees.closing(os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as folder:
        for found in trees.walk(folder):
            yield Path(f"{top}/{found.path}"), found.status


def measure(top: Path) -> int:
    """Return the bytes of all files. Files with several names are counted once."""
    seen: set[int] = set()
    total = 0
    for _, info in walk(top):
        if stat.S_ISREG(info.st_mode) and (info.st_nlink == 1 or info.st_ino not in seen):
            seen.add(info.st_ino)
            total += info.st_size
    return total


def hash_tree(top: Path, extra: bytes) -> str:
    """Return the address of a tree, a hash over paths, kinds, executable bits, file contents and link targets.

    Parameters
    ----------
    top : Path
        A tree that :func:`clean` has processed.
    extra : bytes
        Other data that distinguishes the image.

    Raises
    ------
    Damaged
        The tree contains something that no image has.
    """
    digest = hashlib.sha256(b"jupyter_agentbox image 1\0" + hashlib.sha256(extra).digest())
    prefix = len(os.fsencode(top)) + 1
    for path, info in walk(top):
        name = os.fsencode(path)[prefix:]
        if stat.S_ISLNK(info.st_mode):
            kind, content = b"l", os.fsencode(os.readlink(path))
        elif stat.S_ISDIR(info.st_mode):
            kind, content = b"d", b""
        elif stat.S_ISREG(info.st_mode):
            kind, content = b"x" if info.st_mode & 0o111 else b"f", _hash_file(path)
        else:
            raise Damaged(f"{path} is not a file, a folder or a link", field="image")
        for part in (kind, name, content):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def _hash_file(path: Path) -> bytes:
    digest = hashlib.sha256()
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as file:
        while data := file.read(_PIECE):
            digest.update(data)
    return digest.digest()


def find_inside(top: Path, path: str) -> Path | None:
    """Return the host path of a path inside, or None if it does not exist. Follow links only within the tree."""
    todo = [part for part in path.split("/") if part][::-1]
    place = top
    hops = 0
    while todo:
        part = todo.pop()
        if part in ("", "."):
            continue
        if part == "..":
            place = place.parent if place != top else top
            continue
        place = place / part
        mode = _mode(place)
        if not mode:
            return None
        if stat.S_ISLNK(mode):
            hops += 1
            if hops > _MAX_HOPS:
                return None
            target = os.readlink(place)
            place = top if target.startswith("/") else place.parent
            todo += [part for part in target.split("/") if part][::-1]
    return place


def check_tree(top: Path) -> None:
    """Refuse a tree that cannot be the root of a sandbox.

    Raises
    ------
    InvalidRequest
    """
    for name in ("etc", "usr"):
        if not stat.S_ISDIR(_mode(top / name)):
            raise InvalidRequest(f"the image has no folder /{name}", field="image")
    python = find_inside(top, "/usr/bin/python3")
    if python is None or not python.is_file() or not os.access(python, os.X_OK):
        raise InvalidRequest(
            "the image has no /usr/bin/python3, which runs the init process of its sandboxes; install python3 in it",
            field="image",
        )
    if find_inside(top, "/bin/sh") is None:
        raise InvalidRequest("the image has no /bin/sh", field="image")
