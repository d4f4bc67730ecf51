"""Measure what parked kernels cost, and how fast a message wakes one: ``python -m benchmarks.parked``.

Many kernels are started on one server, or on several of the same user, and parked. Then some of them, each with a
connected client, are woken by a cell, first one at a time, then twenty concurrently. As usual, each kernel starts from
a template. ``--minutes`` limits the duration, and thereby the number of kernels. An interrupt ends the run and prints
the results so far. The exit status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
import websocket

from jupyter_agentbox.storage.snapshots.owner import disk_usage

from .__main__ import machine

MB = 1_000_000
#: Maximum values.
TARGETS = {
    "wake by a message, p50": 0.3,
    "wake by a message, p95": 0.5,
    "20 concurrent wakes, slowest": 5.0,
    "disk per kernel, MB": 15.0,
    "processes of all parked kernels": 0.0,
}


class Server:
    """Jupyter server in a separate process. Several share one directory, and everything that they store there."""

    def __init__(self, base: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.base, self.token = base, uuid.uuid4().hex
        (base / "config").mkdir(exist_ok=True)
        policy = {"max_snapshot_bytes": "100 GiB", "lease_timeout": 60.0}
        (base / "config" / "jupyter_agentbox_config.json").write_text(json.dumps({"Policy": policy}))
        self.http = requests.Session()
        self.http.headers["Authorization"] = f"token {self.token}"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        places = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "run"}
        variables = {**os.environ, **{name: str(self.base / place) for name, place in places.items()}}
        command = [
            sys.executable, "-m", "jupyter_server", "--no-browser", "--allow-root", f"--ServerApp.port={self.port}",
            f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={self.base}",
            "--ServerApp.jpserver_extensions={'jupyter_agentbox': True}",
        ]  # fmt: skip
        with (self.base / f"log-{self.port}").open("w") as log:
            process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
        try:
            for _ in range(3000):
                with contextlib.suppress(requests.ConnectionError):
                    if self.http.get(self.url("api"), timeout=5).ok:
                        break
                time.sleep(0.1)
            self.pid = process.pid
            yield
        finally:
            process.terminate()
            try:
                process.wait(300)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def url(self, path: str) -> str:
        """Return the URL of a path."""
        return f"http://127.0.0.1:{self.port}/{path}"

    def call(self, verb: str, path: str, body: Any = None) -> Any:
        """Make a call that must succeed, and return the decoded answer."""
        answer = self.http.request(verb, self.url(path), json=body, timeout=300)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def park(self, kernel_id: str) -> None:
        """Park a kernel."""
        self.call("POST", f"api/agentbox/sandboxes/{kernel_id}/park")

    def descriptors(self) -> int:
        """Return the number of open files of the server."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def memory(self) -> float:
        """Return the resident memory of the server, in MB."""
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        return int(fields["VmRSS"].split()[0]) * 1024 / MB

    def processes(self) -> int:
        """Return the number of gVisor processes of this server's directory."""
        return sum(str(self.base).encode() in line and b"runsc" in line for line in _command_lines())


def _command_lines() -> Iterator[bytes]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                yield (entry / "cmdline").read_bytes()


class Client:
    """Connection of a notebook to its kernel."""

    def __init__(self, server: Server, kernel_id: str) -> None:
        self.id = kernel_id
        address = server.url(f"api/kernels/{kernel_id}/channels").replace("http", "ws", 1)
        header = [f"Authorization: token {server.token}"]
        self._socket = websocket.create_connection(address, header=header, timeout=120)

    def execute(self, code: str) -> float:
        """Run a cell, which must succeed. Return the seconds until its reply."""
        header = {"msg_id": uuid.uuid4().hex, "msg_type": "execute_request", "session": "s", "username": "",
                  "version": "5.3", "date": ""}  # fmt: skip
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
        began = time.perf_counter()
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv())
            if answer["msg_type"] == "execute_reply" and answer["parent_header"]["msg_id"] == header["msg_id"]:
                assert answer["content"]["status"] == "ok", answer["content"]
                return time.perf_counter() - began

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def start(server: Server) -> Client:
    """Start a kernel, run a cell in it, and return a connected client."""
    client = Client(server, server.call("POST", "api/kernels", {"name": "agentbox"})["id"])
    client.execute("x = 41")
    return client


def wait_for_template(server: Server) -> None:
    """Wait for a template, from which later kernels start. The first kernel triggers its creation."""
    for _ in range(600):
        if list((server.base / "data" / "agentbox").glob("snapshots/owners/*/snapshots/*/image")):
            return
        time.sleep(0.1)
    raise TimeoutError("no template was created within a minute")


