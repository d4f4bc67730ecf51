"""Publish sandbox events on Jupyter's event bus, and count them for Prometheus.

Both are derived from the rows of the audit log as they are written, so the three never differ. Counters have no ids as
labels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from tornado.ioloop import IOLoop

from jupyter_agentbox.service.service import SandboxService
from jupyter_agentbox.storage.audit.log import AuditLog

STARTS = Histogram(
    "agentbox_start_seconds",
    "Time from request to start of a sandbox, in seconds",
    ["kind"],
    buckets=(0.1, 0.25, 0.5, 1, 2, 5, 10, 30),
)
HOW = Counter(
    "agentbox_starts",
    "Sandbox starts by kind: cold, template, pool, adopted, restored, forked, revived or woken",
    ["how"],
)
RUNNING = Gauge("agentbox_sandboxes", "Running sandboxes of this server")
CALLS = Histogram(
    "agentbox_call_seconds", "Duration of tool calls, in seconds", ["tool", "outcome"],
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 30, 120, 600),
)  # fmt: skip
EGRESS = Counter("agentbox_egress", "Decisions of the egress gate, allowed or denied", ["decision"])
ENDS = Counter("agentbox_ends", "Sandbox ends by cause", ["cause"])

SCHEMA_DIR = Path(__file__).parent / "event_schemas"
_URL = "https://events.jupyter-agentbox.readthedocs.io/{name}"
LIFECYCLE = _URL.format(name="lifecycle")
EGRESS_EVENT = _URL.format(name="egress")
ACTIVITY = _URL.format(name="activity")


class Observer:
    """Observer of this process's audit log.

    Parameters
    ----------
    service : SandboxService
        The service whose sandboxes are counted.
    event_logger : EventLogger or None
        Jupyter's event logger.
    """

    def __init__(self, service: SandboxService, event_logger: Any = None) -> None:
        self._events = event_logger
        self._loop = IOLoop.current()
        if event_logger is not None:
            for path in sorted(SCHEMA_DIR.glob("*.yaml")):
                event_logger.register_event_schema(path)
        RUNNING.set_function(service.registry.alive)
        AuditLog.observers.append(self._seen)

    def close(self) -> None:
        """Stop observing."""
        with contextlib.suppress(ValueError):
            AuditLog.observers.remove(self._seen)

    def _seen(self, kind: str, sandbox: str, columns: Mapping[str, Any]) -> None:
        """Process a row of the audit log, on the thread that wrote it."""
        detail: Mapping[str, Any] = columns.get("detail") or {}
        if kind == "lifecycle":
            event = str(detail.get("event", ""))
            if event == "started":
                STARTS.labels("notebook" if detail.get("kernel_id") else "session").observe(
                    columns.get("duration") or 0
                )
                HOW.labels(str(detail.get("how", ""))).inc()
            elif event in ("adopted", "forked", "revived", "woken") or (event == "restored" and "how" not in detail):
                HOW.labels(event).inc()
            elif event == "ended":
                ENDS.labels(str(detail.get("cause", ""))).inc()
            fields = {name: str(detail.get(name) or "") for name in ("cause", "kernel_id", "message", "setting")}
            self._emit(LIFECYCLE, {"sandbox": sandbox, "event": event, **fields})
        elif kind == "egress":
            is_allowed = bool(columns.get("is_allowed"))
            EGRESS.labels("allowed" if is_allowed else "denied").inc()
            if not is_allowed:
                self._emit(
                    EGRESS_EVENT,
                    {
                        "sandbox": sandbox,
                        "host": str(columns.get("host") or ""),
                        "port": int(columns.get("port") or 0),
                        "reason": str(columns.get("reason") or ""),
                    },
                )
        elif kind == "call":
            outcome = "denied" if columns.get("is_allowed") is False else "failed" if columns.get("reason") else "ok"
            CALLS.labels(str(detail.get("tool", "")), outcome).observe(columns.get("duration") or 0)
        if kind in ("call", "ask", "grant", "token"):
            # The event has no details: callers with the permission can read them in the audit log.
            self._emit(ACTIVITY, {"sandbox": sandbox, "kind": kind})

    def _emit(self, schema: str, data: dict[str, Any]) -> None:
        if self._events is not None:
            with contextlib.suppress(RuntimeError):  # the server's loop is already closed
                self._loop.add_callback(self._events.emit, schema_id=schema, data=data)
