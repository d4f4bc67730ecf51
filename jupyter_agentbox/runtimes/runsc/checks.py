"""Test the runsc runtime for ``jupyter agentbox doctor``, in real sandboxes.

The checks report what works on this machine, not what should work.
"""

from __future__ import annotations

import getpass
import os
import re
import select
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_agentbox.errors import AgentboxError, RuntimeFailed
from jupyter_agentbox.linux import find_processes, kill_processes, remove_cgroups, remove_tree
from jupyter_agentbox.runtimes import Check, Handle, cgroups, namespaces
from jupyter_agentbox.runtimes.linkdir import share_fifo
from jupyter_agentbox.runtimes.oci import GUEST_CAPABILITIES
from jupyter_agentbox.spec import GUEST_DIR, LIMIT_NAMES, MIB, Limits, SandboxSpec

if TYPE_CHECKING:
    from .runtime import RunscRuntime

#: Seconds for each step, and seconds after which a probe exits on its own because its caller was killed.
PROBE_TIMEOUT, PROBE_LIFE = 20.0, 200.0
#: Prefix of the probes' directories, which other users may also have.
PREFIX = "agentbox-check-"
#: Guest program that says hello on the link, and again when it is restored from a checkpoint. It opens the FIFO for
#: reading too: gVisor would wait for ever for the reader of a caller that was killed.
PROBE = f'''
import os, time
end = time.monotonic() + {PROBE_LIFE}
for is_restored in (False, True):
    up = os.open("{GUEST_DIR}/link/up", os.O_RDWR)
    os.write(up, b"hello")
    os.close(up)
    while time.monotonic() < end and (is_restored or not os.path.exists("{GUEST_DIR}/link/again")):
        time.sleep(0.05)
'''


def check_runsc(runtime: RunscRuntime) -> list[Check]:
    """Run the checks in order, as each needs those before it, and return their results."""
    from .runtime import INSTALL_REMEDY, MIN_VERSION

    checks = []
    try:
        path, version = runtime.find_runsc(), runtime.read_version()
    except AgentboxError as error:
        return [Check("runsc", False, str(error), INSTALL_REMEDY)]
    release = re.search(r"20\d{6}", version)
    is_new_enough = release is None or int(release[0]) >= MIN_VERSION
    checks.append(
        Check(
            "runsc",
            is_new_enough,
            f"{path}, release {version}, platform {runtime.platform}",
            "" if is_new_enough else INSTALL_REMEDY,
        )
    )
    checks.append(_check_namespaces())
    checks.append(_check_spare_ids())
    for limit, reason in runtime.enforceable().items():
        checks.append(
            Check(f"limit on {limit}", reason is None, reason or "enforced", cgroups.REMEDY if reason else "")
        )
    checks += _check_sandbox(runtime)
    return checks


