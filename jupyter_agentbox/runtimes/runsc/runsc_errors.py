"""Translate gVisor's save and restore failures into errors that name what a program inside has open.

The patterns match gVisor's own text, which contains names that code inside has chosen. These names are only quoted,
with a length limit.
"""

from __future__ import annotations

import re

from jupyter_agentbox.errors import AgentboxError, Conflict, RuntimeFailed

_DELETED = re.compile(r'gofer\.dentry\("(.{1,1200}?)"\)\.beforeSave: deleted and invalidated')
_GONE = re.compile(r'restoring container "[^"]*": no such file or directory')
#: Start of gVisor's trace of where in its own code the failure occurred.
_TRACE = "; goroutine "


def explain_save(error: RuntimeFailed) -> AgentboxError:
    """Return the error to raise after ``runsc checkpoint`` has failed."""
    if found := _DELETED.search(str(error)):
        return Conflict(
            f"the sandbox can't be saved while a program in it has {found[1][:200]!r} open, which was deleted from the"
            " work folder: close it, or keep such files in /tmp"
        )
    return RuntimeFailed(str(error).partition(_TRACE)[0])


def explain_restore(error: RuntimeFailed) -> AgentboxError:
    """Return the error to raise after ``runsc restore`` has failed."""
    if _GONE.search(str(error)):
        return Conflict(
            "the snapshot can't be restored: a file or folder that a program had open when it was taken, in a folder"
            " that the sandbox shows but does not keep, was deleted or renamed since. Put it back, or use another"
            " snapshot",
            field="snapshot",
        )
    return RuntimeFailed(str(error).partition(_TRACE)[0])
