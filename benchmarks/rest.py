"""Compare calls over REST with the same work without server and sandbox: ``python -m benchmarks --rest``.

Both are run alternately by the same client process, over one persistent connection. Each row names its baseline. For
files it is ``cp`` within the file system that holds the sandbox's workspace.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import kernels
from .serving import Served, serving

FILE_BYTES = 200_000_000
_BLOCK = 1024 * 1024

#: Baseline of each row, and the maximum ratio if there is a target.
ROWS: dict[str, tuple[str, float | None]] = {
    "exec python3 -c 'print(1+1)'": ("subprocess", 4.0),
    "exec true": ("subprocess", None),
    "run_code 1+1": ("bare ipykernel", None),
    "GET a sandbox": ("subprocess of true", None),
    "upload of 200 MB": ("cp", 4.0),
    "download of 200 MB": ("cp", 4.0),
    "SHA-256 of 200 MB (floor of the two)": ("cp", None),
}
Samples = dict[str, tuple[list[float], list[float]]]


class Api:
    """Calls to one server over one connection."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._http = http.client.HTTPConnection(*served.address, timeout=120, blocksize=_BLOCK)

    def send(self, verb: str, path: str, body: Any, headers: dict[str, str]) -> http.client.HTTPResponse:
        """Make a call, and return its answer unread. Raises RuntimeError unless it succeeds."""
        self._http.request(verb, self._served.root + path, body, {**self._served.headers, **headers})
        answer = self._http.getresponse()
        if not 200 <= answer.status < 300:
            raise RuntimeError(f"{verb} {path}: {answer.status} {answer.read()[:500]!r}")
        return answer

    def call(self, verb: str, path: str, body: Any = None) -> Any:
        """Make a call with JSON, and return the decoded answer."""
        data = self.send(verb, path, None if body is None else json.dumps(body), {}).read()
        return json.loads(data or b"null")

    def upload(self, path: str, source: Path) -> None:
        """Upload a file."""
        with source.open("rb") as file:
            self.send("PUT", path, file, {"Content-Length": str(FILE_BYTES)}).read()

    def download(self, path: str, target: Path) -> None:
        """Download a file."""
        answer, buffer = self.send("GET", path, None, {}), memoryview(bytearray(_BLOCK))
        with target.open("wb", buffering=0) as file:
            while count := answer.readinto(buffer):
                file.write(buffer[:count])

    def close(self) -> None:
        """Close the connection."""
        self._http.close()


def seconds(work: Callable[[], Any]) -> float:
    """Return the seconds that `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(base: Path, rounds: int, executions: int) -> Samples:
    """Return all samples in seconds: for each row those of the baseline and of the call.

    Parameters
    ----------
    base : Path
        Empty directory for all files.
    rounds, executions : int
        Number of samples of each transfer, and of each short call.
    """
    samples: Samples = defaultdict(lambda: ([], []))
    source, copy = base / "source", base / "copy"
    source.write_bytes(os.urandom(FILE_BYTES))
    program = ["-c", "print(1+1)"]
    (base / "served").mkdir()
    with serving(base / "served") as served, kernels.running(kernels.SUBJECTS[0]) as kernel:
        api, box = Api(served), "/sandboxes/bench"
        api.call("POST", "/sandboxes", {"id": "bench"})

        def run(*argv: str) -> None:
            ran = api.call("POST", box + "/exec", {"argv": argv})
            if ran["exit_code"]:
                raise RuntimeError(f"{argv} ended with {ran}")

        def code() -> None:
            result = api.call("POST", box + "/code", {"code": "1+1"})["result"]
            if result["data"]["text/plain"] != "2":
                raise RuntimeError(f"1+1 is {result}")

        def bare(*argv: str) -> None:
            subprocess.run(argv, check=True, capture_output=True, timeout=60)

        short: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
            ("exec python3 -c 'print(1+1)'", lambda: bare(sys.executable, *program), lambda: run("python3", *program)),
            ("exec true", lambda: bare("true"), lambda: run("true")),
            ("run_code 1+1", lambda: kernel.execute("1+1"), code),
            ("GET a sandbox", lambda: bare("true"), lambda: api.call("GET", box)),
        ]
        long: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
            ("upload of 200 MB", lambda: _copy(source, copy), lambda: api.upload(box + "/files/upload?path=f", source)),
            (
                "download of 200 MB",
                lambda: _copy(source, copy),
                lambda: api.download(box + "/files/download?path=f", copy),
            ),
            ("SHA-256 of 200 MB (floor of the two)", lambda: _copy(source, copy), lambda: _hash(source)),
        ]
        for name, theirs, ours in short:
            for _ in range(5):  # not counted
                theirs(), ours()
            for _ in range(executions):
                samples[name][0].append(seconds(theirs))
                samples[name][1].append(seconds(ours))
        for _ in range(rounds + 1):
            for name, theirs, ours in long:
                copy.unlink(missing_ok=True)
                samples[name][0].append(seconds(theirs))
                copy.unlink(missing_ok=True)
                samples[name][1].append(seconds(ours))
                if name.startswith("download") and _hash(copy) != _hash(source):
                    raise RuntimeError("the downloaded bytes differ")
        for name, _, _ in long:  # the first round fills caches and is not counted
            for values in samples[name]:
                values.pop(0)
        api.call("DELETE", box)
        api.close()
    return samples


def table(samples: Samples, median: Callable[[list[float]], float]) -> tuple[str, bool]:
    """Return the Markdown table, and whether all targets are met."""
    lines = ["| over REST, median ms | beside | its median ms | ratio | target | |", "|---|---|---|---|---|---|"]
    are_met = True
    for name, (beside, target) in ROWS.items():
        theirs, ours = map(median, samples[name])
        is_met = target is None or ours / theirs <= target
        are_met &= is_met
        verdict = "" if target is None else "met" if is_met else "MISSED"
        lines.append(
            f"| {name}: {1e3 * ours:.3g} | {beside} | {1e3 * theirs:.3g} | {ours / theirs:.2f}x "
            f"| {f'{target:g}x' if target else ''} | {verdict} |"
        )
    return "\n".join(lines), are_met


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "--reflink=never", source, target], check=True, timeout=120)


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while data := file.read(_BLOCK):
            digest.update(data)
    return digest.hexdigest()
