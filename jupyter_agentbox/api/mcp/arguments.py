"""Define the tools' arguments. A field's description is all that a model knows about it.

Names and limits are those of the REST API's bodies, into which the arguments are converted.
"""

# ruff: noqa: RUF012 - msgspec creates a new value of an empty default for each struct

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from jupyter_agentbox.models import Body, FileBytes, HostName, Label, Name, Path, Seconds
from jupyter_agentbox.models.code import ImageBytes, ImagePixels
from jupyter_agentbox.models.snapshots import Note, SnapshotId, Title

#: Bytes of text that a tool returns by default, and at most.
MAX_TEXT = 40_000
MOST_TEXT = 1_000_000
#: Maximum number of bytes of one part of a file.
MAX_PART = 4 * 1024 * 1024

Package = Annotated[str, Meta(min_length=1, max_length=300)]
MaxText = Annotated[
    int,
    Meta(ge=100, le=MOST_TEXT, description="Maximum bytes of output; longer output is shortened in the middle."),
]
Pixels = Annotated[
    ImagePixels, Meta(description="Maximum pixels of an image's side. Larger images are reduced, and saved in full.")
]
ImageSize = Annotated[ImageBytes, Meta(description="Maximum bytes of an image, likewise.")]
FilePath = Annotated[Path, Meta(description="Path in the workspace: relative, or starting with `/workspace/`.")]
Directory = Annotated[Path, Meta(description="Directory to search recursively; default: the whole workspace.")]
Limit = Annotated[int, Meta(ge=1, le=10_000, description="Maximum number of results.")]
Timeout = Annotated[float, Meta(gt=0, le=3600, description="Seconds after which it is killed.")]


class Target(Body, frozen=True, kw_only=True):
    """The sandbox to use."""

    sandbox: Annotated[
        Annotated[str, Meta(min_length=1, max_length=64)] | None,
        Meta(
            description="Id of a sandbox, or of a notebook's kernel. Optional if you have only one sandbox.",
        ),
    ] = None


class CreateSandbox(Body, frozen=True, kw_only=True):
    """A sandbox to create."""

    id: Annotated[
        Name | None, Meta(description="Id of your choice; repeating an identical call returns the same sandbox.")
    ] = None
    profile: Annotated[
        Annotated[str, Meta(min_length=1, max_length=100)] | None,
        Meta(description="Name of a profile with limits and defaults."),
    ] = None
    image: Annotated[
        Annotated[str, Meta(min_length=1, max_length=128)] | None,
        Meta(description="Name of an image with other languages or packages, such as `r`; default: the profile's."),
    ] = None
    packages: Annotated[
        list[Package],
        Meta(
            max_length=200,
            description="Packages to install first: `pandas==2.2.*` (Python), `npm:left-pad`, `R:data.table`.",
        ),
    ] = []
    files: Annotated[
        dict[str, str | FileBytes],
        Meta(description='Files to create, by path: text, or `{"base64": "..."}` for bytes.'),
    ] = {}
    env: Annotated[dict[str, str], Meta(description="Environment variables of all processes inside.")] = {}
    allowed_hosts: Annotated[
        Annotated[list[HostName], Meta(max_length=1000)] | None,
        Meta(description="Hosts that it may reach; default: those of the profile. `[]` for none."),
    ] = None
    tenant: Annotated[Name | None, Meta(description="Name of a workspace that is kept for later sandboxes.")] = None
    idle_timeout: Annotated[Seconds | None, Meta(description="Seconds without use after which it ends.")] = None
    labels: Annotated[dict[Name, Label], Meta(max_length=64, description="Labels of your choice.")] = {}


class ListSandboxes(Body, frozen=True, kw_only=True):
    """Which sandboxes to list."""

    state: Annotated[
        Literal["starting", "running", "parked", "unknown", "ended", "lost"] | None,
        Meta(description="Only this state; default: all that run or can be revived. Using a parked one wakes it."),
    ] = None


class Snapshot(Target, frozen=True, kw_only=True):
    """A snapshot to take."""

    name: Annotated[Title, Meta(description="A short name for people.")] = ""
    note: Annotated[Note, Meta(description="A description for people.")] = ""


class Restore(Target, frozen=True, kw_only=True):
    """A snapshot to restore."""

    snapshot: Annotated[SnapshotId, Meta(description="Id from `snapshot` or `list_snapshots`.")]


class Fork(Target, frozen=True, kw_only=True):
    """A sandbox to fork."""

    id: Annotated[Name | None, Meta(description="Id of your choice for the new sandbox.")] = None
    snapshot: Annotated[
        SnapshotId | None, Meta(description="Snapshot to start from; default: the sandbox's current state.")
    ] = None


class RunCode(Target, frozen=True, kw_only=True):
    """Code to run in a persistent kernel."""

    code: Annotated[str, Meta(description="The code. The value of its last expression is returned as well.")]
    context: Annotated[
        Name,
        Meta(description="Name of a kernel, started at first use; each has its own variables. In a notebook's sandbox, "
             "`default` is the notebook's kernel."),
    ] = "default"  # fmt: skip
    language: Annotated[
        Annotated[str, Meta(min_length=1, max_length=64)] | None,
        Meta(description="One of the sandbox's languages, such as `r` or `bash`; default: Python. Each has its "
             "own context, so you can omit `context`."),
    ] = None  # fmt: skip
    timeout: Annotated[float, Meta(gt=0, le=86_400, description="Seconds after which it is interrupted.")] = 120.0
    max_output: MaxText = MAX_TEXT
    image_pixels: Pixels = 2000
    image_bytes: ImageSize = 1_000_000


