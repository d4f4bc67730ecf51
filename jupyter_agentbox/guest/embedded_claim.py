# mypy: allow-untyped-calls
"""What an ipykernel that waited becomes when it is claimed: somebody's, with an environment and secrets of its own.

Done by the thread of the control channel before the first request is read; the main thread sleeps meanwhile. No code of
a user's ran before. Other copies of the same memory may exist, so nothing that must differ may stay.
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
    """Make the kernel that of its claimer.

    Parameters
    ----------
    app : EmbeddedApp
    order : dict
        ``key`` and ``signature_scheme`` of the session; ``env``, the whole environment; ``rlimits`` by name.
    """
    os.environ.clear()
    os.environ.update(order["env"])
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
    # As every kernel says first.
    topic = kernel._topic("status")
    app.session.send(app.iopub_socket, "status", {"execution_state": "starting"}, parent={}, ident=topic)


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


def reseed() -> None:
    """Seed the generators of random numbers anew, those that were loaded."""
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