def park_many(servers: list[Server], count: int, deadline: float) -> list[tuple[Server, str]]:
    """Start and park `count` kernels, or as many as the time allows. Return their servers and ids."""
    began = time.perf_counter()
    kernels: list[tuple[Server, str]] = []

    def make(number: int) -> None:
        if time.perf_counter() > deadline:
            return
        server = servers[number % len(servers)]
        client = start(server)
        client.close()
        server.park(client.id)
        kernels.append((server, client.id))
        if len(kernels) % 50 == 0:
            print(f"{len(kernels)} kernels parked after {time.perf_counter() - began:.0f} s", flush=True)

    pool = ThreadPoolExecutor(3)
    try:
        list(pool.map(make, range(count)))
    finally:
        pool.shutdown(cancel_futures=True)
    return kernels


def measure(servers: list[Server], count: int, samples: int, minutes: float, figures: dict[str, float]) -> None:
    """Park `count` kernels, and wake some of them. Each result is stored as soon as it is known."""
    server = servers[0]
    end = time.perf_counter() + minutes * 60 if minutes else float("inf")
    # The later steps take two minutes, and forty seconds.
    ends = [end - min(share * minutes * 60, most) for share, most in ((0.25, 120), (0.1, 40))]
    first = start(server)
    wait_for_template(server)
    server.call("DELETE", f"api/kernels/{first.id}")
    first.close()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        client = start(server)
        times.append(time.perf_counter() - began)
        client.close()
        server.call("DELETE", f"api/kernels/{client.id}")
    figures["baseline: kernel start to first reply"] = sorted(times)[len(times) // 2]
    began, before = time.perf_counter(), sum(each.memory() for each in servers)
    held = sum(each.descriptors() for each in servers)
    kernels = park_many(servers, count, ends[0])
    state = server.base / "data" / "agentbox"
    saved = list(state.glob("snapshots/owners/*/snapshots/*/packed"))  # excludes templates
    assert len(saved) == len(kernels)
    figures["parked"] = len(kernels)
    figures["seconds per kernel to start and park"] = (time.perf_counter() - began) / len(kernels)
    figures["disk per kernel, MB"] = disk_usage(*(path.parent for path in saved), state / "parked") / MB / len(kernels)
    figures["processes of all parked kernels"] = server.processes()
    figures["server memory per kernel, MB"] = (sum(each.memory() for each in servers) - before) / len(kernels)
    figures["server descriptors per kernel"] = (sum(each.descriptors() for each in servers) - held) / len(kernels)
    times = []
    for owner, kernel_id in random.Random(0).sample(kernels, min(len(kernels), samples)):
        if times and time.perf_counter() > ends[1]:
            break
        times.append(wake_one(owner, kernel_id))
        ordered = sorted(times)
        figures["wake by a message, p50"] = ordered[len(times) // 2]
        figures["wake by a message, p95"] = ordered[int(0.95 * len(times))]

    clients = [parked_with_client(owner, kernel_id) for owner, kernel_id in kernels[:20]]
    with ThreadPoolExecutor(len(clients)) as pool:
        times = list(pool.map(lambda client: client.execute("assert x == 41"), clients))
    figures[f"{len(clients)} concurrent wakes, slowest"] = max(times)
    for client in clients:
        client.close()


def parked_with_client(server: Server, kernel_id: str) -> Client:
    """Return a client that stays connected to a parked kernel."""
    client = Client(server, kernel_id)  # connecting wakes it
    client.execute("x")
    server.park(kernel_id)
    return client


def wake_one(server: Server, kernel_id: str) -> float:
    """Return the seconds until the reply to a cell that wakes the kernel."""
    client = parked_with_client(server, kernel_id)
    took = client.execute("assert x == 41")
    client.close()
    server.park(kernel_id)
    return took


def main() -> int:
    """Run the benchmark, and print the results with their targets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", type=int, default=1000, help="number of parked kernels (default: %(default)s)")
    parser.add_argument(
        "--servers", type=int, default=1, help="number of servers of the same user (default: %(default)s)"
    )
    parser.add_argument(
        "--samples", type=int, default=40, help="number of kernels woken one at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="approximate time limit; 0 for none (default: %(default)s)"
    )
    options = parser.parse_args()
    figures: dict[str, float] = {}
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory(prefix="parked") as directory:
        servers = [Server(Path(directory)) for _ in range(options.servers)]
        with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
            for server in servers:
                stack.callback(server.http.close)
                stack.enter_context(server.running())
            measure(servers, options.kernels, options.samples, options.minutes, figures)
    missed = 0
    print(f"\n{machine()}")
    for name, value in figures.items():
        target = TARGETS.get(name)
        is_missed = target is not None and value > target
        missed += is_missed
        verdict = "" if target is None else f"target {target:g}: {'missed' if is_missed else 'met'}"
        print(f"{name:48} {value:8.2f}  {verdict}".rstrip())
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
