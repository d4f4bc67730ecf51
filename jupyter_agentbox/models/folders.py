"""Define the request and response bodies for the folders that a person adds to the sandboxes of notebooks."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .base import Answer, Body

FolderScope = Literal["notebook", "always"]
HostPath = Annotated[str, Meta(min_length=1, max_length=4096)]


class FolderRequest(Body, frozen=True):
    """A folder of the host to show in a notebook's sandbox.

    Parameters
    ----------
    source : str
        Absolute path on the server.
    scope : str
        `notebook`, or `always` for all notebooks of the sandbox's profile.
    """

    source: HostPath
    scope: FolderScope = "notebook"


class FolderRemoval(Body, frozen=True):
    """Which added folder to remove.

    Parameters
    ----------
    source : str
        The folder's path on the server.
    scope : str, optional
        `notebook` or `always`. Without it, for both.
    """

    source: HostPath
    scope: FolderScope | None = None


class FolderInfo(Answer, frozen=True):
    """A folder that a person added.

    Parameters
    ----------
    source : str
        Path on the server.
    paths : list of str
        Paths inside, where it is visible.
    scope : str
        `notebook` or `always`.
    target : str
        The notebook's path on the server, or the profile's name.
    by : str
        Who added it.
    added : float
        When, in seconds since the epoch.
    is_shown : bool
        Whether the sandbox shows it. If not, the kernel must be restarted.
    """

    source: str
    paths: list[str]
    scope: FolderScope
    target: str
    by: str
    added: float
    is_shown: bool


class FolderList(Answer, frozen=True):
    """The folders that a person added for a notebook's sandbox, oldest first.

    Parameters
    ----------
    may_add : bool
        Whether the caller may add folders.
    message : str
        Why the caller may not.
    scopes : list of str
        For what the caller may add a folder: `notebook`, `always`.
    """

    folders: list[FolderInfo]
    may_add: bool
    message: str
    scopes: list[FolderScope]
