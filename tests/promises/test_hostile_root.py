"""Code that is root inside, against a server started the way the documentation says: ``is_root`` allowed by policy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from support.started import Installation, Started

MIB = 1 << 20

#: Puts a link to a host file in place of what has one of some names in the link's directory, as fast as it can.
REPLACE = """
import os, sys, time
os.chdir("/run/agentbox/link")
while True:
    for name in ("new-shell", "new-stdin", "new-control", "up", "fifo.new"):
        try:
            os.symlink(sys.argv[1], "mine")
            os.rename("mine", name)
        except OSError:
            pass
"""

#: Writes frames into the guest's end of the link, as the guest would: its format, and whole frames.
FLOOD = """
import glob, sys
def frame(kind, stream, payload):
    return len(payload).to_bytes(4, "big") + bytes((kind,)) + stream.to_bytes(4, "big") + payload
what, first = sys.argv[1], 1_000_000
fill = b'{"kind":"tcp","x":[' + b"[]," * 86_000 + b"[]]}"
pieces = {
    "headers": lambda: (frame(2, first + 2 * n, fill) for n in range(256)),
    "small frames": lambda: (
        frame(2, first + 2 * n, b'{"kind":"tcp","via":"direct"}') + frame(3, first + 2 * n, b"xy") * 32768
        for n in range(96)
    ),
    "pings": lambda: (frame(7, 0, b"12345678") * 1000 for _ in range(1000)),
    "resets": lambda: (frame(2, first + 2 * n, b'{"kind":"tcp"}') + frame(6, first + 2 * n, b"x" * 1024)
                       for n in range(20_000)),
}[what]
(name,) = glob.glob("/run/agentbox/link/up.*")
with open(name, "wb", buffering=0) as link:
    for piece in pieces():
        while piece:
            piece = piece[link.write(piece):]
"""


@pytest.fixture(scope="module")
def server(make_user: Callable[[], Installation]) -> Iterator[Started]:
    user = make_user()
    user.write_config({"Policy": {"allow_root": True, "profiles": {"admin": {"is_root": True}}}})
    with user.start("server") as started:
        yield started


@pytest.fixture(scope="module")
def other(server: Started) -> Iterator[Box]:
    """A sandbox beside those that attack."""
    box = Box(server)
    yield box
    box.ask("DELETE", "")


class Box:
    """A sandbox in which code is root."""

    def __init__(self, server: Started) -> None:
        self.server = server
        self.path = (
            "api/agentbox/sandboxes/" + server.call("POST", "api/agentbox/sandboxes", {"profile": "admin"})["id"]
        )

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> requests.Response:
        return self.server.request(method, self.path + path, body)

    def ok(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return self.server.call(method, self.path + path, body)

    def start(self, program: str, *arguments: str) -> None:
        self.ok("POST", "/processes", {"argv": ["/usr/bin/python3", "-c", program, *arguments]})


def test_no_file_of_the_user_is_opened_for_code_that_is_root_inside(server: Started) -> None:
    victim = Path(server.env.base) / "home" / "secret.txt"
    before = victim.read_bytes()
    box = Box(server)
    assert box.ok("POST", "/code", {"code": "import os; os.getuid()"})["result"]["data"]["text/plain"] == "0"
    box.start(REPLACE, str(victim))
    tried = saved = 0
    while tried < 4 or (not saved and tried < 20):
        # To save a sandbox closes the files of its link and kernels, and opens them again.
        tried += 1
        saved += box.ask("POST", "/snapshots", {"name": "again"}).ok
        links = [f"/proc/{server.pid}/fd/{name.name}" for name in Path(f"/proc/{server.pid}/fd").iterdir()]
        assert not any(Path(link).resolve() == victim for link in links)
    assert victim.read_bytes() == before
    assert saved
    box.ask("DELETE", "")


@pytest.mark.parametrize("what", ["headers", "small frames", "pings", "resets"])
def test_a_flood_of_frames_ends_its_sandbox_and_does_not_take_the_servers_memory(
    server: Started, other: Box, what: str
) -> None:
    box = Box(server)
    assert other.ok("POST", "/exec", {"argv": ["echo", "here"]})["stdout"] == "here\n"
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")  # the peak is counted from here
    before = read_peak(server)
    box.ask("POST", "/exec", {"argv": ["/usr/bin/python3", "-c", FLOOD, what], "timeout": 60})
    assert read_peak(server) - before < 150 * MIB
    assert other.ok("POST", "/exec", {"argv": ["echo", "here"]})["stdout"] == "here\n"
    box.ask("DELETE", "")


def read_peak(server: Started) -> int:
    (kib,) = re.findall(r"VmHWM:\s*(\d+)", Path(f"/proc/{server.pid}/status").read_text())
    return int(kib) * 1024
