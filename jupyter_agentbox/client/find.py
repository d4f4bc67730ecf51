"""Select the server to call: given explicitly, by the environment, or running on this machine for this user.

A token belongs to one address and is never sent to another one.
"""

from __future__ import annotations

import os
import ssl
import stat
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec

from jupyter_agentbox.models import ToolList

from .errors import InvalidRequest, NotFound

ROOT = "api/agentbox"
URL_VARIABLE, TOKEN_VARIABLE = "JUPYTER_AGENTBOX_URL", "JUPYTER_AGENTBOX_TOKEN"
#: Timeout for checking whether a running server serves sandboxes, in seconds.
PROBE_TIMEOUT = 10.0
_MAX_FILE = 64 * 1024
_MAX_FILES = 50


class Server:
    """Address of a server and the token for it, which is never shown.

    Parameters
    ----------
    url : str
        Base URL, such as ``http://localhost:8888/``.
    token : str
        Token; empty for none.
    """

    def __init__(self, url: str, token: str = "") -> None:
        self.url = check_url(url)
        self.token = token.strip()
        if not self.token.isprintable() or not self.token.isascii() or " " in self.token:
            raise InvalidRequest("the token contains invalid characters", field="token")

    @property
    def root(self) -> str:
        """URL of the API."""
        return self.url + ROOT

    def __repr__(self) -> str:
        return f"Server({self.url!r})"

    def headers(self) -> dict[str, str]:
        """Return the headers of every call. They refuse content encodings, so that sizes are those of the data."""
        headers = {"Accept-Encoding": "identity", "User-Agent": "jupyter-agentbox"}
        return {**headers, "Authorization": f"token {self.token}"} if self.token else headers

    def verify(self) -> ssl.SSLContext | bool:
        """Return how to verify certificates: with the system's authorities, or with those of ``SSL_CERT_FILE``."""
        return ssl.create_default_context() if self.url.startswith("https:") else True


def check_url(url: str) -> str:
    """Return a base URL with a trailing slash. Raises InvalidRequest."""
    parts = urlsplit(url.strip())
    try:
        is_sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_sound = False
    if not is_sound:
        raise InvalidRequest("the server's URL must look like http://localhost:8888/", field="url")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise InvalidRequest("the server's URL must not contain a token or password", field="url")
    path = parts.path.rstrip("/").removesuffix(f"/{ROOT}")
    return f"{parts.scheme}://{parts.netloc}{path.rstrip('/')}/"


def named_server(url: str | None, token: str | None) -> Server | None:
    """Return the server that is given here or by the environment, or None.

    The environment's token is for the environment's address. If the environment has no address, it is for the given
    one.
    """
    env_url, env_token = os.environ.get(URL_VARIABLE), os.environ.get(TOKEN_VARIABLE, "")
    if url is None and env_url is None:
        if token is not None:
            raise InvalidRequest("a token was given without a URL; give the server's URL as well", field="url")
        return None
    server = Server(url or env_url or "")
    if token is None and (not env_url or check_url(env_url) == server.url):
        token = env_token
    return Server(server.url, token or "")


def running_servers() -> list[Server]:
    """Return this user's running Jupyter servers on this machine, found by their files, newest first."""
    from jupyter_core.paths import jupyter_runtime_dir

    files = []
    for path in Path(jupyter_runtime_dir()).glob("jpserver-*.json"):
        try:
            files.append((path.stat().st_mtime, path))
        except OSError:
            continue
    found = (_read(path) for _, path in sorted(files, reverse=True)[:_MAX_FILES])
    return [server for server in found if server is not None]


class _File(msgspec.Struct):
    url: str
    pid: int
    token: str = ""


def _read(path: Path) -> Server | None:
    """Read a running server's file. Return None unless it belongs only to this user and its process is running."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
                return None
            info = msgspec.json.decode(file.read(_MAX_FILE), type=_File)
        if info.pid <= 0:
            return None
        os.kill(info.pid, 0)
        return Server(info.url, info.token)
    except (OSError, OverflowError, ValueError, InvalidRequest):
        return None


def find_server(url: str | None = None, token: str | None = None) -> Server:
    """Return the given server, or else the newest running one that serves sandboxes. Blocks.

    Raises
    ------
    NotFound
        No server was given and none was found.
    InvalidRequest
        The address or the token is invalid.
    """
    named = named_server(url, token)
    if named is not None:
        return named
    servers = running_servers()
    for server in servers:
        if _is_serving(server):
            return server
    others = f"; {len(servers)} running Jupyter servers do not serve sandboxes" if servers else ""
    raise NotFound(
        f"no running server with sandboxes was found{others}. Start one with `jupyter agentbox serve`, or set "
        f"{URL_VARIABLE} and {TOKEN_VARIABLE}"
    )


def _is_serving(server: Server) -> bool:
    try:
        with httpx.Client(
            headers=server.headers(), verify=server.verify(), timeout=PROBE_TIMEOUT, trust_env=False
        ) as http:
            # The cheapest call: the health check takes the server longer.
            answer = http.get(server.root + "/tools")
            return answer.status_code == 200 and bool(msgspec.json.decode(answer.content, type=ToolList).tools)
    except (httpx.HTTPError, ValueError, OSError):
        return False


def read_token(path: str) -> str:
    """Read a token from a file, or from standard input for ``-``. Raises InvalidRequest."""
    try:
        if path == "-":
            return sys.stdin.readline(_MAX_FILE).strip()
        with open(path, encoding="ascii") as file:
            return file.readline(_MAX_FILE).strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not valid text"
        raise InvalidRequest(f"cannot read the token file {path}: {reason}", field="token") from None
