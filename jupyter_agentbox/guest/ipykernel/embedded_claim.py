# mypy: allow-untyped-calls
"""Turn a waiting ipykernel into its claimer's kernel, with the claimer's environment and secrets.

The thread of the control channel does this before the first request is read, while the main thread sleeps. No user code
has run yet. Other copies of the same memory may exist, so every value that must be unique is replaced.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
import uuid
from typing import Any

WORKSPACE = "/workspace"


def claim(app: Any, order: dict[str, Any]) -> None:
    """Give the kernel to its claimer.

    Parameters
    ----------
    app : EmbeddedApp
    order : dict
        ``key`` and ``signature_scheme`` of the session; ``env``, the whole environment; ``rlimits`` by name.
    """
    take_environment(order["env"])
    time.tzset()
    for name, value in order["rlimits"].items():
        number = getattr(resource, f"RLIMIT_{name}")
        value = min(value, resource.getrlimit(number)[1])
        resource.setrlimit(number, (value, value))
    os.chdir(WORKSPACE)
    _take_identity(app, order)
    reseed()
    kernel = app.kernel
    if name := order["env"].get("JPY_SESSION_NAME"):
        kernel.shell.user_ns["__session__"] = name
    # The first message of every kernel.
    topic = kernel._topic("status")
    app.session.send(app.iopub_socket, "status", {"execution_state": "starting"}, parent={}, ident=topic)


def take_environment(env: dict[str, str]) -> None:
    """Replace the variables that the process was started with, and keep those that were set since.

    No user code has run yet. What differs from the initial environment was set by Python, ipykernel or a preloaded
    module, and a cold start sets it too, whatever the environment says: MPLBACKEND, without which no figure is shown,
    PAGER, TERM and others. ``os.environ`` writes through to the C library's environment.

    Parameters
    ----------
    env : dict of str to str
        The complete environment that a cold start would pass to the kernel.
    """
    started = _read_initial_environment()
    names = {*started, *os.environ}
    changed = {name: os.environ.get(name) for name in names if os.environ.get(name) != started.get(name)}
    wanted: dict[str, str | None] = {**env, **changed}
    for name in {*names, *wanted}:
        value = wanted.get(name)
        if value is None:
            os.environ.pop(name, None)
        elif os.environ.get(name) != value:
            os.environ[name] = value


def _read_initial_environment() -> dict[str, str]:
    """Return the environment that this process was started with, without later changes."""
    with open("/proc/self/environ", "rb") as file:
        rows = (os.fsdecode(row).partition("=") for row in file.read().split(b"\0") if row)
        return {name: value for name, _, value in rows}


def _take_identity(app: Any, order: dict[str, Any]) -> None:
    session, kernel = app.session, app.kernel
    session.signature_scheme = order["signature_scheme"]
    session.key = order["key"].encode()
    session.session = str(uuid.uuid4())
    kernel.ident = str(uuid.uuid4())
    kernel.shell.displayhook.topic = kernel._topic("execute_result")
    with open(app.abs_connection_file, "r+", encoding="utf-8") as file:
        info = {**json.load(file), "key": order["key"], "signature_scheme": order["signature_scheme"]}
        file.seek(0)
        file.truncate()
        json.dump(info, file)
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


def reseed() -> None:
    """Reseed the random number generators of all loaded modules."""
    random.seed()
    if "tempfile" in sys.modules:
        sys.modules["tempfile"]._name_sequence = None  # type: ignore[attr-defined]
    uuid._node = None  # type: ignore[attr-defined]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "ssl" in sys.modules:
        sys.modules["ssl"].RAND_add(os.urandom(64), 64.0)
    if "torch" in sys.modules:
        sys.modules["torch"].seed()
