"""Run sandboxes with ``runsc`` directly: without a daemon, root rights or an image registry.

Each sandbox runs in its own user namespace and mount namespace (``runtimes.namespaces``), on a root that exists
nowhere else (``runtimes.rootfs``), under control groups that this package creates (``runtimes.cgroups``). gVisor gets
no network and can open no socket of the host. It reaches outside only through the link's two FIFOs and the work folder.
Ending a sandbox never involves runsc: its processes are killed, and its directory contains all of runsc's state for it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from traitlets import Enum, Float, Unicode

from jupyter_agentbox.errors import RuntimeFailed, RuntimeUnavailable
from jupyter_agentbox.guest import covers
from jupyter_agentbox.linux import (
    GUEST,
    find_processes,
    find_python,
    kill_processes,
    measure_tree,
    remove_cgroups,
    remove_tree,
    send_signal,
)
from jupyter_agentbox.runtimes import Check, Handle, Runtime, Usage, cgroups, machine, namespaces, oci, rootfs
from jupyter_agentbox.spec import CLAIM_DIR, WORKSPACE, Cause, End, Limits, SandboxSpec, out_of_memory

from . import import_cache, open_files
from .open_files import OpenFile, list_open_files
from .runsc_errors import explain_restore, explain_save

#: First release that has systrap as the default platform and supports FIFOs of the host.
MIN_VERSION = 20230904
INSTALL_REMEDY = "jupyter agentbox setup"
#: File in a sandbox's directory that exists while the sandbox is paused.
PAUSED = "paused"
#: Path of the work folder inside, for both layouts.
_WORK = (f"{WORKSPACE}/", f"{CLAIM_DIR}/work/")
#: File in the sandbox's bundle that lists the covered entries of the work folder.
COVERED = "covered"
#: Seconds to wait until control groups can be removed after their processes have ended.
CGROUP_TIMEOUT = 30.0
_PYTHONS = (Path("/usr/bin/python3"), Path(sys.executable))


class RunscRuntime(Runtime):
    """Runtime that runs sandboxes with ``runsc``."""

    name: ClassVar[str] = "runsc"
    waits_for_image: ClassVar[bool] = True

    runsc = Unicode(
        "", help="Path of runsc. If empty, it is looked up on PATH and in the state directory, where setup installs it."
    ).tag(config=True)
    platform = Enum(
        ("systrap", "ptrace", "kvm"),
        default_value="systrap",
        help="How gVisor intercepts system calls. ``kvm`` hangs on many virtual machines.",
    ).tag(config=True)
    start_timeout = Float(30.0, help="Seconds that a sandbox may take to start.").tag(config=True)
    checkpoint_timeout = Float(120.0, help="Seconds that saving a sandbox's memory may take.").tag(config=True)
    cgroup_parent = Unicode("", help="Parent of the sandboxes' control groups. If empty, a suitable one is used.").tag(
        config=True
    )
    state_dir = Unicode("", help="Directory of all sandboxes; never visible inside one. Set by the manager.").tag(
        config=True
    )
    guest_dir = Unicode(str(GUEST), help="Directory of the guest program, which is PID 1 inside.")

    # The contract

    def start(self, sandbox_id: str, spec: SandboxSpec, directory: Path) -> Handle:
        """Start a sandbox; see :meth:`.Runtime.start`."""
        return self.launch(sandbox_id, spec, directory, ["run", "-detach"])

    def is_alive(self, handle: Handle) -> bool:
        """Return whether the sandbox runs.

        If the kernel has killed one of its processes for lack of memory, the result is false, even if the main process
        still exists: gVisor waits forever for what the killed process ran.
        """
        return handle.is_running and not cgroups.read_oom_kills(handle.cgroups)

    def usage(self, handle: Handle, directory: Path) -> Usage:
        """Measure memory, processor time and disk.

        Without a control group, memory is what gVisor has allocated for the inside and for itself. If the memory limit
        was accepted as unenforced, the owner uses this value to end a sandbox that exceeds the limit.
        """
        if not self.is_alive(handle):
            return Usage(0, 0.0, 0)
        memory = cgroups.read_memory(handle.cgroups)
        cpu = cgroups.read_cpu(handle.cgroups)
        files = read_open_files([pid for pid, _ in handle.processes])
        if memory is None:
            inside = sum(file.size for file in files if file.name.startswith("/memfd:runsc-memory"))
            memory = inside + sum(_read_own_memory(pid) for pid, _ in handle.processes)
        if cpu is None:
            cpu = sum(_read_cpu(pid) for pid, _ in handle.processes)
        layer = f"{directory}/fs/"
        disk = sum(file.size for file in files if file.name.startswith(layer))
        named = [(_name_in_work(file.name), file) for file in files if not file.name.startswith(layer)]
        deleted = [(name, file) for name, file in named if name]
        return Usage(
            memory,
            cpu,
            disk + measure_shared(directory),
            sum(file.size for _, file in deleted),
            tuple((name, file.inode) for name, file in deleted),
        )

    def why_ended(self, handle: Handle, limits: Limits, directory: Path) -> End:
        """Return why it ended: out of memory by the counters, a crash by the log, and otherwise killed."""
        if cgroups.read_oom_kills(handle.cgroups):
            return out_of_memory(limits)
        words = namespaces.read_tail(directory / "log", 64_000)
        for sign in ("panic:", "fatal error:", "SIGSEGV"):
            if sign in words:
                return End(Cause.CRASHED, 1, f"gVisor crashed: {words[words.index(sign) :][:200]}")
        return End(Cause.KILLED, 137, "the processes of the sandbox were killed from outside")

    def lower_limits(self, handle: Handle, limits: Limits) -> frozenset[str]:
        """Lower the limits of its control groups. The limit on processes cannot change, because gVisor enforces it.

        Memory in use is not taken away.
        """
        return frozenset({"processes"}) | cgroups.lower(handle.cgroups, limits)

    def freeze(self, handle: Handle) -> bool:
        """Stop gVisor's main process. Nothing inside can run without it, but the clock inside keeps running."""
        return send_signal(handle.pid, handle.start_time, signal.SIGSTOP)

    def thaw(self, handle: Handle) -> None:
        """Continue gVisor's main process."""
        handle.resume()

    def kill(self, handle: Handle, timeout: float = 10.0) -> None:
        """End the sandbox and wait until all its processes have ended."""
        if left := kill_processes(handle.processes, timeout):
            raise RuntimeFailed(f"Cannot end the sandbox: processes {left} still run {timeout:g} s after SIGKILL")

    def remove(self, handle: Handle, directory: Path) -> None:
        """Remove the control groups and runsc's part of ``directory``."""
        if left := remove_cgroups(handle.cgroups, CGROUP_TIMEOUT):
            self.log.warning("control groups could not be removed: %s", ", ".join(left))
        if (directory / namespaces.HELPER).exists():
            kill_processes(find_processes(directory))
        self._remove_own(directory)

    def fingerprint(self, spec: SandboxSpec) -> dict[str, str]:
        """Return the release of runsc, the processor's features, and an identifier of the files that kernels map."""
        return {
            "runtime": self.name,
            "release": self.read_version(),
            "platform": self.platform,
            "processor": _hash_processor(),
            "root": _hash_root(spec),
        }

    def checkpoint(
        self, handle: Handle, sandbox_id: str, directory: Path, image: Path, copy: Callable[[], None] | None = None
    ) -> None:
        """Save the sandbox with ``runsc checkpoint``, uncompressed, which is fastest for both saving and restoring."""
        options = ("--image-path", str(image), "-compression", "none", "-leave-running")
        if copy is not None:
            (directory / PAUSED).touch()
            self.run_once(directory, "pause", sandbox_id)
        try:
            if copy is not None:
                copy()
            self.run_once(directory, "checkpoint", *options, sandbox_id, timeout=self.checkpoint_timeout)
        except RuntimeFailed as error:
            raise explain_save(error) from error
        finally:
            self.recover(sandbox_id, directory)

    def recover(self, sandbox_id: str, directory: Path) -> None:
        """Resume a paused sandbox."""
        if (directory / PAUSED).exists():
            self.run_once(directory, "resume", sandbox_id)
            (directory / PAUSED).unlink()

    def restore(self, sandbox_id: str, spec: SandboxSpec, directory: Path, image: Path) -> Handle:
        """Start a sandbox from a checkpoint."""
        try:
            return self.launch(sandbox_id, spec, directory, ["restore", "-detach", "--image-path", str(image)])
        except RuntimeFailed as error:
            raise explain_restore(error) from error

    def wait_for_claim(self, handle: Handle, directory: Path) -> None:
        """Freeze the sandbox after starting the helper that will give it a folder."""
        namespaces.start_helper(directory, directory / "log")
        self.freeze(handle)

    def claim(self, handle: Handle, sandbox_id: str, spec: SandboxSpec, directory: Path) -> None:
        """Set new limits on its control groups, and mount the folder in the sandbox's view."""
        self._check_limits(spec)
        workspace = rootfs.find_workspace(spec, directory, self.state_dir)
        if self._make_maps(spec, workspace).user != handle.user:
            raise RuntimeFailed("the work folder has another owner than the prestarted sandbox")
        cgroups.detect(self.cgroup_parent).create(sandbox_id, spec.limits)
        plan = rootfs.make_claim_plan(spec, workspace, is_private=spec.workspace is None)
        plan.append(("covered", str(directory / "bundle" / COVERED)))
        view = next((found for found in handle.helpers if _is_gofer(found[0])), None)
        if view is None:
            raise RuntimeFailed("the prestarted sandbox has no file server")
        maps = namespaces.IdMaps((), (), handle.user, True, True)
        launch = namespaces.Launch([], maps, directory / "stage", plan, join=(*view, f"{CLAIM_DIR}/work"))
        failure = namespaces.ask_helper(launch, directory, self.start_timeout)
        namespaces.raise_refusal(failure or "")
        if failure is None and namespaces.run(launch, directory / "log", self.start_timeout):
            failure = namespaces.read_tail(directory / "log")
        if failure:
            raise RuntimeFailed(f"cannot mount the work folder: {failure}")
        shutil.rmtree(directory / namespaces.HELPER, ignore_errors=True)

    def read_covered(self, directory: Path) -> list[tuple[str, str]]:
        """Return the list that the launcher wrote."""
        return covers.parse((directory / "bundle" / COVERED).read_bytes())

    def check(self) -> list[Check]:
        """Test runsc, its namespaces, limits, link, checkpoint and restore in real sandboxes."""
        from .checks import check_runsc  # only doctor needs it

        return check_runsc(self)

    # Implementation

    def find_runsc(self) -> str:
        """Return the path of runsc. Raises RuntimeUnavailable."""
        if self.runsc:
            if os.access(self.runsc, os.X_OK):
                return os.path.abspath(self.runsc)
            raise RuntimeUnavailable(
                f"RunscRuntime.runsc is {self.runsc}, which is not a program; correct or remove the setting",
                setting="RunscRuntime.runsc",
            )
        # Setup installs one there only if the one on PATH is missing or too old.
        own = Path(self.state_dir) / "bin" if self.state_dir else None
        found = (shutil.which("runsc", path=str(own)) if own else None) or shutil.which("runsc")
        if not found:
            raise RuntimeUnavailable(
                f"gVisor's runsc was not found; install it with `{INSTALL_REMEDY}`", setting="RunscRuntime.runsc"
            )
        return os.path.abspath(found)

    def read_version(self) -> str:
        """Return the release from ``runsc --version``. Raises RuntimeUnavailable or RuntimeFailed."""
        path = self.find_runsc()
        found = os.stat(path)
        return _ask_version(path, found.st_ino, found.st_size, found.st_mtime_ns)

    def enforceable(self) -> dict[str, str | None]:
        """Return for each limit the reason why it cannot be enforced here, or None if it can."""
        return cgroups.detect(self.cgroup_parent).enforceable()

    def launch(self, sandbox_id: str, spec: SandboxSpec, directory: Path, verb: Sequence[str]) -> Handle:
        """Build the file system view and control groups, and run one runsc command that creates a detached sandbox."""
        runsc = self.find_runsc()
        is_private = spec.workspace is None
        workspace = rootfs.find_workspace(spec, directory, self.state_dir)
        found = cgroups.detect(self.cgroup_parent)
        missing = self._check_limits(spec)
        maps = self._make_maps(spec, workspace)
        python, prefix = rootfs.find_guest_python()
        if spec.root:
            python = "/usr/bin/python3"
        stage, bundle = directory / "stage", directory / "bundle"
        groups: tuple[str, ...] = ()
        try:
            for path in (stage, bundle, directory / "state", directory / "fs"):
                path.mkdir(mode=0o700, exist_ok=True)
            plan = rootfs.make_plan(
                spec,
                guest=Path(self.guest_dir),
                workspace=workspace,
                is_private=is_private,
                user=maps.user,
                python=prefix,
            )
            config = oci.make_config(
                spec, stage=stage, link=directory / "link", layer=directory / "fs", python=python, user=maps.user
            )
            # The entries to cover are known only after the launcher has searched the folder.
            if spec.layout == "claimed":
                plan.append(("covered", str(bundle / COVERED)))
            elif rootfs.has_covers(spec):
                plan.append(("covered", f"root{covers.COVERED}"))
            plan.append(("memory", "meminfo", machine.find_visible_memory(spec.limits.memory)))
            plan.append(("config", str(bundle / "config.json"), json.dumps(config, separators=(",", ":"))))
            # Written before they exist, so that a sweep finds them even if this process ends during the start.
            (bundle / "cgroups").write_text("\n".join(found.name(sandbox_id)))
            groups = found.create(sandbox_id, spec.limits)
            launch = namespaces.Launch(
                command=[
                    *self._make_command(runsc, directory),
                    *verb,
                    "-bundle",
                    str(bundle),
                    "-pid-file",
                    str(bundle / "pid"),
                    sandbox_id,
                ],
                maps=maps,
                stage=stage,
                plan=plan,
                cgroups=[f"{group}/cgroup.procs" for group in groups],
                processors=machine.count_processors(spec.limits),
            )
            status = namespaces.run(launch, directory / "log", self.start_timeout)
            if status:
                raise RuntimeFailed(f"runsc failed with status {status}: {namespaces.read_tail(directory / 'log')}")
            self._release_layer(directory / "fs")
            handle = self._read_handle(directory, groups, maps.user)
            # Where the share of processor time cannot be enforced, the number of processors stands in for it.
            if "cpus" not in missing:
                machine.release_processors(cgroups.read_pids(groups) or ())
            return handle
        except BaseException:
            kill_processes(find_processes(directory))
            remove_cgroups(groups, CGROUP_TIMEOUT)
            self._remove_own(directory)
            raise

    def _check_limits(self, spec: SandboxSpec) -> dict[str, str]:
        """Return unenforced limits with their reasons. Raises RuntimeUnavailable unless policy accepts all of them."""
        missing = {name: reason for name, reason in self.enforceable().items() if reason}
        for name, reason in missing.items():
            if name not in spec.accept_unenforced:
                raise RuntimeUnavailable(
                    f"Cannot enforce the {name} limit: {reason}. Fix: {cgroups.REMEDY}; or run without it by adding"
                    f" {name!r} to Policy.accept_unenforced",
                    setting="Policy.accept_unenforced",
                )
        return missing

    def _make_maps(self, spec: SandboxSpec, workspace: Path) -> namespaces.IdMaps:
        uid, gid = os.geteuid(), os.getegid()
        found = workspace.stat()
        spare = namespaces.find_spare_ids(uid)
        return namespaces.make_id_maps(uid, gid, is_root=spec.is_root, owner=(found.st_uid, found.st_gid), spare=spare)

    def _make_command(self, runsc: str, directory: Path) -> list[str]:
        return [
            runsc,
            f"--root={directory / 'state'}",
            f"--platform={self.platform}",
            "--network=none",
            "--host-uds=none",
            "--host-fifo=open",
            "--ignore-cgroups",
            "--overlay2=none",  # the sandbox's first program makes a layer of limited size
        ]

    def _release_layer(self, folder: Path) -> None:
        """Remove the name of the file that contains the writable layer, so that its space is free after any end."""
        names = os.listdir(folder)
        if not names:
            raise RuntimeFailed(
                f"this release of runsc ({self.read_version()}) keeps the writable layer in memory. Install another one"
                f" with `{INSTALL_REMEDY}`"
            )
        for name in names:
            (folder / name).unlink()

    def _read_handle(self, directory: Path, groups: tuple[str, ...], user: int) -> Handle:
        """Find the processes that runsc left running. Its state file is not readable for an ordinary user."""
        try:
            pid = int((directory / "bundle" / "pid").read_text())
        except (OSError, ValueError) as error:
            raise RuntimeFailed(f"runsc did not report the sandbox's process: {error}") from error
        found = dict(find_processes(directory, cgroups.read_pids(groups)))
        start_time = found.pop(pid, None)
        if start_time is None:
            raise RuntimeFailed(f"the sandbox ended immediately: {namespaces.read_tail(directory / 'log')}")
        return Handle(self.name, pid, start_time, tuple(found.items()), groups, user)

    def _remove_own(self, directory: Path) -> None:
        for name in ("stage", "bundle", "state", "fs", namespaces.HELPER):
            with contextlib.suppress(OSError):
                remove_tree(directory / name)

    def run_once(self, directory: Path, *arguments: str, timeout: float = 30.0) -> None:
        """Run a runsc command on a sandbox that exists. Raises RuntimeFailed."""
        spare = namespaces.find_spare_ids(os.geteuid())
        maps = namespaces.make_id_maps(os.geteuid(), os.getegid(), spare=spare)
        command = [*self._make_command(self.find_runsc(), directory), *arguments]
        log = directory / f"{arguments[0]}.log"
        if status := namespaces.run(namespaces.Launch(command, maps), log, timeout):
            words = namespaces.read_tail(log, 64_000)  # the reason, then gVisor's trace of where it occurred
            raise RuntimeFailed(f"runsc {arguments[0]} failed with status {status}: {words[:600]}")


