"""Define the request and response bodies for packages and HTTP requests."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .base import Answer, Body
from .commands import Encoding, RefusedHost
from .files import Path


class InstallRequest(Body, frozen=True):
    """Packages to install.

    Parameters
    ----------
    packages : list of str
        Names with extras and versions, such as `pandas[excel]==2.2.*`.
    requirements : str, optional
        Path of a requirements file in the workspace.
    manager : str
        Package manager: `pip`, or `npm` or `R` if the sandbox has it.
    upgrade : bool
        Upgrade packages that are already installed.
    """

    packages: Annotated[list[Annotated[str, Meta(min_length=1, max_length=300)]], Meta(max_length=200)] = []
    requirements: Path | None = None
    manager: Literal["pip", "npm", "R"] = "pip"
    upgrade: bool = False
    timeout: Annotated[float, Meta(gt=0, le=3600)] = 600.0


class Installed(Answer, frozen=True):
    """The result of an installation.

    Parameters
    ----------
    is_ok : bool
        Whether all packages are installed.
    message : str
        What was installed, or why the installation failed.
    log : str
        End of the package manager's output.
    refused : list of RefusedHost
        Connections that the gate refused during the installation: the most common cause of failure.
    """

    is_ok: bool
    message: str
    exit_code: int
    duration: float
    log: str
    refused: list[RefusedHost]


class ProgressEvent(Answer, frozen=True):
    """A line of the package manager's output."""

    text: str


class HttpRequest(Body, frozen=True):
    """A request to send through the sandbox's egress gate.

    Parameters
    ----------
    url : str
        An `http` or `https` URL.
    max_bytes : int
        Maximum number of bytes kept of the response body.
    """

    url: Annotated[str, Meta(min_length=8, max_length=8192)]
    method: Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"] = "GET"
    headers: Annotated[dict[str, str], Meta(max_length=100)] = {}
    body: str = ""
    body_base64: bytes = b""
    timeout: Annotated[float, Meta(gt=0, le=300)] = 30.0
    max_bytes: Annotated[int, Meta(ge=0, le=16 * 1024 * 1024)] = 1024 * 1024


class HttpAnswer(Answer, frozen=True):
    """The server's response. Redirects are not followed; request the new URL yourself if policy allows its host."""

    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: str
    encoding: Encoding
    truncated: bool
    duration: float
