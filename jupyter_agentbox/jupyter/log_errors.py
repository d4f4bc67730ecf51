"""Log each error of this package in one line.

Jupyter logs an error of a kernel's start three times, each with its traceback. These errors are sentences for people,
and the traceback shows only code of Jupyter and of this package.
"""

from __future__ import annotations

import logging
import weakref

from jupyter_agentbox.errors import AgentboxError


class OneLineErrors(logging.Filter):
    """Filter that removes the traceback of this package's errors, and drops an error that was just logged.

    If the logger's output is at level DEBUG, nothing is changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: weakref.ref[AgentboxError] | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record, which is changed in place."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, AgentboxError) or _is_debugging(record.name):
            return True
        if self._last is not None and self._last() is error:
            return False
        self._last = weakref.ref(error)
        record.msg, record.args = str(error), ()
        record.exc_info = record.exc_text = None
        return True


def _is_debugging(name: str) -> bool:
    # Jupyter's logger passes everything on; the level that its user sets is its handlers'.
    return any(0 < handler.level <= logging.DEBUG for handler in logging.getLogger(name).handlers)


_FILTER = OneLineErrors()


def shorten(log: logging.Logger | logging.LoggerAdapter[logging.Logger]) -> None:
    """Log errors in one line in this logger and in that of Jupyter's request handlers. Repeated calls do nothing."""
    logger = log.logger if isinstance(log, logging.LoggerAdapter) else log
    for one in (logger, logging.getLogger("tornado.application")):
        one.addFilter(_FILTER)  # does nothing if it is there
