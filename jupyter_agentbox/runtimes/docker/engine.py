"""Ask Docker's engine, never longer than a set time, and turn what it answers into our own errors.

A dozen calls over a UNIX socket, by the standard library: each has a connection of its own, so that nothing is shared
between threads, and nothing is left open by a call that fails.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any
from urllib.parse import quote, urlencode

from jupyter_agentbox.errors import NotFound, RuntimeFailed, RuntimeUnavailable

from .config import LABEL, REPOSITORY

DEFAULT_HOST = "unix:///var/run/docker.sock"
#: The version of the API that this speaks, that of Docker 20.10; a later one where the engine knows that no more.
API = "1.41"
#: Bytes of the longest answer that is read.
MAX_ANSWER = 32 * 1024 * 1024
SETUP_REMEDY = "jupyter agentbox setup --docker --reload"
#: Name of the runtime that setup registers.
RUNTIME_NAME = "agentbox-runsc"
#: Flags that gVisor needs for our sandboxes. Without the gofer between, it lets a file of a read-only mount be emptied
#: by O_TRUNC, for Docker's binds are read-only in gVisor alone.
REQUIRED_FLAGS = {
    "network": "none", "host-uds": "none", "host-fifo": "open", "oci-seccomp": "true", "directfs": "false",
}  # fmt: skip


@dataclass(frozen=True)
class EngineRuntime:
    """A runtime that an engine knows: its name there, the program and its flags."""

    name: str
    path: str
    flags: Mapping[str, str]

    @property
    def is_gvisor(self) -> bool:
        """Whether the program is gVisor's, by its name."""
        return PurePath(self.path).name.startswith("runsc")

    @property
    def missing(self) -> list[str]:
        """The flags that it lacks or has with another value."""
        found = [f"--{name}={value}" for name, value in REQUIRED_FLAGS.items() if self.flags.get(name) != value]
        overlay = self.flags.get("overlay2", "")
        if overlay.startswith("all:"):
            found.append(f"no --overlay2={overlay}, which keeps what is written to work folders")
        return found


def read_flags(arguments: list[str]) -> dict[str, str]:
    """Read ``--name=value`` and ``--name``."""
    found = {}
    for argument in arguments:
        name, has_value, value = argument.lstrip("-").partition("=")
        found[name] = value.lower() if has_value else "true"
    return found


def choose_version(about: Mapping[str, Any]) -> str:
    """Return the version to speak with an engine that says so of itself. Raises RuntimeUnavailable."""

    def number(version: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version.split(".") if part.isdigit())

    newest, oldest = str(about.get("ApiVersion", "")), str(about.get("MinAPIVersion") or API)
    if number(newest) < number(API):
        raise RuntimeUnavailable(f"Docker's engine speaks version {newest} of its API, and Docker 20.10 is needed")
    return max(API, oldest, key=number)


