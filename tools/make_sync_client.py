"""Generate the synchronous client, ``jupyter_agentbox/client/_sync``, from the asynchronous one.

Building or installing the package does this (``hatch_build.py``), as does running the tests.
"""

from __future__ import annotations

import re
from pathlib import Path

CLIENT = Path(__file__).parents[1] / "jupyter_agentbox" / "client"
SOURCE, TARGET = CLIENT / "_async", CLIENT / "_sync"
_RULES = [
    (r"\bAsyncGenerator\[bytes, None\]", "Generator[bytes, None, None]"),
    (r"\bAsync([A-Z]\w*)", r"\1"),
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\b__a(enter|exit|iter|next)__", r"__\1__"),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\ba(call|close|iter_raw)\b", r"\1"),
]


def convert(text: str) -> str:
    """Return the synchronous form of a module."""
    for pattern, replacement in _RULES:
        text = re.sub(pattern, replacement, text)
    return text


def main() -> None:
    """Write the modules that have changed."""
    TARGET.mkdir(exist_ok=True)
    sources = {path.name: convert(path.read_text()) for path in SOURCE.glob("*.py")}
    for path in TARGET.glob("*.py"):
        if path.name not in sources:
            path.unlink()
    for name, text in sources.items():
        path = TARGET / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    main()
