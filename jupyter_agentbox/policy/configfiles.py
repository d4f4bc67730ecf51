"""The administrator's files, read by the package itself, so that they hold in any program.

``jupyter_agentbox_config.py`` and ``jupyter_agentbox_config.json`` lie in Jupyter's configuration directories
(``jupyter --paths``). The current directory is none of them: a sandbox may write there.
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
#: What each file held when it was last read, by its path: the state of the file then, and its settings or its error.
_cache: dict[str, tuple[tuple[int, int, int], Config | InvalidConfig]] = {}


def file_config() -> Config:
    """Read ``jupyter_agentbox_config.py`` and ``.json`` along Jupyter's path, the user's last.

    Read anew only when a file has changed, as each start of a kernel asks.

    Raises
    ------
    InvalidConfig
        One of them cannot be read, or has Policy's name wrong: a policy that is half read could be wider than what was
        meant.
    """
    config = Config()
    for _, loaded in _read_files():
        if isinstance(loaded, InvalidConfig):
            raise loaded.with_traceback(None)
        config.merge(copy.deepcopy(loaded))
    return config


def find_enforcing_files() -> list[str]:
    """Return the files that set ``AgentboxExtension.enforce``, for a sentence.

    One is enough: another file, such as the user's own, cannot turn off what it enforces. A file that cannot be read
    counts if it has the word in it or cannot be opened at all, since what it says is not known.
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
    """Return the files that set ``AgentboxExtension.enforce`` to false."""
    return [
        path
        for path, loaded in _read_files()
        if not isinstance(loaded, InvalidConfig)
        and "AgentboxExtension" in loaded
        and loaded.AgentboxExtension.get("enforce") is False
    ]


def _read_files() -> list[tuple[str, Config | InvalidConfig]]:
    """Return the files that exist, the user's last, each with its settings or with why it cannot be read."""
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
        return Config()  # removed this moment
    except Exception as error:
        return _unreadable(path, repr(error))
    if slips := [name for name in difflib.get_close_matches("Policy", loaded, 3, 0.8) if name != "Policy"]:
        return InvalidConfig(f"the configuration file {path} has settings of {slips[0]}; Policy is meant")
    return loaded


def _unreadable(path: str, reason: str) -> InvalidConfig:
    return InvalidConfig(f"the configuration file {path} can't be read: {reason}")
