"""What the tools take. Descriptions are for models: they are all that a model knows of a field.

Names and bounds are those of the REST API's bodies, which these are turned into.
"""

# ruff: noqa: RUF012 - msgspec makes a new value of an empty default for each struct

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from jupyter_agentbox.models import Body, FileBytes, HostName, Label, Name, Path, Seconds
from jupyter_agentbox.models.snapshots import Note, SnapshotId, Title

#: Characters of text that a tool answers, unless another number is asked for; and the most.
MAX_TEXT = 40_000
MOST_TEXT = 1_000_000
#: Bytes of one part of a file.
MAX_PART = 4 * 1024 * 1024

Package = Annotated[str, Meta(min_length=1, max_length=300)]
MaxText = Annotated[
    int,
    Meta(ge=100, le=MOST_TEXT, description="Characters of output to answer; what is left out in the middle is said."),
]
FilePath = Annotated[Path, Meta(description="Path in the workspace, relative or beginning with `/workspace/`.")]
Directory = Annotated[Path, Meta(description="Directory to look in, recursively; the whole workspace unless given.")]
Limit = Annotated[int, Meta(ge=1, le=10_000, description="How many to answer at most.")]
Timeout = Annotated[float, Meta(gt=0, le=3600, description="Seconds, after which it is ended.")]


class Target(Body, frozen=True, kw_only=True):
    """Which sandbox."""

    sandbox: Annotated[
        Annotated[str, Meta(min_length=1, max_length=64)] | None,
        Meta(
            description="Id of a sandbox, or of a notebook's kernel. May be left out if you have just one sandbox.",
        ),
    ] = None


class CreateSandbox(Body, frozen=True, kw_only=True):
    """A sandbox to make."""

    id: Annotated[
        Name | None, Meta(description="A name of your own; asking again for the same one answers the same sandbox.")
    ] = None
    profile: Annotated[
        Annotated[str, Meta(min_length=1, max_length=100)] | None,
        Meta(description="Named set of limits; the default unless given."),
    ] = None
    image: Annotated[
        Annotated[str, Meta(min_length=1, max_length=128)] | None,
        Meta(description="Name of an image with other languages or packages, such as `r`; the profile's unless given."),
    ] = None
    packages: Annotated[
        list[Package], Meta(max_length=200, description="Python packages to install first, like `pandas==2.2.*`.")
    ] = []
    files: Annotated[
        dict[str, str | FileBytes],
        Meta(description='Files to write first, by path: text, or `{"base64": "..."}` for bytes.'),
    ] = {}
    env: Annotated[dict[str, str], Meta(description="Environment variables of everything inside.")] = {}
    allowed_hosts: Annotated[
        Annotated[list[HostName], Meta(max_length=1000)] | None,
        Meta(description="Hosts it may reach; those of the profile unless given, `[]` for none."),
    ] = None
    tenant: Annotated[Name | None, Meta(description="Keep its workspace under this name for later sandboxes.")] = None
    idle_timeout: Annotated[Seconds | None, Meta(description="Seconds without use after which it ends.")] = None
    labels: Annotated[dict[Name, Label], Meta(max_length=64, description="Notes of your own.")] = {}


class ListSandboxes(Body, frozen=True, kw_only=True):
    """Which sandboxes to list."""

    state: Annotated[
        Literal["starting", "running", "parked", "unknown", "ended", "lost"] | None,
        Meta(description="Only those; unless given, all that live or can be revived. A parked one wakes when used."),
    ] = None


class Snapshot(Target, frozen=True, kw_only=True):
    """What to call a snapshot."""

    name: Annotated[Title, Meta(description="A short name for people.")] = ""
    note: Annotated[Note, Meta(description="What is worth knowing of it.")] = ""


class Restore(Target, frozen=True, kw_only=True):
    """Where to go back to."""

    snapshot: Annotated[SnapshotId, Meta(description="Id that `snapshot` or `list_snapshots` has answered.")]


class Fork(Target, frozen=True, kw_only=True):
    """Another sandbox."""

    id: Annotated[Name | None, Meta(description="A name of your own for the new sandbox.")] = None
    snapshot: Annotated[
        SnapshotId | None, Meta(description="Snapshot that it begins at; the sandbox as it is now unless given.")
    ] = None


class RunCode(Target, frozen=True, kw_only=True):
    """Code for a persistent kernel."""

    code: Annotated[str, Meta(description="The code. The value of its last expression is answered, too.")]
    context: Annotated[
        Name,
        Meta(description="Which kernel, started at first use; each has variables of its own. Of a notebook's sandbox, "
             "`default` is the notebook's kernel."),
    ] = "default"  # fmt: skip
    language: Annotated[
        Annotated[str, Meta(min_length=1, max_length=64)] | None,
        Meta(description="Such as `r` or `bash`, of those that the sandbox has; Python unless given. Each has a "
             "context of its own, so `context` may be left out."),
    ] = None  # fmt: skip
    timeout: Annotated[float, Meta(gt=0, le=86_400, description="Seconds, after which it is interrupted.")] = 120.0
    max_output: MaxText = MAX_TEXT


class Bash(Target, frozen=True, kw_only=True):
    """A command."""

    command: Annotated[str, Meta(min_length=1, max_length=200_000, description="A line for bash.")]
    workdir: Annotated[
        Annotated[str, Meta(min_length=1, max_length=4096)] | None,
        Meta(description="Where it starts; the workspace unless given."),
    ] = None
    timeout: Timeout = 120.0
    background: Annotated[
        bool, Meta(description="Start it and answer at once; `bash_output` reads on. It has no time limit.")
    ] = False
    max_output: MaxText = MAX_TEXT


