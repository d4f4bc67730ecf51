"""Load one server with many concurrent clients for a minute, and look for leaks: ``python -m benchmarks.load``.

Each client has its own connection. It makes one call after another: it runs commands and writes, reads, uploads,
downloads and deletes files in one of a few sandboxes, and compares every byte. Everything that could leak is counted
before and after. The exit status is 1 if a call failed or something leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .serving import Held, Served, serving

#: Size of an upload in bytes, and timeout of one call in seconds.
UPLOAD_BYTES = 256 * 1024
CALL_TIMEOUT = 90.0
#: Number of clients, and seconds of work, before anything is counted.
WARM_CLIENTS, WARM_SECONDS = 40, 3.0
#: Permitted growth of a server. Its thread pools fill gradually: 24 workers for files, and those of Python's own pool.
#: A leak in one of fifty calls exceeds these limits within a minute.
SLACK_DESCRIPTORS, SLACK_THREADS = 8, 32
#: Seconds within which the resources of a closed connection must be released.
SETTLE_TIMEOUT = 60.0
_INSIDE = "ls /proc | grep -c '^[0-9]'"


@dataclass
class Figures:
    """Results of a run.

    Parameters
    ----------
    clients, sandboxes : int
    seconds : float
        From the first call to the last answer.
    calls : dict of str to list of float
        Seconds of each call, by kind.
    errors : list of str
    leaks : list of str
        Resources of which there are more at the end than at the beginning.
    before, after : Held
    """

    clients: int
    sandboxes: int
    before: Held
    after: Held
    seconds: float = 0.0
    calls: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    errors: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        count = sum(map(len, self.calls.values()))
        lines = [
            f"{self.clients} clients, {self.sandboxes} sandboxes, {self.seconds:.0f} s: {count} calls, "
            f"{count / max(self.seconds, 0.001):.0f} per second, {len(self.errors)} errors",
            "",
            "| call | count | p50 ms | p95 ms | longest ms |",
            "|---|---|---|---|---|",
        ]
        for kind, times in sorted(self.calls.items()):
            cuts = sorted(times)
            p95 = cuts[min(len(cuts) - 1, int(0.95 * len(cuts)))]
            lines.append(
                f"| {kind} | {len(cuts)} | {1e3 * statistics.median(cuts):.0f} | {1e3 * p95:.0f} "
                f"| {1e3 * cuts[-1]:.0f} |"
            )
        lines += ["", "| held by the server | before | after |", "|---|---|---|"]
        for name in ("descriptors", "threads", "processes"):
            lines.append(f"| {name} | {getattr(self.before, name)} | {getattr(self.after, name)} |")
        lines.append(f"| memory, MB | {self.before.memory / 1e6:.0f} | {self.after.memory / 1e6:.0f} |")
        return "\n".join([*lines, *(f"ERROR {text}" for text in self.errors[:10]), *(f"LEAK {x}" for x in self.leaks)])


class Connection:
    """Connection of one client, which makes one call after another."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, verb: str, path: str, body: Any = None) -> bytes:
        """Make a call, and return the body of its answer. Raises RuntimeError unless it succeeds."""
        return await asyncio.wait_for(self._call(verb, path, body), CALL_TIMEOUT)

    async def _call(self, verb: str, path: str, body: Any) -> bytes:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._served.address)
        reader, writer = self._streams
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        head = [f"{verb} {self._served.root}{path} HTTP/1.1", f"Content-Length: {len(data)}"]
        head += [f"{name}: {value}" for name, value in self._served.headers.items()]
        writer.write("\r\n".join([*head, "", ""]).encode() + data)
        await writer.drain()
        answer = (await reader.readuntil(b"\r\n\r\n")).decode()
        status = int(answer.split(" ", 2)[1])
        headers = dict(line.lower().split(": ", 1) for line in answer.split("\r\n")[1:] if line)
        found = await reader.readexactly(int(headers.get("content-length", 0)))
        if not 200 <= status < 300:
            raise RuntimeError(f"{verb} {path}: {status} {found.decode(errors='replace')[:300]}")
        return found

    async def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            await self._streams[1].wait_closed()


