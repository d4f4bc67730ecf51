"""Programs that make images: run with a deadline, heard line by line, and ended with all that they started."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

from jupyter_agentbox.errors import RuntimeFailed, RuntimeUnavailable

#: Told what is being done, one line at a time.
Tell = Callable[[str], object]
#: What programs that make images have of the environment: where to find things, and the way to the network.
_PASSED_ON = (
    "PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy",
    "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS", "DOCKER_HOST", "DOCKER_CONFIG",
    "DOCKER_CONTEXT", "DOCKER_BUILDKIT", "XDG_RUNTIME_DIR",
)  # fmt: skip
#: Seconds that a program has to end of itself.
_GRACE = 10.0
#: What a file's time may be at most in an image, in seconds since the epoch: the same for every build.
EPOCH = 1_700_000_000


def make_environment() -> dict[str, str]:
    """Return the environment of programs that make images."""
    names = (*_PASSED_ON, *(name for name in os.environ if name.lower().startswith("npm_config_")))
    env = {name: os.environ[name] for name in names if name in os.environ}
    path = env.get("PATH", os.defpath)
    return {
        **env,
        "PATH": ":".join((path, *(folder for folder in ("/usr/sbin", "/sbin") if folder not in path.split(":")))),
        "LC_ALL": "C.UTF-8",
        "SOURCE_DATE_EPOCH": str(EPOCH),
        "DEBIAN_FRONTEND": "noninteractive",
    }


def find_program(name: str, remedy: str) -> str:
    """Return the path of a program. Raises RuntimeUnavailable with what gets it."""
    found = shutil.which(name, path=make_environment()["PATH"])
    if found is None:
        raise RuntimeUnavailable(f"{name} is needed to build this image, and is not installed: {remedy}")
    return found


def run(
    command: Sequence[str],
    tell: Tell,
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    what: str = "",
) -> list[str]:
    """Run a program to its end, and tell each line that it prints.

    Returns
    -------
    list of str
        The last lines that it printed.

    Raises
    ------
    RuntimeFailed
        It failed, or did not end in time; with the last of what it said.
    """
    with piped(command, tell, timeout=timeout, env=env, what=what, is_heard=True) as (_, lines):
        pass
    return lines


@contextlib.contextmanager
def piped(
    command: Sequence[str],
    tell: Tell,
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    what: str = "",
    is_heard: bool = False,
) -> Iterator[tuple[IO[bytes], list[str]]]:
    """Run a program, and give its standard output to the block; what it says on standard error is told.

    Parameters
    ----------
    is_heard : bool
        Its standard output is told as well, and not given.

    Raises
    ------
    RuntimeFailed
        As for :func:`run`, at the end of the block.
    """
    lines: deque[str] = deque(maxlen=50)
    kept: list[str] = []
    what = what or os.path.basename(command[0])
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if is_heard else subprocess.PIPE,
        env=dict(env if env is not None else make_environment()),
        start_new_session=True,
    )
    assert process.stdout is not None
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        _kill(process)

    timer = threading.Timer(timeout, end)
    timer.daemon = True
    said = process.stdout if is_heard else process.stderr
    assert said is not None

    def listen() -> None:
        for line in iter(lambda: said.readline(10_000), b""):
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                lines.append(text)
                tell(text)

    listener = threading.Thread(target=listen, daemon=True)
    is_done = False
    try:
        timer.start()
        listener.start()
        yield process.stdout, kept
        is_done = True
    finally:
        if not is_done:
            _kill(process)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout + _GRACE)
            listener.join(_GRACE)
        finally:  # also when a signal ends the wait
            timer.cancel()
            _kill(process)
            process.wait()
            listener.join(_GRACE)
            process.stdout.close()
            if process.stderr is not None:
                process.stderr.close()
    kept += lines
    if is_late.is_set():
        raise RuntimeFailed(f"{what} did not end within {timeout:g} s; the last that it said: {_end_of(kept)}")
    if process.returncode:
        raise RuntimeFailed(f"{what} failed with status {process.returncode}: {_end_of(kept)}")


def _end_of(lines: Sequence[str]) -> str:
    return " | ".join(lines[-5:])[-1000:] or "nothing"


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
