"""Read named groups of hosts from the configuration of the package managers themselves.

A company's mirror therefore works without extra settings, and there is no list of hosts to maintain here. The
configuration is read again each time, and reading blocks: it takes a file or two, and for npm and R one run of
the program when its files have changed. Call it in a worker thread.

URLs in such configuration may contain passwords, so only hosts and ports are taken from it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from jupyter_agentbox.errors import InvalidRequest
from jupyter_agentbox.guest.own_pip import find_wheel
from jupyter_agentbox.linux import write_atomically

from .rules import DEFAULT_PORTS, normal_name

log = logging.getLogger(__name__)

#: Timeout for asking npm or R for its configuration, in seconds.
ASK_TIMEOUT = 20.0


@dataclass(frozen=True)
class Preset:
    """Named group of hosts.

    Parameters
    ----------
    name : str
        Name of the preset.
    hosts : tuple of str
        Patterns.
    note : str or None
        Reason why the preset is empty, if it is.
    """

    name: str
    hosts: tuple[str, ...] = ()
    note: str | None = None


class _Unavailable(Exception):
    """A package manager is not installed or its configuration cannot be read; the text gives the reason."""


def expand(name: str) -> tuple[str, ...]:
    """Return the patterns of a preset. If it is empty, log the reason.

    Raises
    ------
    InvalidRequest
        No preset has this name.
    """
    preset = lookup(name)
    if preset.note:
        log.warning("egress preset %s is empty: %s", name, preset.note)
    return preset.hosts


def expand_all(entries: Iterable[str]) -> tuple[str, ...]:
    """Replace the names of presets in a list with their patterns, and remove duplicates."""
    found: dict[str, None] = {}
    for entry in entries:
        found.update(dict.fromkeys(expand(entry) if entry in PRESETS else (entry,)))
    return tuple(found)


def lookup(name: str) -> Preset:
    """Return a preset, with a reason if it is empty; see :func:`expand`."""
    source = PRESETS.get(name)
    if source is None:
        raise InvalidRequest(
            f"egress preset {name!r} does not exist; presets are {', '.join(sorted(PRESETS))}", field="hosts"
        )
    try:
        hosts = tuple(dict.fromkeys(source()))
    except _Unavailable as reason:
        return Preset(name, (), str(reason))
    return Preset(name, hosts, None if hosts else "its configuration contains no hosts")


def host_pattern(url: str) -> str | None:
    """Return the pattern for the host of an http or https URL, without the URL's other parts."""
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
    """pip's configured indexes, and its defaults."""

    index: str
    extra: tuple[str, ...]
    default_index: str
    default_hosts: tuple[str, ...]


def _pip() -> _Pip:
    try:
        # Imported by name: pip is not a dependency and has no stubs.
        with _pip_importable():
            configuration: Any = importlib.import_module("pip._internal.configuration").Configuration(isolated=False)
            public: Any = importlib.import_module("pip._internal.models.index").PyPI
    except ImportError:
        raise _Unavailable(
            "pip is not installed in the environment of the Jupyter server, and its Python has no copy of it"
        ) from None
    try:
        configuration.load()
        values: Mapping[str, str] = dict(configuration.items())
        default = (str(public.simple_url), (str(public.netloc), str(public.file_storage_domain)))
    except Exception as error:
        # A newer pip may have moved these modules. In that case nothing is allowed, and the note gives the reason.
        raise _Unavailable(f"the configuration of pip cannot be read ({type(error).__name__})") from None

    def value(name: str) -> str:
        # The sections that pip install reads, in ascending precedence. Newer releases keep a dict for each file.
        found = ""
        for section in ("global", "install", ":env:"):
            entry: Any = values.get(f"{section}.{name}")
            entries = entry.values() if isinstance(entry, dict) else [entry]
            found = next((str(text) for text in entries if text), found)
        return found

    return _Pip(value("index-url") or default[0], tuple(value("extra-index-url").split()), *default)


@contextlib.contextmanager
def _pip_importable() -> Iterator[None]:
    """Make the pip that comes with Python importable where no other is, as in an environment of uv."""
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    wheel = find_wheel(os.path.dirname(python), f"{sys.version_info.major}.{sys.version_info.minor}")
    if wheel:
        sys.path.append(wheel)  # last, so that an installed pip takes precedence
    try:
        yield
    finally:
        if wheel:
            sys.path.remove(wheel)


def _pypi() -> list[str]:
    pip = _pip()
    hosts = _patterns([pip.index, *pip.extra])
    # The public index serves its files from a second host. Of a mirror, only its own host is known.
    public = pip.default_hosts[0]
    return hosts + [host for host in pip.default_hosts[1:] if public in hosts]


# -- npm ------------------------------------------------------------------------------------------