async def _rounds(served: Served, figures: Figures, number: int, box: str, deadline: float) -> None:
    """Act as one client until the deadline."""
    connection, rng, path = Connection(served), random.Random(number), f"/sandboxes/{box}"

    async def timed(kind: str, verb: str, place: str, body: Any = None) -> bytes:
        began = time.perf_counter()
        answer = await connection.call(verb, path + place, body)
        figures.calls[kind].append(time.perf_counter() - began)
        return answer

    async def commands(word: str) -> AsyncIterator[None]:
        ran = json.loads(await timed("exec", "POST", "/exec", {"command": f"echo {word}", "timeout": CALL_TIMEOUT}))
        _expect(ran["stdout"] == f"{word}\n" and ran["exit_code"] == 0, f"exec answered {ran}")
        yield

    async def files(word: str) -> AsyncIterator[None]:
        data = rng.randbytes(UPLOAD_BYTES)
        await timed("write", "PUT", "/files/content", {"path": f"{name}/small", "text": word})
        yield
        read = json.loads(await timed("read", "GET", f"/files/content?path={name}/small"))
        _expect(read["data"] == word, f"read answered {read}")
        yield
        await timed("upload", "PUT", f"/files/upload?path={name}/large", data)
        yield
        _expect(await timed("download", "GET", f"/files/download?path={name}/large") == data, "downloaded bytes differ")
        yield
        listed = json.loads(await timed("list", "GET", f"/files?path={name}"))
        _expect(len(listed["entries"]) == 2, f"list answered {listed}")
        yield
        await timed("delete", "POST", "/files/delete", {"path": name, "recursive": True})
        yield

    name, turn = f"client-{number}", 0
    # Half of the clients begin with a command and half with a file, so that both kinds run at every moment.
    halves = (commands, files) if number % 2 else (files, commands)
    try:
        while time.monotonic() < deadline:
            turn += 1
            for half in halves:
                async for _ in half(f"{number}-{turn}"):
                    if time.monotonic() > deadline:
                        return
    except Exception as error:
        figures.errors.append(f"client {number}, round {turn}: {type(error).__name__}: {error!s:.400}")
    finally:
        await connection.close()


def _expect(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise AssertionError(otherwise)


async def _inside(connection: Connection, boxes: list[str]) -> dict[str, int]:
    """Return the number of processes in each sandbox."""
    found = {}
    for box in boxes:
        ran = json.loads(await connection.call("POST", f"/sandboxes/{box}/exec", {"command": _INSIDE}))
        found[box] = int(ran["stdout"])
    return found


async def _listed(connection: Connection) -> list[str]:
    found = json.loads(await connection.call("GET", "/sandboxes?state=running"))["sandboxes"]
    return sorted(item["sandbox_id"] for item in found)


async def run(served: Served, *, clients: int = 200, sandboxes: int = 4, seconds: float = 60.0) -> Figures:
    """Run all clients. Return the results.

    Parameters
    ----------
    served : Served
        The server. It must have room for the sandboxes, which are deleted at the end.
    clients, sandboxes : int
    seconds : float
        Duration of the load. A short warm-up, which is not counted, fills thread pools and caches before.
    """
    control = Connection(served)
    boxes = [f"load-{number}" for number in range(sandboxes)]
    try:
        first = await _listed(control)
        for box in boxes:
            await control.call("POST", "/sandboxes", {"id": box})
        warm = Figures(clients, sandboxes, served.held(), served.held())

        async def work(figures: Figures, count: int, duration: float) -> None:
            began = time.monotonic()
            each = (_rounds(served, figures, n, boxes[n % sandboxes], began + duration) for n in range(count))
            await asyncio.gather(*each)
            figures.seconds = time.monotonic() - began

        await work(warm, min(clients, WARM_CLIENTS), min(WARM_SECONDS, seconds))
        await asyncio.sleep(0.5)
        inside, living, before = await _inside(control, boxes), await _listed(control), served.held()
        figures = Figures(clients, sandboxes, before, before, errors=warm.errors)
        await work(figures, clients, seconds)
        deadline = time.monotonic() + SETTLE_TIMEOUT
        while True:
            figures.after = served.held()
            figures.leaks = find_leaks(before, figures.after)
            if await _listed(control) != living:
                figures.leaks.append("the running sandboxes differ from those before")
            now = await _inside(control, boxes)
            if any(count > inside[box] for box, count in now.items()):
                figures.leaks.append(f"processes in sandboxes: {inside} before, {now} after")
            if not figures.leaks or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.25)
        for box in boxes:
            await control.call("DELETE", f"/sandboxes/{box}")
        if (last := await _listed(control)) != first:
            figures.leaks.append(f"sandboxes were not deleted: {sorted(set(last) - set(first))}")
        return figures
    finally:
        await control.close()


def find_leaks(before: Held, after: Held) -> list[str]:
    """Return the resources of which a server holds more than before."""
    most = {
        "descriptors": before.descriptors + SLACK_DESCRIPTORS,
        "threads": before.threads + SLACK_THREADS,
        "processes": before.processes,
    }
    return [
        f"{name}: {getattr(before, name)} before, {getattr(after, name)} after"
        for name, limit in most.items()
        if getattr(after, name) > limit
    ]


def main() -> int:
    """Run the load on a new server, and print the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--sandboxes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ab") as folder, serving(Path(folder)) as served:
        figures = asyncio.run(
            run(served, clients=options.clients, sandboxes=options.sandboxes, seconds=options.seconds)
        )
    print(figures)
    return 1 if figures.errors or figures.leaks else 0


if __name__ == "__main__":
    raise SystemExit(main())