class Bash(Target, frozen=True, kw_only=True):
    """A command to run."""

    command: Annotated[str, Meta(min_length=1, max_length=200_000, description="Shell command line for bash.")]
    workdir: Annotated[
        Annotated[str, Meta(min_length=1, max_length=4096)] | None,
        Meta(description="Working directory; default: the workspace."),
    ] = None
    timeout: Timeout = 120.0
    background: Annotated[
        bool, Meta(description="Return immediately, without a timeout. Read the output with `bash_output`.")
    ] = False
    max_output: MaxText = MAX_TEXT


class Process(Target, frozen=True, kw_only=True):
    """A background command."""

    process: Annotated[str, Meta(min_length=1, max_length=64, description="Id from `bash` with `background`.")]


class BashOutput(Process, frozen=True, kw_only=True):
    """Which output of a background command to read."""

    stream: Annotated[Literal["stdout", "stderr"], Meta(description="Output stream.")] = "stdout"
    offset: Annotated[int, Meta(ge=0, le=2**62, description="Byte offset to start at, from the last result.")] = 0
    wait: Annotated[float, Meta(ge=0, le=60, description="Seconds to wait for new output.")] = 0.0
    limit: Annotated[int, Meta(ge=100, le=MOST_TEXT, description="Maximum number of bytes.")] = MAX_TEXT


class Read(Target, frozen=True, kw_only=True):
    """Which part of a file to read."""

    path: FilePath
    offset: Annotated[
        int, Meta(ge=-(2**62), le=2**62, description="Byte offset to start at; a negative one counts from the end.")
    ] = 0
    length: Annotated[int, Meta(ge=1, le=MOST_TEXT, description="Maximum number of bytes.")] = MAX_TEXT


class Write(Target, frozen=True, kw_only=True):
    """A text file to write."""

    path: FilePath
    text: Annotated[str, Meta(description="The whole content.")]
    overwrite: Annotated[bool, Meta(description="Replace an existing file.")] = True


class Edit(Target, frozen=True, kw_only=True):
    """A text to replace in a file."""

    path: FilePath
    old: Annotated[
        str, Meta(min_length=1, description="The exact text, with enough context to be unique. Newlines match CRLF.")
    ]
    new: Annotated[str, Meta(description="The replacement.")]
    all: Annotated[bool, Meta(description="Replace all occurrences instead of exactly one.")] = False


class ListFiles(Target, frozen=True, kw_only=True):
    """A directory."""

    path: Annotated[Path, Meta(description="The directory; default: the workspace.")] = "."
    recursive: Annotated[bool, Meta(description="Include everything beneath it.")] = False
    limit: Limit = 500


class Glob(Target, frozen=True, kw_only=True):
    """A path pattern."""

    pattern: Annotated[str, Meta(min_length=1, max_length=512, description="Path pattern, e.g. `**/*.py`.")]
    path: Directory = "."
    limit: Limit = 500


class Grep(Target, frozen=True, kw_only=True):
    """A search for lines."""

    pattern: Annotated[str, Meta(min_length=1, max_length=512, description="Python regular expression.")]
    path: Annotated[Path, Meta(description="File, or directory to search recursively.")] = "."
    glob: Annotated[
        Annotated[str, Meta(min_length=1, max_length=512)] | None,
        Meta(description="Only files that match, e.g. `*.py`."),
    ] = None
    is_literal: Annotated[bool, Meta(description="Treat the pattern as plain text.")] = False
    ignore_case: Annotated[bool, Meta(description="Ignore the difference between upper and lower case.")] = False
    context: Annotated[int, Meta(ge=0, le=50, description="Lines to show before and after each match.")] = 0
    limit: Limit = 200


class Upload(Target, frozen=True, kw_only=True):
    """Bytes to write to a file."""

    path: FilePath
    base64: Annotated[bytes, Meta(max_length=2 * MAX_PART, description="The bytes in base64, at most 4 MiB.")]
    append: Annotated[bool, Meta(description="Append to the file, to write a larger one in parts.")] = False
    overwrite: Annotated[bool, Meta(description="Replace an existing file.")] = True


class Download(Target, frozen=True, kw_only=True):
    """Which bytes of a file to read."""

    path: FilePath
    offset: Annotated[int, Meta(ge=0, le=2**62, description="Byte offset to start at.")] = 0
    length: Annotated[int, Meta(ge=1, le=MAX_PART, description="Maximum number of bytes.")] = 1024 * 1024


class Install(Target, frozen=True, kw_only=True):
    """Packages to install."""

    packages: Annotated[
        list[Package], Meta(max_length=200, description="Names with extras and versions, e.g. `pandas[excel]==2.2.*`.")
    ] = []
    requirements: Annotated[Path | None, Meta(description="Path of a requirements file in the workspace.")] = None
    manager: Annotated[Literal["pip", "npm", "R"], Meta(description="Package manager.")] = "pip"
    upgrade: Annotated[bool, Meta(description="Upgrade packages that are already installed.")] = False
    timeout: Timeout = 600.0


class AskHost(Target, frozen=True, kw_only=True):
    """A host to request."""

    host: Annotated[HostName, Meta(description="`name`, `*.name`, or `name:port`.")]
    why: Annotated[str, Meta(max_length=1000, description="Why you need it; a person reads this.")]


class HttpCall(Target, frozen=True, kw_only=True):
    """An HTTP request."""

    url: Annotated[str, Meta(min_length=8, max_length=8192, description="An `http` or `https` URL.")]
    method: Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"] = "GET"
    headers: Annotated[dict[str, str], Meta(max_length=100)] = {}
    body: Annotated[str, Meta(description="Request body.")] = ""
    timeout: Annotated[float, Meta(gt=0, le=300, description="Seconds.")] = 30.0
    max_output: MaxText = MAX_TEXT
