"""Remove orphaned containers: those with our labels whose sandbox directory no longer exists.

The runtime ``docker`` lists in ``<state_dir>/engines`` the engines that it has asked for containers. The sweeper ends
sandboxes and removes their directories. It runs this file as a program, in the server's environment, and kills it
after a timeout, so that an engine that hangs delays nothing else.

The program prints the ids of the sandboxes whose containers it has removed. It exits with 0 if no orphan is left.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from jupyter_agentbox.errors import AgentboxError
from jupyter_agentbox.runtimes.docker.config import LABEL, name_state_dir
from jupyter_agentbox.runtimes.docker.engine import Engine

#: File of a state directory that lists engines, one address per line.
ENGINES = "engines"
#: Seconds for an answer. A removal gets twice as long, because Docker gives a running container ten.
TIMEOUT = 10.0
MAX_ENGINES = 16


def note_engine(state_dir: Path, address: str) -> None:
    """Record that an engine may have containers of a state directory. Call this before creating a container."""
    path = state_dir / ENGINES
    if address not in read_engines(state_dir):
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(f"{address}\n")


def read_engines(state_dir: Path) -> list[str]:
    """Return the recorded addresses, at most the last :data:`MAX_ENGINES`."""
    try:
        lines = (state_dir / ENGINES).read_text().splitlines()
    except (OSError, ValueError):
        return []
    return [line for line in dict.fromkeys(lines) if line.startswith("unix://")][-MAX_ENGINES:]


def remove_orphans(address: str, state_dir: Path) -> tuple[list[str], bool]:
    """Remove an engine's containers of this state directory that have no sandbox.

    A sandbox's directory is created before its container, and removed when it has no owner. So a listed container
    without a directory is an orphan.

    Returns
    -------
    list of str
        Ids of the sandboxes whose containers were removed.
    bool
        Whether the engine answered and no orphan is left.
    """
    engine = Engine(address, TIMEOUT)
    removed, is_done = [], True
    try:
        found = engine.list(f"{LABEL}=sandbox", f"{LABEL}.state-dir={name_state_dir(state_dir)}")
        orphans = [item for item in found if not _has_directory(item, state_dir)]
    except (AgentboxError, KeyError, TypeError):
        return [], False
    for item in orphans:
        try:
            engine.remove(item["Id"])
            removed.append(item["Labels"][f"{LABEL}.sandbox"])
        except (AgentboxError, KeyError):
            is_done = False
    return removed, is_done


def _has_directory(item: dict[str, Any], state_dir: Path) -> bool:
    name = item["Labels"][f"{LABEL}.sandbox"]
    return not name or "/" in name or (state_dir / "sandboxes" / name).is_dir()


def main() -> int:
    """Check every engine that the state directory lists, once."""
    state_dir, is_done = Path(sys.argv[1]), True
    for address in read_engines(state_dir):
        removed, is_over = remove_orphans(address, state_dir)
        is_done = is_done and is_over
        for name in removed:
            print(name, flush=True)
    return 0 if is_done else 1


if __name__ == "__main__":
    sys.exit(main())
