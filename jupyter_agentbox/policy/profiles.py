"""Read and validate the values of profiles and requests, with one reader for each key.

The administrator writes *profiles*. A *request* is untrusted: it comes from a kernelspec's stanza or a REST body. Both
are mappings of plain JSON values. They are read here into values that ``policy.policy`` compares.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from jupyter_agentbox.egress import presets, rules
from jupyter_agentbox.errors import AgentboxError
from jupyter_agentbox.names import HIDDEN_FILES, READ_ONLY_FILES
from jupyter_agentbox.spec import (
    GUEST_DIR,
    KIB,
    LIMIT_NAMES,
    MIB,
    WORKSPACE,
    KernelCommand,
    Limits,
    Mount,
    Service,
    WarmStart,
    format_size,
)
from jupyter_agentbox.storage.images import values as image_values

from .traits import parse_size

log = logging.getLogger(__name__)

#: Smallest limits with which a sandbox can do useful work.
MINIMUM = Limits(memory=64 * MIB, cpus=0.05, processes=16, disk=64 * KIB)
#: Directories inside that belong to the package. No profile may mount anything there.
_OWN_TARGETS = ("/proc", "/sys", "/dev", "/tmp", GUEST_DIR, WORKSPACE)


@dataclass(frozen=True)
class Profile:
    """A profile, with the values that it inherits from Policy.

    Parameters
    ----------
    name : str
        Its name.
    limits : Limits
        The most that a request may ask for.
    hosts, private_hosts : tuple of str
        Patterns. `hosts` may also contain names of presets.
    hosts_setting : str
        The setting that an error names.
    user_may_allow : tuple of str
        Patterns of the hosts that a person may allow in addition, with presets expanded. The port may be ``*``.
    runtime : str
        Name of the runtime.
    root : Path or None
        Image directory to use as root.
    is_root : bool
        Whether user code is uid 0 inside.
    hidden, read_only : tuple of str
        Patterns of entries of the work folder to hide, and to make read-only.
    is_private : bool
        Whether the work folder is a private one, never the notebook's.
    env : mapping
        Additional variables.
    mounts : tuple of Mount
        Additional read-only mounts.
    lease_timeout : float
        Seconds.
    freeze_after : float
        Seconds; 0 for never.
    image : str or None
        Name or address of the image to use as root.
    python : Path or str or None
        Interpreter of a Python environment of the host. :meth:`Policy.choose` replaces it by the interpreter inside.
    init, services, kernels
        See :class:`~jupyter_agentbox.spec.SandboxSpec`.
    warm : WarmStart
        Settings of its templates and pooled kernels.
    """

    name: str
    limits: Limits
    hosts: tuple[str, ...]
    private_hosts: tuple[str, ...]
    hosts_setting: str
    runtime: str
    user_may_allow: tuple[str, ...] = ()
    root: Path | None = None
    is_root: bool = False
    hidden: tuple[str, ...] = HIDDEN_FILES
    read_only: tuple[str, ...] = READ_ONLY_FILES
    is_private: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    lease_timeout: float = 60.0
    freeze_after: float = 60.0
    warm: WarmStart = field(default_factory=WarmStart)
    image: str | None = None
    python: Path | str | None = None
    init: tuple[str, ...] = ()
    services: tuple[Service, ...] = ()
    kernels: tuple[KernelCommand, ...] = ()


def _read_hosts(value: object) -> tuple[str, ...]:
    """Read host patterns and names of presets."""
    texts = _read_texts(value)
    for text in texts:
        if text not in presets.PRESETS:
            rules.parse_pattern(text)
    return texts


def _read_allowable(value: object) -> tuple[str, ...]:
    """Read host patterns, whose port may be ``*``, and names of presets."""
    texts = _read_texts(value)
    for text in texts:
        if text not in presets.PRESETS:
            rules.parse_pattern(text, setting="Policy.user_may_allow", has_any_port=True)
    return texts


def _read_plain_hosts(value: object) -> tuple[str, ...]:
    texts = _read_texts(value)
    for text in texts:
        if text in presets.PRESETS:
            raise ValueError(f"{text!r} is a preset, which is not allowed here. List its hosts")
        rules.parse_pattern(text)
    return texts


def _read_texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) and text for text in value):
        raise ValueError(f"{value!r} must be a list of strings")
    return tuple(value)


def _read_patterns(value: object) -> tuple[str, ...]:
    patterns = _read_texts(value)
    for pattern in patterns:
        if any(part in ("", ".", "..") for part in pattern.split("/")):
            raise ValueError(
                f"{pattern!r} must be a name or names separated by single slashes, such as '.config/gcloud'. It is "
                "compared at any depth of the work folder"
            )
    return patterns


def _read_number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{value!r} must be a number above 0")
    return float(value)


def _read_seconds(value: object) -> float:
    return 0.0 if value == 0 and not isinstance(value, bool) else _read_number(value)


def _read_count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{value!r} must be a whole number above 0")
    return value


def _read_pool_size(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 100:
        raise ValueError(f"{value!r} must be a whole number from 0 to 100")
    return value


def _read_modules(value: object) -> tuple[str, ...]:
    names = _read_texts(value)
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"{name!r} is not a valid module name")
    return names


def _read_flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} must be true or false")
    return value


def _read_text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} must be a non-empty string")
    return value


def _read_workspace(value: object) -> bool:
    if value not in ("folder", "private"):
        raise ValueError(f"{value!r} must be 'folder' (the notebook's own) or 'private'")
    return value == "private"


def _read_root(value: object) -> Path:
    path = Path(_read_text(value)).expanduser()
    if not path.is_absolute() or path == Path("/"):
        raise ValueError(f"{value!r} must be an absolute path, and not /")
    return path


def _read_python(value: object) -> Path:
    """Read the path of an interpreter, or of an environment's folder, for which its interpreter is returned.

    A relative path is that of an environment in the notebook's folder, and is returned as it is.
    """
    text = _read_text(value)
    if not text.startswith(("/", "~")):
        parts = text.rstrip("/").split("/")
        if any(part in ("", ".", "..") for part in parts):
            raise ValueError(
                f"{value!r} must be an absolute path, or the path of an environment in the notebook's folder"
            )
        return Path(text)
    path = _read_root(value)
    return path / "bin" / "python" if path.is_dir() else path


def _read_lines(value: object) -> tuple[str, ...]:
    lines = _read_texts(value)
    if any("\0" in line for line in lines):
        raise ValueError("a line contains a NUL character")
    return lines


def _read_services(value: object) -> tuple[Service, ...]:
    """Read services in the form of a recipe: a list of tables."""
    try:
        found = msgspec.convert(value, list[image_values.Service])
    except msgspec.ValidationError as error:
        raise ValueError(
            f"{value!r:.100} must be a list such as [{{'name': 'pages', 'line': 'python3 -m http.server'}}], where "
            f"each service may also have 'ready' and 'timeout' ({image_values.explain(error, value)})"
        ) from None
    return tuple(Service(item.name, item.line, item.ready or "", item.timeout) for item in found)


def _read_env(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} must map names to strings")
    for name, text in value.items():
        if not isinstance(name, str) or not isinstance(text, str) or not name or "=" in name or "\0" in name + text:
            raise ValueError(f"{name!r} or its value is not valid in an environment")
    return dict(value)


def read_mounts(value: object) -> tuple[Mount, ...]:
    """Read a mapping from paths inside to host paths. All mounts are read-only."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} must map paths inside to host paths")
    return tuple(Mount(_read_root(source), _read_target(target), is_policys=True) for target, source in value.items())


