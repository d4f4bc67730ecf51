"""Run the programs that build images: with a timeout, line-by-line output, and termination of all child processes."""

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

from jupyter_agentbox.errors import Damaged, RuntimeFailed, RuntimeUnavailable

#: Callback that receives progress, one line at a time.
OnProgress = Callable[[str], object]
#: Environment variables passed to programs that build images: paths, and network settings.
_PASSED_ON = (
    "PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy",
    "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS", "DOCKER_HOST", "DOCKER_CONFIG",
    "DOCKER_CONTEXT", "DOCKER_BUILDKIT", "XDG_RUNTIME_DIR",
)  # fmt: skip
#: Seconds that a program has to end by itself.
_GRACE = 10.0
#: Latest timestamp of files in an image, in seconds since the epoch. It is the same for every build.
EPOCH = 1_700_000_000


def make_environment() -> dict[str, str]:
    """Return the environment for programs that build images."""
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
    """Return the path of a program. Raises RuntimeUnavailable with the command that installs it."""
    found = shutil.which(name, path=make_environment()["PATH"])
    if found is None:
        raise RuntimeUnavailable(f"Cannot build this image: {name} is not installed ({remedy})")
    return found


def run(
    command: Sequence[str],
    on_progress: OnProgress,
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    what: str = "",
) -> list[str]:
    """Run a program to its end, and pass each line that it prints to `on_progress`.

    Returns
    -------
    list of str
        The last lines of output.

    Raises
    ------
    RuntimeFailed
        It failed or timed out; the message contains the last lines of output.
    """
    with piped(command, on_progress, timeout=timeout, env=env, what=what, merge_output=True) as (_, lines):
        pass
    return lines


@contextlib.contextmanager
def piped(
    command: Sequence[str],
    on_progress: OnProgress,
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    what: str = "",
    merge_output: bool = False,
) -> Iterator[tuple[IO[bytes], list[str]]]:
    """Run a program and give its standard output to the block. Its standard error goes to `on_progress`.

    Parameters
    ----------
    merge_output : bool
        Pass its standard output to `on_progress` as well, instead of giving it to the block.

    Raises
    ------
    RuntimeFailed
        As for :func:`run`, at the end of the block. It replaces an error of the block about damaged data, because a
        program that fails writes only a part of its data.
    """
    lines: deque[str] = deque(maxlen=50)
    last_lines: list[str] = []
    what = what or os.path.basename(command[0])
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merge_output else subprocess.PIPE,
        env=dict(env if env is not None else make_environment()),
        start_new_session=True,
    )
    assert process.stdout is not None
    has_timed_out = threading.Event()

    def end() -> None:
        has_timed_out.set()
        _kill(process)

    timer = threading.Timer(timeout, end)
    timer.daemon = True
    output = process.stdout if merge_output else process.stderr
    assert output is not None

    def listen() -> None:
        for line in iter(lambda: output.readline(10_000), b""):
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                lines.append(text)
                on_progress(text)

    listener = threading.Thread(target=listen, daemon=True)
    is_done = False
    damage: Damaged | None = None
    try:
        timer.start()
        listener.start()
        try:
            yield process.stdout, last_lines
        except Damaged as error:
            damage = error
            while process.stdout.read(1 << 20):
                pass
        is_done = True
    finally:
        if not is_done:
            _kill(process)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout + _GRACE)
            listener.join(_GRACE)
        finally:  # also if a signal interrupts the wait
            timer.cancel()
            _kill(process)
            process.wait()
            listener.join(_GRACE)
            process.stdout.close()
            if process.stderr is not None:
                process.stderr.close()
    last_lines += lines
    if has_timed_out.is_set():
        raise RuntimeFailed(f"{what} did not finish within {timeout:g} s; its last output: {_end_of(last_lines)}")
    if process.returncode:
        raise RuntimeFailed(f"{what} failed with status {process.returncode}: {_end_of(last_lines)}")
    if damage is not None:
        raise damage


def _end_of(lines: Sequence[str]) -> str:
    return " | ".join(lines[-5:])[-1000:] or "no output"


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