def _check_namespaces() -> Check:
    name = "user namespaces"
    maps = namespaces.make_id_maps(os.geteuid(), os.getegid(), spare=namespaces.find_spare_ids(os.geteuid()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as directory:
        log, stage = Path(directory) / "log", Path(directory) / "stage"
        stage.mkdir()
        try:  # with a mount, because some systems create a namespace but give it no rights
            status = namespaces.run(namespaces.Launch(["/bin/true"], maps, stage), log, PROBE_TIMEOUT)
        except AgentboxError as error:
            return Check(name, False, str(error), namespaces.namespace_remedy())
        if status:
            return Check(name, False, namespaces.read_tail(log), namespaces.namespace_remedy())
    return Check(name, True, f"{len(maps.uids)} ids mapped")


def _check_spare_ids() -> Check:
    name = "subordinate ids"
    if namespaces.find_spare_ids(os.geteuid()):
        return Check(name, True, "user code and the guest are different users inside")
    held = ", ".join(sorted(capability.removeprefix("CAP_") for capability in GUEST_CAPABILITIES))
    message = (
        "none for this user in /etc/subuid and /etc/subgid: user code is uid 0 inside its sandbox\n"
        f"It has the capabilities {held} there, and can replace the sandbox's own guest program.\n"
        "Outside it has this user's rights on the shared folders and no others, like uid 1000.\n"
        "Kernels start cold: templates and the pool need a uid that user code does not have."
    )
    if os.geteuid() == 0:
        return Check(name, True, message, "map uid and gid 65534 into the container that this server runs in")
    ranges = "--add-subuids 100000-165535 --add-subgids 100000-165535"
    return Check(name, True, message, f"apt-get install uidmap && usermod {ranges} {getpass.getuser()}")


def end_probes() -> None:
    """End leftover probes of killed processes, and remove everything that belongs to them. Blocks; never fails."""
    for old in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            facts = old.lstat()
            is_own = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
            if is_own and time.time() - facts.st_mtime > 2 * PROBE_LIFE:
                kill_processes(find_processes(old))
                with suppress(OSError):
                    remove_cgroups((old / "bundle" / "cgroups").read_text().splitlines())
                remove_tree(old)


@contextmanager
def _probe(runtime: RunscRuntime) -> Iterator[tuple[RunscRuntime, Path, SandboxSpec]]:
    end_probes()
    base = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        for name in ("guest", "link", "image"):
            (base / name).mkdir(mode=0o700)
        (base / "guest" / "__main__.py").write_text(PROBE)
        probe = type(runtime)(
            runsc=runtime.runsc,
            platform=runtime.platform,
            cgroup_parent=runtime.cgroup_parent,
            state_dir=runtime.state_dir,
            guest_dir=str(base / "guest"),
            start_timeout=PROBE_TIMEOUT,
        )
        limits = replace(Limits(), memory=512 * MIB, cpus=1.0)
        yield probe, base, SandboxSpec(limits=limits, accept_unenforced=frozenset(LIMIT_NAMES))
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _check_sandbox(runtime: RunscRuntime) -> list[Check]:
    checks: list[Check] = []
    name = "sandbox"
    handles: list[Handle] = []
    with _probe(runtime) as (probe, base, spec):
        try:
            sandbox_id = base.name.removeprefix("agentbox-")
            up = share_fifo(base / "link", "up", os.O_RDONLY)
            try:
                started = time.monotonic()
                handles.append(probe.start(sandbox_id, spec, base))
                checks.append(Check(name, True, f"starts in {time.monotonic() - started:.2f} s"))
                name = "link"
                _wait_for_hello(up)
                checks.append(Check(name, True, f"connected after {time.monotonic() - started:.2f} s"))
            finally:
                os.close(up)
            name = "checkpoint and restore"
            (base / "link" / "up").unlink()
            probe.run_once(base, "checkpoint", "--image-path", str(base / "image"), "-compression", "none", sandbox_id)
            probe.kill(handles[0])
            probe.remove(handles[0], base)
            up = share_fifo(base / "link", "up", os.O_RDONLY)
            (base / "link" / "again").touch()
            try:
                started = time.monotonic()
                verb = ["restore", "-detach", "--image-path", str(base / "image")]
                handles.append(probe.launch(sandbox_id, spec, base, verb))
                _wait_for_hello(up)
                checks.append(Check(name, True, f"restored in {time.monotonic() - started:.2f} s"))
            finally:
                os.close(up)
        except (AgentboxError, OSError) as error:
            checks.append(Check(name, False, str(error)))
        finally:
            for handle in handles:
                probe.kill(handle)
                probe.remove(handle, base)
    return checks


def _wait_for_hello(up: int) -> None:
    deadline = time.monotonic() + PROBE_TIMEOUT
    while time.monotonic() < deadline:
        # After the writer has closed, the FIFO is always readable, and the sleep below limits the rate.
        select.select([up], [], [], 0.5)
        try:
            if os.read(up, 5) == b"hello":
                return
        except BlockingIOError:
            pass
        time.sleep(0.01)
    raise RuntimeFailed(f"the guest did not connect within {PROBE_TIMEOUT:g} s")
