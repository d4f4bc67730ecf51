"""Define the subjects of the benchmarks, and measure one kernel with the same client code for every subject.

A *subject* is a way to run a kernel. The first is the bare local ipykernel, which is 1.0 in every ratio. To measure
another driver or a restored start side by side with the others, add an entry to :data:`SUBJECTS`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import zmq
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

#: Number of the system call that compares two processes, and its argument to compare their memory.
_KCMP, _KCMP_VM = {"x86_64": 312, "aarch64": 272}, 1
_libc = ctypes.CDLL(None)

OUTPUT_BYTES = 50_000_000
BUFFER_BYTES = 10_000_000
PRINTS = 60_000
PRINTED_BYTES = sum(len(f"step {i} \n") + 20 for i in range(PRINTS))


@dataclass(frozen=True)
class Subject:
    """Way to run a kernel.

    Parameters
    ----------
    name : str
        Name in the table.
    kernel_name : str
        Kernelspec that starts it.
    """

    name: str
    kernel_name: str


SUBJECTS = [Subject("bare", "python3"), Subject("sandboxed", "agentbox")]


class Kernel:
    """Started kernel with a connected client."""

    def __init__(self, subject: Subject) -> None:
        file = Path(os.environ["JUPYTER_RUNTIME_DIR"]) / f"kernel-{uuid.uuid4().hex}.json"
        self.manager = KernelManager(kernel_name=subject.kernel_name, connection_file=str(file))
        self.others = _processes()
        self.manager.start_kernel(extra_arguments=["--log-level=ERROR"])
        try:
            self.client: BlockingKernelClient = self.manager.client()
            self.client.start_channels()
            self.client.wait_for_ready(timeout=90)
        except BaseException:
            self.manager.shutdown_kernel(now=True)
            raise

    def execute(self, code: str, timeout: float = 120) -> int:
        """Run code, and wait for its reply and idle status. Return the number of bytes of stream output and buffers."""
        return self._wait_for(self.client.execute(code), "execute_reply", code, timeout)

    def send_comm(self, target: str, buffers: list[bytes], timeout: float = 120) -> None:
        """Open a comm in the kernel with buffers, and wait until its handler has finished."""
        session, channel = self.client.session, self.client.shell_channel
        message = session.msg("comm_open", {"comm_id": uuid.uuid4().hex, "target_name": target, "data": {}})
        session.send(channel.socket, message, buffers=buffers)
        self._wait_for(message["msg_id"], "", target, timeout)

    def _wait_for(self, request: str, reply: str, what: str, timeout: float) -> int:
        shell, iopub = self.client.shell_channel, self.client.iopub_channel
        poller = zmq.Poller()
        poller.register(shell.socket, zmq.POLLIN)
        poller.register(iopub.socket, zmq.POLLIN)
        is_idle, has_reply = False, not reply
        size, deadline = 0, time.monotonic() + timeout
        while not (is_idle and has_reply):
            ready = dict(poller.poll(int(1000 * max(0.0, deadline - time.monotonic()))))
            if not ready:
                raise TimeoutError(f"no reply to {what[:40]!r} within {timeout} s")
            if shell.socket in ready:
                has_reply |= shell.get_msg(timeout=1)["parent_header"].get("msg_id") == request
            if iopub.socket in ready:
                message = iopub.get_msg(timeout=1)
                if message["parent_header"].get("msg_id") == request:
                    if message["msg_type"] == "stream":
                        size += len(message["content"]["text"])
                    size += sum(map(len, message["buffers"]))
                    is_idle |= message["content"].get("execution_state") == "idle"
        return size

    def memory(self) -> int:
        """Return the proportional set size, in bytes, of all processes that were started only for this kernel."""
        alone: list[int] = []
        for pid in sorted(_processes() - self.others):
            if not any(_share_memory(pid, other) for other in alone):
                alone.append(pid)
        return sum(map(_pss, alone))

    def close(self) -> None:
        """Stop client and kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@contextlib.contextmanager
