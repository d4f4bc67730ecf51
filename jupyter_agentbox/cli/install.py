"""``jupyter agentbox setup``: install runsc and other requirements.

Setup looks for runsc in this order: the configured path, PATH, the distribution's package, the official release. The
checksum of the release is verified. The command never prompts, prints each step before it runs it, and can be repeated.
Packages need root or passwordless ``sudo``; the official release goes into the state directory and needs neither.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from jupyter_agentbox.errors import RuntimeUnavailable
from jupyter_agentbox.linux import write_atomically
from jupyter_agentbox.runtimes.runsc.runtime import MIN_VERSION

RELEASES = "https://storage.googleapis.com/gvisor/releases/release/latest"
#: Debian release with a recent enough runsc, for machines with an older release.
DEBIAN_SUITE = "trixie"

_MAX_DOWNLOAD = 512 * 1024 * 1024
_COMMAND_TIMEOUT = 600.0
_SOURCE = Path("etc/apt/sources.list.d/jupyter-agentbox.sources")
_PIN = Path("etc/apt/preferences.d/jupyter-agentbox")
#: Fields that make a machine's own source trusted and reachable. A source derived from it must keep them.
_KEPT_FIELDS = ("signed-by", "trusted", "architectures", "check-valid-until", "allow-insecure")


def find_runsc(configured: str, state_dir: Path) -> str | None:
    """Return the runsc to use, or None: the configured one, that of an earlier setup, or the first on PATH.

    An earlier setup downloaded runsc only if the one on PATH was missing or too old, so the downloaded one comes first.
    """
    if configured:
        return shutil.which(os.path.expanduser(configured))
    return shutil.which("runsc", path=str(state_dir / "bin")) or shutil.which("runsc")


def runsc_date(text: str) -> int:
    """Return the date in a release number, from ``runsc --version`` or a package's version; 0 if it has none."""
    match = re.search(r"(?<!\d)(20\d{6})(?!\d)", text)
    return int(match[1]) if match else 0


def derive_source(text: str, codename: str, suite: str = DEBIAN_SUITE) -> str | None:
    """Return an apt source of `suite`, derived from the machine's own source of `codename`.

    Parameters
    ----------
    text : str
        Content of a file of the machine's sources, in either format of apt.
    codename : str
        Release of the machine, such as ``bookworm``.
    suite : str
        Release of the returned source.

    Returns
    -------
    str or None
        A stanza, or None if `text` has no source of that release's main component.
    """
    for stanza in re.split(r"\n\s*\n", re.sub(r"^[ \t]*#.*\n?", "", text, flags=re.MULTILINE)):
        fields = _read_stanza(stanza) or _read_line(stanza, codename)
        if (
            "deb" in fields.get("types", "").split()
            and codename in fields.get("suites", "").split()
            and "main" in fields.get("components", "").split()
            and fields.get("enabled", "yes") not in ("no", "false", "0")
        ):
            kept = [f"{name.title()}: {fields[name]}" for name in _KEPT_FIELDS if name in fields]
            return "\n".join(
                ["Types: deb", f"URIs: {fields['uris']}", f"Suites: {suite}", "Components: main", *kept, ""]
            )
    return None


def _read_stanza(stanza: str) -> dict[str, str]:
    """Parse the fields of a deb822 stanza. Continuation lines are kept unchanged."""
    fields: dict[str, str] = {}
    name = ""
    for line in stanza.splitlines():
        if line[:1] in (" ", "\t") and name:
            fields[name] += "\n" + line
        elif match := re.fullmatch(r"([A-Za-z-]+):\s*(.*?)\s*", line):
            name = match[1].lower()
            fields[name] = match[2]
    return fields if "uris" in fields else {}


def _read_line(stanza: str, codename: str) -> dict[str, str]:
    """Parse the first ``deb [options] uri suite component...`` of that release."""
    for line in stanza.splitlines():
        match = re.match(r"\s*deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)\s+([^#]*)", line)
        if match and match[3] == codename:
            options = dict(option.split("=", 1) for option in (match[1] or "").split() if "=" in option)
            names = {"arch": "architectures"}
            return {
                "types": "deb",
                "uris": match[2],
                "suites": match[3],
                "components": match[4],
                **{names.get(name, name): value for name, value in options.items()},
            }
    return {}


