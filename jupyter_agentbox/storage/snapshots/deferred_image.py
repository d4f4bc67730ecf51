"""An image that is handed out before its bytes are there, so that a runtime starts while they are verified.

The runtime opens the image's files when it is ready to load them, and goes on when all are open. The smallest of them
is a FIFO: whoever opens it waits until every byte is verified, and reads it from here. If something was changed, it
finds empty files instead, from which nothing can be loaded.
"""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Callable
from pathlib import Path

#: The file that is kept back: where the pages lie, some bytes for each range of them.
GATE = "pages_meta.img"
#: Seconds between two looks for somebody who opens it.
_INTERVAL = 0.002


class LateImage:
    """Lays an image out on a thread of its own, and lets its reader go on afterwards.

    Parameters
    ----------
    image : Path
        Directory in which the FIFO is made.
    handles : dict of str to int
        Open files of the image by name, which belong to this object; that of :data:`GATE` is not in the directory.
    lay_out : callable
        Writes and verifies all of them.

    Attributes
    ----------
    error : BaseException or None
        What was wrong, once it is over.
    """

    def __init__(self, image: Path, handles: dict[str, int], lay_out: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._gate = image / GATE
        self._handles = handles
        self._lay_out = lay_out
        self._is_over = threading.Event()
        os.mkfifo(self._gate, 0o600)
        self._thread = threading.Thread(target=self._run, name="agentbox-image", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody will read it any more. Waits until it stands still."""
        self._is_over.set()
        self._thread.join()

    def finish(self) -> None:
        """Close it, and raise what was wrong, if anything was."""
        self.close()
        if self.error is not None:
            raise self.error from None

    def _run(self) -> None:
        try:
            try:
                self._lay_out()
            except BaseException as error:
                self.error = error
                for handle in self._handles.values():
                    os.ftruncate(handle, 0)
            self._let_go_on()
        except BaseException as error:
            self.error = self.error or error
        finally:
            for handle in self._handles.values():
                os.close(handle)

    def _let_go_on(self) -> None:
        pipe = self._open()
        if pipe < 0:
            return
        try:
            gate = self._handles[GATE]
            at, size = 0, os.fstat(gate).st_size
            poll = select.poll()
            poll.register(pipe, select.POLLOUT)
            while at < size and not self._is_over.is_set():
                if poll.poll(50):
                    try:
                        at += os.write(pipe, os.pread(gate, 65536, at))
                    except BlockingIOError:
                        pass
                    except BrokenPipeError:
                        return  # it has its own reasons, and says so
        finally:
            os.close(pipe)

    def _open(self) -> int:
        """Open the FIFO once somebody reads; -1 if nobody will."""
        while not self._is_over.is_set():
            try:
                return os.open(self._gate, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
            self._is_over.wait(_INTERVAL)
        return -1
