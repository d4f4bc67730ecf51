"""Run sandboxes as Docker containers, with gVisor as the containers' runtime.

The sandbox matches the one of ``runtimes.runsc.runtime`` as closely as Docker allows: no network, the link's two FIFOs,
a read-only view of the host, and the same ids inside. :mod:`.config` builds the requests to the engine, :mod:`.engine`
sends them, and ``runtimes.sandbox_start`` is the first program that the container runs. ``docs/runtimes.md`` lists the
differences.

Whether a sandbox is alive is determined by its process on this machine, never by the engine. An engine that hangs,
restarts or has been stopped makes no sandbox look dead.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from traitlets import Float, Unicode

from jupyter_agentbox.errors import AgentboxError, InvalidRequest, RuntimeFailed, RuntimeUnavailable
from jupyter_agentbox.guest import covers
from jupyter_agentbox.linux import (
    GUEST,
    is_running,
    kill_processes,
    read_start_time,
    remove_tree,
    send_signal,
)
from jupyter_agentbox.names import Names
from jupyter_agentbox.runtimes import Check, Handle, Runtime, Usage, cgroups, namespaces, rootfs
from jupyter_agentbox.runtimes.launcher import HIDDEN_FILE, READ_ONLY, Refused, find_entries
from jupyter_agentbox.runtimes.runsc.runtime import measure_shared
from jupyter_agentbox.spec import USER_ID, Cause, End, Limits, SandboxSpec, out_of_memory

from . import config, orphans
from .engine import Engine, EngineRuntime

#: Seconds for which information about the engine stays valid: its runtimes, and whether it responds.
RUNTIME_INTERVAL, PING_INTERVAL = 60.0, 2.0
#: Seconds that the engine may take to answer a ping.
PING_TIMEOUT = 2.0
#: Seconds that the engine may take to notice the end of a process.
NOTICE_TIMEOUT = 5.0
#: Maximum number of records of the kernel's log to read.
MAX_KERNEL_LOG = 100_000


class DockerRuntime(Runtime):
    """Runtime that runs sandboxes as Docker containers under gVisor."""

    name: ClassVar[str] = "docker"

    host = Unicode(
        "",
        help="Address of Docker's engine: a UNIX socket of this machine, such as ``unix:///run/user/1000/docker.sock``."
        " If empty, ``DOCKER_HOST`` or Docker's own default is used.",
    ).tag(config=True)
    engine_runtime = Unicode(
        "", help="Name of gVisor's runtime in Docker's engine. If empty, one with the required flags is used."
    ).tag(config=True)
    start_timeout = Float(30.0, help="Seconds that a sandbox may take to start.").tag(config=True)
    engine_timeout = Float(10.0, help="Seconds that Docker's engine may take to answer.").tag(config=True)
    state_dir = Unicode("", help="Directory of all sandboxes; never visible inside one. Set by the manager.").tag(
        config=True
    )
    guest_dir = Unicode(str(GUEST), help="Directory of the guest program, which is PID 1 inside.")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.engine = Engine(self.host, self.engine_timeout)
        self._found: tuple[float, EngineRuntime] | None = None
        self._pinged, self._is_answering = 0.0, True
        self._pinging = threading.Lock()
        self._out_of_memory: set[str] = set()
        self._kills_before: dict[str, int] = {}

    # The contract

    def start(self, sandbox_id: str, spec: SandboxSpec, directory: Path) -> Handle:
        """Start a sandbox; see :meth:`.Runtime.start`."""
        workspace = rootfs.find_workspace(spec, directory, self.state_dir)
        deadline = time.monotonic() + self.start_timeout
        self.engine.ping()  # fails early if the engine hangs, instead of waiting for the whole start timeout
        kind = self.find_engine_runtime()
        (directory / "log").touch(0o600)
        own = directory / "docker"
        container = ""
        try:
            body = self._make_container(sandbox_id, spec, directory, workspace, kind)
            if self.state_dir:
                orphans.note_engine(Path(self.state_dir), self.engine.host)
            container = self.engine.create(f"agentbox-{sandbox_id}", body, self.start_timeout)
            self._kills_before[container] = cgroups.read_all_oom_kills()
            self.engine.start(container, max(1.0, deadline - time.monotonic()))
            return self._make_handle(container, directory, 0 if spec.is_root else USER_ID)
        except BaseException:
            if container:
                self._kills_before.pop(container, None)
                with contextlib.suppress(AgentboxError):
                    self._keep_log(container, directory)
                with contextlib.suppress(AgentboxError):
                    self.engine.remove(container)
            self.engine.forget_images()
            self._found = None
            remove_tree(own)
            raise

    def is_alive(self, handle: Handle) -> bool:
        """Return whether the sandbox runs, based on its process. The engine is not asked."""
        if not handle.is_running:
            return False
        kills = cgroups.read_all_oom_kills()  # read first, so that this sandbox's own kill never counts as earlier
        if cgroups.read_oom_kills(handle.cgroups):
            self._out_of_memory.add(handle.container)
            return False
        self._kills_before[handle.container] = kills
        return True

    def is_reachable(self) -> bool:
        """Return whether the engine responded to the last ping."""
        return self._is_answering

    def usage(self, handle: Handle, directory: Path) -> Usage:
        """Measure memory and processor time from control groups, and the disk usage of the work folder.

        All other writable file systems are in memory.
        """
        self._ping()
        if not self.is_alive(handle):
            return Usage(0, 0.0, 0)
        memory, cpu = cgroups.read_memory(handle.cgroups) or 0, cgroups.read_cpu(handle.cgroups) or 0.0
        return Usage(memory, cpu, measure_shared(directory))

    def why_ended(self, handle: Handle, limits: Limits, directory: Path) -> End:
        """Return why it ended: out of memory by counters and engine, a crash by the log, and otherwise killed."""
        if cgroups.read_oom_kills(handle.cgroups):
            self._out_of_memory.add(handle.container)
        state: dict[str, Any] = {}
        removed = False
        words = ""
        is_away = False
        try:
            found = self._inspect_ended(handle.container)
            state = (found or {}).get("State") or {}
            removed = found is None or state.get("Status") in ("removing", "dead")
            if found is not None:
                self._keep_log(handle.container, directory)
                words = namespaces.read_tail(directory / "log", 64_000)
        except RuntimeUnavailable:
            is_away = True
        except AgentboxError:
            pass
        if handle.container in self._out_of_memory or state.get("OOMKilled") or self._was_killed(handle, removed):
            return out_of_memory(limits)
        for sign in ("panic:", "fatal error:"):
            if sign in words:
                return End(Cause.CRASHED, 1, f"it crashed: {words[words.index(sign) :][:200]}")
        if removed:
            return End(Cause.KILLED, 137, "its container was removed from outside")
        if is_away:
            return End(
                Cause.KILLED,
                137,
                "Docker's engine was stopped or restarted, and ended its containers. With live-restore in the engine's"
                " daemon.json, sandboxes outlive that",
            )
        return End(Cause.KILLED, 137, "its container was ended from outside")

    def freeze(self, handle: Handle) -> bool:
        """Stop gVisor's main process, if this user may. Docker's own pause leaves it running."""
        return send_signal(handle.pid, handle.start_time, signal.SIGSTOP)

    def thaw(self, handle: Handle) -> None:
        """Continue gVisor's main process."""
        handle.resume()

    def kill(self, handle: Handle, timeout: float = 10.0) -> None:
        """End the sandbox, directly if this user may and otherwise by the engine, and wait for its process to end."""
        if not is_running(handle.pid, handle.start_time):
            return
        deadline = time.monotonic() + timeout
        if os.geteuid():
            with contextlib.suppress(AgentboxError):
                self.engine.kill(handle.container)
        else:
            kill_processes(handle.processes, timeout)
        while is_running(handle.pid, handle.start_time):
            if time.monotonic() > deadline:
                raise RuntimeFailed(
                    f"Cannot end the sandbox: its process {handle.pid} still runs {timeout:g} s after SIGKILL. See its"
                    f" state in /proc/{handle.pid}/status"
                )
            time.sleep(0.01)

    def remove(self, handle: Handle, directory: Path) -> None:
        """Remove the container and our part of ``directory``.

        If the engine does not answer, the sweeper removes the container later. Nothing runs in it any more.
        """
        try:
            self.engine.remove(handle.container, is_over=True)
        except AgentboxError as error:
            self.log.warning("container %s remains until Docker's engine answers: %s", handle.container[:12], error)
        self._out_of_memory.discard(handle.container)
        self._kills_before.pop(handle.container, None)
        with contextlib.suppress(OSError):
            remove_tree(directory / "docker")

    def check(self) -> list[Check]:
        """Test the engine, its runtime and a real sandbox."""
        from .checks import check_docker  # only doctor needs it

        return check_docker(self)

    # Implementation

    def find_engine_runtime(self) -> EngineRuntime:
        """Return the engine's runtime to use. Raises RuntimeUnavailable or RuntimeFailed."""
        if self._found is None or time.monotonic() - self._found[0] > RUNTIME_INTERVAL:
            self._found = time.monotonic(), self.engine.find_gvisor(self.engine_runtime)
        return self._found[1]

    def _make_container(
        self, sandbox_id: str, spec: SandboxSpec, directory: Path, workspace: Path, kind: EngineRuntime
    ) -> dict[str, Any]:
        """Return the container's settings, after making sure that the engine has its image."""
        found = workspace.stat()
        spare = (namespaces.NOBODY, namespaces.NOBODY)
        uid, owner = os.geteuid(), (found.st_uid, found.st_gid)
        maps = namespaces.make_id_maps(uid, os.getegid(), is_root=spec.is_root, owner=owner, spare=spare)
        if added := [mount.source for mount in spec.mounts if mount.is_added]:
            raise InvalidRequest(
                f"the runtime {self.name!r} cannot show {added[0]}, which you added. Remove it with `jupyter agentbox "
                f"folder remove {added[0]}`, and have your administrator add it to Policy.mounts",
                field="runtime",
            )
        python, prefix = rootfs.find_guest_python()
        is_private = spec.workspace is None
        steps = rootfs.make_plan(
            spec,
            guest=Path(self.guest_dir),
            workspace=workspace,
            is_private=is_private,
            user=maps.user,
            python=prefix,
        )
        own = directory / "docker"
        own.mkdir(mode=0o700, exist_ok=True)
        texts = {path.rpartition("/")[2]: rest[0] for step, path, *rest in steps if step == "file"}
        for name in (*config.DOCKERS_OWN, *covers.FILES):
            (own / name).write_text(texts.get(name, covers.FILES.get(name, "")))
            (own / name).chmod(0o444)
        entries = [] if is_private else list(_find_entries(workspace, spec))
        covers_inside = bool(entries) and self.isolation == "gvisor"
        if covers_inside:
            (own / "covered").write_bytes(covers.pack(entries))
            (own / "covered").chmod(0o444)
        layers, files = config.find_layers(steps), list[str]()
        if spec.is_root:
            (layers, files), maps = config.find_root_layers(steps), config.widen_maps(maps, uid)
        return config.make_container(
            spec,
            image=self.engine.ensure_image(config.make_image(steps, maps), spec.image),
            runtime=kind.name,
            python="/usr/bin/python3" if spec.root else python,
            maps=maps,
            mounts=config.make_mounts(steps, entries, own, directory / "link", covers_inside=covers_inside),
            labels=config.make_labels(sandbox_id, spec, self.state_dir),
            layers=layers,
            files=files,
            is_isolated=self.isolation == "gvisor",
            covers_inside=covers_inside,
            filter_steps=self._make_filter(),
        )

    def _make_filter(self) -> bytes:
        """Return the system call filter to set inside; empty if gVisor is the kernel."""
        return b""

    def _make_handle(self, container: str, directory: Path, user: int) -> Handle:
        found = self.engine.inspect(container) or {}
        pid = int((found.get("State") or {}).get("Pid") or 0)
        start_time = read_start_time(pid) if pid else None
        if start_time is None:
            self._keep_log(container, directory)
            words = namespaces.read_tail(directory / "log")
            raise RuntimeFailed(f"Cannot start the sandbox: it ended immediately. Log: {words or 'empty'}")
        return Handle(
            self.name,
            pid,
            start_time,
            cgroups=cgroups.find_groups_of(pid),
            user=user,
            engine=self.engine.host,
            container=container,
        )

    def _inspect_ended(self, container: str) -> dict[str, Any] | None:
        """Return the engine's description of an ended container, after the engine has noticed the end."""
        deadline = time.monotonic() + (0.0 if container in self._out_of_memory else NOTICE_TIMEOUT)
        while True:
            found = self.engine.inspect(container)
            if found is None or not (found.get("State") or {}).get("Running") or time.monotonic() > deadline:
                return found
            time.sleep(0.05)

    def _was_killed(self, handle: Handle, removed: bool) -> bool:
        """Return whether the sandbox was killed for lack of memory, after its control group was removed unread.

        In that case the engine misses the kill as well. The kernel's log names the container, if this user may read the
        log. Otherwise only the machine's own counter is left, which has no names. The result is then whether the kernel
        killed any process for memory between the last check of the living sandbox, less than a second before, and its
        end.
        """
        message = _find_in_kernel_log(handle.container)
        if message is not None or removed:
            return bool(message)
        before = self._kills_before.get(handle.container)
        return before is not None and cgroups.read_all_oom_kills() > before

    def _keep_log(self, container: str, directory: Path) -> None:
        with open(directory / "log", "wb") as file:
            file.write(self.engine.read_log(container))

    def _ping(self) -> None:
        """Ping the engine at intervals, with at most one ping at a time."""
        if time.monotonic() - self._pinged < PING_INTERVAL or not self._pinging.acquire(blocking=False):
            return
        try:
            try:
                self.engine.ping(PING_TIMEOUT)
                is_answering = True
            except AgentboxError:
                is_answering = False
            if is_answering != self._is_answering:
                message = "responds again" if is_answering else "does not respond; its sandboxes keep running"
                self.log.warning("Docker's engine at %s %s", self.engine.host, message)
            self._is_answering = is_answering
            self._pinged = time.monotonic()
        finally:
            self._pinging.release()


