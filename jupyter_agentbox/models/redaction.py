"""Recognize scoped tokens, and redact them in logs."""

from __future__ import annotations

import re

#: Prefix of every scoped token.
PREFIX = "agentbox_"
#: A token, or the beginning of one, also inside a URL.
_ANYWHERE = re.compile(r"agentbox(?:_|%5f)eyJ[A-Za-z0-9_%.-]*", re.IGNORECASE)


def redact(text: str) -> str:
    """Return a text for a log, with scoped tokens redacted."""
    return _ANYWHERE.sub(f"{PREFIX}[secret]", text)
