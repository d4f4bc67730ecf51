"""Operate on files beneath one directory that a hostile sandbox writes to, for REST, MCP, the CLI and the client.

The directory is opened once. Everything else is found beneath it through descriptors, never again by a host path.
:class:`FolderView` lists and reads, and :class:`Folder` also makes changes. The rules:

*Links.* A relative link that stays inside is followed for stat, read, list, grep, download, copy and pack, if the path
that the caller gives goes through it. Operations that change something (write, edit, move, delete, mkdir, unpack) go
through no link at all: move and delete act on the link itself, the others refuse it. A walk through a tree follows no
links. Absolute links are refused, because they refer to something else on the host than inside.

*Kinds.* Only regular files and directories are opened. FIFOs, sockets and devices are shown by stat and list, can be
moved and deleted, and are never opened, so that no operation can block.

*Hard links.* A sandbox can create them only to files that it sees, which are inside anyway. Whole writes and edits
replace the file and leave its other names unchanged; append refuses a file with other names. Files that someone outside
has hard-linked into the directory are shown.

*Hidden names* are treated as nonexistent, wherever a path or a link goes through them, and creating one is refused. A
directory that contains hidden names is copied without them, and neither moved nor deleted. The same holds for changes
to *read-only names*, which can be read and listed.

*Atomic writes.* New content is in an unnamed file until it is complete and verified, and then gets its name in one
step. Permission bits are kept; set-user-id and similar bits are never set.

*Limits.* Each operation has a limit on entries, bytes or time. An operation that only reads reports that it was cut
short. One that would change something is refused, or reports how far it came.

Modules: ``paths`` (paths as callers write them), ``tree`` (safe opening, walks), ``atomic`` (new files), ``view`` and
``folder`` (the operations), ``search`` with ``grep_worker``, ``transfer`` (streams), ``trees`` and ``archives`` (many
files). ``guarded`` is for programs that use absolute paths, and has its own rule for links.
"""

from __future__ import annotations

from jupyter_agentbox.models.file_entries import Content, Copied, Edited, Entry, Kind, Listing, Match, Matches, Used

from .archives import Packed
from .folder import Folder
from .transfer import Download, Upload
from .view import FolderView

__all__ = [
    "Content",
    "Copied",
    "Download",
    "Edited",
    "Entry",
    "Folder",
    "FolderView",
    "Kind",
    "Listing",
    "Match",
    "Matches",
    "Packed",
    "Upload",
    "Used",
]
