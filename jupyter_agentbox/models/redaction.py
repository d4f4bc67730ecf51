"""How a scoped token looks, and how it is left out of what is logged."""

from __future__ import annotations

import re

#: What every scoped token begins with.
PREFIX = "agentbox_"
#: A token, or the beginning of one, also as part of an address.
_ANYWHERE = re.compile(r"agentbox(?:_|%5f)eyJ[A-Za-z0-9_%.-]*", re.IGNORECASE)


def redact(text: str) -> str:
    """Return a text that is to be logged with its scoped tokens left out."""
    return _ANYWHERE.sub(f"{PREFIX}[secret]", text)
