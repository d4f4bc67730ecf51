"""Keeps tokens out of the server's log, where clients put them into addresses."""

from __future__ import annotations

import logging
import re
from logging import Filter, Logger, LogRecord

from tornado.log import access_log, app_log, gen_log

from jupyter_agentbox.models.redaction import redact

#: A query parameter of an address that holds a token of Jupyter's.
_PARAMETER = re.compile(r"([?&;][^=&;\s]*(?:token|%74oken)[^=&;\s]*=)[^&;\s'\"]+", re.IGNORECASE)


class TokenFilter(Filter):
    """Replaces tokens in what is logged.

    Parameters
    ----------
    has_addresses : bool
        The logger writes addresses of requests as they came, so Jupyter's own tokens are replaced too. Not so in the
        server's own log, which tells its user the address with the token to open.
    """

    def __init__(self, *, has_addresses: bool) -> None:
        super().__init__()
        self._has_addresses = has_addresses

    def filter(self, record: LogRecord) -> bool:
        """Replace the tokens of a record's message; every record passes."""
        try:
            message = record.getMessage()
        except (TypeError, ValueError, KeyError):
            return True  # its arguments do not fit: logging itself says so
        redacted = redact(message)
        if self._has_addresses:
            redacted = _PARAMETER.sub(r"\1[secret]", redacted)
        if redacted != message:
            record.msg, record.args = redacted, None
        return True


_FILTERS = {has_addresses: TokenFilter(has_addresses=has_addresses) for has_addresses in (False, True)}


def redact_logs(server_log: Logger | logging.LoggerAdapter[Logger]) -> None:
    """Keep tokens out of a server's log and of Tornado's. Does nothing the second time.

    Tornado writes the whole address of each request that fails, and Jupyter leaves out only what it finds in the query.
    """
    own = server_log.logger if isinstance(server_log, logging.LoggerAdapter) else server_log
    own.addFilter(_FILTERS[False])
    for logger in (access_log, app_log, gen_log):
        logger.addFilter(_FILTERS[True])
