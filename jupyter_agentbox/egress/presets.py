"""Named groups of hosts, read from the configuration of the package managers themselves.

So a company's mirror works by itself, and no list of hosts grows old here. Read anew each time, blocking: a file or
two, and for npm one run of npm when its files have changed. Call it in a worker thread.

Addresses in such configuration may hold passwords: only hosts and ports are taken out of it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from jupyter_agentbox.errors import InvalidRequest
from jupyter_agentbox.linux import write_atomically

from .rules import DEFAULT_PORTS, normal_name

log = logging.getLogger(__name__)

#: Seconds that npm may take to tell its configuration.
NPM_TIMEOUT = 20.0


@dataclass(frozen=True)
class Preset:
    """A named group of hosts.

    Parameters
    ----------
    name : str
        Its name.
    hosts : tuple of str
        Patterns.
    note : str or None
        Why it is empty, if it is.
    """

    name: str
    hosts: tuple[str, ...] = ()
    note: str | None = None


class _NotThere(Exception):
    """A package manager is not installed or cannot be asked; the text says so."""


def expand(name: str) -> tuple[str, ...]:
    """Return the patterns of a preset; an empty one is logged with the reason.

    Raises
    ------
    InvalidRequest
        There is no preset of that name.
    """
    preset = lookup(name)
    if preset.note:
        log.warning("egress preset %s is empty: %s", name, preset.note)
    return preset.hosts


def expand_all(entries: Iterable[str]) -> tuple[str, ...]:
    """Replace the names of presets in a list by their patterns, and leave out what is there twice."""
    found: dict[str, None] = {}
    for entry in entries:
        found.update(dict.fromkeys(expand(entry) if entry in PRESETS else (entry,)))
    return tuple(found)


def lookup(name: str) -> Preset:
    """Return a preset with the reason why it is empty, if it is; see :func:`expand`."""
    source = PRESETS.get(name)
    if source is None:
        raise InvalidRequest(
            f"there is no egress preset {name!r}; there are: {', '.join(sorted(PRESETS))}", field="hosts"
        )
    try:
        hosts = tuple(dict.fromkeys(source()))
    except _NotThere as reason:
        return Preset(name, (), str(reason))
    return Preset(name, hosts, None if hosts else "its configuration names no host")


def host_pattern(url: str) -> str | None:
    """Return the pattern for the host of an http or https URL, without anything else that stands in it."""
    try:
        parts = urlsplit(url.strip())
        if parts.scheme.lower() not in ("http", "https") or not parts.hostname:
            return None
        name = normal_name(parts.hostname)
        port = parts.port
    except ValueError:
        return None
    return name if port is None or port in DEFAULT_PORTS else f"{name}:{port}"


def without_credentials(url: str) -> str | None:
    """Return an http or https URL without user name and password; None for any other URL."""
    if host_pattern(url) is None:
        return None
    parts = urlsplit(url.strip())
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _patterns(urls: Iterable[str]) -> list[str]:
    return [pattern for url in urls if (pattern := host_pattern(url))]


# -- pip ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pip:
    """The indexes pip is set to, and what it would use if nothing were set."""

    index: str
    extra: tuple[str, ...]
    default_index: str
    default_hosts: tuple[str, ...]


def _pip() -> _Pip:
    try:
        # By name: pip is no dependency, and has no stubs.
        configuration: Any = importlib.import_module("pip._internal.configuration").Configuration(isolated=False)
        public: Any = importlib.import_module("pip._internal.models.index").PyPI
    except ImportError:
        raise _NotThere("pip is not installed in the environment of the Jupyter server") from None
    try:
        configuration.load()
        values: Mapping[str, str] = dict(configuration.items())
        default = (str(public.simple_url), (str(public.netloc), str(public.file_storage_domain)))
    except Exception as error:
        # Another release of pip may have moved all this: then nothing is allowed, and it is said why.
        raise _NotThere(f"the configuration of pip cannot be read ({type(error).__name__})") from None

    def value(name: str) -> str:
        # What pip install goes by, the last one winning; newer releases keep a dict for each file.
        found = ""
        for section in ("global", "install", ":env:"):
            entry: Any = values.get(f"{section}.{name}")
            entries = entry.values() if isinstance(entry, dict) else [entry]
            found = next((str(text) for text in entries if text), found)
        return found

    return _Pip(value("index-url") or default[0], tuple(value("extra-index-url").split()), *default)


def _pypi() -> list[str]:
    pip = _pip()
    hosts = _patterns([pip.index, *pip.extra])
    # The public index keeps its files on a second host; of a mirror only its own host is known.
    public = pip.default_hosts[0]
    return hosts + [host for host in pip.default_hosts[1:] if public in hosts]


# -- npm ------------------------------------------------------------------------------------------


def _run_npm(npm: str, *arguments: str, env: Mapping[str, str] | None = None) -> str:
    try:
        return subprocess.run(
            [npm, *arguments],
            cwd="/",  # the configuration of no project
            env={**os.environ, "NO_UPDATE_NOTIFIER": "1", **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=NPM_TIMEOUT,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        # Its output is left out: it may hold what stands in the configuration.
        raise _NotThere(f"npm cannot be asked for its configuration ({type(error).__name__})") from None


def _stamp(path: str) -> tuple[str, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return path, 0, 0
    return path, found.st_mtime_ns, found.st_size


#: What npm said last, by what it depends on.
_npm_answers: dict[str, _Npm] = {}


@dataclass(frozen=True)
class _Npm:
    """npm's registries without credentials, the one it has built in, and the files that could change them."""

    registries: dict[str, str]
    default: str
    stamps: list[tuple[str, int, int]]

    @property
    def is_current(self) -> bool:
        return all(_stamp(path) == (path, *rest) for path, *rest in self.stamps)