@functools.lru_cache(maxsize=8)
def _ask_version(path: str, *file: int) -> str:
    """Run ``runsc --version``, once for each version of the file."""
    try:
        result = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise RuntimeFailed("runsc --version did not answer within 10 s") from None
    return (result.stdout.splitlines() or ["unknown"])[0].removeprefix("runsc version").strip()


def _is_gofer(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"runsc-gofer\0")
    return False


@functools.lru_cache(maxsize=1)
def _hash_processor() -> str:
    """Return a hash of the processor's features, because code in memory may have been selected by them."""
    with open("/proc/cpuinfo", "rb") as file:
        lines = {line for line in file.read().split(b"\n") if line.startswith((b"flags", b"Features", b"model name"))}
    return hashlib.sha256(b"\n".join(sorted(lines))).hexdigest()[:16]


def _hash_root(spec: SandboxSpec) -> str:
    """Return a hash that identifies the root: the image's path, or the host's interpreters and C library."""
    digest = hashlib.sha256(str(spec.root).encode())
    if spec.root is None:
        for path in (Path("/lib/x86_64-linux-gnu/libc.so.6"), Path("/lib/aarch64-linux-gnu/libc.so.6"), *_PYTHONS):
            with contextlib.suppress(OSError):
                found = path.stat()
                digest.update(f"{path} {found.st_ino} {found.st_size} {found.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _name_in_work(name: str) -> str:
    """Return a file's path in the work folder from its name in ``/proc``; empty if it is elsewhere.

    gVisor's file server, which has the file open, sees the sandbox's root as a folder of its own root.
    """
    inside = "/" + name.removeprefix("/").partition("/")[2]
    return next((inside.removeprefix(work) for work in _WORK if inside.startswith(work)), "")


def read_open_files(pids: Sequence[int]) -> list[OpenFile]:
    """Return the deleted files that a sandbox's processes hold open."""
    try:
        return list_open_files(pids)
    except PermissionError:
        pass  # they run under a subordinate id
    except OSError:
        return []
    program = Path(open_files.__file__)
    command = [find_python(), "-I", "-S", "-B", str(program), *map(str, pids)]
    try:
        result = subprocess.run(command, capture_output=True, timeout=10, stdin=subprocess.DEVNULL, env={}, check=False)
    except (subprocess.TimeoutExpired, OSError):
        return []
    return open_files.parse(result.stdout)


def _read_own_memory(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def _read_cpu(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    # Of the process itself and of the children it has reaped.
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def measure_shared(directory: Path) -> int:
    """Return the allocated bytes that code inside can fill in a sandbox's directory: work files, link and log.

    The import cache that the host puts into the link's directory is not counted, up to its original size.
    """
    given = min(_measure_file(directory / "link" / import_cache.NAME), import_cache.measure(directory))
    written = sum(measure_tree(directory / name)[0] for name in ("work", "link"))
    return written - given + _measure_file(directory / "log")


def _measure_file(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0


__all__ = ["INSTALL_REMEDY", "MIN_VERSION", "RunscRuntime"]
