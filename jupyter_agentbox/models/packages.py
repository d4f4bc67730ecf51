"""Bodies and answers about packages and HTTP requests."""

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
        `pip`; `npm` or `R` where the sandbox has it.
    upgrade : bool
        Newer versions in place of what is there.
    """

    packages: Annotated[list[Annotated[str, Meta(min_length=1, max_length=300)]], Meta(max_length=200)] = []
    requirements: Path | None = None
    manager: Literal["pip", "npm", "R"] = "pip"
    upgrade: bool = False
    timeout: Annotated[float, Meta(gt=0, le=3600)] = 600.0


class Installed(Answer, frozen=True):
    """What came of it.

    Parameters
    ----------
    is_ok : bool
        All of them are there.
    message : str
        What was installed, or what went wrong.
    log : str
        The end of what the package manager printed.
    refused : list of RefusedHost
        What the gate refused meanwhile: most often the reason.
    """

    is_ok: bool
    message: str
    exit_code: int
    duration: float
    log: str
    refused: list[RefusedHost]


class ProgressEvent(Answer, frozen=True):
    """A line of what the package manager prints."""

    text: str


class HttpRequest(Body, frozen=True):
    """A request to be sent through the sandbox's egress gate.

    Parameters
    ----------
    url : str
        `http` or `https`.
    max_bytes : int
        Bytes kept of the answer.
    """

    url: Annotated[str, Meta(min_length=8, max_length=8192)]
    method: Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"] = "GET"
    headers: Annotated[dict[str, str], Meta(max_length=100)] = {}
    body: str = ""
    body_base64: bytes = b""
    timeout: Annotated[float, Meta(gt=0, le=300)] = 30.0
    max_bytes: Annotated[int, Meta(ge=0, le=16 * 1024 * 1024)] = 1024 * 1024


class HttpAnswer(Answer, frozen=True):
    """What the server answered. Redirects are not followed: ask for the next address, if policy allows its host."""

    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: str
    encoding: Encoding
    truncated: bool
    duration: float