def _read_target(value: object) -> str:
    text = _read_text(value)
    is_plain = text.startswith("/") and Path(text).as_posix() == text and ".." not in text.split("/") and text != "/"
    if not is_plain:
        raise ValueError(f"{text!r} must be a plain absolute path inside")
    if any(text == own or text.startswith(own + "/") for own in _OWN_TARGETS):
        raise ValueError(f"{text!r} is reserved: every sandbox uses it")
    return text


#: Reader for each key of a request. Each key can only narrow what the profile allows.
REQUEST_KEYS: Mapping[str, Callable[[object], Any]] = {
    "profile": _read_text,
    "memory": parse_size,
    "cpus": _read_number,
    "processes": _read_count,
    "disk": parse_size,
    "allowed_hosts": _read_hosts,
    "hidden_files": _read_patterns,
    "read_only_files": _read_patterns,
    "workspace": _read_workspace,
    "lease_timeout": _read_number,
    "image": _read_text,
    "python": _read_python,
}

#: Reader for each key of a profile.
PROFILE_KEYS: Mapping[str, Callable[[object], Any]] = {
    **{key: reader for key, reader in REQUEST_KEYS.items() if key != "profile"},
    "private_hosts": _read_plain_hosts,
    "user_may_allow": _read_allowable,
    "runtime": _read_text,
    "root": _read_root,
    "freeze_after": _read_seconds,
    "is_root": _read_flag,
    "env": _read_env,
    "mounts": read_mounts,
    "init": _read_lines,
    "services": _read_services,
    "preload": _read_modules,
    "pool_size": _read_pool_size,
}


