"""Copy, build and delete whole trees, within limits and without following links."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from types import TracebackType
from typing import NamedTuple

from jupyter_agentbox.errors import AgentboxError, Conflict, NotFound, TooLarge
from jupyter_agentbox.models.file_entries import Copied, kind_of
from jupyter_agentbox.names import Names
from jupyter_agentbox.storage.trees import closing

from .atomic import NewFile, Room, check_replaceable, copy_data, look, make_name, permissions
from .paths import MAX_PATH, Parts, is_inner_link, show, write_path
from .tree import KIND_NAMES, Budget, Tree, translate_os_errors

_MAX_SENTENCES = 20
_BATCH = 1000


class Skipped:
    """The entries that were left out: sentences about the first ones, and the total number."""

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self.count = 0

    def add(self, path: str, reason: str) -> None:
        """Record that `path` was left out."""
        self.count += 1
        if len(self.sentences) < _MAX_SENTENCES:
            self.sentences.append(f"{show(path)} was left out: {reason}")


class Item(NamedTuple):
    """An entry of a tree as it was when the plan was made. `target` is the target of a link."""

    parts: Parts
    status: os.stat_result
    target: str


def make_plan(tree: Tree, budget: Budget) -> list[Item]:
    """Return all entries of a tree, a directory before its contents.

    Raises
    ------
    TooLarge
        The tree exceeds the budget.
    """
    items = []
    for found in tree.walk(budget):
        target = ""
        if stat.S_ISLNK(found.status.st_mode):
            with suppress(OSError):
                target = os.readlink(found.name, dir_fd=found.directory)
        items.append(Item(found.parts, found.status, target))
    budget.refuse()
    return items


class Builder:
    """Builder of entries beneath a directory, which never goes through a link that exists there.

    Parameters
    ----------
    tree : Tree
        The directory. It is closed together with this object.
    top : tuple of str
        Path of the directory, for messages.
    room : Room
        Space that may be used.
    overwrite : bool
        Whether files may be replaced.
    """

    def __init__(self, tree: Tree, top: Parts, room: Room, overwrite: bool) -> None:
        self.tree, self._top, self.room, self._overwrite = tree, top, room, overwrite
        self.entries = self.bytes = 0
        self.skipped = Skipped()

    def __enter__(self) -> Builder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tree.close()

    def path(self, parts: Parts) -> str:
        """Return a path in the form that the caller knows."""
        return write_path(self._top + parts)

    def directory(self, parts: Parts, mode: int) -> None:
        """Create a directory that its owner can use, whatever `mode` is."""
        os.close(self.tree.make_directories(parts, mode & 0o777 | 0o700))
        self.entries += 1
        self.room.take(4096, self.path(parts))

    def new_file(self, parts: Parts) -> NewFile:
        """Start a file, to be passed to :meth:`commit`."""
        return NewFile(self.tree.open_parent(parts, make=True), parts[-1], self.path(parts), self.room)

    def commit(self, file: NewFile, mode: int) -> None:
        """Give the file its name, so that it appears."""
        file.commit(mode=mode & 0o777, overwrite=self._overwrite)
        self.entries += 1
        self.bytes += file.size

    def link(self, parts: Parts, target: str) -> None:
        """Create a link, or leave it out if it would lead out of the tree."""
        if not is_inner_link(len(parts) - 1, target):
            self.skipped.add(self.path(parts), f"it links to {show(target)}, which is outside")
            return
        self._place(parts, lambda name, directory: os.symlink(target, name, dir_fd=directory))

    def hard_link(self, parts: Parts, source: Parts) -> None:
        """Give a file that this builder has created an additional name."""
        with closing(self.tree.open_parent(source)) as old:

            def make(name: str, directory: int) -> None:
                os.link(source[-1], name, src_dir_fd=old, dst_dir_fd=directory, follow_symlinks=False)

            self._place(parts, make)

    def _place(self, parts: Parts, make: Callable[[str, int], None]) -> None:
        path = self.path(parts)
        with closing(self.tree.open_parent(parts, make=True)) as directory, translate_os_errors(path):
            try:
                make(parts[-1], directory)
            except FileExistsError:
                existing = look(directory, parts[-1])
                if existing is None or not stat.S_ISLNK(existing.st_mode) or not self._overwrite:
                    check_replaceable(existing, path, self._overwrite)
                name = make_name()
                make(name, directory)
                os.replace(name, parts[-1], src_dir_fd=directory, dst_dir_fd=directory)
        self.entries += 1
        self.room.take(4096, path)

    def result(self, digest: str | None = None) -> Copied:
        """Return the summary of what was created."""
        return Copied(self.entries, self.bytes, digest, self.skipped.sentences, self.skipped.count)


def copy_tree(source: Tree, plan: list[Item], builder: Builder, budget: Budget) -> Copied:
    """Create the entries of the plan. Entries that were removed or replaced since are left out and reported."""
    builder.entries += 1  # counts the directory itself
    for parts, status, target in plan:
        budget.require()
        kind = kind_of(status.st_mode)
        if refusal := builder.tree.find_refusal(parts, is_folder=kind == "directory"):
            builder.skipped.add(builder.path(parts), refusal[0])
        elif kind == "directory":
            builder.directory(parts, permissions(status))
        elif kind == "link":
            builder.link(parts, target)
        elif kind != "file":
            builder.skipped.add(builder.path(parts), f"it is {KIND_NAMES[kind]}")
        else:
            try:
                fd = source.open_file(parts, follow=False)
            except AgentboxError as error:
                builder.skipped.add(builder.path(parts), str(error))
                continue
            with closing(fd):
                file = builder.new_file(parts)
                try:
                    copy_data(fd, file, budget.require)
                    builder.commit(file, permissions(os.fstat(fd)))
                finally:
                    file.discard()
    return builder.result()


def check_unchangeable(tree: Tree, path: str, budget: Budget, verb: str) -> None:
    """Raise Conflict if a directory contains hidden or read-only entries. `path` and `verb` are for the message."""
    if not tree.names:
        return
    budget = copy(budget)  # so that the check uses up none of it
    for found in tree.walk(budget, see_hidden=True):
        if tree.find_refusal(found.parts, is_folder=stat.S_ISDIR(found.status.st_mode)):
            raise _covered_entries_error(path, verb)
    budget.refuse()


def delete_tree(
    directory: int, name: str, path: str, budget: Budget, names: Names | None = None, at: Parts = ()
) -> int:
    """Delete a directory with everything in it, and return the number of deleted entries.

    Uses at most two descriptors and no recursion, however deep and wide the tree is. If another process adds entries
    as fast as they are deleted, the budget ends the operation. `at` is the path to which the `names` apply.

    Raises
    ------
    Conflict
        The directory contains hidden or read-only entries. Nothing was deleted.
    TooLarge
        The deletion is incomplete. The message says how much was deleted and how to continue.
    """
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with translate_os_errors(path):
        top = os.open(name, flags, dir_fd=directory)
    visible, tree = Tree(top, names, at), Tree(os.dup(top))
    try:
        check_unchangeable(visible, path, budget, "deleted")
        with translate_os_errors(path):
            return _empty(tree, visible, path, budget) + _remove(directory, name)
    finally:
        visible.close()
        tree.close()


def _empty(tree: Tree, visible: Tree, path: str, budget: Budget) -> int:
    pending: list[Parts] = [()]
    count = 0

    def take() -> None:
        if not budget.take():
            raise TooLarge(
                f"the deletion of {show(path)} {budget.reason}, which is its limit, with {count} entries deleted; "
                "delete it again to continue",
                field="path",
            )

    while pending:
        take()
        inside = pending[-1]
        try:
            base = tree.open(inside)
        except (NotFound, Conflict):
            pending.pop()
            continue
        with closing(base):
            if not stat.S_ISDIR(os.fstat(base).st_mode):
                pending.pop()  # it is found again, as what it is now, when its parent directory is not empty
                continue
            below: list[Parts] = []
            entries = _read_batch(base)
            for name, is_directory in entries:
                take()
                if visible.find_refusal((*inside, name), is_folder=is_directory):
                    raise _covered_entries_error(path, "deleted")
                if not is_directory:
                    count += _unlink(base, name)
                elif removed := _remove(base, name, quietly=True):
                    count += removed
                elif len(os.fsencode("/".join((*inside, name)))) < MAX_PATH - 512:
                    below.append((*inside, name))
                else:
                    # The path is too long to be used, so the entry is moved to the top, where its path is short.
                    short = make_name()
                    with suppress(FileNotFoundError):
                        os.rename(name, short, src_dir_fd=base, dst_dir_fd=tree.fd)
                        below.append((short,))
        pending.extend(below)
        if not entries:
            pending.pop()
            if inside:
                with suppress(NotFound, Conflict), closing(tree.open(inside[:-1])) as parent:
                    count += _remove(parent, inside[-1], quietly=True)
    return count


def _read_batch(directory: int) -> list[tuple[str, bool]]:
    with closing(os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)) as fd:
        with os.scandir(fd) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in itertools.islice(entries, _BATCH)]


def _unlink(directory: int, name: str) -> int:
    try:
        os.unlink(name, dir_fd=directory)
    except (FileNotFoundError, IsADirectoryError):
        return 0  # removed, or replaced by a directory, which the next pass finds
    return 1


def _remove(directory: int, name: str, *, quietly: bool = False) -> int:
    try:
        os.rmdir(name, dir_fd=directory)
    except FileNotFoundError:
        return 0
    except OSError:
        if not quietly:
            raise
        return 0
    return 1


def _covered_entries_error(path: str, verb: str) -> Conflict:
    return Conflict(
        f"{show(path)} cannot be {verb}: it contains entries that are hidden or read-only in sandboxes"
        f" (Policy.hidden_files, Policy.read_only_files). Only the others can be {verb}",
        field="path",
    )
