"""How setup gets runsc: what is here, the distribution's package, the official release."""

from __future__ import annotations

import functools
import hashlib
import http.server
import platform
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_agentbox.cli import install
from jupyter_agentbox.cli.install import Setup, derive_source, find_runsc, runsc_date
from jupyter_agentbox.errors import RuntimeUnavailable

GOOD, OLD = "20990101", "20200101"


def program(path: Path, date: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho runsc version release-{date}.0\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bin_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An otherwise empty PATH."""
    (tmp_path / "path").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(install.os, "geteuid", lambda: 0)
    return tmp_path / "path"


@pytest.fixture
def releases(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """An address that serves releases, and its folder for this machine."""
    folder = tmp_path / "releases" / platform.machine()
    program(folder / "runsc", GOOD)
    digest = hashlib.sha512((folder / "runsc").read_bytes()).hexdigest()
    (folder / "runsc.sha512").write_text(f"{digest}  runsc\n")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(tmp_path / "releases"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()
        thread.join(10)


class Apt:
    """Stands in for apt: records every command, and makes its package installable once its source is there."""

    def __init__(self, root: Path, bin_dir: Path, rows: list[str]) -> None:
        self.root, self.bin_dir, self.rows = root, bin_dir, rows
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert options["timeout"] > 0
        if command[0].endswith("runsc"):
            return subprocess.run(command, **options)
        self.commands.append(command)
        text = ""
        if command[:2] == ["apt-cache", "madison"]:
            has_source = (self.root / "etc/apt/sources.list.d/jupyter-agentbox.sources").exists()
            text = "\n".join(row for row in self.rows if has_source or "trixie" not in row)
        elif command[0] == "tee":
            Path(command[1]).parent.mkdir(parents=True, exist_ok=True)
            Path(command[1]).write_text(options["input"])
        elif "install" in command:
            program(self.bin_dir / "runsc", str(runsc_date(command[-1])))
        return subprocess.CompletedProcess(command, 0, text, "")


@pytest.fixture
def make(tmp_path: Path, bin_dir: Path) -> Callable[..., tuple[Setup, list[str]]]:
    def make(**options: Any) -> tuple[Setup, list[str]]:
        said: list[str] = []
        return Setup(tmp_path / "state", on_progress=said.append, root=tmp_path / "root", **options), said

    return make


Make = Callable[..., tuple[Setup, list[str]]]

DEB822 = """\
# a comment
Types: deb deb-src
URIs: http://mirror.example.org/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/example.gpg

Types: deb
URIs: http://mirror.example.org/debian-security
Suites: bookworm-security
Components: main
"""
DERIVED = """\
Types: deb
URIs: http://mirror.example.org/debian
Suites: trixie
Components: main
Signed-By: /usr/share/keyrings/example.gpg
"""


def debian(root: Path, bin_dir: Path) -> None:
    (root / "etc/apt/sources.list.d").mkdir(parents=True)
    (root / "etc/apt/sources.list.d/debian.sources").write_text(DEB822)
    (root / "etc/os-release").write_text('ID=debian\nVERSION_CODENAME="bookworm"\n')
    program(bin_dir / "apt-get", OLD)


@pytest.mark.parametrize(
    ("text", "date"),
    [
        ("runsc version 0.0~20240729.0\nspec: 1.2.0", 20240729),
        ("release-20250101.0", 20250101),
        ("1.0", 0),
        ("1202401019", 0),
    ],
)
def test_a_release_is_known_by_its_date(text: str, date: int) -> None:
    assert runsc_date(text) == date


def test_a_source_is_like_the_machines_own() -> None:
    assert derive_source(DEB822, "bookworm") == DERIVED


@pytest.mark.parametrize(
    "line",
    [
        "deb [signed-by=/usr/share/keyrings/example.gpg] http://mirror.example.org/debian bookworm main contrib",
        "# deb http://old.example.org bookworm main\n\n"
        "deb-src http://mirror.example.org/debian bookworm main\n"
        "deb [ signed-by=/usr/share/keyrings/example.gpg ] http://mirror.example.org/debian bookworm main # ours",
    ],
)
def test_one_line_sources_are_read_too(line: str) -> None:
    assert derive_source(line, "bookworm") == DERIVED


def test_a_key_in_the_stanza_is_kept_as_it_stands() -> None:
    key = "Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc"
    made = derive_source(
        f"Types: deb\nURIs: http://m.example.org/\nSuites: bookworm\nComponents: main\n{key}\n", "bookworm"
    )
    assert made is not None
    assert "\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc\n" in made


@pytest.mark.parametrize(
    "text",
    [
        "",
        DEB822.replace("Suites", "Enabled: no\nSuites"),
        DEB822.replace("main contrib", "contrib"),
        DEB822.replace("deb deb-src", "deb-src"),
        "deb http://mirror.example.org/debian bookworm-backports main",
    ],
)
def test_no_source_is_made_up(text: str) -> None:
    assert derive_source(text, "bookworm") is None


def test_what_is_here_is_taken_and_nothing_is_done(make: Make, bin_dir: Path, tmp_path: Path) -> None:
    program(bin_dir / "runsc", GOOD)
    setup, said = make()
    setup.get_runsc()
    assert said == [f"gVisor: {bin_dir}/runsc, release {GOOD}, is already installed"]
    assert not (tmp_path / "state").exists()


def test_a_configured_runsc_is_taken_or_refused_and_never_replaced(make: Make, bin_dir: Path, tmp_path: Path) -> None:
    program(bin_dir / "runsc", GOOD)
    mine = program(tmp_path / "mine" / "runsc", GOOD)
    setup, said = make(configured=str(mine))
    setup.get_runsc()
    assert str(mine) in said[0]
    program(mine, OLD)
    for path, words in ((mine, "older than"), (tmp_path / "none", "not an executable")):
        with pytest.raises(RuntimeUnavailable, match=words):
            make(configured=str(path))[0].get_runsc()


def test_an_earlier_setups_own_goes_before_the_path(bin_dir: Path, tmp_path: Path) -> None:
    assert find_runsc("", tmp_path / "state") is None
    program(bin_dir / "runsc", OLD)
    own = program(tmp_path / "state" / "bin" / "runsc", GOOD)
    assert find_runsc("", tmp_path / "state") == str(own)


def test_a_new_enough_package_is_installed_as_it_is(make: Make, bin_dir: Path, tmp_path: Path) -> None:
    debian(tmp_path / "root", bin_dir)
    apt = Apt(tmp_path / "root", bin_dir, [f" runsc | 0.0~{GOOD}.0-1 | http://mirror.example.org sid/main Packages"])
    setup, said = make(run=apt)
    setup.get_runsc()
    assert f"runsc=0.0~{GOOD}.0-1" in apt.commands[-1]
    assert not any("tee" in command for command in apt.commands)
    assert said[-1].endswith("is installed")


def test_on_an_older_debian_only_runsc_comes_from_the_newer_one(make: Make, bin_dir: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    debian(root, bin_dir)
    program(bin_dir / "runsc", OLD)
    rows = [
        f" runsc | 0.0~{OLD}.0-1 | http://mirror.example.org/debian bookworm/main amd64 Packages",
        f" runsc | 0.0~{GOOD}.0-4+b7 | http://mirror.example.org/debian trixie/main amd64 Packages",
        f" runsc | 0.0~{GOOD}.0-5 | http://mirror.example.org/debian trixie/main Sources",
    ]
    apt = Apt(root, bin_dir, rows)
    setup, said = make(run=apt)
    setup.get_runsc()
    assert (root / "etc/apt/sources.list.d/jupyter-agentbox.sources").read_text() == DERIVED
    pin = (root / "etc/apt/preferences.d/jupyter-agentbox").read_text()
    assert pin == "Package: *\nPin: release n=trixie\nPin-Priority: -10\n"
    writes = [command[1] for command in apt.commands if command[0] == "tee"]
    assert "preferences" in writes[0]  # before the source, so that no upgrade ever sees it unpinned
    assert apt.commands[-1][-1] == f"runsc=0.0~{GOOD}.0-4+b7"
    assert "noninteractive" in apt.commands[-1][1]
    assert said[0] == f"gVisor: {bin_dir}/runsc is too old (release {OLD})"


def test_a_dry_run_says_all_and_changes_nothing(make: Make, bin_dir: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    debian(root, bin_dir)
    before = sorted(tmp_path.rglob("*"))
    apt = Apt(root, bin_dir, [])
    setup, said = make(run=apt, is_dry=True)
    setup.get_runsc()
    assert sorted(tmp_path.rglob("*")) == before
    assert all(command[0] == "apt-cache" for command in apt.commands)
    assert any("trixie" in line for line in said)


def test_without_packages_the_release_is_downloaded_and_verified(
    make: Make, releases: tuple[str, Path], tmp_path: Path
) -> None:
    setup, said = make(releases=releases[0])
    setup.get_runsc()
    own = tmp_path / "state" / "bin" / "runsc"
    assert own.stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0
    assert said[-1] == f"gVisor: {own}, release {GOOD}, is installed"
    make(releases="http://127.0.0.1:1")[0].get_runsc()  # a second run asks nobody


def test_without_root_and_sudo_nothing_is_asked_and_the_release_is_taken(
    make: Make, releases: tuple[str, Path], bin_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install.os, "geteuid", lambda: 1000)
    program(bin_dir / "apt-get", OLD)
    (bin_dir / "sudo").write_text("#!/bin/sh\nexit 1\n")
    (bin_dir / "sudo").chmod(0o755)
    setup, said = make(releases=releases[0])
    setup.get_runsc()
    assert any("needs root or passwordless sudo" in line for line in said)
    setup.get_uidmap()
    assert "uidmap: not installed" in said[-1]


def change(folder: Path) -> None:
    (folder / "runsc").write_bytes(b"#!/bin/sh\n# other\n")


def spoil(folder: Path) -> None:
    (folder / "runsc.sha512").write_text("<html>not found</html>")


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def age(folder: Path) -> None:
    program(folder / "runsc", OLD)
    (folder / "runsc.sha512").write_text(hashlib.sha512((folder / "runsc").read_bytes()).hexdigest())


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        (change, "does not match its checksum"),
        (spoil, "contains no checksum"),
        (remove, "404"),
        (age, f"release {OLD}, is too old"),
    ],
)
def test_a_release_that_is_not_as_it_should_be_is_not_used(
    make: Make, releases: tuple[str, Path], tmp_path: Path, attack: Callable[[Path], None], words: str
) -> None:
    attack(releases[1])
    with pytest.raises(RuntimeUnavailable, match=words) as caught:
        make(releases=releases[0])[0].get_runsc()
    assert "on PATH yourself" in str(caught.value)
    if attack is not age:
        assert list((tmp_path / "state" / "bin").iterdir()) == []


def test_a_download_is_bounded(releases: tuple[str, Path]) -> None:
    with pytest.raises(RuntimeUnavailable, match="is too large"):
        install._fetch(f"{releases[0]}/{platform.machine()}/runsc", 10)


def test_a_failing_command_is_told_by_its_last_line(make: Make, bin_dir: Path) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 100, "", "noise\nE: no such package\n")

    program(bin_dir / "apt-get", OLD)
    with pytest.raises(RuntimeUnavailable, match="E: no such package"):
        make(run=run, releases="http://127.0.0.1:1")[0].get_runsc()