class DockerRuncRuntime(DockerRuntime):
    """Runtime for plain containers, **not isolated by gVisor**. Used only if policy names it, never as a fallback.

    The host's own kernel serves the code inside. Each start is logged, and every description of a sandbox states this.
    """

    name: ClassVar[str] = "docker-runc"
    isolation = "none"

    def start(self, sandbox_id: str, spec: SandboxSpec, directory: Path) -> Handle:
        """Start a sandbox, and log that gVisor does not isolate it."""
        if spec.is_root:
            raise RuntimeUnavailable(
                "Cannot start the sandbox: code cannot be root in a plain container, which has no writable layer over"
                " read-only files. Use the runtime runsc or docker",
                setting="Policy.profiles",
            )
        self.log.warning("sandbox %s is NOT isolated by gVisor: the policy selects %s", sandbox_id, self.name)
        return super().start(sandbox_id, spec, directory)

    def freeze(self, handle: Handle) -> bool:
        """Return False: a plain container has no single process whose stop would stop all others."""
        return False

    def find_engine_runtime(self) -> EngineRuntime:
        """Return the engine's runtime for plain containers."""
        wanted = self.engine_runtime or "runc"
        for found in self.engine.runtimes():
            if found.name == wanted:
                return found
        raise RuntimeUnavailable(
            f"Docker's engine has no runtime {wanted!r}. Choose one that is registered there",
            setting=f"{type(self).__name__}.engine_runtime",
        )

    def _make_filter(self) -> bytes:
        return config.make_namespace_filter(os.uname().machine)


