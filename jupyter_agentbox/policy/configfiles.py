"""Read the administrator's configuration files, in every program that uses the package.

``jupyter_agentbox_config.py`` and ``jupyter_agentbox_config.json`` are in Jupyter's configuration directories
(``jupyter --paths``). The current directory is not searched, because a sandbox may write there.
"""

from __future__ import annotations

import copy
import difflib
import os

from jupyter_core.paths import jupyter_config_path
from traitlets.config import Config
from traitlets.config.loader import ConfigFileNotFound, FileConfigLoader, JSONFileConfigLoader, PyFileConfigLoader

from jupyter_agentbox.errors import InvalidConfig

CONFIG_NAME = "jupyter_agentbox_config"

_LOADERS: tuple[tuple[str, type[FileConfigLoader]], ...] = (
    (".py", PyFileConfigLoader),
    (".json", JSONFileConfigLoader),
)
#: For each path, the file's status when it was last read, and its settings or the error.
_cache: dict[str, tuple[tuple[int, int, int], Config | InvalidConfig]] = {}


def file_config() -> Config:
    """Return the merged configuration of all files. The user's own files take precedence.

    Each start of a kernel calls this function, so a file is read again only when it has changed.

    Raises
    ------
    InvalidConfig
        A file cannot be read, or misspells Policy's name. A partly read policy could allow more than intended.
    """
    config = Config()
    for _, loaded in _read_files():
        if isinstance(loaded, InvalidConfig):
            raise loaded.with_traceback(None)
        config.merge(copy.deepcopy(loaded))
    return config


def find_enforcing_files() -> list[str]:
    """Return the paths of the files that set ``AgentboxExtension.enforce``, for a message.

    One such file is enough: no other file, such as the user's own, can turn enforcement off. A file that cannot be
    parsed counts if it contains the word or cannot be opened, because its settings are unknown.
    """
    found = []
    for path, loaded in _read_files():
        if isinstance(loaded, InvalidConfig):
            try:
                with open(path, "rb") as file:
                    is_enforcing = b"enforce" in file.read()
            except OSError:
                is_enforcing = True
            if is_enforcing:
                found.append(f"{path} (which cannot be read)")
        elif "AgentboxExtension" in loaded and loaded.AgentboxExtension.get("enforce", False) is not False:
            found.append(path)
    return found


def find_lenient_files() -> list[str]:
    """Return the paths of the files that set ``AgentboxExtension.enforce`` to false."""
    return [
        path
        for path, loaded in _read_files()
        if not isinstance(loaded, InvalidConfig)
        and "AgentboxExtension" in loaded
        and loaded.AgentboxExtension.get("enforce") is False
    ]


def _read_files() -> list[tuple[str, Config | InvalidConfig]]:
    """Return the existing files, the user's last, each with its settings or the error that prevented reading it."""
    files: list[tuple[str, Config | InvalidConfig]] = []
    for directory in reversed(jupyter_config_path()):
        for suffix, loader in _LOADERS:
            path = os.path.join(directory, CONFIG_NAME + suffix)
            try:
                status = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                _cache.pop(path, None)
                continue
            except OSError as error:
                files.append((path, _unreadable(path, str(error))))
                continue
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if path not in _cache or _cache[path][0] != stamp:
                _cache[path] = (stamp, _read_file(loader, path))
            files.append((path, _cache[path][1]))
    return files


def _read_file(loader: type[FileConfigLoader], path: str) -> Config | InvalidConfig:
    try:
        loaded: Config = loader(path).load_config()
    except ConfigFileNotFound:
        return Config()  # the file has just been removed
    except Exception as error:
        return _unreadable(path, repr(error))
    if misspelled := [name for name in difflib.get_close_matches("Policy", loaded, 3, 0.8) if name != "Policy"]:
        return InvalidConfig(
            f"the configuration file {path} configures {misspelled[0]}, which does not exist; use Policy"
        )
    return loaded


def _unreadable(path: str, reason: str) -> InvalidConfig:
    return InvalidConfig(f"Cannot read the configuration file {path}: {reason}")
