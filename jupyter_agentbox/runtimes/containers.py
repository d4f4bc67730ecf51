"""Remove the containers of sandboxes that are no more: those of our labels whose directory is gone.

The runtime ``docker`` writes down in ``<state_dir>/engines`` which engines it has asked for containers. ``sweep``
ends sandboxes and removes their directories, and runs this as a program of its own that it can kill, so an engine that
hangs holds nothing up. Standard library only.

Prints the ids of the sandboxes whose containers it has removed. Its exit status is 0 where none is left.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

#: File of a state directory that names engines, an address a line.
ENGINES = "engines"
#: Of every container that is ours.
LABEL = "jupyter-agentbox"
#: Seconds for one answer of an engine: to a question, and to the removal of one that runs, which may take it ten.
ASK_TIMEOUT, REMOVE_TIMEOUT = 5.0, 20.0
MAX_ENGINES, MAX_ANSWER = 16, 8 * 1024 * 1024


def note_engine(state_dir: Path, address: str) -> None:
    """Write down that an engine may have containers of a state directory. Call it before one is made."""
    path = state_dir / ENGINES
    if address not in read_engines(state_dir):
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(f"{address}\n")


def read_engines(state_dir: Path) -> list[str]:
    """Return the addresses that were written down, of many the last ones."""
    try:
        lines = (state_dir / ENGINES).read_text().splitlines()
    except (OSError, ValueError):
        return []
    return [line for line in dict.fromkeys(lines) if line.startswith("unix://")][-MAX_ENGINES:]


def name_state_dir(state_dir: str | Path) -> str:
    """Return what the label of a container says of the state directory: one text, however it is written."""
    return os.path.realpath(state_dir)


def remove_orphans(address: str, state_dir: Path) -> tuple[list[str], bool]:
    """Remove an engine's containers of this state directory that have no sandbox any more.

    A sandbox's directory is made before its container and removed when nobody owns it, so one that is listed and
    has none is nobody's.

    Returns
    -------
    list of str
        Ids of their sandboxes.
    bool
        The engine has answered, and none is left.
    """
    wanted = json.dumps({"label": [f"{LABEL}=sandbox", f"{LABEL}.state-dir={name_state_dir(state_dir)}"]})
    removed, is_done = [], True
    try:
        found = json.loads(_ask(address, "GET", f"/containers/json?all=1&filters={quote(wanted)}", ASK_TIMEOUT))
        orphans = [item for item in found if not _has_directory(item, state_dir)]
    except (OSError, ValueError, TypeError, KeyError, http.client.HTTPException):
        return [], False
    for item in orphans:
        try:
            _ask(address, "DELETE", f"/containers/{quote(item['Id'])}?force=1&v=1", REMOVE_TIMEOUT)
            removed.append(item["Labels"][f"{LABEL}.sandbox"])
        except (OSError, http.client.HTTPException):
            is_done = False
    return removed, is_done


def _has_directory(item: dict[str, Any], state_dir: Path) -> bool:
    name = item["Labels"][f"{LABEL}.sandbox"]
    return not name or "/" in name or (state_dir / "sandboxes" / name).is_dir()


def _ask(address: str, method: str, path: str, timeout: float) -> bytes:
    """Make one call of the engine's API. Raises OSError where it does not answer, or refuses."""
    connection = http.client.HTTPConnection("localhost", timeout=timeout)
    try:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(timeout)
        connection.sock.connect(address.removeprefix("unix://"))
        connection.request(method, path, headers={"Connection": "close"})
        with connection.getresponse() as answer:
            body = answer.read(MAX_ANSWER)
        if answer.status >= 400 and answer.status != 404:
            raise OSError(f"the engine refused: {answer.status}")
        return body
    finally:
        connection.close()


def main() -> int:
    """Look once at every engine of the state directory that is named."""
    state_dir, is_done = Path(sys.argv[1]), True
    for address in read_engines(state_dir):
        removed, is_over = remove_orphans(address, state_dir)
        is_done = is_done and is_over
        for name in removed:
            print(name, flush=True)
    return 0 if is_done else 1


if __name__ == "__main__":
    sys.exit(main())
