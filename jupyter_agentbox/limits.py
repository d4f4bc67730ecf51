"""Limits that nothing but the owner holds a sandbox to."""

from __future__ import annotations

from .runtimes import Usage
from .spec import Cause, End, SandboxSpec, format_size


def find_breach(usage: Usage, spec: SandboxSpec, room: int) -> End | None:
    """Judge what no one else holds it to: the disk always, memory where there is no control group.

    Parameters
    ----------
    usage : Usage
    spec : SandboxSpec
    room : int
        Bytes that it may have on the disk now; the limit, or more where it has inherited more.
    """
    limits = spec.limits
    if usage.disk > room:
        return End(
            Cause.DISK_FULL,
            137,
            f"disk full (limit {format_size(limits.disk)}, used {format_size(usage.disk)})",
            "limits.disk of the profile, Policy.max_disk",
        )
    if usage.memory > limits.memory and "memory" in spec.accept_unenforced:
        return End(
            Cause.OUT_OF_MEMORY,
            137,
            f"out of memory (limit {format_size(limits.memory)}, used {format_size(usage.memory)})",
            "limits.memory of the profile, Policy.max_memory",
        )
    return None
