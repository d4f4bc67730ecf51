"""Provide Jupyter's file browser for folders that sandboxes write: it follows a link only within the link's own folder.

A sandbox whose workspace is the notebook's folder can replace any file in it with a link. Jupyter's own manager follows
links. If an open notebook were replaced with a link to the user's ``.bashrc``, saving the notebook would overwrite
``.bashrc``. Jupyter's manager also opens names that it derives from the requested one: ``.~name`` for a safe save and
``.ipynb_checkpoints/`` for a checkpoint.

Here everything that reads content or changes something goes through
:class:`~jupyter_agentbox.storage.files.guarded.GuardedPaths`. Jupyter's code above that layer is unchanged, and other
packages can derive classes from this one.
"""

from __future__ import annotations

import base64
import os
import stat
from asyncio import to_thread
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, ClassVar, TypeVar

import nbformat
from jupyter_core.paths import is_hidden, jupyter_data_dir
from jupyter_server.base.handlers import AuthenticatedFileHandler
from jupyter_server.services.contents.filecheckpoints import AsyncFileCheckpoints, FileCheckpoints
from jupyter_server.services.contents.fileio import AsyncFileManagerMixin
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager
from tornado.web import HTTPError
from traitlets import List, Unicode, default

from jupyter_agentbox import __all__ as PUBLIC
from jupyter_agentbox.errors import AgentboxError, NotFound, PolicyRefused, TooLarge
from jupyter_agentbox.names import HIDDEN_FILES, READ_ONLY_FILES, Names
from jupyter_agentbox.policy.folders import private_directories, program_directories
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.storage.files.guarded import GuardedPaths

#: Bytes to read at a time from a file that is downloaded.
PART = 1024 * 1024
#: A file of Python code that jupytext runs in the server, if the server shows hidden files.
_RUN_IN_SERVER = ".jupytext.py"

_Result = TypeVar("_Result")