class Setup:
    """Installation of what sandboxes need on a machine.

    Parameters
    ----------
    state_dir : Path
        State directory; a downloaded runsc goes into its ``bin``.
    configured : str
        Configured path of runsc; empty for none.
    on_progress : callable
        Called with a sentence before each step.
    is_dry : bool
        Only report the steps.
    releases : str
        URL of the official release.
    root : Path
        Root of the file system. Tests use another one.
    run : callable
        Replacement for :func:`subprocess.run` in tests.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        configured: str = "",
        on_progress: Callable[[str], None] = print,
        is_dry: bool = False,
        releases: str = RELEASES,
        root: Path = Path("/"),
        run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run,
    ) -> None:
        self.state_dir = state_dir
        self.configured = configured
        self.on_progress = on_progress
        self.is_dry = is_dry
        self.releases = releases
        self.root = root
        self._run = run
        self._sudo: list[str] | None = None

    def get_runsc(self) -> None:
        """Find runsc, or install it.

        Raises
        ------
        RuntimeUnavailable
            runsc cannot be installed. The message lists what was tried and why each attempt failed.
        """
        found = find_runsc(self.configured, self.state_dir)
        date = self._date_of(found) if found else 0
        if date >= MIN_VERSION:
            self.on_progress(f"gVisor: {found}, release {date}, is already installed")
            return
        if self.configured:
            what = f"release {date or 'unknown'}, older than {MIN_VERSION}" if found else "not an executable program"
            raise RuntimeUnavailable(
                f"the configured runsc {self.configured} is {what}; correct the path, or remove the setting",
                setting="RunscRuntime.runsc",
            )
        self.on_progress(
            f"gVisor: {found} is too old (release {date or 'unknown'})" if found else "gVisor: runsc is not installed"
        )
        problems = []
        for install in (self._get_package, self._get_release):
            try:
                install()
                if self.is_dry:
                    return
                found = find_runsc("", self.state_dir)
                date = self._date_of(found) if found else 0
                if date >= MIN_VERSION:
                    self.on_progress(f"gVisor: {found}, release {date}, is installed")
                    return
                problems.append(f"installed {found}, release {date or 'unknown'}, is too old")
            except (RuntimeUnavailable, OSError, subprocess.SubprocessError) as error:
                problems.append(str(error))
                self.on_progress(f"  failed: {error}")
        raise RuntimeUnavailable(
            f"runsc cannot be installed: {'; '.join(problems)}. Put runsc {MIN_VERSION} or later on PATH yourself"
        )

    def get_uidmap(self) -> None:
        """Install newuidmap for ordinary users, so that code inside need not run as uid 0. Errors are only reported."""
        if os.geteuid() == 0 or shutil.which("newuidmap"):
            return
        try:
            self._need_apt()
            self.on_progress("uidmap: installing the package, so that code in sandboxes does not run as uid 0")
            self._install("uidmap")
        except (RuntimeUnavailable, OSError, subprocess.SubprocessError) as error:
            self.on_progress(f"uidmap: not installed ({error}); code runs as uid 0 in its sandbox; see `doctor`")

    def register_in_docker(self, settings: str = "", host: str = "", *, may_reload: bool = False) -> None:
        """Add gVisor to the runtimes of Docker's engine, if runsc is installed. Raises as :func:`.register`."""
        from jupyter_agentbox.runtimes.docker.setup import DAEMON_FILE, register

        found = find_runsc(self.configured, self.state_dir)
        if found is not None:  # a dry run only reports how to install it
            path = Path(settings) if settings else DAEMON_FILE
            register(found, say=self.on_progress, is_dry=self.is_dry, may_reload=may_reload, path=path, host=host)

    def _get_package(self) -> None:
        """Install the distribution's package, if its version is recent enough."""
        self._need_apt()
        version = self._package_version()
        if version is None:
            self.on_progress("  refreshing the package lists: apt-get update")
            self._as_root(["apt-get", "update", "-q"])
            version = self._package_version()
        if version is None:
            self._add_source()
            if self.is_dry:
                return
            version = self._package_version()
        if version is None:
            raise RuntimeUnavailable(f"the distribution has no runsc of {MIN_VERSION} or later")
        self.on_progress(f"  installing the package runsc {version} with apt-get")
        self._install(f"runsc={version}")

    def _need_apt(self) -> None:
        if not shutil.which("apt-get"):
            raise RuntimeUnavailable("apt-get is not installed")
        if self._sudo is None:
            if os.geteuid() == 0:
                self._sudo = []
            elif shutil.which("sudo") and self._command(["sudo", "-n", "true"], is_checked=False).returncode == 0:
                self._sudo = ["sudo", "-n"]
            else:
                raise RuntimeUnavailable("installing packages needs root or passwordless sudo")

    def _package_version(self) -> str | None:
        """Return the newest version of the package that apt can install, if it is recent enough."""
        rows = self._command(["apt-cache", "madison", "runsc"], is_checked=False).stdout.splitlines()
        versions = [row.split("|")[1].strip() for row in rows if row.count("|") >= 2 and "Packages" in row]
        good = [version for version in versions if runsc_date(version) >= MIN_VERSION]
        return max(good, key=runsc_date, default=None)

    def _add_source(self) -> None:
        """On an older Debian, add the release that has runsc as a source for runsc only, from the machine's mirror."""
        release = self.root / "etc/os-release"
        text = release.read_text() if release.exists() else ""
        values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        codename = values.get("VERSION_CODENAME", "").strip('"')
        if values.get("ID", "").strip('"') != "debian" or not codename:
            raise RuntimeUnavailable(f"the distribution has no runsc of {MIN_VERSION} or later")
        apt = self.root / "etc/apt"
        files = [
            apt / "sources.list",
            *sorted(apt.glob("sources.list.d/*.sources")),
            *sorted(apt.glob("sources.list.d/*.list")),
        ]
        sources = (derive_source(file.read_text(), codename) for file in files if file.is_file())
        source = next(filter(None, sources), None)
        if source is None:
            raise RuntimeUnavailable(
                f"/etc/apt has no source for {codename} from which to derive one for {DEBIAN_SUITE}"
            )
        self.on_progress(
            f"  adding {DEBIAN_SUITE}, from this machine's mirror, as a source for runsc only: /{_SOURCE}, with "
            f"/{_PIN}, which excludes all other packages"
        )
        # Write the pin first: an upgrade must never see the source without it.
        self._write(_PIN, f"Package: *\nPin: release n={DEBIAN_SUITE}\nPin-Priority: -10\n")
        self._write(_SOURCE, source)
        self._as_root(["apt-get", "update", "-q"])

    def _write(self, path: Path, text: str) -> None:
        self._as_root(["tee", str(self.root / path)], text)

    def _install(self, package: str) -> None:
        env = ["env", "DEBIAN_FRONTEND=noninteractive"]
        self._as_root([*env, "apt-get", "install", "-qy", "--no-install-recommends", package])

    def _get_release(self) -> None:
        """Download the official release, verify its checksum, then move it into place."""
        machine = platform.machine()
        address = f"{self.releases}/{machine}/runsc"
        target = self.state_dir / "bin" / "runsc"
        self.on_progress(f"  downloading the official release {address} to {target} and verifying its SHA-512")
        if machine not in ("x86_64", "aarch64"):
            raise RuntimeUnavailable(f"gVisor has no release for {machine}")
        if self.is_dry:
            return
        self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        words = _fetch(f"{address}.sha512", 4096).decode("ascii", "replace").split()
        if not words or not re.fullmatch(r"[0-9a-f]{128}", words[0]):
            raise RuntimeUnavailable(f"{address}.sha512 contains no checksum")
        data = _fetch(address, _MAX_DOWNLOAD)
        if hashlib.sha512(data).hexdigest() != words[0]:
            raise RuntimeUnavailable(f"{address} does not match its checksum; nothing was installed")
        write_atomically(target, data, 0o755)

    def _date_of(self, program: str) -> int:
        try:
            return runsc_date(self._command([program, "--version"], timeout=20).stdout)
        except (OSError, subprocess.SubprocessError, RuntimeUnavailable):
            return 0

    def _as_root(self, command: Sequence[str], text: str = "") -> None:
        if not self.is_dry:
            self._command([*(self._sudo or []), *command], text)

    def _command(
        self,
        command: Sequence[str],
        text: str = "",
        *,
        timeout: float = _COMMAND_TIMEOUT,
        is_checked: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command without a terminal. Raises RuntimeUnavailable with the last line of its output."""
        answer = self._run(list(command), input=text, capture_output=True, text=True, timeout=timeout)
        if is_checked and answer.returncode:
            output = (answer.stderr or answer.stdout).strip().splitlines()
            reason = output[-1] if output else f"exit status {answer.returncode}"
            raise RuntimeUnavailable(f"{' '.join(command[:6])} failed: {reason}")
        return answer


def _fetch(address: str, limit: int, timeout: float = 600.0) -> bytes:
    """Download at most `limit` bytes within `timeout` seconds, through the environment's proxy if one is set."""
    deadline = time.monotonic() + timeout
    parts, size = [], 0
    with urllib.request.urlopen(address, timeout=30) as response:
        if address.startswith("https:") and not response.geturl().startswith("https:"):
            raise RuntimeUnavailable(f"{address} was redirected to an address without TLS")
        while part := response.read(1 << 20):
            parts.append(part)
            size += len(part)
            if size > limit or time.monotonic() > deadline:
                raise RuntimeUnavailable(f"{address} is too large, or its download took too long")
    return b"".join(parts)