def _npm() -> _Npm:
    npm = shutil.which("npm")
    if npm is None:
        raise _NotThere("npm is not installed on the machine of the Jupyter server")
    settings = sorted((k, v) for k, v in os.environ.items() if k.lower().startswith("npm_config_") or k == "HOME")
    # A digest, as the settings may hold tokens and the answer is kept on disk.
    key = hashlib.sha256(repr((_stamp(npm), settings)).encode()).hexdigest()
    answer = _npm_answers.get(key) or _read_npm_answer(key)
    if answer is None or not answer.is_current:
        answer = _ask_npm(npm, {name: "" for name, _ in settings if name.lower().endswith("registry")})
        _write_npm_answer(key, answer)
    _npm_answers.clear()
    _npm_answers[key] = answer
    return answer


def _ask_npm(npm: str, nothing: dict[str, str]) -> _Npm:
    try:
        found = json.loads(_run_npm(npm, "config", "list", "--json"))
        urls = {k: without_credentials(str(v)) for k, v in found.items() if k == "registry" or k.endswith(":registry")}
        files = [str(found[k]) for k in ("userconfig", "globalconfig") if found.get(k)]
    except (ValueError, AttributeError):
        raise _NotThere("npm does not tell its configuration") from None
    nothing |= {"npm_config_userconfig": "/nonexistent/user", "npm_config_globalconfig": "/nonexistent/global"}
    default = _run_npm(npm, "config", "get", "registry", env=nothing).strip()
    return _Npm({k: url for k, url in urls.items() if url}, default, [_stamp(file) for file in files])


def _npm_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentbox" / "npm.json"


def _read_npm_answer(key: str) -> _Npm | None:
    """What an earlier process was told: npm takes half a second, and a batch run may be no longer than that."""
    try:
        kept = json.loads(_npm_file().read_text())
        if kept["key"] != key:
            return None
        stamps = [(str(path), int(time), int(size)) for path, time, size in kept["stamps"]]
        return _Npm({str(k): str(v) for k, v in kept["registries"].items()}, str(kept["default"]), stamps)
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _write_npm_answer(key: str, answer: _Npm) -> None:
    path = _npm_file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"key": key, **asdict(answer)}).encode())
    except (OSError, RuntimeError):
        pass  # it will be asked again


def _npm_hosts() -> list[str]:
    return _patterns(_npm().registries.values())


# -- apt ------------------------------------------------------------------------------------------

_APT = Path("/etc/apt")
_OS_RELEASE = Path("/etc/os-release")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _apt_urls(directory: Path) -> list[str]:
    urls: list[str] = []
    files = [directory / "sources.list", *sorted((directory / "sources.list.d").glob("*"))]
    for file in files:
        if file.suffix == ".list":
            for line in _read(file).splitlines():
                # deb [options] URL suite component...
                if match := re.match(r"\s*deb(?:-src)?\s+(?:\[[^\]]*\]\s+)?(\S+)", line):
                    urls.append(match[1])
        elif file.suffix == ".sources":
            for stanza in re.split(r"\n\s*\n", _read(file)):
                text = re.sub(r"(?m)^#.*\n?", "", stanza)
                fields = dict(re.findall(r"(?mi)^([a-z-]+):[ \t]*((?:.*)(?:\n[ \t].*)*)", text))
                fields = {key.lower(): value for key, value in fields.items()}
                if fields.get("enabled", "yes").strip().lower() not in (
                    "no",
                    "false",
                    "0",
                    "off",
                    "without",
                    "disable",
                ):
                    urls += fields.get("uris", "").split()
    return urls


