"""Call Docker's engine through its Python client, with a deadline, and raise this package's errors.

Each call has its own client and connection, so threads share nothing, and no socket outlives a call.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NoReturn

from docker import APIClient
from docker.errors import APIError, DockerException
from docker.transport.unixconn import UnixHTTPAdapter, UnixHTTPConnection, UnixHTTPConnectionPool

from jupyter_agentbox.errors import NotFound, RuntimeFailed, RuntimeUnavailable

from .config import LABEL, REPOSITORY

DEFAULT_HOST = "unix:///var/run/docker.sock"
#: Version of the API that this module uses, from Docker 20.10. Engines that have dropped it get their oldest version.
API = "1.41"
#: Maximum bytes of an answer.
MAX_ANSWER = 32 * 1024 * 1024
SETUP_REMEDY = "jupyter agentbox setup --docker --reload"
#: Name of the runtime that setup registers.
RUNTIME_NAME = "agentbox-runsc"
#: Flags that gVisor needs for our sandboxes. With directfs, gVisor uses no gofer process, and O_TRUNC can then empty a
#: file of a read-only mount, because Docker's binds are read-only in gVisor only.
REQUIRED_FLAGS = {
    "network": "none", "host-uds": "none", "host-fifo": "open", "oci-seccomp": "true", "directfs": "false",
}  # fmt: skip


@dataclass(frozen=True)
class EngineRuntime:
    """A runtime that an engine knows: its name there, its program and its flags."""

    name: str
    path: str
    flags: Mapping[str, str]

    @property
    def is_gvisor(self) -> bool:
        """Whether the program is gVisor, judged by its name."""
        return PurePath(self.path).name.startswith("runsc")

    @property
    def missing(self) -> list[str]:
        """The required flags that are missing or have another value."""
        found = [f"--{name}={value}" for name, value in REQUIRED_FLAGS.items() if self.flags.get(name) != value]
        overlay = self.flags.get("overlay2", "")
        if overlay.startswith("all:"):
            found.append(f"no --overlay2={overlay}, which keeps what is written to work folders")
        return found


def read_flags(arguments: list[str]) -> dict[str, str]:
    """Parse flags of the forms ``--name=value`` and ``--name``."""
    found = {}
    for argument in arguments:
        name, has_value, value = argument.lstrip("-").partition("=")
        found[name] = value.lower() if has_value else "true"
    return found


def choose_version(about: Mapping[str, Any]) -> str:
    """Return the API version to use with an engine, given its ``/version`` answer. Raises RuntimeUnavailable."""

    def number(version: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version.split(".") if part.isdigit())

    newest, oldest = str(about.get("ApiVersion", "")), str(about.get("MinAPIVersion") or API)
    if number(newest) < number(API):
        raise RuntimeUnavailable(
            f"Docker's engine is too old: it has version {newest} of the API, and sandboxes need {API}. Install Docker"
            " 20.10 or later"
        )
    return max(API, oldest, key=number)


class Engine:
    """A Docker engine.

    Parameters
    ----------
    host : str
        Address of the engine; empty selects ``DOCKER_HOST``, or Docker's own default. It must be a UNIX socket of this
        machine, because sandboxes share files with this process.
    timeout : float
        Default seconds for a call.
    """

    def __init__(self, host: str = "", timeout: float = 10.0) -> None:
        self.host = host or os.environ.get("DOCKER_HOST") or DEFAULT_HOST
        self.timeout = timeout
        self._version = ""
        self._images: set[str] = set()

    @contextlib.contextmanager
    def connect(self, timeout: float = 0.0) -> Iterator[APIClient]:
        """Yield Docker's client for the calls in the block, then close it.

        Parameters
        ----------
        timeout : float
            Seconds for all calls together; 0 selects the engine's default.

        Raises
        ------
        RuntimeUnavailable
            The engine cannot be reached, or is too old.
        RuntimeFailed
            The engine refused, gave a malformed answer, or timed out.
        NotFound
            The engine has no such object.
        """
        if not self.host.startswith("unix://"):
            raise RuntimeUnavailable(
                f"Cannot use Docker's engine at {self.host}: its address must be a UNIX socket, because containers"
                " share files with this process. Use an engine on this machine, such as unix:///var/run/docker.sock",
                setting="DockerRuntime.host",
            )
        seconds = timeout or self.timeout
        make_socket = functools.partial(_Socket, self.host, seconds, time.monotonic() + seconds)
        if not self._version:
            with self._open(make_socket, API) as client:
                self._version = choose_version(client.version(api_version=False))
        with self._open(make_socket, self._version) as client:
            yield client

    @contextlib.contextmanager
    def _open(self, make_socket: Callable[[], _Socket], version: str) -> Iterator[APIClient]:
        try:
            client = APIClient(base_url=self.host, version=version)
        except Exception as error:  # any error that a malformed file can cause
            raise RuntimeUnavailable(
                f"Cannot create a client for Docker's engine at {self.host}: {type(error).__name__}: {error}. Check the"
                " address, and this user's Docker settings in ~/.docker/config.json",
                setting="DockerRuntime.host",
            ) from error
        try:
            with client:
                client.trust_env = False  # no proxies and no .netrc
                client.max_redirects = 0  # a redirect would use another transport, without our deadline
                client.mount("http+docker://", _Transport(make_socket))
                yield client
        except APIError as error:
            reason = str(error.explanation)[:1000]
            if error.status_code == 404:
                raise NotFound(f"Docker's engine has no such object: {reason}") from None
            raise RuntimeFailed(f"Docker's engine refused: {reason}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RuntimeFailed(
                f"Docker's engine at {self.host} sent an invalid answer: {type(error).__name__}: {error!s:.200}. Check"
                " that Docker listens there"
            ) from error
        except (OSError, DockerException) as error:  # the errors of requests are OSErrors
            raise RuntimeUnavailable(
                f"Cannot reach Docker's engine at {self.host}: {error!s:.500}. Check that Docker runs",
                setting="DockerRuntime.host",
            ) from error

    def version(self) -> dict[str, Any]:
        """Return the engine's version information."""
        with self.connect() as client:
            return dict(client.version())

    def info(self) -> dict[str, Any]:
        """Return the engine's description of itself and its settings."""
        with self.connect() as client:
            return dict(client.info())

    def ping(self, timeout: float = 0.0) -> None:
        """Check that the engine answers within ``timeout`` seconds; see :meth:`connect` for the errors."""
        with self.connect(timeout) as client:
            client.ping()

    def runtimes(self) -> list[EngineRuntime]:
        """Return the runtimes that are registered in the engine."""
        with self.connect() as client:
            return [
                EngineRuntime(
                    name,
                    str(item.get("path") or item.get("runtimeType") or ""),
                    read_flags([str(argument) for argument in item.get("runtimeArgs") or ()]),
                )
                for name, item in sorted((client.info().get("Runtimes") or {}).items())
            ]

    def find_gvisor(self, name: str = "") -> EngineRuntime:
        """Return a gVisor runtime that has all the flags that sandboxes need.

        Parameters
        ----------
        name : str
            The administrator's choice; empty selects our runtime, or else the first that qualifies.

        Raises
        ------
        RuntimeUnavailable
            No runtime qualifies; the message names what each one lacks.
        """
        known = self.runtimes()
        setting = "DockerRuntime.engine_runtime"
        candidates = [item for item in known if item.name == name] if name else known
        if name and not candidates:
            names = ", ".join(item.name for item in known)
            raise RuntimeUnavailable(
                f"Docker's engine has no runtime {name!r}, only {names}. Register gVisor: {SETUP_REMEDY}",
                setting=setting,
            )
        gvisor = [item for item in candidates if item.is_gvisor]
        if not gvisor:
            which = f"the runtime {name!r} of Docker's engine is not" if name else "no runtime of Docker's engine is"
            raise RuntimeUnavailable(
                f"Cannot isolate sandboxes: {which} gVisor's runsc. Register gVisor: {SETUP_REMEDY}", setting=setting
            )
        usable = [item for item in gvisor if not item.missing]
        if not usable:
            lacking = "; ".join(f"{item.name} lacks {', '.join(item.missing)}" for item in gvisor)
            raise RuntimeUnavailable(
                "Cannot isolate sandboxes: no gVisor runtime of Docker's engine has the flags that sandboxes need:"
                f" {lacking}. Register one: {SETUP_REMEDY}",
                setting=setting,
            )
        return next((item for item in usable if item.name == RUNTIME_NAME), usable[0])

    def inspect_image(self, name: str) -> dict[str, Any]:
        """Return the engine's description of an image. Raises NotFound."""
        with self.connect() as client:
            return dict(client.inspect_image(name))

    def ensure_image(self, content: bytes, address: str = "") -> str:
        """Make sure that the engine has an image with this content, and return its name, tagged with the content hash.

        Parameters
        ----------
        content : bytes
            The tar archive.
        address : str
            Address of the :mod:`image <jupyter_agentbox.storage.images>` whose tree is mounted on it, stored as a
            label; empty for none.
        """
        tag = hashlib.sha256(content + address.encode()).hexdigest()[:32]
        name = f"{REPOSITORY}:{tag}"
        if name not in self._images:
            try:
                self.inspect_image(name)
            except NotFound:
                label = f"LABEL {LABEL}=root" + (f" {LABEL}.image={address}" if address else "")
                with self.connect(60.0) as client:
                    answer = client.import_image_from_data(content, REPOSITORY, tag, changes=label)
                if '"error"' in answer:
                    raise RuntimeFailed(f"Docker's engine did not accept the image: {answer[:1000]}") from None
            self._images.add(name)
        return name

    def forget_images(self) -> None:
        """Check at the next start which images the engine has, because someone may have pruned them."""
        self._images.clear()

    def create(self, name: str, body: Mapping[str, Any], timeout: float = 0.0) -> str:
        """Create a container and return its id."""
        with self.connect(timeout) as client:
            return str(client.create_container_from_config(dict(body), name)["Id"])

    def start(self, container: str, timeout: float) -> None:
        """Start a container."""
        with self.connect(timeout) as client:
            client.start(container)

    def inspect(self, container: str) -> dict[str, Any] | None:
        """Return the engine's description of a container, or None if it does not exist."""
        try:
            with self.connect() as client:
                return dict(client.inspect_container(container))
        except NotFound:
            return None

    def list(self, *labels: str) -> list[dict[str, Any]]:
        """Return the containers that have all of these labels, running or not."""
        with self.connect() as client:
            return [dict(item) for item in client.containers(all=True, filters={"label": [*labels]})]

    def kill(self, container: str) -> None:
        """Send SIGKILL to a container's PID 1."""
        with self.connect() as client:
            client.kill(container)

    def remove(self, container: str, *, is_over: bool = False) -> None:
        """End and remove a container with its volumes. Does nothing if it does not exist or is being removed.

        Parameters
        ----------
        is_over : bool
            Whether its process has ended. The engine then gets time to notice the end; otherwise it tries to end the
            process, which takes 10 s.
        """
        with contextlib.suppress(NotFound):
            if is_over:
                with contextlib.suppress(RuntimeFailed), self.connect() as client:
                    client.wait(container)
            try:
                with self.connect(2 * self.timeout) as client:
                    client.remove_container(container, v=True, force=True)
            except RuntimeFailed as error:
                if "is already in progress" not in str(error):
                    raise

    def read_log(self, container: str, lines: int = 200) -> bytes:
        """Return the end of the output of a container's PID 1."""
        with self.connect() as client:
            return bytes(client.logs(container, tail=lines))[-64_000:]


