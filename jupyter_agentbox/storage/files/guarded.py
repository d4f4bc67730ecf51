"""Open and change files by absolute host paths, following a link only within the folder that contains it.

This module is for programs of the host that use paths, such as Jupyter's file browser, in folders that sandboxes write
to. Code in a sandbox can replace any name in its folder by a link at any moment. So the kernel never resolves a whole
path: :meth:`GuardedPaths.locate` opens one directory after the other with ``O_NOFOLLOW``, decides about each link that
it finds, and returns the descriptor of the last directory and the name in it. All further operations are relative to
that descriptor and do not follow links. There is no interval between a check and a use.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from jupyter_agentbox.errors import Conflict, InvalidRequest, PolicyRefused
from jupyter_agentbox.models.file_entries import kind_of
from jupyter_agentbox.names import HIDDEN_FILES, PARENT, READ_ONLY, READ_ONLY_FILES, Names
from jupyter_agentbox.storage.trees import closing, libc

from .atomic import Room, copy_content, copy_data, look, permissions
from .builder import Builder, copy_tree, delete_tree, make_plan
from .paths import show
from .tree import KIND_NAMES, Budget, Tree

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_MAX_LINKS = 40
#: Number of attempts to open a name that another process keeps replacing.
_TRIES = 10
#: Maximum entries and seconds of a tree to copy or delete.
_MAX_ENTRIES, _MAX_SECONDS = 1_000_000, 300.0


@dataclass(frozen=True)
class GuardedPaths:
    """The paths beneath certain base folders.

    Parameters
    ----------
    bases : sequence of str
        Absolute paths of folders. The path to a base is trusted; what is beneath it is not.
    linked : sequence of str
        Folders that links may lead to, wherever the links are.
    names : Names
        Names that sandboxes do not see, or cannot write. No link may lead to one, because code in a sandbox could then
        make the server read or write what the sandbox itself cannot.
    private : sequence of str
        Folders that are hidden from sandboxes regardless of their names, as paths without links.
    setting : str
        The setting that contains `linked`, for errors.
    """

    bases: Sequence[str]
    linked: Sequence[str] = ()
    names: Names = field(default_factory=lambda: Names(HIDDEN_FILES, READ_ONLY_FILES))
    private: Sequence[str] = ()
    setting: str = "AgentboxContentsManager.linked_folders"

    @contextmanager
    def locate(self, path: str, *, follow: bool = True) -> Iterator[tuple[int, str]]:
        """Yield a descriptor of the directory that contains an entry, and the entry's name in it.

        Parameters
        ----------
        path : str
            An absolute path in one of the bases. The entry may be missing, but its directory must exist.
        follow : bool
            Whether to follow the entry itself if it is a link.

        Raises
        ------
        PolicyRefused
            A link leads out of its folder, or to something hidden.
        OSError
            A directory in the path is missing or is not a directory.
        """
        path = os.path.normpath(path)
        base = max((base for base in self.bases if _parts(path, base) is not None), key=len, default=None)
        if base is None:
            raise InvalidRequest(f"Cannot open {show(path)}: it is outside {' and '.join(self.bases)}.")
        parts, links = _parts(path, base) or [], 0
        directory = os.open(base, _DIRECTORY)
        try:
            while parts:
                name = parts.pop(0)
                target = _read_link(directory, name) if parts or follow else None
                if target is not None:
                    links += 1
                    if links > _MAX_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                    inner, folder = self._resolve_link(base, os.path.relpath(path, base), directory, name, target)
                    parts[:0] = inner
                    child = os.open(folder or ".", _DIRECTORY, dir_fd=None if folder else directory)
                elif not parts:
                    break
                else:
                    child = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
                directory, old = child, directory
                os.close(old)
            else:
                name = "."
            yield directory, name
        finally:
            os.close(directory)

    @contextmanager
    def _locate_entry(self, path: str) -> Iterator[tuple[int, str]]:
        """Yield the directory and the name of an entry to move or delete. A link is not followed."""
        with self.locate(path, follow=False) as (directory, name):
            if name == ".":
                raise InvalidRequest("The root directory cannot be moved or deleted.")
            yield directory, name

    def _resolve_link(
        self, base: str, path: str, directory: int, name: str, target: str
    ) -> tuple[list[str], str | None]:
        """Return where a link leads: names, and the folder they are relative to, or None for the link's own directory.

        The path resolution here only determines which names are tried. Each of them is then opened in turn.
        """
        here = os.readlink(f"/proc/self/fd/{directory}")
        real = os.path.realpath(os.path.join(here, target))
        for folder in map(os.path.realpath, self.linked):
            if (parts := _parts(real, folder)) is not None:
                return parts, folder
        parts = _parts(real, here)
        reason = f"leads out of its folder, to {show(real)}"
        if parts is not None:
            # The names count from the base, because the link may be in a folder such as .git itself.
            kind, _ = self.names.classify(_parts(real, os.path.realpath(base)) or parts)
            if not kind and all(_parts(real, folder) is None for folder in self.private):
                return parts, None
            state = "read-only in" if kind in (READ_ONLY, PARENT) else "hidden from"
            reason = f"leads to {show(real)}, which is {state} sandboxes"
        raise PolicyRefused(
            f"Cannot open {show(path)}: the link {show(name)} {reason}. Code in a sandbox can create such"
            f" links. Delete the link, or add its target folder to {self.setting}.",
            setting=self.setting,
        )

    def stat(self, path: str) -> os.stat_result:
        """Return the status of an entry. A link is not followed."""
        with self.locate(path, follow=False) as (directory, name):
            return os.stat(name, dir_fd=directory, follow_symlinks=False)

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        """Open a regular file like :func:`os.open`. Anything else is refused, and never blocks."""
        with self.locate(path) as (directory, name):
            return open_regular(directory, name, flags, mode)

    @contextmanager
    def rewrite(self, path: str, *, is_safe: bool = True) -> Iterator[int]:
        """Open a file to rewrite its content. It stays the same file, with its owner, mode and other names.

        Parameters
        ----------
        path : str
            The file; created if it is missing.
        is_safe : bool
            Whether to keep a copy of the old content beside the file, named as Jupyter names it (``.~name``), until the
            new content is on the disk. The copy replaces the file if writing fails.
        """
        with self.locate(path) as (directory, name), closing(
            open_regular(directory, name, os.O_RDWR | os.O_CREAT)
        ) as fd:  # fmt: skip
            backup = _back_up(directory, name, fd) if is_safe else None
            try:
                os.ftruncate(fd, 0)
                os.lseek(fd, 0, os.SEEK_SET)
                yield fd
                if is_safe:
                    os.fsync(fd)
            except BaseException:
                if backup is not None:
                    with suppress(FileNotFoundError):
                        os.replace(backup, name, src_dir_fd=directory, dst_dir_fd=directory)
                raise
            if backup is not None:
                with suppress(FileNotFoundError):
                    os.unlink(backup, dir_fd=directory)

    def restore_backup(self, path: str) -> bool:
        """Restore the copy that an interrupted :meth:`rewrite` left; the file itself is renamed to ``name.invalid``.

        Returns
        -------
        bool
            Whether such a copy existed.
        """
        with self.locate(path) as (directory, name):
            if look(directory, _backup_name(name)) is None:
                return False
            for old, new in ((name, f"{name}.invalid"), (_backup_name(name), name)):
                os.replace(old, new, src_dir_fd=directory, dst_dir_fd=directory)
            return True

    def copy_file(self, source: str, target: str) -> None:
        """Copy a file's content, permissions and times over another file, which is created if it is missing."""
        flags = os.O_WRONLY | os.O_CREAT
        with closing(self.open(source, os.O_RDONLY)) as old, closing(self.open(target, flags)) as new:
            if os.path.samestat(os.fstat(old), os.fstat(new)):
                raise Conflict(
                    f"Cannot copy {show(source)}: {show(target)} is another name of the same file. Delete one."
                )
            os.ftruncate(new, 0)
            _copy(old, new)

    def make_directory(self, path: str, *, exist_ok: bool = False, parents: bool = False) -> None:
        """Create a directory, and with `parents` missing ones above it. Raises FileExistsError unless `exist_ok`."""
        try:
            with self.locate(path, follow=False) as (directory, name):
                os.mkdir(name, dir_fd=directory)
        except FileExistsError:
            if not exist_ok:
                raise
            with self.locate(path) as (directory, name):
                os.close(os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=directory))
        except FileNotFoundError:
            if not parents:
                raise
            self.make_directory(os.path.dirname(path), exist_ok=True, parents=True)
            self.make_directory(path, exist_ok=exist_ok)

    def copy_directory(self, source: str, target: str) -> list[str]:
        """Copy a directory to an unused path. Links in it are copied as links if they lead to somewhere in it.

        Returns
        -------
        list of str
            Sentences about entries that were left out.
        """
        budget = Budget(_MAX_ENTRIES, _MAX_SECONDS)
        with self.locate(source) as (directory, name):
            tree = Tree(os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=directory))
        try:
            with self.locate(target, follow=False) as (directory, name):
                return _copy_into(tree, directory, name, budget)
        finally:
            tree.close()

    def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Move an entry of any kind, or a link itself, to another path. Raises FileExistsError unless `overwrite`."""
        with self._locate_entry(source) as (old_dir, old), self._locate_entry(target) as (new_dir, new):
            try:
                _move(old_dir, old, new_dir, new)
            except FileExistsError:
                if not overwrite and not _is_same(look(old_dir, old), look(new_dir, new)):
                    raise
                os.replace(old, new, src_dir_fd=old_dir, dst_dir_fd=new_dir)

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Delete an entry of any kind, or a link itself. A directory must be empty, unless `recursive`."""
        with self._locate_entry(path) as (directory, name):
            _delete(directory, name, recursive=recursive)

    def list(self, path: str) -> list[str]:
        """Return the names in a directory. Raises OSError if it is not a directory."""
        with self.locate(path) as (directory, name):
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            with closing(os.open(name, flags, dir_fd=directory)) as fd:
                return os.listdir(fd)

    def trash(self, path: str) -> None:
        """Move an entry to the user's trash, according to the specification of freedesktop.org.

        This is the home trash if it is on the same file system, or else ``.Trash-UID`` at the top of the other file
        system.
        """
        with self._locate_entry(path) as (directory, name):
            device = os.stat(name, dir_fd=directory, follow_symlinks=False).st_dev
            real = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), name)
            data = Path(os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share"))
            data.mkdir(mode=0o700, parents=True, exist_ok=True)
            top, folder, recorded = str(data), "Trash", real
            if data.stat().st_dev != device:
                top, folder = _mount_point(os.path.dirname(real)), f".Trash-{os.getuid()}"
                recorded = os.path.relpath(real, top)
            with _open_trash(top, folder, "files") as files, _open_trash(top, folder, "info") as info:
                stem, extension = os.path.splitext(name)
                date = time.strftime("%Y-%m-%dT%H:%M:%S")
                text = f"[Trash Info]\nPath={quote(os.fsencode(recorded))}\nDeletionDate={date}\n"
                for number in range(1, 10_000):
                    trash_name = name if number == 1 else f"{stem} {number}{extension}"
                    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
                    try:
                        fd = os.open(f"{trash_name}.trashinfo", flags, 0o600, dir_fd=info)
                    except FileExistsError:
                        continue
                    with closing(fd):
                        os.write(fd, text.encode())
                    try:
                        _move(directory, name, files, trash_name)
                    except FileExistsError:
                        os.unlink(f"{trash_name}.trashinfo", dir_fd=info)
                        continue
                    except BaseException:
                        os.unlink(f"{trash_name}.trashinfo", dir_fd=info)
                        raise
                    return
            raise Conflict(
                f"Cannot move {show(name)} to the trash: it contains too many entries of that name. Empty it."
            )


def open_regular(directory: int, name: str, flags: int, mode: int = 0o666) -> int:
    """Open a regular file in an open directory, like :func:`os.open`, without following links.

    Raises
    ------
    Conflict
        The entry is not a regular file.
    """
    for _ in range(_TRIES):
        try:
            found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            with suppress(FileExistsError):
                return os.open(name, flags | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=directory)
            continue
        with closing(found):
            kind = kind_of(os.fstat(found).st_mode)
            if kind != "file":
                raise Conflict(f"Cannot open {show(name)}: it is {KIND_NAMES[kind]}, not a regular file.")
            # Through the descriptor, which refers to the checked file. O_CREAT and O_NOFOLLOW do not apply to it.
            flags &= ~(os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
            return os.open(f"/proc/self/fd/{found}", flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    raise Conflict(f"Cannot open {show(name)}: it keeps being replaced.")


def _parts(path: str, folder: str) -> list[str] | None:
    """Return the names that lead from a folder to a path, both absolute and normalized; None if the path is outside."""
    if path == folder:
        return []
    prefix = folder.rstrip("/") + "/"
    return path[len(prefix) :].split("/") if path.startswith(prefix) else None


def _read_link(directory: int, name: str) -> str | None:
    try:
        return os.readlink(name, dir_fd=directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def _backup_name(name: str) -> str:
    return f".~{name}"


def _back_up(directory: int, name: str, fd: int) -> str | None:
    """Copy a file with content to its backup name, and return that name; None if no copy was made."""
    if not os.fstat(fd).st_size:
        return None
    backup = _backup_name(name)
    for _ in range(_TRIES):
        try:
            with suppress(FileNotFoundError):
                os.unlink(backup, dir_fd=directory)  # left by an interrupted save, or anything else, including a link
            flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC
            copy = os.open(backup, flags, 0o600, dir_fd=directory)
        except FileExistsError:
            continue
        except PermissionError:
            if look(directory, backup) is None:
                return None  # nothing can be created in this directory, but the file itself may be writable
            raise
        with closing(copy):
            try:
                _copy(fd, copy)
            except BaseException:
                os.unlink(backup, dir_fd=directory)
                raise
        return backup
    raise Conflict(f"Cannot save {show(name)}: {show(backup)} keeps being replaced.")


def _copy(source: int, target: int) -> None:
    """Copy content, permissions and times to an empty file."""
    copy_content(source, target)
    status = os.fstat(source)
    with suppress(OSError):
        os.fchmod(target, permissions(status))
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def _copy_into(tree: Tree, directory: int, name: str, budget: Budget) -> list[str]:
    plan = make_plan(tree, budget)  # complete before the first entry is created, so that a copy into itself ends
    os.mkdir(name, dir_fd=directory)
    top = Tree(os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=directory))
    with Builder(top, (), Room(), overwrite=False) as builder:
        return copy_tree(tree, plan, builder, budget).skipped


def _move(old_dir: int, old: str, new_dir: int, new: str) -> None:
    """Move an entry, also to another file system. Raises FileExistsError if the target exists."""
    try:
        libc.rename_new(old_dir, old, new_dir, new)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _move_across(old_dir, old, new_dir, new)


def _move_across(old_dir: int, old: str, new_dir: int, new: str) -> None:
    status = os.stat(old, dir_fd=old_dir, follow_symlinks=False)
    skipped: list[str] = []
    if stat.S_ISDIR(status.st_mode):
        tree = Tree(os.open(old, _DIRECTORY | os.O_NOFOLLOW, dir_fd=old_dir))
        try:
            skipped = _copy_into(tree, new_dir, new, Budget(_MAX_ENTRIES, _MAX_SECONDS))
        finally:
            tree.close()
    elif stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(old, dir_fd=old_dir), new, dir_fd=new_dir)
    else:
        with Builder(Tree(os.dup(new_dir)), (), Room(), overwrite=False) as builder:
            with closing(open_regular(old_dir, old, os.O_RDONLY)) as fd:
                file = builder.new_file((new,))
                try:
                    copy_data(fd, file)
                    builder.commit(file, permissions(status))
                finally:
                    file.discard()
    if skipped:
        raise Conflict(f"{show(old)} was copied but not removed, because some of it could not be copied: {skipped[0]}")
    _delete(old_dir, old, recursive=True)


def _is_same(one: os.stat_result | None, other: os.stat_result | None) -> bool:
    """Return whether two names refer to the same entry, such as two names that differ only in case."""
    return one is not None and other is not None and os.path.samestat(one, other)


def _delete(directory: int, name: str, *, recursive: bool) -> None:
    if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=directory)
    elif recursive:
        delete_tree(directory, name, name, Budget(_MAX_ENTRIES, _MAX_SECONDS))
    else:
        os.rmdir(name, dir_fd=directory)


def _mount_point(path: str) -> str:
    device = os.stat(path).st_dev
    while path != "/" and os.stat(os.path.dirname(path)).st_dev == device:
        path = os.path.dirname(path)
    return path


@contextmanager
def _open_trash(top: str, *names: str) -> Iterator[int]:
    """Open a directory of the trash, created if it is missing, without following links beneath `top`."""
    fd = os.open(top, _DIRECTORY)
    try:
        for name in names:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=fd)
            child = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            fd, old = child, fd
            os.close(old)
        yield fd
    finally:
        os.close(fd)
