"""Register gVisor in Docker's engine and keep all its other settings: ``jupyter agentbox setup --docker``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jupyter_agentbox.errors import AgentboxError, InvalidConfig, RuntimeUnavailable

from .engine import REQUIRED_FLAGS, RUNTIME_NAME, Engine

#: The engine's settings file.
DAEMON_FILE = Path("/etc/docker/daemon.json")
#: Seconds that an engine may take to reload its settings.
RELOAD_TIMEOUT = 30.0


def make_runtime(runsc: str) -> dict[str, Any]:
    """Return the setting that registers gVisor, without a network, and with FIFOs but no sockets of the host."""
    flags = [f"--{name}={value}" for name, value in REQUIRED_FLAGS.items()]
    return {"path": runsc, "runtimeArgs": ["--platform=systrap", *flags]}


def add_runtime(text: str, runsc: str) -> str | None:
    """Return the text of ``daemon.json`` with our runtime added, or None if it contains the runtime already.

    Raises
    ------
    InvalidConfig
        The text is not a JSON object.
    """
    try:
        settings = json.loads(text) if text.strip() else {}
        runtimes = settings.setdefault("runtimes", {})
        wanted = make_runtime(runsc)
        if runtimes.get(RUNTIME_NAME) == wanted:
            return None
        runtimes[RUNTIME_NAME] = wanted
    except (ValueError, AttributeError, TypeError) as error:
        raise InvalidConfig(
            f"Cannot add the runtime: Docker's settings are not a JSON object ({error}). Nothing was changed. Correct"
            " that file first"
        ) from error
    return json.dumps(settings, indent=2) + "\n"


def find_engines(path: Path, proc: Path = Path("/proc")) -> dict[int, list[str]]:
    """Return the command lines of the running engines that use these settings, by pid."""
    found = {}
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            line = (entry / "cmdline").read_bytes().rstrip(b"\0")
            if os.path.basename(line.partition(b"\0")[0]) != b"dockerd":
                continue
        except OSError:
            continue
        arguments = [os.fsdecode(word) for word in line.split(b"\0")]
        if os.path.realpath(_read_option(arguments, "--config-file") or DAEMON_FILE) == os.path.realpath(path):
            found[int(entry.name)] = arguments
    return found


def _read_option(arguments: Sequence[str], name: str) -> str:
    for index, word in enumerate(arguments):
        if word == name and index + 1 < len(arguments):
            return arguments[index + 1]
        if word.startswith(f"{name}="):
            return word[len(name) + 1 :]
    return ""


def register(
    runsc: str,
    *,
    say: Callable[[str], None] = print,
    is_dry: bool = False,
    may_reload: bool = False,
    path: Path = DAEMON_FILE,
    host: str = "",
) -> None:
    """Add our runtime to Docker's settings and have a running engine reload them. Announce each step first.

    Parameters
    ----------
    runsc : str
        Path of the program.
    say : callable
        Called with a sentence for each step.
    is_dry : bool
        Only announce the steps.
    may_reload : bool
        Have the engine reload its settings now; otherwise print the command for that.
    path : Path
        The settings file.
    host : str
        Address of the engine; empty selects ``DOCKER_HOST``, or Docker's own default.

    Raises
    ------
    InvalidConfig
        The settings cannot be read, or the engine could not read them. Nothing was changed.
    RuntimeUnavailable
        This user may not write the settings or signal the engine, or the engine has not applied them.
    """
    path = Path(os.path.realpath(path))  # write to the target of a link instead of replacing the link
    text = path.read_text() if path.exists() else ""
    engines = find_engines(path)
    changed = add_runtime(text, os.path.abspath(runsc))
    if changed is None:
        say(f"Docker: the runtime {RUNTIME_NAME} is already in {path}")
    else:
        if any(_read_option(arguments, "--add-runtime") for arguments in engines.values()):
            raise InvalidConfig(
                f"Cannot add the runtime to {path}: Docker's engine was started with --add-runtime, and would forget"
                " those runtimes when it reads the file again. Nothing was changed. Move them from its command line to"
                " that file first"
            )
        say(f"Docker: adding the runtime {RUNTIME_NAME}, {runsc}, to {path}; the rest of that file is kept")
        if not is_dry:
            _write(path, changed)
    command = "kill -HUP " + " ".join(map(str, engines))
    if not engines:
        say("  no engine with these settings is running; the next one that starts loads the runtime")
    elif changed is None and _knows_runtime(host):
        say("  and the engine has loaded it")
    elif not may_reload:
        say(f"  reload the engine with `{command}`, or use --reload; running containers are not affected")
    else:
        say(f"  reloading the engine: {command}; running containers are not affected")
        if not is_dry:
            _reload(engines, host)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found = path.stat() if path.exists() else None
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            try:
                file.write(text)
                os.fchmod(file.fileno(), stat.S_IMODE(found.st_mode) if found else 0o644)
                if found:
                    os.fchown(file.fileno(), found.st_uid, found.st_gid)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise RuntimeUnavailable(f"Cannot write {path}: {error}. Run `sudo jupyter agentbox setup --docker`") from error


def _reload(engines: Iterable[int], host: str) -> None:
    for pid in engines:
        try:
            os.kill(pid, signal.SIGHUP)
        except ProcessLookupError:
            continue
        except PermissionError as error:
            raise RuntimeUnavailable(
                f"Cannot reload Docker's engine: this user may not signal it. Run `sudo kill -HUP {pid}`"
            ) from error
    deadline = time.monotonic() + RELOAD_TIMEOUT
    while not _knows_runtime(host):
        if time.monotonic() > deadline:
            raise RuntimeUnavailable(
                f"Docker's engine at {Engine(host).host} has not registered the runtime {RUNTIME_NAME} within"
                f" {RELOAD_TIMEOUT:g} s. See its log. If sandboxes use another engine, set DockerRuntime.host",
                setting="DockerRuntime.host",
            )
        time.sleep(0.1)


def _knows_runtime(host: str) -> bool:
    with contextlib.suppress(AgentboxError):
        return any(found.name == RUNTIME_NAME and not found.missing for found in Engine(host).runtimes())
    return False