class _Transport(UnixHTTPAdapter):
    """Docker's transport over a single connection whose socket this module creates."""

    def __init__(self, make_socket: Callable[[], _Socket]) -> None:
        super().__init__("")
        self.pools["engine"] = _Pool(make_socket)

    def get_connection(self, url: bytes | str, proxies: object = None) -> UnixHTTPConnectionPool:
        pool: UnixHTTPConnectionPool = self.pools["engine"]
        return pool

    def build_response(self, req: Any, resp: Any) -> Any:
        resp.headers.pop("Content-Encoding", None)  # not decompressed, so that the limit on bytes bounds the answer
        return super().build_response(req, resp)


class _Pool(UnixHTTPConnectionPool):
    def __init__(self, make_socket: Callable[[], _Socket]) -> None:
        super().__init__("", "", maxsize=1)
        self._make_socket = make_socket

    def _new_conn(self) -> UnixHTTPConnection:  # type: ignore[override]  # as docker does
        return _Connection(self._make_socket)


class _Connection(UnixHTTPConnection):
    def __init__(self, make_socket: Callable[[], _Socket]) -> None:
        super().__init__("", "")
        self._make_socket = make_socket

    def connect(self) -> None:
        self.sock = sock = self._make_socket()
        sock.open()


class _Socket(socket.socket):
    """A socket that fails at a deadline, however slowly bytes arrive, and after :data:`MAX_ANSWER` bytes.

    It raises this package's errors, which neither urllib3 nor requests handles.
    """

    def __init__(self, host: str, seconds: float, deadline: float) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._host, self._seconds, self._deadline = host, seconds, deadline
        self._left = MAX_ANSWER

    def open(self) -> None:
        """Connect to the engine."""
        try:
            with self._limit():
                self.connect(self._host.removeprefix("unix://"))
        except PermissionError as error:
            self._refuse("this user cannot access its socket. Add the user to the group docker, which grants root"
                         " rights on this machine", error)  # fmt: skip
        except FileNotFoundError as error:
            self._refuse("the socket does not exist. Is Docker installed and running?", error)
        except ConnectionRefusedError as error:
            self._refuse("nothing listens there. Is Docker running?", error)

    def _refuse(self, reason: str, error: OSError) -> NoReturn:
        raise RuntimeUnavailable(
            f"Cannot reach Docker's engine at {self._host}: {reason}", setting="DockerRuntime.host"
        ) from error

    def sendall(self, data: Any, flags: int = 0) -> None:
        with self._limit():
            super().sendall(data, flags)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        with self._limit():
            count = super().recv_into(buffer, nbytes, flags)
        self._left -= count
        if self._left < 0:
            raise RuntimeFailed(
                f"Docker's engine at {self._host} sent an answer of more than {MAX_ANSWER >> 20} MiB. Check that"
                " Docker listens there"
            )
        return count

    @contextlib.contextmanager
    def _limit(self) -> Iterator[None]:
        """Give one operation the time that is left before the deadline."""
        left = self._deadline - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            self.settimeout(left)
            yield
        except TimeoutError:
            raise RuntimeFailed(
                f"Docker's engine at {self._host} did not answer within {self._seconds:g} s. Check whether it hangs:"
                " docker info"
            ) from None
