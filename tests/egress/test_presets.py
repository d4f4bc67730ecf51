"""Presets: hosts from the package managers' own configuration, and nothing else that stands in it."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from support.gate_box import Box

from jupyter_agentbox.egress import presets, rules
from jupyter_agentbox.errors import InvalidRequest

SECRET = "s3cret"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No configuration but what a test makes."""
    names = "PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS CARGO_HOME npm_config_registry XDG_CACHE_HOME"
    names += " XDG_CONFIG_HOME JSR_URL CONDARC CONDA_ROOT CONDA_PREFIX R_PROFILE R_PROFILE_USER"
    for name in names.split():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return tmp_path


def test_pip_without_configuration_uses_its_own_default() -> None:
    hosts = presets.expand("pypi")
    assert len(hosts) == 2
    assert all(rules.parse_pattern(host).port is None for host in hosts)
    assert "PIP_INDEX_URL" not in presets.pip_environment()


def test_pip_variables_win_and_leave_their_secrets_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"https://user:{SECRET}@mirror.corp.example:8443/simple/")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"http://{SECRET}@extra.example/x file:///opt/simple ftp://no.example/")
    assert presets.expand("pypi") == ("mirror.corp.example:8443", "extra.example")
    env = presets.pip_environment()
    assert env["PIP_INDEX_URL"] == "https://mirror.corp.example:8443/simple/"
    assert env["PIP_EXTRA_INDEX_URL"] == "http://extra.example/x"
    assert SECRET not in repr(presets.lookup("pypi")) + repr(env)


