"""Hand out an image before its contents are complete, so that a runtime can start while they are verified.

The runtime opens the image's files when it is ready to load them, and continues once all are open. The smallest of them
is a FIFO. Its reader waits until every byte of the image is verified, and then reads the file from here. If data was
changed, the reader finds the other files empty, and nothing can be loaded from them.
"""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Callable
from pathlib import Path

#: The file that is delayed. It contains the locations of the pages, with a few bytes for each range.
GATE = "pages_meta.img"
#: Seconds between two attempts to find a reader of the FIFO.
_INTERVAL = 0.002


class DeferredImage:
    """A thread that restores an image and then unblocks the image's reader.

    Parameters
    ----------
    image : Path
        Directory in which the FIFO is created.
    handles : dict of str to int
        Open files of the image by name, owned by this object. The file of :data:`GATE` is not in the directory.
    restore : callable
        Writes and verifies all files.

    Attributes
    ----------
    error : BaseException or None
        The error, if any, after the thread has ended.
    """

    def __init__(self, image: Path, handles: dict[str, int], restore: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._gate = image / GATE
        self._handles = handles
        self._restore = restore
        self._is_closed = threading.Event()
        os.mkfifo(self._gate, 0o600)
        self._thread = threading.Thread(target=self._run, name="agentbox-image", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving the image, because no more readers are expected, and wait for the thread to end."""
        self._is_closed.set()
        self._thread.join()

    def finish(self) -> None:
        """Close the image, and raise the error if there was one."""
        self.close()
        if self.error is not None:
            raise self.error from None

    def _run(self) -> None:
        try:
            try:
                self._restore()
            except BaseException as error:
                self.error = error
                for handle in self._handles.values():
                    os.ftruncate(handle, 0)
            self._unblock_reader()
        except BaseException as error:
            self.error = self.error or error
        finally:
            for handle in self._handles.values():
                os.close(handle)

    def _unblock_reader(self) -> None:
        pipe = self._open()
        if pipe < 0:
            return
        try:
            gate = self._handles[GATE]
            at, size = 0, os.fstat(gate).st_size
            poll = select.poll()
            poll.register(pipe, select.POLLOUT)
            while at < size and not self._is_closed.is_set():
                if poll.poll(50):
                    try:
                        at += os.write(pipe, os.pread(gate, 65536, at))
                    except BlockingIOError:
                        pass
                    except BrokenPipeError:
                        return  # the reader reports its own reason
        finally:
            os.close(pipe)

    def _open(self) -> int:
        """Open the FIFO once it has a reader; return -1 if the image is closed before that."""
        while not self._is_closed.is_set():
            try:
                return os.open(self._gate, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
            self._is_closed.wait(_INTERVAL)
        return -1