class GuardedFiles(AsyncFileManagerMixin):
    """Mixin for Jupyter's file and checkpoint managers. Opens and changes files without following links elsewhere."""

    @property
    def paths(self) -> GuardedPaths:
        """The guarded paths. All file access goes through them."""
        raise NotImplementedError

    def _os_path(self, path: str) -> str:
        manager: Any = self
        return str(manager._get_os_path(path.strip("/")))

    @contextmanager
    def guard(self, os_path: str = "") -> Iterator[None]:
        """Convert errors of the guarded paths to HTTP errors."""
        try:
            with self.perm_to_403(os_path):
                yield
        except AgentboxError as error:
            kinds = {PolicyRefused: 403, NotFound: 404, TooLarge: 413}
            raise HTTPError(kinds.get(type(error), 400), str(error)) from error

    async def _guarded(self, os_path: str, work: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
        with self.guard(os_path):
            return await to_thread(work, *args, **kwargs)

    @contextmanager
    def open(self, os_path: str, mode: str = "r", **kwargs: Any) -> Iterator[Any]:
        """Open a regular file."""
        with self.guard(os_path), open(os_path, mode, opener=self.paths.open, **kwargs) as file:
            yield file

    @contextmanager
    def atomic_writing(self, os_path: str, text: bool = True, encoding: str = "utf-8", **kwargs: Any) -> Iterator[Any]:
        """Rewrite a file. With ``use_atomic_writing``, its old content is kept beside it until the write is done."""
        if text:
            kwargs = {"newline": "\n", "encoding": encoding, **kwargs}
        with self.guard(os_path), self.paths.rewrite(os_path, is_safe=self.use_atomic_writing) as fd:
            with open(fd, "w" if text else "wb", closefd=False, **kwargs) as file:
                yield file

    async def _copy(self, src: str, dest: str) -> None:
        await self._guarded(src, self.paths.copy_file, src, dest)

    async def _read_notebook(
        self, os_path: str, as_version: int = 4, capture_validation_error: Any = None, raw: bool = False
    ) -> Any:
        read = partial(nbformat.reads, as_version=as_version, capture_validation_error=capture_validation_error)
        answer: Any = await self._read_file(os_path, "text", raw=True)
        try:
            notebook = await to_thread(read, answer[0])
        except Exception as error:
            # Fall back to the backup that an interrupted save may have left.
            if not self.use_atomic_writing or not await self._guarded(os_path, self.paths.restore_backup, os_path):
                raise HTTPError(400, f"Unreadable Notebook: {os_path} {error!r}") from error
            answer = await self._read_file(os_path, "text", raw=True)
            try:
                notebook = await to_thread(read, answer[0])
            except Exception as again:
                raise HTTPError(400, f"Unreadable Notebook: {os_path} {again!r}") from again
        return (notebook, answer[2]) if raw else notebook


class AgentboxContentsManager(GuardedFiles, AsyncLargeFileManager):  # type: ignore[misc]  # as in Jupyter's own
    """Jupyter's file manager, changed to follow a link only within the link's own folder.

    The extension makes it the server's manager (``ServerApp.contents_manager_class``).
    """

    linked_folders = List(
        Unicode(),
        help="""Folders that links in the root directory may lead to. Any other link is followed only within its own
        folder. Code in any sandbox can create links to these folders. The server then reads and writes files there
        when you open and save them through such a link.""",
    ).tag(config=True)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        hidden, read_only = set(HIDDEN_FILES), set(READ_ONLY_FILES)
        private = [*private_directories(), *program_directories()]
        try:
            policy = Policy(parent=self.parent)
        except AgentboxError as error:
            self.log.warning(
                "The file browser uses the defaults of Policy.hidden_files and Policy.read_only_files, because the"
                " policy cannot be read: %s",
                error,
            )
        else:
            hidden.update(policy.hidden_files)
            read_only.update(policy.read_only_files)
            for name in policy.profile_names():
                hidden.update(policy.profile(name).hidden)
                read_only.update(policy.profile(name).read_only)
            private.append(policy.state_path)
        self._names = Names(sorted(hidden), sorted(read_only))
        self._private = [os.path.realpath(folder) for folder in private]

    @property
    def paths(self) -> GuardedPaths:
        """The guarded paths below the root directory."""
        return self.paths_beneath(self.root_dir)

    def paths_beneath(self, *folders: str) -> GuardedPaths:
        """Return the guarded paths below some folders, with this server's rules for links."""
        linked = [os.path.expanduser(folder) for folder in self.linked_folders]
        return GuardedPaths([os.path.abspath(folder) for folder in folders], linked, self._names, self._private)

    @default("checkpoints")
    def _default_checkpoints(self) -> Any:
        kind: Any = self.checkpoints_class
        if issubclass(kind, FileCheckpoints) and not issubclass(kind, GuardedCheckpoints):
            kind = type(kind.__name__, (GuardedCheckpoints, kind), {})
        return kind(**self.checkpoints_kwargs)

    # -- operations that Jupyter's manager does on paths itself ----------------------------------------

    async def file_exists(self, path: str) -> bool:
        """Return whether a file exists. Always false for a file that jupytext would run in the server."""
        return path.rpartition("/")[2] != _RUN_IN_SERVER and bool(await super().file_exists(path))

    async def _dir_model(self, path: str, content: Any = True) -> Any:
        if content:  # refuse a link that leads out; otherwise Jupyter's code lists the directory
            os_path = self._os_path(path)
            with suppress(FileNotFoundError, NotADirectoryError):
                await self._guarded(os_path, self.paths.list, os_path)
        base: Any = super()
        return await base._dir_model(path, content)

    async def _save_directory(self, os_path: str, model: Any, path: str = "") -> None:
        if not self.allow_hidden and is_hidden(os_path, self.root_dir):
            raise HTTPError(400, f"Cannot create hidden directory {os_path!r}")
        try:
            await self._guarded(os_path, self.paths.make_directory, os_path, exist_ok=True)
        except NotADirectoryError:
            raise HTTPError(400, f"Not a directory: {os_path}") from None

    async def _save_large_file(self, os_path: str, content: str, format: str) -> None:
        if format not in ("text", "base64"):
            raise HTTPError(400, "Must specify format of file contents as 'text' or 'base64'")
        try:
            data = content.encode() if format == "text" else base64.b64decode(content.encode("ascii"))
        except ValueError as error:
            raise HTTPError(400, f"Encoding error saving {os_path}: {error}") from error
        with self.open(os_path, "ab") as file:
            await to_thread(file.write, data)

    async def delete_file(self, path: str) -> None:
        """Delete a file or directory. For a link, delete the link itself."""
        os_path = self._os_path(path)
        if not self.allow_hidden and is_hidden(os_path, self.root_dir):
            raise HTTPError(400, f"Cannot delete file or directory {os_path!r}")
        await self._guarded(os_path, self._delete, os_path)

    def _delete(self, os_path: str) -> None:
        try:
            mode = self.paths.stat(os_path).st_mode
        except FileNotFoundError:
            raise HTTPError(404, f"File or directory does not exist: {os_path}") from None
        if self.delete_to_trash:
            if not stat.S_ISLNK(mode) and not os.access(os_path, os.W_OK):
                raise HTTPError(403, f"Permission denied: {os_path}")
            try:
                self.paths.trash(os_path)
            except OSError as error:
                raise HTTPError(400, f"Cannot move {os_path} to the trash: {error}") from error
            return
        # A directory that contains only checkpoints counts as empty.
        kept = {getattr(self.checkpoints, "checkpoint_dir", None)}
        if stat.S_ISDIR(mode) and not self.always_delete_dir and set(self.paths.list(os_path)) - kept:
            raise HTTPError(400, f"Directory {os_path} not empty")
        self.paths.delete(os_path, recursive=True)

    async def rename_file(self, old_path: str, new_path: str) -> None:
        """Rename a file or directory. For a link, rename the link itself."""
        old_path, new_path = old_path.strip("/"), new_path.strip("/")
        if new_path == old_path:
            return
        old, new = self._os_path(old_path), self._os_path(new_path)
        if not self.allow_hidden and (is_hidden(old, self.root_dir) or is_hidden(new, self.root_dir)):
            raise HTTPError(400, f"Cannot rename file or directory {old!r}")
        try:
            await self._guarded(old, self.paths.move, old, new)
        except FileExistsError:
            raise HTTPError(409, f"File already exists: {new_path}") from None
        except FileNotFoundError:
            raise HTTPError(404, f"File or directory does not exist: {old_path}") from None
        except OSError as error:
            raise HTTPError(500, f"Unknown error renaming file: {old_path} {error}") from error

    async def _copy_dir(self, from_path: str, to_path_original: str, to_name: str, to_path: str) -> Any:
        source, target = self._os_path(from_path), self._os_path(to_path)
        try:
            skipped = await self._guarded(source, self.paths.copy_directory, source, target)
        except OSError as error:
            raise HTTPError(400, f"Cannot copy {from_path!r} to {to_path!r}: {error}") from error
        for sentence in skipped:
            self.log.warning("Copying %s: %s", from_path, sentence)
        base: Any = self
        return await base.get(to_path, content=False)

    # -- hooks -----------------------------------------------------------------------------------------

    def run_post_save_hooks(self, model: Any, os_path: str) -> None:
        """Run the post-save hooks. If one fails, the error says that the file was saved nevertheless."""
        base: Any = super()
        try:
            base.run_post_save_hooks(model, os_path)
        except Exception as error:
            cause = error.__cause__ or error
            raise HTTPError(
                500,
                f"{model['path']} was saved, but a post-save hook failed: {type(cause).__name__}: {cause}. Fix the"
                " hook, or remove it from FileContentsManager.post_save_hook.",
            ) from error

    @default("files_handler_class")
    def _default_files_handler_class(self) -> type:
        return type("FilesHandler", (_FilesHandler,), {"manager": self})


class GuardedCheckpoints(GuardedFiles, AsyncFileCheckpoints):
    """Checkpoints in files, under the same link rules. Also mixed into a configured class of checkpoints."""

    @property
    def paths(self) -> GuardedPaths:
        """The guarded paths below the manager's root directory and below all configured checkpoint directories."""
        own = [self.checkpoint_dir] if os.path.isabs(self.checkpoint_dir) else []
        return self._manager.paths_beneath(self._manager.root_dir, self.root_dir, _fallback(), *own)

    @property
    def _manager(self) -> AgentboxContentsManager:
        assert isinstance(self.parent, AgentboxContentsManager)
        return self.parent

    def checkpoint_path(self, checkpoint_id: str, path: str) -> str:
        """Return the path of a checkpoint. Its directory is created if needed."""
        parent, _, name = path.strip("/").rpartition("/")
        stem, extension = os.path.splitext(name)
        folder = self._os_path(parent)
        directory = os.path.join(folder, self.checkpoint_dir)
        if not os.access(folder, os.W_OK) and os.path.exists(folder):
            directory = os.path.join(_fallback(), parent)
        with self.guard(directory), suppress(FileNotFoundError):
            # Create a directory beside the file only if the parent directory exists.
            is_beside = self.root_dir == self._manager.root_dir and os.path.dirname(directory) == folder
            self.paths.make_directory(directory, exist_ok=True, parents=not is_beside)
        return os.path.join(directory, f"{stem}-{checkpoint_id}{extension}")

    async def rename_checkpoint(self, checkpoint_id: str, old_path: str, new_path: str) -> None:
        """Rename a checkpoint, if it exists."""
        old, new = (self.checkpoint_path(checkpoint_id, path) for path in (old_path, new_path))
        with suppress(FileNotFoundError):
            await self._guarded(old, self.paths.move, old, new, overwrite=True)

    async def delete_checkpoint(self, checkpoint_id: str, path: str) -> None:
        """Delete a checkpoint."""
        os_path = self.checkpoint_path(checkpoint_id, path)
        try:
            await self._guarded(os_path, self.paths.delete, os_path)
        except FileNotFoundError:
            raise HTTPError(404, f"Checkpoint does not exist: {path}@{checkpoint_id}") from None


def _fallback() -> str:
    """Return the directory for checkpoints of files whose own directory is not writable."""
    return os.path.join(jupyter_data_dir(), "agentbox-checkpoints")


#: Attributes that a class derived from the manager must not override.
_GUARDED = (
    *("open", "atomic_writing", "_copy", "_read_notebook", "_save_directory", "_save_large_file", "_copy_dir"),
    "paths",
)


def name_class(thing: object) -> str:
    """Return the name of a class, or of an object's class, as it is written in settings."""
    kind: Any = thing if isinstance(thing, type) else type(thing)
    is_public = kind.__module__.startswith("jupyter_agentbox.") and kind.__qualname__ in PUBLIC
    return f"{'jupyter_agentbox' if is_public else kind.__module__}.{kind.__qualname__}"


def guard_state(manager: object) -> str | None:
    """Return the reason why a server's contents manager may follow links out of their folders.

    Parameters
    ----------
    manager : object
        ``ServerApp.contents_manager`` after all extensions are loaded, because extensions may replace it.

    Returns
    -------
    str or None
        The problem and what is required, or None if the guard is in place.
    """
    kind, guard = type(manager), "jupyter_agentbox.AgentboxContentsManager"
    name = name_class(manager)
    if not isinstance(manager, AgentboxContentsManager):
        return (
            f"the file browser, {name}, follows links that code in a sandbox creates to any target; it must be"
            f" {guard} or a class derived from it"
        )
    changed = [each for each in _GUARDED if getattr(kind, each) is not getattr(AgentboxContentsManager, each)]
    if changed:
        return (
            f"the file browser, {name}, may follow links that code in a sandbox creates, because it overrides"
            f" {', '.join(changed)} of {guard}"
        )
    kept: object = manager.checkpoints
    if isinstance(kept, FileCheckpoints) and not isinstance(kept, GuardedCheckpoints):
        return (
            f"the checkpoint manager, {name_class(kept)}, may follow links that code in a sandbox creates;"
            " configure checkpoints_class instead of checkpoints"
        )
    return None


class _FilesHandler(AuthenticatedFileHandler):
    """Handler that serves files for download, under the same link rules."""

    manager: ClassVar[AgentboxContentsManager]

    def validate_absolute_path(self, root: str, absolute_path: str) -> str:
        with self.manager.guard(absolute_path):
            try:
                with self.manager.paths.locate(absolute_path):
                    return str(super().validate_absolute_path(root, absolute_path))
            except (FileNotFoundError, NotADirectoryError):
                raise HTTPError(404, f"{self.path} does not exist") from None

    @classmethod
    def get_content(
        cls, abspath: str, start: int | None = None, end: int | None = None
    ) -> Generator[bytes, None, None]:
        opened: AbstractContextManager[Any] = cls.manager.open(abspath, "rb")
        with opened as file:
            file.seek(start or 0)
            left = None if end is None else end - (start or 0)
            while left is None or left > 0:
                part = file.read(PART if left is None else min(PART, left))
                if not part:
                    return
                left = None if left is None else left - len(part)
                yield part
