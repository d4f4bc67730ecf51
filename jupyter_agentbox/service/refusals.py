"""Who was refused what, as rows of the audit log.

Anybody can be refused as often as they like, and what is refused belongs to no sandbox, or to one that the caller may
not see. So of each caller there are only so many rows in a minute, and the next tells how many were left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from jupyter_agentbox.storage.audit.log import AuditLog

#: What stands for the sandbox in rows that are about none.
SERVER = "-"
#: Rows of one caller in so many seconds.
MAX_REFUSALS, INTERVAL = 60, 60.0
#: Callers that are remembered at a time.
MAX_KEYS = 1000


class Throttle:
    """Lets through so many of each kind in a while. From any thread of one event loop, or under a lock of the caller's.

    Parameters
    ----------
    most : int
        Of each kind.
    interval : float
        In so many seconds.
    """

    def __init__(self, most: int, interval: float) -> None:
        self._most, self._interval = most, interval
        self._seen: dict[Hashable, tuple[float, int]] = {}

    def admit(self, key: Hashable) -> int | None:
        """Return how many were left out before this one, or None if it is left out as well."""
        now = time.monotonic()
        begun, count = self._seen.get(key, (now, 0))
        left_out = 0
        if now - begun >= self._interval:
            left_out, begun, count = max(0, count - self._most), now, 0
            self._seen.pop(key, None)
        while len(self._seen) >= MAX_KEYS and key not in self._seen:
            del self._seen[next(iter(self._seen))]
        self._seen[key] = begun, count + 1
        return left_out if count < self._most else None


class Refusals:
    """Writes them down. From one event loop.

    Parameters
    ----------
    audit : callable
        Returns the log.
    """

    def __init__(self, audit: Callable[[], AuditLog]) -> None:
        self._audit = audit
        self._throttle = Throttle(MAX_REFUSALS, INTERVAL)

    def note(
        self,
        operation: str,
        who: Mapping[str, Any],
        reason: str,
        *,
        sandbox: str | None = None,
        asked: str | None = None,
        setting: str | None = None,
    ) -> None:
        """Write one down, without waiting for it.

        Parameters
        ----------
        operation : str
            What was to be done.
        who : mapping
            The caller's ``to_detail``.
        reason : str
            A word, never a sentence: that may quote what was sent.
        sandbox : str, optional
            The one that the caller's token is for.
        asked : str, optional
            What the caller called the sandbox, if any.
        setting : str, optional
            That would have changed it.
        """
        left_out = self._throttle.admit((who.get("by"), who.get("token")))
        if left_out is None:
            return
        detail = {"operation": operation, "asked": (asked or "")[:64], "setting": setting, "left_out": left_out, **who}
        detail = {name: value for name, value in detail.items() if value}
        self._audit().note("refusal", sandbox or SERVER, is_allowed=False, reason=reason, detail=detail)