def _find_in_kernel_log(container: str) -> bool | None:
    """Return whether the kernel's log records an out-of-memory kill in the container; None if that is unknown.

    When many kills happen at once, the kernel does not log each of them.
    """
    wanted = f"{container},".encode()
    named = killed = 0
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        for _ in range(MAX_KERNEL_LOG):
            try:
                record = os.read(log, 8192)
            except BrokenPipeError:
                named = killed = 0
                continue  # the next record was overwritten; reading continues after it
            if b"oom_memcg=" in record:
                named += 1
                if wanted in record.partition(b"oom_memcg=")[2]:
                    return True
            killed += b";Memory cgroup out of memory: Killed process" in record
    except BlockingIOError:
        return False if named >= killed else None
    except OSError:
        pass
    finally:
        os.close(log)
    return None


def _find_entries(workspace: Path, spec: SandboxSpec) -> Iterator[tuple[str, str]]:
    """Yield the entries to cover, and how.

    Symbolic links are skipped: nothing can be mounted on them, and they cannot lead outside the sandbox. A FIFO is
    refused, because gVisor would wait forever for its other end.
    """
    try:
        found = find_entries(str(workspace), Names(spec.hidden, spec.read_only))
    except Refused as error:
        raise InvalidRequest(str(error), field="workspace", setting="Policy.hidden_files") from None
    for name, kind in found:
        if kind not in (HIDDEN_FILE, READ_ONLY):
            yield name, kind
            continue
        try:
            mode = (workspace / name).lstat().st_mode
        except FileNotFoundError:
            continue
        if stat.S_ISREG(mode) or (kind == READ_ONLY and stat.S_ISDIR(mode)):
            yield name, kind
        elif not stat.S_ISLNK(mode):
            raise InvalidRequest(
                f"Cannot cover the entry {name!r} of the work folder: it is neither a file nor a folder, and the"
                " runtime docker covers only those. Remove it, or use the runtime runsc",
                field="workspace",
            )


__all__ = ["DockerRuncRuntime", "DockerRuntime"]