def read(
    values: Mapping[str, Any], keys: Mapping[str, Callable[[object], Any]], where: str, error: type[AgentboxError]
) -> dict[str, Any]:
    """Read a mapping. Raises `error` for an unknown key or a malformed value.

    Parameters
    ----------
    values : mapping
        The values as configured or requested.
    keys : mapping
        :data:`REQUEST_KEYS` or :data:`PROFILE_KEYS`.
    where : str
        Name of `values` for the error message.
    error : type
        Type of the error to raise. Its ``field`` is the key.
    """
    if not isinstance(values, Mapping):
        raise error(f"{where} must map keys to values, but is {values!r}")
    found = {}
    for key, value in values.items():
        if key not in keys:
            raise error(
                f"{where} has an unknown key {key!r}{did_you_mean(str(key), keys)}; valid keys are {', '.join(keys)}",
                field=str(key),
            )
        try:
            found[key] = keys[key](value)
            if key in LIMIT_NAMES and found[key] < getattr(MINIMUM, key):
                raise ValueError(f"{value!r} is too low: the minimum is {show(key, getattr(MINIMUM, key))}")
        except (ValueError, AgentboxError) as cause:
            raise error(f"{where}, key {key!r}: {cause}", field=key) from None
    return found


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` if an entry of `words` resembles `word`, or an empty string."""
    close = difflib.get_close_matches(word, list(words), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def show(key: str, value: float) -> str:
    """Return the value of a limit as text for messages."""
    return format_size(int(value)) if key in ("memory", "disk") else f"{value:g}"


def expand(entries: Iterable[str]) -> tuple[str, ...]:
    """Replace names of presets with their patterns. Blocks, because it reads the package managers' configuration."""
    found: dict[str, None] = {}
    for entry in entries:
        preset = presets.lookup(entry) if entry in presets.PRESETS else presets.Preset(entry, (entry,))
        if preset.note:
            log.info("egress preset %s is empty: %s", entry, preset.note)
        found.update(dict.fromkeys(preset.hosts))
    return tuple(found)


def find_uncovered(entries: Iterable[str], ceiling: Iterable[str]) -> str | None:
    """Return the first pattern or preset of `entries` that allows more than `ceiling`, or None."""
    names = frozenset(ceiling)
    wide: list[rules.Pattern] | None = None
    for entry in entries:
        if entry in names:
            continue  # avoids querying package managers for the preset's meaning
        if wide is None:
            wide = [rules.parse_pattern(text, has_any_port=True) for text in expand(names)]
        if not all(_is_covered(rules.parse_pattern(text, has_any_port=True), wide) for text in expand([entry])):
            return entry
    return None


def _is_covered(inner: rules.Pattern, ceiling: Iterable[rules.Pattern]) -> bool:
    def has_name(wide: rules.Pattern) -> bool:
        if inner.is_exact:
            return wide.matches_name(inner.name)
        return wide.is_below and (wide.name == inner.name or wide.matches_name(inner.name))

    return all(any(wide.has_port(port) and has_name(wide) for wide in ceiling) for port in inner.ports)