class Process(Target, frozen=True, kw_only=True):
    """A background command."""

    process: Annotated[str, Meta(min_length=1, max_length=64, description="Id that `bash` has answered.")]


class BashOutput(Process, frozen=True, kw_only=True):
    """A part of what a background command printed."""

    stream: Annotated[Literal["stdout", "stderr"], Meta(description="Which output.")] = "stdout"
    offset: Annotated[int, Meta(ge=0, le=2**62, description="Byte to read on from, as the last answer said.")] = 0
    wait: Annotated[float, Meta(ge=0, le=60, description="Seconds to wait for something new.")] = 0.0
    limit: Annotated[int, Meta(ge=100, le=MOST_TEXT, description="Bytes to answer at most.")] = MAX_TEXT


class Read(Target, frozen=True, kw_only=True):
    """A part of a file."""

    path: FilePath
    offset: Annotated[
        int, Meta(ge=-(2**62), le=2**62, description="Byte to begin at; a negative one counts from the end.")
    ] = 0
    length: Annotated[int, Meta(ge=1, le=MOST_TEXT, description="Bytes to answer at most.")] = MAX_TEXT


class Write(Target, frozen=True, kw_only=True):
    """A text file to write."""

    path: FilePath
    text: Annotated[str, Meta(description="The whole content.")]
    overwrite: Annotated[bool, Meta(description="Replace a file that is there.")] = True


class Edit(Target, frozen=True, kw_only=True):
    """A text to replace in a file."""

    path: FilePath
    old: Annotated[str, Meta(min_length=1, description="The text as it stands there, with enough around it.")]
    new: Annotated[str, Meta(description="What to put in its place.")]
    all: Annotated[bool, Meta(description="Replace it wherever it stands, instead of exactly once.")] = False


class ListFiles(Target, frozen=True, kw_only=True):
    """A directory."""

    path: Annotated[Path, Meta(description="The directory; the workspace unless given.")] = "."
    recursive: Annotated[bool, Meta(description="All beneath it, too.")] = False
    limit: Limit = 500


class Glob(Target, frozen=True, kw_only=True):
    """A pattern of paths."""

    pattern: Annotated[str, Meta(min_length=1, max_length=512, description="Such as `**/*.py`.")]
    path: Directory = "."
    limit: Limit = 500


class Grep(Target, frozen=True, kw_only=True):
    """A pattern of lines."""

    pattern: Annotated[str, Meta(min_length=1, max_length=512, description="Regular expression of Python's.")]
    path: Annotated[Path, Meta(description="File, or directory to look in recursively.")] = "."
    glob: Annotated[
        Annotated[str, Meta(min_length=1, max_length=512)] | None,
        Meta(description="Only files that fit, such as `*.py`."),
    ] = None
    is_literal: Annotated[bool, Meta(description="The pattern is plain text.")] = False
    ignore_case: Annotated[bool, Meta(description="Take capital and small letters as the same.")] = False
    context: Annotated[int, Meta(ge=0, le=50, description="Lines to show before and after each match.")] = 0
    limit: Limit = 200


class Upload(Target, frozen=True, kw_only=True):
    """Bytes to write into a file."""

    path: FilePath
    base64: Annotated[bytes, Meta(max_length=2 * MAX_PART, description="The bytes, in base64; 4 MiB at most.")]
    append: Annotated[bool, Meta(description="Add to the end of the file, for larger ones in parts.")] = False
    overwrite: Annotated[bool, Meta(description="Replace a file that is there.")] = True


class Download(Target, frozen=True, kw_only=True):
    """Bytes to read from a file."""

    path: FilePath
    offset: Annotated[int, Meta(ge=0, le=2**62, description="Byte to begin at.")] = 0
    length: Annotated[int, Meta(ge=1, le=MAX_PART, description="Bytes to answer at most.")] = 1024 * 1024


class Install(Target, frozen=True, kw_only=True):
    """Packages to install."""

    packages: Annotated[
        list[Package], Meta(max_length=200, description="Names with extras and versions, like `pandas[excel]==2.2.*`.")
    ] = []
    requirements: Annotated[Path | None, Meta(description="A requirements file in the workspace.")] = None
    manager: Annotated[Literal["pip", "npm", "R"], Meta(description="Which package manager.")] = "pip"
    upgrade: Annotated[bool, Meta(description="Take newer versions in place of what is there.")] = False
    timeout: Timeout = 600.0


class AskHost(Target, frozen=True, kw_only=True):
    """A host to ask for."""

    host: Annotated[HostName, Meta(description="`name`, `*.name`, or `name:port`.")]
    why: Annotated[str, Meta(max_length=1000, description="What it is needed for; a person reads this.")]


class HttpCall(Target, frozen=True, kw_only=True):
    """An HTTP request."""

    url: Annotated[str, Meta(min_length=8, max_length=8192, description="`http` or `https`.")]
    method: Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"] = "GET"
    headers: Annotated[dict[str, str], Meta(max_length=100)] = {}
    body: Annotated[str, Meta(description="Text to send.")] = ""
    timeout: Annotated[float, Meta(gt=0, le=300, description="Seconds.")] = 30.0
    max_output: MaxText = MAX_TEXT
