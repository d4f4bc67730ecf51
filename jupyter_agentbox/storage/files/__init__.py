"""Files beneath one directory that a hostile sandbox writes, for REST, MCP, the CLI and the client alike.

The directory is opened once; everything else is found beneath it by descriptors, never again by a path of the host.
:class:`FolderView` looks and reads, :class:`Folder` changes, too. The rules:

*Links.* One that is relative and stays inside is followed for stat, read, list, grep, download, copy and pack, where
the path that the caller gives leads through it. What changes something (write, edit, move, delete, mkdir, unpack) goes
through no link at all: move and delete take the link itself, the others refuse it. A walk through a tree follows none.
Absolute links are refused: what they name inside is not what they name here.

*Kinds.* Regular files and directories are all that is opened. FIFOs, sockets and devices are shown by stat and list,
can be moved and deleted, and are never opened, so that nothing can block.

*Hard links.* A sandbox can make them only to what it sees, which is inside anyway. Whole writes and edits replace the
file and leave its other names alone; append refuses a file that has some. What somebody outside linked in is shown.

*Hidden names* do not exist, wherever a path or a link leads through them; making one is refused. A directory that holds
some is moved with them, copied without them and not deleted.

*Whole or not at all.* New content is a nameless file until it is complete and verified, and then takes its name in one
step. Permission bits are kept; set-user-id and the like never come to be.

*Bounds.* Each operation has a limit of entries, bytes or time. What only looks says that it was cut; what would change
something half is refused or says how far it came.

Modules: ``paths`` (what callers write), ``tree`` (safe opening, walks), ``atomic`` (new files), ``view`` and ``folder``
(the operations), ``search`` with ``grep_worker``, ``transfer`` (streams), ``trees`` and ``archives`` (many files).
``guarded`` is for programs that work on absolute paths, and has a rule for links of its own.
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