class Engine:
    """One engine.

    Parameters
    ----------
    host : str
        Its address; empty takes ``DOCKER_HOST``, or Docker's own default. Only a UNIX socket of this machine will do:
        sandboxes share files with this process.
    timeout : float
        Seconds that it may take to answer, unless a call is given another time.
    """

    def __init__(self, host: str = "", timeout: float = 10.0) -> None:
        self.host = host or os.environ.get("DOCKER_HOST") or DEFAULT_HOST
        self.timeout = timeout
        self._version = ""
        self._images: set[str] = set()

    def call(
        self, method: str, path: str, body: Any = None, *, timeout: float = 0.0, **query: str | list[str]
    ) -> bytes:
        """Make one call of the API, and return its answer's body.

        Parameters
        ----------
        method, path : str
            As in Docker's reference, without the version.
        body : bytes or what JSON can hold, optional
        timeout : float
            Seconds for all of it; the engine's own unless given.

        Raises
        ------
        RuntimeUnavailable
            The engine is not there, or too old.
        RuntimeFailed
            It refused, or did not answer in time.
        NotFound
            It knows no such thing.
        """
        deadline = time.monotonic() + (timeout or self.timeout)
        if not self._version:
            about = json.loads(self._exchange("GET", "/version", None, deadline))
            self._version = choose_version(about)
        asked = f"/v{self._version}{path}" + ("?" + urlencode(query, doseq=True) if query else "")
        return self._exchange(method, asked, body, deadline)

    def get(self, path: str, *, timeout: float = 0.0, **query: str) -> Any:
        """Make a call whose answer is JSON; see :meth:`call`."""
        return json.loads(self.call("GET", path, timeout=timeout, **query))

    def _exchange(self, method: str, path: str, body: Any, deadline: float) -> bytes:
        if not self.host.startswith("unix://"):
            raise RuntimeUnavailable(
                f"the engine {self.host} is not reached by a UNIX socket; it must be one on this machine, since its"
                " containers share files with this process",
                setting="DockerRuntime.host",
            )
        connection = _Connection(self.host.removeprefix("unix://"), deadline)
        kind = "application/x-tar" if isinstance(body, bytes) else "application/json"
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, data, {"Content-Type": kind, "Connection": "close"})
            with connection.getresponse() as answer:
                parts = []
                while part := answer.read1(1 << 16):
                    parts.append(part)
                    connection.limit()
                    if len(parts) * (1 << 16) > MAX_ANSWER:
                        raise RuntimeFailed("Docker's engine answered with more than is read")
        except TimeoutError:
            raise RuntimeFailed(f"Docker's engine at {self.host} did not answer in time") from None
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()
        said = b"".join(parts)
        if answer.status >= 400:
            words = _read_message(said)
            if answer.status == 404:
                raise NotFound(f"Docker's engine knows no such thing: {words}")
            raise RuntimeFailed(f"Docker's engine refused: {words}")
        return said

    def _unreachable(self, error: Exception) -> RuntimeUnavailable:
        if isinstance(error, PermissionError):
            reason = "this user may not use its socket; being in the group docker is being root of this machine"
        elif isinstance(error, FileNotFoundError):
            reason = "there is no such socket; is Docker installed and running?"
        elif isinstance(error, ConnectionRefusedError):
            reason = "nobody listens there; is Docker running?"
        else:
            reason = f"{type(error).__name__}: {error}"
        return RuntimeUnavailable(
            f"Docker's engine at {self.host} can't be reached: {reason}", setting="DockerRuntime.host"
        )

    def ping(self, timeout: float) -> bool:
        """Tell whether it answers within ``timeout`` seconds."""
        try:
            self.call("GET", "/_ping", timeout=timeout)
        except (RuntimeUnavailable, RuntimeFailed, NotFound):
            return False
        return True

    def runtimes(self) -> list[EngineRuntime]:
        """Return the runtimes that it knows."""
        found = self.get("/info").get("Runtimes") or {}
        return [
            EngineRuntime(
                name,
                str(item.get("path") or item.get("runtimeType") or ""),
                read_flags([str(argument) for argument in item.get("runtimeArgs") or ()]),
            )
            for name, item in sorted(found.items())
        ]

    def find_gvisor(self, name: str = "") -> EngineRuntime:
        """Return the runtime that is gVisor with all that it needs.

        Parameters
        ----------
        name : str
            The administrator's choice; empty takes ours, or else the first that will do.

        Raises
        ------
        RuntimeUnavailable
            There is none; says what each lacks.
        """
        known = self.runtimes()
        setting = "DockerRuntime.engine_runtime"
        chosen = [item for item in known if item.name == name] if name else known
        if name and not chosen:
            names = ", ".join(item.name for item in known)
            raise RuntimeUnavailable(
                f"Docker's engine knows no runtime {name!r}, only {names}; {SETUP_REMEDY}", setting=setting
            )
        gvisor = [item for item in chosen if item.is_gvisor]
        if not gvisor:
            said = f"the runtime {name!r} of Docker's engine is" if name else "none of Docker's engine's runtimes is"
            raise RuntimeUnavailable(f"{said} gVisor's runsc; register it by: {SETUP_REMEDY}", setting=setting)
        good = [item for item in gvisor if not item.missing]
        if not good:
            said = "; ".join(f"{item.name} lacks {', '.join(item.missing)}" for item in gvisor)
            raise RuntimeUnavailable(
                f"no gVisor runtime of Docker's engine has the flags that sandboxes need: {said}. Register one by:"
                f" {SETUP_REMEDY}",
                setting=setting,
            )
        return next((item for item in good if item.name == RUNTIME_NAME), good[0])

    def ensure_image(self, content: bytes, address: str = "") -> str:
        """Have the engine hold an image of that content, and return its name: its content's hash is its tag.

        Parameters
        ----------
        content : bytes
            The tar archive.
        address : str
            Of the image of ours whose tree is mounted on it, for its label; empty for none.
        """
        tag = hashlib.sha256(content + address.encode()).hexdigest()[:32]
        name = f"{REPOSITORY}:{tag}"
        if name not in self._images:
            try:
                self.get(f"/images/{name}/json")
            except NotFound:
                label = f"LABEL {LABEL}=root" + (f" {LABEL}.image={address}" if address else "")
                query = {"fromSrc": "-", "repo": REPOSITORY, "tag": tag, "changes": label}
                said = self.call("POST", "/images/create", content, timeout=60.0, **query)
                if b'"error"' in said:
                    raise RuntimeFailed(f"Docker's engine did not take the image: {_read_message(said)}") from None
            self._images.add(name)
        return name

    def forget_images(self) -> None:
        """Look again at the next start whether images are there: somebody may have pruned them."""
        self._images.clear()

    def create(self, name: str, body: Mapping[str, Any], timeout: float = 0.0) -> str:
        """Make a container, and return its id."""
        said = self.call("POST", "/containers/create", dict(body), timeout=timeout, name=name)
        return str(json.loads(said)["Id"])

    def start(self, container: str, timeout: float) -> None:
        """Start a container."""
        self.call("POST", f"/containers/{quote(container)}/start", timeout=timeout)

    def inspect(self, container: str) -> dict[str, Any] | None:
        """Return what it tells of a container; None where there is none."""
        try:
            found: dict[str, Any] = self.get(f"/containers/{quote(container)}/json")
            return found
        except NotFound:
            return None

    def list(self, *labels: str) -> list[dict[str, Any]]:
        """Return the containers that have all of these labels, whether they run or not."""
        found: list[dict[str, Any]] = self.get("/containers/json", all="1", filters=json.dumps({"label": labels}))
        return found

    def kill(self, container: str) -> None:
        """Send SIGKILL to a container's PID 1."""
        self.call("POST", f"/containers/{quote(container)}/kill")

    def remove(self, container: str, *, is_over: bool = False) -> None:
        """Remove a container with all that is its own, ending it first. Does nothing to one that is gone, or going.

        Of one that is over the engine is left time to notice: else it would try to end it, and take ten seconds.
        """
        path = f"/containers/{quote(container)}"
        with contextlib.suppress(NotFound):
            if is_over:
                with contextlib.suppress(RuntimeFailed):
                    self.call("POST", path + "/wait")
            try:
                self.call("DELETE", path, timeout=2 * self.timeout, force="1", v="1")
            except RuntimeFailed as error:
                if "is already in progress" not in str(error):
                    raise

    def read_log(self, container: str, lines: int = 200) -> bytes:
        """Return the end of what its PID 1 has printed."""
        path = f"/containers/{quote(container)}/logs"
        data = self.call("GET", path, stdout="1", stderr="1", tail=str(lines))
        parts, place = [], 0
        while place + 8 <= len(data):  # each part behind eight bytes, of which the last four are its length
            (size,) = struct.unpack(">I", data[place + 4 : place + 8])
            parts.append(data[place + 8 : place + 8 + size])
            place += 8 + size
        return b"".join(parts)[-64_000:]


class _Connection(http.client.HTTPConnection):
    """A connection to a UNIX socket that is over at a deadline."""

    def __init__(self, path: str, deadline: float) -> None:
        super().__init__("localhost")
        self._path, self._deadline = path, deadline

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.limit()
        self.sock.connect(self._path)

    def limit(self) -> None:
        """Let the next step take what is left of the time."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if self.sock is not None:
            self.sock.settimeout(left)


def _read_message(said: bytes) -> str:
    try:
        return str(json.loads(said)["message"])[:1000]
    except (ValueError, KeyError, TypeError):
        return said.decode(errors="replace")[:1000]
