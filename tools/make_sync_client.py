"""Make ``jupyter_agentbox/client/_sync`` of ``_async``: ``python tools/make_sync_client.py``, then commit it.

The client for plain programs is the one for event loops with the waiting taken out, word by word. ``local`` of each is
written by hand. ``tests/client`` looks whether this was done.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parents[1] / "jupyter_agentbox" / "client"
SOURCE, TARGET = CLIENT / "_async", CLIENT / "_sync"
_BY_HAND = ("__init__.py", "local.py")
_RULES = [
    (r"\bAsyncGenerator\[bytes, None\]", "Generator[bytes, None, None]"),
    (r"\bAsync([A-Z]\w*)", r"\1"),
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\b__a(enter|exit|iter|next)__", r"__\1__"),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\baclose\b", "close"),
    (r"\baiter_raw\b", "iter_raw"),
]


def convert(text: str) -> str:
    """Return a module of the one for plain programs."""
    for pattern, replacement in _RULES:
        text = re.sub(pattern, replacement, text)
    return text


def sources() -> list[Path]:
    """Return the modules that are converted."""
    return sorted(path for path in SOURCE.glob("*.py") if path.name not in _BY_HAND)


def main() -> None:
    """Write the modules, formatted as all others are."""
    for path in sources():
        (TARGET / path.name).write_text(convert(path.read_text()))
    ruff = [sys.executable, "-m", "ruff"]
    subprocess.run([*ruff, "check", "--quiet", "--fix", "--select=I", str(TARGET)], check=True, timeout=60)
    subprocess.run([*ruff, "format", "--quiet", str(TARGET)], check=True, timeout=60)


if __name__ == "__main__":
    main()
