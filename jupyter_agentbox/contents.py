"""The server's file browser, kept to its folder: what code in a sandbox puts there may not lead elsewhere.

A sandbox whose workspace is the notebook's folder can put links into it. Jupyter's own manager follows them, so an
open notebook that was replaced by a link to the user's ``.bashrc`` would be saved over that. Here a link that leads
out of the root directory, and out of the folders that :attr:`AgentboxContentsManager.linked_folders` names, is shown
and can be renamed and deleted, but what it leads to can be neither read nor written. Paths are looked at first, for a
clear answer. What holds when a link is put in the way after that look is :mod:`~jupyter_agentbox.landlock`, on the
threads where all the work is done.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import mimetypes
import os
import stat
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from jupyter_server.base.handlers import AuthenticatedFileHandler
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager
from tornado.web import HTTPError
from traitlets import List, Unicode, default

from . import landlock

#: Calls that are worked on at a time.
MAX_CALLS = 8
#: Bytes of a file that is downloaded, at a time.
PART = 1024 * 1024
#: Seconds that a thread waits for what has to be done on the server's own.
TIMEOUT = 10.0

#: The server's loop, on the threads that are kept to the folder.
_home: contextvars.ContextVar[asyncio.AbstractEventLoop | None] = contextvars.ContextVar("home", default=None)


class AgentboxContentsManager(AsyncLargeFileManager):
    """Jupyter's file manager, which follows no link out of its root directory.

    ``c.ServerApp.contents_manager_class``; the package's own configuration of Jupyter servers sets it. Hooks that run
    when something is saved run under the same bounds.
    """

    linked_folders = List(
        Unicode(),
        help="""Folders outside of the root directory that links in it may lead to. What code in a sandbox links to in
        these can be read and written from JupyterLab, too.""",
    ).tag(config=True)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        mimetypes.init()  # reads files of the system
        is_bound = landlock.is_available()
        if not is_bound:
            self.log.warning(
                "The file browser looks where links lead before it follows them, but this kernel cannot hold it to"
                " that while code in a sandbox changes them: it has no Landlock of Linux 5.19 or newer"
            )
        self._threads = concurrent.futures.ThreadPoolExecutor(
            MAX_CALLS, "agentbox-contents", initializer=self._restrict if is_bound else None
        )

    def _restrict(self) -> None:
        changed = [self.root_dir, *self.linked_folders, os.devnull]
        # Wherever they are configured to be. One in the root directory may be a link.
        kept = getattr(self.checkpoints, "checkpoint_dir", "")
        changed.append(kept if os.path.isabs(kept) else getattr(self.checkpoints, "root_dir", self.root_dir))
        if self.delete_to_trash:
            trash = Path(os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share"), "Trash")
            for folder in ("files", "info"):
                with contextlib.suppress(OSError):  # then there is none, which a deletion says
                    (trash / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            changed.append(str(trash))
        # Modules are imported when they are first used.
        prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, "/usr", "/lib", "/lib64"}
        modules = [path for path in sys.path if os.path.isabs(path) and Path(path) != Path.cwd()]
        landlock.restrict(changed, [*prefixes, *modules])

    def check(self, os_path: str) -> None:
        """Raise HTTPError (403) if a path of the machine's leads out of the folder: a look, for a clear answer."""
        real = Path(os.path.realpath(os_path))
        for folder in (self.root_dir, *self.linked_folders):
            if real.is_relative_to(os.path.realpath(folder)):
                return
        raise HTTPError(
            403,
            f"{os.path.relpath(os_path, self.root_dir)!r} is a link, or in one, that leads out of the folder of this"
            " server; AgentboxContentsManager.linked_folders names the folders that links may lead to",
        )

    async def _bound(self, name: str, paths: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        """Have Jupyter's method do its work on a thread that is kept to the folder, with what these paths lead to."""
        method: Any = getattr(super(), name)
        place: Any = self._get_os_path
        if _home.get() is not None:
            return await method(*args, **kwargs)
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        context.run(_home.set, loop)

        async def work() -> Any:
            for path in paths:
                self.check(place(path.strip("/")))
            return await method(*args, **kwargs)

        return await loop.run_in_executor(self._threads, context.run, asyncio.run, work())

    def open_bound(self, os_path: str) -> Any:
        """Open a file to read its bytes. Raises HTTPError (403) if it is outside of the folder, OSError."""

        def work() -> Any:
            self.check(os_path)
            return open(os_path, "rb", opener=_open_regular)

        return self._threads.submit(work).result(TIMEOUT)

    def open(self, os_path: str, *args: Any, **kwargs: Any) -> Any:
        """Jupyter's own way to open what it reads, which waits for nobody."""
        method: Any = super().open
        return method(os_path, *args, **{"opener": _open_regular, **kwargs})

    # -- each call of the API ----------------------------------------------------------------------

    async def get(self, path: str, content: Any = True, *args: Any, **kwargs: Any) -> Any:
        # A link is shown wherever it leads.
        return await self._bound("get", [path] if content else [], path, content, *args, **kwargs)

    async def save(self, model: dict[str, Any], path: str = "") -> Any:
        return await self._bound("save", [path], model, path)

    async def copy(self, from_path: str, to_path: str | None = None) -> Any:
        return await self._bound("copy", [from_path, to_path or from_path], from_path, to_path)

    async def delete(self, path: str) -> Any:
        return await self._bound("delete", [_parent(path)], path)

    async def rename(self, old_path: str, new_path: str) -> Any:
        return await self._bound("rename", [_parent(old_path), _parent(new_path)], old_path, new_path)

    async def dir_exists(self, path: str) -> Any:
        return await self._bound("dir_exists", [], path)

    async def file_exists(self, path: str) -> Any:
        return await self._bound("file_exists", [], path)

    async def is_hidden(self, path: str) -> Any:
        return await self._bound("is_hidden", [], path)

    async def create_checkpoint(self, path: str) -> Any:
        return await self._bound("create_checkpoint", [path], path)

    async def restore_checkpoint(self, checkpoint_id: str, path: str) -> Any:
        return await self._bound("restore_checkpoint", [path], checkpoint_id, path)

    async def list_checkpoints(self, path: str) -> Any:
        return await self._bound("list_checkpoints", [_parent(path)], path)

    async def delete_checkpoint(self, checkpoint_id: str, path: str) -> Any:
        return await self._bound("delete_checkpoint", [_parent(path)], checkpoint_id, path)

    # -- what needs the server's own thread: signatures lie elsewhere, events go to websockets -----------------

    def mark_trusted_cells(self, *args: Any, **kwargs: Any) -> None:
        self._at_home("mark_trusted_cells", *args, **kwargs)

    def check_and_sign(self, *args: Any, **kwargs: Any) -> None:
        self._at_home("check_and_sign", *args, **kwargs)

    def emit(self, *args: Any, **kwargs: Any) -> None:
        self._at_home("emit", *args, **kwargs)

    def _at_home(self, name: str, *args: Any, **kwargs: Any) -> None:
        method: Any = getattr(super(), name)
        loop = _home.get()
        if loop is None:
            method(*args, **kwargs)
            return

        async def work() -> None:
            method(*args, **kwargs)

        asyncio.run_coroutine_threadsafe(work(), loop).result(TIMEOUT)

    @default("files_handler_class")
    def _default_files_handler_class(self) -> type:
        return type("FilesHandler", (_FilesHandler,), {"manager": self})


class _FilesHandler(AuthenticatedFileHandler):
    """Serves files for download, under the same bounds."""

    manager: ClassVar[AgentboxContentsManager]

    def validate_absolute_path(self, root: str, absolute_path: str) -> str:
        self.manager.check(absolute_path)
        return str(super().validate_absolute_path(root, absolute_path))

    @classmethod
    def get_content(
        cls, abspath: str, start: int | None = None, end: int | None = None
    ) -> Generator[bytes, None, None]:
        try:
            file = cls.manager.open_bound(abspath)
        except PermissionError:
            raise HTTPError(403, "it leads out of the folder of this server, or this user may not read it") from None
        with file:
            file.seek(start or 0)
            left = None if end is None else end - (start or 0)
            while left is None or left > 0:
                part = file.read(PART if left is None else min(PART, left))
                if not part:
                    return
                left = None if left is None else left - len(part)
                yield part


def _open_regular(path: str, flags: int) -> int:
    """Open a file, and no FIFO that was put in its place, which would be waited for."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise HTTPError(400, "it is no regular file")
    return fd


def _parent(path: str) -> str:
    return path.strip("/").rpartition("/")[0]
