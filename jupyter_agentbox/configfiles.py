"""The administrator's files, read by the package itself, so that they hold in any program.

``jupyter_agentbox_config.py`` and ``jupyter_agentbox_config.json`` lie in Jupyter's configuration directories
(``jupyter --paths``). The current directory is none of them: a sandbox may write there.
"""

from __future__ import annotations

import copy
import difflib
import os
from typing import Any

from jupyter_core.paths import jupyter_config_path
from traitlets.config import Config
from traitlets.config.loader import ConfigFileNotFound, FileConfigLoader, JSONFileConfigLoader, PyFileConfigLoader

from .errors import InvalidConfig

CONFIG_NAME = "jupyter_agentbox_config"

_LOADERS: tuple[tuple[str, type[FileConfigLoader]], ...] = (
    (".py", PyFileConfigLoader),
    (".json", JSONFileConfigLoader),
)
_cache: list[Any] = []


def file_config() -> Config:
    """Read ``jupyter_agentbox_config.py`` and ``.json`` along Jupyter's path, the user's last.

    Read anew only when a file has changed, as each start of a kernel asks.

    Raises
    ------
    InvalidConfig
        One of them cannot be read, or has Policy's name wrong: a policy that is half read could be wider than what was
        meant.
    """
    files = []
    for directory in reversed(jupyter_config_path()):
        for suffix, loader in _LOADERS:
            path = os.path.join(directory, CONFIG_NAME + suffix)
            try:
                status = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise InvalidConfig(f"the configuration file {path} can't be read: {error}") from None
            files.append((loader, path, (status.st_mtime_ns, status.st_size, status.st_ino)))
    key = [(path, stamp) for _, path, stamp in files]
    if not _cache or _cache[0] != key:
        config = Config()
        for loader, path, _ in files:
            try:
                loaded = loader(path).load_config()
            except ConfigFileNotFound:
                continue  # removed this moment
            except Exception as error:
                raise InvalidConfig(f"the configuration file {path} can't be read: {error!r}") from None
            if slips := [name for name in difflib.get_close_matches("Policy", loaded, 3, 0.8) if name != "Policy"]:
                raise InvalidConfig(f"the configuration file {path} has settings of {slips[0]}; Policy is meant")
            config.merge(loaded)
        _cache[:] = [key, config]
    found: Config = copy.deepcopy(_cache[1])
    return found