def running(subject: Subject) -> Iterator[Kernel]:
    """Start a kernel, and stop it afterwards."""
    kernel = Kernel(subject)
    try:
        yield kernel
    finally:
        kernel.close()


def start(subject: Subject) -> tuple[float, int]:
    """Return the seconds from requesting a kernel to its first reply, and its memory once it is idle."""
    begin = time.perf_counter()
    with running(subject) as kernel:
        kernel.execute("1")
        took = time.perf_counter() - begin
        round_trips(kernel, 10, 0)
        return took, kernel.memory()


def round_trips(kernel: Kernel, count: int, pause: float) -> list[float]:
    """Return the seconds of each of `count` executions of a trivial cell, `pause` seconds apart."""
    times = []
    for _ in range(count):
        if pause:
            time.sleep(pause)
        begin = time.perf_counter()
        kernel.execute("1+1")
        times.append(time.perf_counter() - begin)
    return times


def output(kernel: Kernel) -> float:
    """Return the seconds until 50 MB, printed in blocks of 1 MB, have arrived."""
    return _until_here(
        kernel,
        OUTPUT_BYTES,
        "import sys\nblock = ('x' * 99 + '\\n') * 10_000\n"
        f"for _ in range({OUTPUT_BYTES // 1_000_000}): sys.stdout.write(block)\nsys.stdout.flush()",
    )


def prints(kernel: Kernel) -> float:
    """Return the seconds until the output of 60,000 calls of print has arrived."""
    return _until_here(kernel, PRINTED_BYTES, f"for i in range({PRINTS}): print('step', i, 'x' * 20)")


def comm_buffers(kernel: Kernel) -> float:
    """Return the seconds until 10 MB, in ten buffers of a comm message, have arrived."""
    return _until_here(
        kernel,
        BUFFER_BYTES,
        "from comm import create_comm\n"
        f"create_comm(target_name='none', buffers=[bytes({BUFFER_BYTES // 10}) for _ in range(10)])",
    )


def comm_buffers_to_kernel(kernel: Kernel) -> float:
    """Return the seconds until the kernel has handled a comm message with 10 MB in ten buffers."""
    kernel.execute(
        "def take(comm, message): size = sum(map(len, message['buffers']))\n"
        "get_ipython().kernel.comm_manager.register_target('sink', take)"
    )
    buffers = [bytes(BUFFER_BYTES // 10) for _ in range(10)]
    begin = time.perf_counter()
    kernel.send_comm("sink", buffers)
    return time.perf_counter() - begin


def _until_here(kernel: Kernel, expected: int, code: str) -> float:
    begin = time.perf_counter()
    if (size := kernel.execute(code)) != expected:
        raise AssertionError(f"{size} of {expected} bytes arrived")
    return time.perf_counter() - begin


def parallel_starts(subject: Subject, count: int) -> float:
    """Return the seconds until `count` kernels, requested concurrently, have all replied."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        kernels = list(pool.map(lambda _: Kernel(subject), range(count)))
        list(pool.map(lambda kernel: kernel.execute("1"), kernels))
        took = time.perf_counter() - begin
        list(pool.map(Kernel.close, kernels))
    return took


def _processes() -> set[int]:
    """Return the processes whose command line names a directory of this run, and all their descendants.

    Sandboxes are not descendants of this process, and the processes that gVisor creates for the inside have no such
    name.
    """
    names = os.environ["JUPYTER_DATA_DIR"], os.environ["JUPYTER_RUNTIME_DIR"]
    parents, found = {}, set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if any(name in line for name in names):
                    found.add(int(entry.name))
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _share_memory(first: int, second: int) -> bool:
    """Return whether two processes share one address space, as gVisor's processes for the threads of one program do."""
    result: int = _libc.syscall(_KCMP[platform.machine()], first, second, _KCMP_VM, 0, 0)
    return result == 0


def _pss(pid: int) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:")), 0)
