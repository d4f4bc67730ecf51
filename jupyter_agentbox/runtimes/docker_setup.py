"""``jupyter agentbox setup --docker``: register gVisor in Docker's engine, keeping all else of its settings."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jupyter_agentbox.errors import InvalidConfig, RuntimeUnavailable

from .docker_engine import REQUIRED_FLAGS, RUNTIME_NAME

#: Docker's settings.
DAEMON_FILE = Path("/etc/docker/daemon.json")
_COMMAND_TIMEOUT = 60.0


def make_runtime(runsc: str) -> dict[str, Any]:
    """Return the engine's setting of a runtime: gVisor without a network, that opens FIFOs and no socket."""
    flags = [f"--{name}={value}" for name, value in REQUIRED_FLAGS.items()]
    return {"path": runsc, "runtimeArgs": ["--platform=systrap", *flags]}


def add_runtime(text: str, runsc: str) -> str | None:
    """Return the text of ``daemon.json`` with our runtime in it; None where it is there already.

    Raises
    ------
    InvalidConfig
        It is no JSON object.
    """
    try:
        settings = json.loads(text) if text.strip() else {}
        runtimes = settings.setdefault("runtimes", {})
        wanted = make_runtime(runsc)
        if runtimes.get(RUNTIME_NAME) == wanted:
            return None
        runtimes[RUNTIME_NAME] = wanted
    except (ValueError, AttributeError, TypeError) as error:
        raise InvalidConfig(f"Docker's settings are no JSON object, and were left as they are: {error}") from error
    return json.dumps(settings, indent=2) + "\n"


def register(
    runsc: str,
    *,
    say: Callable[[str], None] = print,
    is_dry: bool = False,
    path: Path = DAEMON_FILE,
    run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run,
) -> None:
    """Add our runtime to Docker's settings, and have a running engine read them. Says each step before it is done.

    Raises
    ------
    InvalidConfig
        The settings cannot be read; nothing was changed.
    RuntimeUnavailable
        This user may not write them, or the engine does not take them.
    """
    text = path.read_text() if path.exists() else ""
    changed = add_runtime(text, os.path.abspath(runsc))
    if changed is None:
        say(f"Docker: the runtime {RUNTIME_NAME} is in {path} already")
        return
    say(f"Docker: adding the runtime {RUNTIME_NAME}, {runsc}, to {path}; all else in that file stays as it is")
    say("  and having the engine read it by `kill -HUP`; containers that run are not touched")
    if is_dry:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            try:
                file.write(changed)
                os.fchmod(file.fileno(), mode)
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise RuntimeUnavailable(
            f"{path} cannot be written: {error}. Run `sudo jupyter agentbox setup --docker`"
        ) from error
    found = run(["pidof", "dockerd"], capture_output=True, text=True, timeout=_COMMAND_TIMEOUT).stdout.split()
    if not found:
        say("  Docker's engine does not run here now; it finds the runtime when it starts")
    for pid in found:
        run(["kill", "-HUP", pid], check=True, timeout=_COMMAND_TIMEOUT)