def _ask(name: str, program: str, *arguments: str, env: Mapping[str, str] | None = None) -> str:
    try:
        return subprocess.run(
            [program, *arguments],
            cwd="/",  # a folder without the configuration of a project
            env={**os.environ, "NO_UPDATE_NOTIFIER": "1", **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        # Leave out the output: it may contain secrets from the configuration.
        raise _Unavailable(f"the configuration of {name} cannot be read ({type(error).__name__})") from None


def _stamp(path: str) -> tuple[str, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return path, 0, 0
    return path, found.st_mtime_ns, found.st_size


#: npm's last answer, by the state that it depends on.
_npm_answers: dict[str, _Npm] = {}


@dataclass(frozen=True)
class _Npm:
    """npm's registries without credentials, its built-in registry, and the files that can change them."""

    registries: dict[str, str]
    default: str
    stamps: list[tuple[str, int, int]]

    @property
    def is_current(self) -> bool:
        return all(_stamp(path) == (path, *rest) for path, *rest in self.stamps)


def _npm() -> _Npm:
    npm = shutil.which("npm")
    if npm is None:
        raise _Unavailable("npm is not installed on the machine of the Jupyter server")
    settings = sorted((k, v) for k, v in os.environ.items() if k.lower().startswith("npm_config_") or k == "HOME")
    # A digest, because the settings may contain tokens and the answer is stored on disk.
    key = hashlib.sha256(repr((_stamp(npm), settings)).encode()).hexdigest()
    answer = _npm_answers.get(key) or _read_npm_answer(key)
    if answer is None or not answer.is_current:
        answer = _query_npm(npm, {name: "" for name, _ in settings if name.lower().endswith("registry")})
        _write_npm_answer(key, answer)
    _npm_answers.clear()
    _npm_answers[key] = answer
    return answer


def _query_npm(npm: str, no_registries: dict[str, str]) -> _Npm:
    try:
        found = json.loads(_ask("npm", npm, "config", "list", "--json"))
        urls = {k: without_credentials(str(v)) for k, v in found.items() if k == "registry" or k.endswith(":registry")}
        files = [str(found[k]) for k in ("userconfig", "globalconfig") if found.get(k)]
    except (ValueError, AttributeError):
        raise _Unavailable("the configuration of npm cannot be parsed") from None
    no_registries |= {"npm_config_userconfig": "/nonexistent/user", "npm_config_globalconfig": "/nonexistent/global"}
    default = _ask("npm", npm, "config", "get", "registry", env=no_registries).strip()
    return _Npm({k: url for k, url in urls.items() if url}, default, [_stamp(file) for file in files])


def _npm_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentbox" / "npm.json"


def _read_npm_answer(key: str) -> _Npm | None:
    """Return the stored answer of an earlier process. Running npm takes half a second, as long as a whole batch run."""
    try:
        stored = json.loads(_npm_file().read_text())
        if stored["key"] != key:
            return None
        stamps = [(str(path), int(time), int(size)) for path, time, size in stored["stamps"]]
        return _Npm({str(k): str(v) for k, v in stored["registries"].items()}, str(stored["default"]), stamps)
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _write_npm_answer(key: str, answer: _Npm) -> None:
    path = _npm_file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"key": key, **asdict(answer)}).encode())
    except (OSError, RuntimeError):
        pass  # npm is run again next time


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
            raise _Unavailable(f"the machine of the Jupyter server does not run {distribution}")
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
    # No configuration names these: the site itself, its API, archives, raw files, releases and large files.
    return [
        "github.com", "api.github.com", "codeload.github.com", "gist.github.com", "raw.githubusercontent.com",
        "objects.githubusercontent.com", "media.githubusercontent.com", "release-assets.githubusercontent.com",
        "github-cloud.githubusercontent.com", "github-cloud.s3.amazonaws.com",
    ]  # fmt: skip


def _crates() -> list[str]:
    home = Path(os.environ.get("CARGO_HOME") or Path.home() / ".cargo")
    if shutil.which("cargo") is None and not home.is_dir():
        raise _Unavailable("cargo is not installed on the machine of the Jupyter server")
    text = next((_read(home / name) for name in ("config.toml", "config") if (home / name).is_file()), "")
    # Only URLs are needed, so a regular expression is enough. Python 3.10 has no TOML parser.
    text = re.sub(r"(?m)^\s*#.*$", "", text)
    urls = re.findall(r"""(?m)(?:^|[\s{,.])(?:index|registry)\s*=\s*["'](?:sparse\+)?(https?://[^"']+)["']""", text)
    urls += [
        url.removeprefix("sparse+")
        for key, url in os.environ.items()
        if re.fullmatch(r"CARGO_REGISTRIES_.*_INDEX", key)
    ]
    is_replaced = re.search(r"\[source\.[\"']?crates-io[\"']?\][^\[]*replace-with", text)
    # Cargo has a built-in registry: an index and a file host.
    return _patterns(urls) + ([] if is_replaced else ["index.crates.io", "static.crates.io", "crates.io"])


# -- R ---------------------------------------------------------------------------------------------

_RPROFILES = ("/etc/R/Rprofile.site", "/usr/lib/R/etc/Rprofile.site", "/usr/local/lib/R/etc/Rprofile.site")
#: R's last answer, by the state of the files that it depends on.
_r_answers: dict[object, list[str]] = {}


