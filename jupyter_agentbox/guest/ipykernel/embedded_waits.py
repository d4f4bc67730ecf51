"""Count what an idle kernel waits for: timers of its event loop, and threads that wake up by themselves.

A sandbox in which something waits is not frozen, because timers stand still while it is.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from typing import Any

#: Functions of the standard library in which a thread waits for others, by file: forever, unless ``timeout`` is set.
_WAITS = frozenset(
    {
        ("threading.py", "wait"),
        ("threading.py", "join"),
        ("threading.py", "_wait_for_tstate_lock"),
        ("selectors.py", "select"),
        ("thread.py", "_worker"),  # of concurrent.futures, without work
    }
)
#: Packages whose threads do nothing of their own for the user.
_HELPERS = frozenset({"IPython", "ipykernel", "_pydevd_bundle", "tqdm", "zmq"})


def count_waits(loop: asyncio.AbstractEventLoop) -> int:
    """Return the number of pending timers of an event loop, and of threads that do not wait for others."""
    timers = sum(not timer.cancelled() for timer in list(getattr(loop, "_scheduled", ())))
    frames = sys._current_frames()
    own = threading.main_thread(), threading.current_thread()
    return timers + sum(
        thread not in own
        and type(thread).__module__.partition(".")[0] not in _HELPERS
        and thread.ident in frames
        and not _waits_forever(frames[thread.ident])
        for thread in threading.enumerate()
    )


def _waits_forever(frame: Any) -> bool:
    if frame.f_code.co_filename.startswith("<agentbox "):
        return True
    place = os.path.basename(frame.f_code.co_filename), frame.f_code.co_name
    return place in _WAITS and frame.f_locals.get("timeout") in (None, -1)
