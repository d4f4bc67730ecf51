"""Write refused calls to the audit log.

Anyone can cause refusals at any rate, and a refused call concerns no sandbox, or one that the caller may not see. The
number of rows for each caller and minute is therefore limited, and the next row states how many were omitted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from jupyter_agentbox.storage.audit.log import AuditLog

#: Placeholder for the sandbox in rows that concern no sandbox.
SERVER = "-"
#: Maximum number of rows for one caller within an interval, and the interval in seconds.
MAX_REFUSALS, INTERVAL = 60, 60.0
#: Maximum number of callers that are remembered.
MAX_KEYS = 1000


class Throttle:
    """Rate limit for events of each key. Use it from one event loop only, or under a lock of the caller's.

    Parameters
    ----------
    most : int
        Maximum number of events for each key within the interval.
    interval : float
        Interval in seconds.
    """

    def __init__(self, most: int, interval: float) -> None:
        self._most, self._interval = most, interval
        self._seen: dict[Hashable, tuple[float, int]] = {}

    def admit(self, key: Hashable) -> int | None:
        """Return how many events were omitted before this one, or None if this one is to be omitted as well."""
        now = time.monotonic()
        since, count = self._seen.get(key, (now, 0))
        left_out = 0
        if now - since >= self._interval:
            left_out, since, count = max(0, count - self._most), now, 0
            self._seen.pop(key, None)
        while len(self._seen) >= MAX_KEYS and key not in self._seen:
            del self._seen[next(iter(self._seen))]
        self._seen[key] = since, count + 1
        return left_out if count < self._most else None


class Refusals:
    """Writer of refused calls to the audit log. Use it from one event loop only.

    Parameters
    ----------
    audit : callable
        Returns the audit log.
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
        """Record a refusal without waiting for the write.

        Parameters
        ----------
        operation : str
            The refused operation.
        who : mapping
            The caller's ``to_detail``.
        reason : str
            A single word, never a sentence, because a sentence may quote what the caller sent.
        sandbox : str, optional
            The sandbox that the caller's token is for.
        asked : str, optional
            The sandbox id or host that the caller gave, if any.
        setting : str, optional
            The setting that would allow the operation.
        """
        left_out = self._throttle.admit((who.get("by"), who.get("token")))
        if left_out is None:
            return
        detail = {"operation": operation, "asked": (asked or "")[:64], "setting": setting, "left_out": left_out, **who}
        detail = {name: value for name, value in detail.items() if value}
        self._audit().note("refusal", sandbox or SERVER, is_allowed=False, reason=reason, detail=detail)