def _cran() -> list[str]:
    # Without a choice of one's own, R suggests the first; packages link to the second.
    return _patterns(_r_repositories()) or ["cloud.r-project.org", "cran.r-project.org"]


def _r_repositories() -> list[str]:
    """Return the repositories of R's options, which its profiles set; empty if R is not installed."""
    program = shutil.which("Rscript")
    if program is None:
        return []
    own = [os.environ.get(name, "") for name in ("R_PROFILE", "R_PROFILE_USER")]
    files = [program, *_RPROFILES, *own, os.path.expanduser("~/.Rprofile")]
    key = tuple(_stamp(file) for file in files)
    if key not in _r_answers:
        # A profile may print text of its own.
        output = _ask("R", program, "-e", 'cat(paste0("\\nrepository ", getOption("repos")), "\\n")')
        _r_answers.clear()
        _r_answers[key] = re.findall(r"(?m)^repository (\S+)", output)
    return _r_answers[key]


# -- conda ------------------------------------------------------------------------------------------

#: Settings of conda that name channels. Others have URLs too, such as those of proxies.
_CHANNEL_SETTINGS = ("channels", "default_channels", "custom_channels", "custom_multichannels", "channel_alias")


def _condarc_files() -> list[Path]:
    home, env = Path(os.path.expanduser("~")), os.environ
    config = Path(env.get("XDG_CONFIG_HOME") or home / ".config")
    places = [Path("/etc/conda"), Path("/var/lib/conda"), config / "conda", home / ".conda", home]
    places += [Path(env[name]) for name in ("CONDA_ROOT", "CONDA_PREFIX") if env.get(name)]
    return [place / ".condarc" for place in places] + [Path(env[name]) for name in ("CONDARC",) if env.get(name)]


def _conda_settings() -> dict[str, list[str]]:
    """Return the values of the settings that name channels, from all of conda's files."""
    found: dict[str, list[str]] = {}
    for file in _condarc_files():
        setting = ""
        for line in _read(file).splitlines():
            if top := re.match(r"([A-Za-z_]+)\s*:(.*)", line):
                setting, line = top[1], top[2]
            if setting in _CHANNEL_SETTINGS:
                # Only names and URLs are needed, so no YAML parser is.
                text = re.sub(r"(^|\s)#.*", "", line).strip().removeprefix("- ")
                text = re.sub(r"^[\w.-]+:\s+", "", text)
                found.setdefault(setting, []).extend(word for word in re.split(r"[\s,\[\]\"']+", text) if word)
    return found


def _conda() -> list[str]:
    settings = _conda_settings()
    urls = [url for values in settings.values() for url in values]
    names = [name for name in settings.get("channels", ["defaults"]) if "://" not in name]
    hosts = _patterns(urls)
    if "channel_alias" not in settings and (set(names) - {"defaults", "nodefaults"} or "channels" not in settings):
        hosts.append("conda.anaconda.org")
    if "default_channels" not in settings and "defaults" in names:
        hosts.append("repo.anaconda.com")
    return hosts


# -- Deno -------------------------------------------------------------------------------------------


def _jsr() -> list[str]:
    # The variable is Deno's own. The second host serves the same packages to npm.
    return _patterns([os.environ.get("JSR_URL", "")]) or ["jsr.io", "npm.jsr.io"]


#: Presets by name, with the function that returns the hosts of each.
PRESETS: dict[str, Callable[[], list[str]]] = {
    "pypi": _pypi,
    "npm": _npm_hosts,
    "debian": _apt("debian"),
    "ubuntu": _apt("ubuntu"),
    "github": _github,
    "crates": _crates,
    "cran": _cran,
    "conda": _conda,
    "jsr": _jsr,
}


def pip_environment() -> dict[str, str]:
    """Return the environment variables that make pip, npm, Deno and conda inside use the same indexes as outside.

    Contains only values that differ from the defaults. User names and passwords are removed: they never go inside.
    """
    # pip retries a refused CONNECT five times over many seconds, and shows the reason only when it retries.
    found = {"PIP_RETRIES": "1"}
    try:
        pip = _pip()
        index = without_credentials(pip.index)
        if index and index.rstrip("/") != pip.default_index.rstrip("/"):
            found["PIP_INDEX_URL"] = index
        if extra := " ".join(url for text in pip.extra if (url := without_credentials(text))):
            found["PIP_EXTRA_INDEX_URL"] = extra
    except _Unavailable:
        pass
    try:
        npm = _npm()
        registry = npm.registries.get("registry", "")
        if registry and registry.rstrip("/") != npm.default.rstrip("/"):
            found["npm_config_registry"] = registry
    except _Unavailable:
        pass
    if url := without_credentials(os.environ.get("JSR_URL", "")):
        found["JSR_URL"] = url
    if url := without_credentials("".join(_conda_settings().get("channel_alias", [])[-1:])):
        found["CONDA_CHANNEL_ALIAS"] = url
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
