"""Run a sandbox with the stand-in guest, and drive it with lines over the link's two FIFOs."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

from jupyter_agentbox.runtimes import Handle, Runtime
from jupyter_agentbox.spec import SandboxSpec

STANDIN = Path(__file__).with_name("standin")


class Box:
    """Running sandbox. Use it as a context manager: it is killed and removed at the end."""

    def __init__(self, runtime: Runtime, state_dir: Path, sandbox_id: str, spec: SandboxSpec) -> None:
        self.runtime, self.spec, self.id = runtime, spec, sandbox_id
        self.directory = state_dir / "sandboxes" / sandbox_id
        link = self.directory / "link"
        link.mkdir(parents=True, mode=0o700)
        for name in ("up", "down"):
            os.mkfifo(link / name, 0o600)
        self._up = os.open(link / "up", os.O_RDONLY | os.O_NONBLOCK)
        self._down = os.open(link / "down", os.O_RDWR | os.O_NONBLOCK)
        try:
            self.handle: Handle = runtime.start(sandbox_id, spec, self.directory)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Box:
        assert self.read() == "ready", self.log
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.runtime.kill(self.handle)
        self.runtime.remove(self.handle, self.directory)

    def close(self) -> None:
        for handle in (self._up, self._down):
            os.close(handle)

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def read(self, timeout: float = 60.0) -> str:
        """Return the next answer."""
        data, deadline = b"", time.monotonic() + timeout
        while not data.endswith(b"\0"):
            if time.monotonic() > deadline or not self.runtime.is_alive(self.handle):
                raise TimeoutError(f"no answer from the guest; so far {data[-500:]!r}; log: {self.log}")
            select.select([self._up], [], [], 0.05)
            try:
                data += os.read(self._up, 65536)
            except BlockingIOError:
                continue
        return data[:-1].decode(errors="replace")

    def send(self, command: str, who: str = "user") -> None:
        """Send a one-line shell command without waiting for its output."""
        assert "\n" not in command
        os.write(self._down, f"{who} {command}\n".encode())

    def run(self, command: str, who: str = "user", timeout: float = 60.0) -> str:
        """Run a one-line shell command, and return its output."""
        self.send(command, who)
        return self.read(timeout)

    def python(self, source: str, who: str = "user", timeout: float = 60.0) -> str:
        """Run Python code inside, and return its output."""
        return self.run(f"/usr/bin/python3 -c 'exec(bytes.fromhex(\"{source.encode().hex()}\"))'", who, timeout)

    def wait_for_end(self, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while self.runtime.is_alive(self.handle):
            assert time.monotonic() < deadline, "the sandbox did not end"
            time.sleep(0.02)