def test_pip_files_are_read_each_time(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = home / "pip.conf"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    file.write_text("[global]\nindex-url = http://one.example:80/simple\n")
    assert presets.expand("pypi") == ("one.example",)
    file.write_text("[global]\nindex-url = http://one.example/simple\n[install]\nindex-url = https://two.example/s\n")
    assert presets.expand("pypi") == ("two.example",)
    file.write_text("no configuration at all")
    assert presets.lookup("pypi").hosts == ()
    assert "cannot be read" in str(presets.lookup("pypi").note)


def test_without_pip_the_preset_is_empty_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pip._internal.configuration", None)
    assert presets.expand("pypi") == ()
    assert "pip is not installed" in caplog.text


def test_an_environment_without_pip_reads_its_configuration_with_the_one_that_comes_with_python(tmp_path: Path) -> None:
    """As the Jupyter server of an environment that uv made."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    packages = f"{Path(presets.__file__).parents[2]}:{Path(msgspec.__file__).parents[1]}"
    code = (
        f"import sys; sys.path += {packages.split(':')!r}\n"
        "import jupyter_agentbox.egress.presets as presets\n"
        "sys.path[:] = [entry for entry in sys.path if 'packages' not in entry]\n"  # a pip may be there
        "print(*presets.lookup('pypi').hosts)\n"
        "print('.whl' in sys.modules['pip'].__file__, [entry for entry in sys.path if entry.endswith('.whl')])\n"
    )
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PIP_INDEX_URL": "https://mirror.corp.example:8443/simple"}
    python = tmp_path / "venv" / "bin" / "python"
    done = subprocess.run([python, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines() == ["mirror.corp.example:8443", "True []"], done.stderr


def fake_npm(directory: Path, monkeypatch: pytest.MonkeyPatch, registries: dict[str, str]) -> Path:
    """Put a program in front of PATH that answers like npm and counts its runs."""
    answer = {
        "userconfig": str(directory / ".npmrc"),
        "globalconfig": str(directory / "none"),
        "//x/:_auth": None,
        **registries,
    }
    (directory / "answer").write_text(json.dumps(answer))
    program = directory / "npm"
    program.write_text(
        f"#!/bin/sh\necho run >> {directory}/runs\n"
        f'if [ "$2" = list ]; then cat {directory}/answer; else echo https://default.example/; fi\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    return directory / "runs"


def test_npm_is_asked_once_until_its_files_change(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registries = {
        "registry": f"https://u:{SECRET}@npm.corp.example/r/",
        "@scope:registry": "http://scope.example:4873/",
    }
    runs = fake_npm(home, monkeypatch, registries)
    assert presets.expand("npm") == ("npm.corp.example", "scope.example:4873")
    assert presets.expand("npm") == ("npm.corp.example", "scope.example:4873")
    assert presets.pip_environment()["npm_config_registry"] == "https://npm.corp.example/r/"
    assert len(runs.read_text().splitlines()) == 2
    presets._npm_answers.clear()  # as in another process
    assert presets.expand("npm") == ("npm.corp.example", "scope.example:4873")
    assert len(runs.read_text().splitlines()) == 2
    kept = home / ".cache/agentbox/npm.json"
    assert SECRET not in kept.read_text()
    assert kept.stat().st_mode & 0o777 == 0o600
    (home / "answer").write_text((home / "answer").read_text().replace("npm.corp", "new.corp"))
    (home / ".npmrc").write_text("registry=...")
    assert presets.expand("npm")[0] == "new.corp.example"


def test_npm_default_registry_needs_no_variable(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_npm(home, monkeypatch, {"registry": "https://default.example/"})
    assert "npm_config_registry" not in presets.pip_environment()


def test_an_npm_that_hangs_or_fails_or_is_missing_is_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = fake_npm(home, monkeypatch, {})
    monkeypatch.setattr(presets, "ASK_TIMEOUT", 0.3)
    for body in ("exec sleep 20", "exit 3", "echo no json"):
        (runs.parent / "npm").write_text(f"#!/bin/sh\n{body}\n")
        preset = presets.lookup("npm")
        assert preset.hosts == ()
        assert "npm" in str(preset.note)
    (runs.parent / "npm").unlink()
    monkeypatch.setenv("PATH", str(home))
    assert "not installed" in str(presets.lookup("npm").note)


def test_apt_sources_of_both_forms(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "apt/sources.list.d").mkdir(parents=True)
    monkeypatch.setattr(presets, "_APT", home / "apt")
    monkeypatch.setattr(presets, "_OS_RELEASE", home / "os-release")
    (home / "os-release").write_text('PRETTY_NAME="x"\nID=ubuntu\nID_LIKE=debian\n')
    (home / "mirrors").write_text("http://m1.example/debian priority:1\nhttps://m2.example:8443/\n")
    (home / "apt/sources.list").write_text(
        f"# deb http://comment.example/ x\ndeb [arch=amd64 signed-by=/k] http://u:{SECRET}@one.example/debian x main\n"
        "deb-src https://two.example/debian x main\ndeb cdrom:[x]/ x\ndeb file:/opt/x y\n"
    )
    (home / "apt/sources.list.d/a.sources").write_text(
        f"# comment\nTypes: deb\nURIs: http://three.example/a\n https://four.example:444/b\nSuites: x\n\n"
        f"Enabled: no\nTypes: deb\nURIs: http://off.example/\n\nTypes: deb\nURIs: mirror+file:{home}/mirrors\n"
    )
    (home / "apt/sources.list.d/b.list.disabled").write_text("deb http://disabled.example/ x y\n")
    expected = ("one.example", "two.example", "three.example", "four.example:444", "m1.example", "m2.example:8443")
    assert presets.expand("debian") == presets.expand("ubuntu") == expected
    (home / "os-release").write_text("ID=fedora\n")
    assert presets.lookup("debian").hosts == ()
    assert "does not run debian" in str(presets.lookup("debian").note)


def test_cargo_mirrors(home: Path) -> None:
    cargo = home / ".cargo"
    cargo.mkdir()
    default = presets.expand("crates")
    assert default
    (cargo / "config.toml").write_text(
        '[source.crates-io]\nreplace-with = "m"\n[source.m]\nregistry = "sparse+https://crates.corp.example:8443/i/"\n'
        '# index = "https://comment.example/"\n[registries]\nmine = { index = "https://mine.example/git" }\n'
    )
    assert presets.expand("crates") == ("crates.corp.example:8443", "mine.example")


def test_the_repositories_of_r_are_those_of_its_options(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(home))
    assert len(presets.expand("cran")) == 2, "R's own default, also for an image where the machine has no R"
    program = home / "Rscript"
    program.write_text(
        f"#!/bin/sh\necho run >> {home}/runs\necho welcome to https://no.example\n"
        f"printf '\\nrepository %s' https://u:{SECRET}@cran.corp.example:8443/r @CRAN@ http://bioc.example\n"
    )
    program.chmod(0o755)
    assert presets.expand("cran") == ("cran.corp.example:8443", "bioc.example")
    assert presets.expand("cran") == ("cran.corp.example:8443", "bioc.example")
    assert (home / "runs").read_text().count("run") == 1
    (home / ".Rprofile").write_text("options(repos = 'https://other.example')")
    presets.expand("cran")
    assert (home / "runs").read_text().count("run") == 2, "a file has changed"
    program.write_text("#!/bin/sh\nexit 1\n")
    assert "R cannot be read" in str(presets.lookup("cran").note)


def test_the_channels_of_conda_are_those_of_its_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(presets.expand("conda")) == 2, "conda's own defaults"
    (home / ".condarc").write_text(
        "proxy_servers:\n  https: http://user:x@proxy.example:3128\n"
        f"channels:\n  - https://u:{SECRET}@one.example/conda  # ours\n  - nodefaults\n"
        "custom_channels:\n  team: http://two.example:8080/c\n"
    )
    assert presets.expand("conda") == ("one.example", "two.example:8080")
    (home / "more").write_text(
        f"channel_alias: https://u:{SECRET}@alias.example/\ndefault_channels: [https://three.example/main]\n"
    )
    monkeypatch.setenv("CONDARC", str(home / "more"))
    assert set(presets.expand("conda")) == {"one.example", "two.example:8080", "alias.example", "three.example"}
    assert presets.pip_environment()["CONDA_CHANNEL_ALIAS"] == "https://alias.example/"
    (home / ".condarc").write_text("channels: [conda-forge, defaults]\n")
    assert set(presets.expand("conda")) == {"alias.example", "three.example"}
    assert SECRET not in repr(presets.pip_environment())


def test_the_registry_of_jsr_is_that_of_deno(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(presets.expand("jsr")) == 2
    assert "JSR_URL" not in presets.pip_environment()
    monkeypatch.setenv("JSR_URL", f"https://u:{SECRET}@jsr.corp.example:8443/")
    assert presets.expand("jsr") == ("jsr.corp.example:8443",)
    assert presets.pip_environment()["JSR_URL"] == "https://jsr.corp.example:8443/"


def test_every_preset_gives_patterns_or_a_reason() -> None:
    for name in presets.PRESETS:
        preset = presets.lookup(name)
        assert bool(preset.hosts) != bool(preset.note)
        for host in preset.hosts:
            rules.parse_pattern(host)
    assert presets.expand_all(["a.example", "github", "a.example"]) == ("a.example", *presets.expand("github"))
    with pytest.raises(InvalidRequest, match="pypi"):
        presets.expand("nonsense")


@pytest.mark.network
def test_pip_installs_through_the_gate_with_the_preset_alone(
    make_box: Callable[..., Box], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    box = make_box(*presets.expand("pypi"), real=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--isolated",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--proxy",
        box.proxy,
    ]
    command = [*pip, "download", "--no-deps", "-d", str(tmp_path / "wheels"), "iniconfig"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    assert list((tmp_path / "wheels").glob("iniconfig*"))
    assert all(row.is_allowed for row in box.rows(kind="egress"))


def test_a_refused_pip_install_ends_soon_and_names_host_and_setting(
    make_box: Callable[..., Box], tmp_path: Path
) -> None:
    box = make_box("a.example")
    environment = {
        **presets.pip_environment(),
        "https_proxy": box.proxy,
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
    }
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "-i",
        "https://denied.example/simple",
    ]
    result = subprocess.run(
        [*command, "-d", str(tmp_path), "iniconfig"], env=environment, capture_output=True, text=True, timeout=200
    )
    assert result.returncode != 0
    assert "Blocked by sandbox: denied.example:443. Ask your administrator" in result.stderr