def _apt(distribution: str) -> Callable[[], list[str]]:
    def read() -> list[str]:
        release = dict(re.findall(r"(?m)^(ID|ID_LIKE)=\"?([^\"\n]*)", _read(_OS_RELEASE)))
        kinds = f"{release.get('ID', '')} {release.get('ID_LIKE', '')}".split()
        if distribution not in kinds or not _APT.is_dir():
            raise _NotThere(f"the machine of the Jupyter server does not run {distribution}")
        urls = []
        for url in _apt_urls(_APT):
            scheme, _, rest = url.partition(":")
            if scheme == "mirror+file":
                urls += [line.split()[0] for line in _read(Path("/" + rest.lstrip("/"))).splitlines() if line.split()]
            else:
                urls.append(url.removeprefix("mirror+"))
        return _patterns(urls)

    return read


# -- others ---------------------------------------------------------------------------------------


def _github() -> list[str]:
    # Nothing configures these: the site itself, its API, archives, raw files, releases and large files.
    return [
        "github.com", "api.github.com", "codeload.github.com", "gist.github.com", "raw.githubusercontent.com",
        "objects.githubusercontent.com", "media.githubusercontent.com", "release-assets.githubusercontent.com",
        "github-cloud.githubusercontent.com", "github-cloud.s3.amazonaws.com",
    ]  # fmt: skip


def _crates() -> list[str]:
    home = Path(os.environ.get("CARGO_HOME") or Path.home() / ".cargo")
    if shutil.which("cargo") is None and not home.is_dir():
        raise _NotThere("cargo is not installed on the machine of the Jupyter server")
    text = next((_read(home / name) for name in ("config.toml", "config") if (home / name).is_file()), "")
    # Only addresses are wanted, so no TOML parser is needed, which Python 3.10 has not got.
    text = re.sub(r"(?m)^\s*#.*$", "", text)
    urls = re.findall(r"""(?m)(?:^|[\s{,.])(?:index|registry)\s*=\s*["'](?:sparse\+)?(https?://[^"']+)["']""", text)
    urls += [
        url.removeprefix("sparse+")
        for key, url in os.environ.items()
        if re.fullmatch(r"CARGO_REGISTRIES_.*_INDEX", key)
    ]
    is_replaced = re.search(r"\[source\.[\"']?crates-io[\"']?\][^\[]*replace-with", text)
    # Cargo has its own registry built in: an index and a file host.
    return _patterns(urls) + ([] if is_replaced else ["index.crates.io", "static.crates.io", "crates.io"])


#: Name of each preset and where its hosts come from.
PRESETS: dict[str, Callable[[], list[str]]] = {
    "pypi": _pypi,
    "npm": _npm_hosts,
    "debian": _apt("debian"),
    "ubuntu": _apt("ubuntu"),
    "github": _github,
    "crates": _crates,
}


def pip_environment() -> dict[str, str]:
    """Return the variables that let pip and npm inside use the indexes that they use outside.

    Only what differs from their defaults, and without user names and passwords: those never go inside.
    """
    # pip repeats a refused CONNECT five times over many seconds, and shows its reason only when it repeats it.
    found = {"PIP_RETRIES": "1"}
    try:
        pip = _pip()
        index = without_credentials(pip.index)
        if index and index.rstrip("/") != pip.default_index.rstrip("/"):
            found["PIP_INDEX_URL"] = index
        if extra := " ".join(url for text in pip.extra if (url := without_credentials(text))):
            found["PIP_EXTRA_INDEX_URL"] = extra
    except _NotThere:
        pass
    try:
        npm = _npm()
        registry = npm.registries.get("registry", "")
        if registry and registry.rstrip("/") != npm.default.rstrip("/"):
            found["npm_config_registry"] = registry
    except _NotThere:
        pass
    return found


__all__ = [
    "PRESETS",
    "Preset",
    "expand",
    "expand_all",
    "host_pattern",
    "lookup",
    "pip_environment",
    "without_credentials",
]
