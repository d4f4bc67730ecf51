"""Write the lines of configuration that change a limit, for a person to copy."""

from __future__ import annotations

import os

from jupyter_core.paths import jupyter_config_dir

from jupyter_agentbox.spec import Cause, SandboxSpec, format_size

from .configfiles import CONFIG_NAME

#: Limits by the cause of the end of a sandbox that exceeded them.
_LIMITS = {Cause.OUT_OF_MEMORY: "memory", Cause.DISK_FULL: "disk"}


def settings_file() -> str:
    """Return the path of the user's own configuration file."""
    return os.path.join(jupyter_config_dir(), f"{CONFIG_NAME}.py")


def raise_limit(cause: Cause, spec: SandboxSpec) -> str:
    """Return a sentence and the lines that double the limit that a sandbox exceeded; empty for another cause."""
    key = _LIMITS.get(cause)
    if key is None:
        return ""
    limit = getattr(spec.limits, key)
    if spec.warm is not None and limit < (most := getattr(spec.warm.limits, key)):
        return f"The kernelspec requests a {key} limit of {format_size(limit)}; its profile allows {format_size(most)}"
    size = format_size(2 * limit)
    return (
        f"To allow {size}, add these lines to {settings_file()} and restart the kernel:\n"
        f"c.Policy.max_{key} = {size!r}\n"
        f"c.Policy.profiles.update({{{spec.profile!r}: {{{key!r}: {size!r}}}}})"
    )
