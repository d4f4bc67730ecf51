"""Redact tokens in the server's log, where URLs may contain them."""

from __future__ import annotations

import logging
import re
from logging import Filter, Logger, LogRecord

from tornado.log import access_log, app_log, gen_log

from jupyter_agentbox.models.redaction import redact

#: A query parameter of a URL that contains one of Jupyter's tokens.
_PARAMETER = re.compile(r"([?&;][^=&;\s]*(?:token|%74oken)[^=&;\s]*=)[^&;\s'\"]+", re.IGNORECASE)


class TokenFilter(Filter):
    """Log filter that redacts tokens.

    Parameters
    ----------
    has_addresses : bool
        Whether the logger writes URLs of requests, so that Jupyter's own tokens must be redacted as well. False for the
        server's own log, which shows its user the URL with the token to open.
    """

    def __init__(self, *, has_addresses: bool) -> None:
        super().__init__()
        self._has_addresses = has_addresses

    def filter(self, record: LogRecord) -> bool:
        """Redact the tokens in a record's message. Never drops a record."""
        try:
            message = record.getMessage()
        except (TypeError, ValueError, KeyError):
            return True  # the arguments do not match the format: logging itself reports this
        redacted = redact(message)
        if self._has_addresses:
            redacted = _PARAMETER.sub(r"\1[secret]", redacted)
        if redacted != message:
            record.msg, record.args = redacted, None
        return True


_FILTERS = {has_addresses: TokenFilter(has_addresses=has_addresses) for has_addresses in (False, True)}


def redact_logs(server_log: Logger | logging.LoggerAdapter[Logger]) -> None:
    """Redact tokens in the logs of a server and of Tornado. Idempotent.

    Tornado logs the full URL of each failed request, and Jupyter redacts only parameters of the query.
    """
    own = server_log.logger if isinstance(server_log, logging.LoggerAdapter) else server_log
    own.addFilter(_FILTERS[False])
    for logger in (access_log, app_log, gen_log):
        logger.addFilter(_FILTERS[True])
