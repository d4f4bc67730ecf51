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
            f"Cannot save the sandbox: a program in it still has {found[1][:200]!r} open, which was deleted from the"
            " work folder. Close it, or keep such files in /tmp"
        )
    return RuntimeFailed(str(error).partition(_TRACE)[0])


def explain_restore(error: RuntimeFailed) -> AgentboxError:
    """Return the error to raise after ``runsc restore`` has failed."""
    if _GONE.search(str(error)):
        return Conflict(
            "Cannot restore the snapshot: a file or folder that a program had open was deleted or renamed since then,"
            " and the snapshot does not include its contents. Put it back, or use another snapshot",
            field="snapshot",
        )
    return RuntimeFailed(str(error).partition(_TRACE)[0])
