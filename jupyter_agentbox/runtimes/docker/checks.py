"""Check the Docker runtime for ``jupyter agentbox doctor``: the engine, its runtimes, and a real sandbox."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_agentbox.errors import AgentboxError, RuntimeFailed, RuntimeUnavailable
from jupyter_agentbox.runtimes import Check
from jupyter_agentbox.runtimes.linkdir import share_fifo
from jupyter_agentbox.runtimes.runsc.checks import PREFIX, PROBE, PROBE_LIFE, PROBE_TIMEOUT, _wait_for_hello, end_probes
from jupyter_agentbox.spec import MIB, Limits, SandboxSpec

from .config import LABEL
from .engine import SETUP_REMEDY

if TYPE_CHECKING:
    from .runtime import DockerRuntime

START_REMEDY = "apt-get install docker.io, and start it: systemctl start docker"
GROUP_REMEDY = 'usermod -aG docker "$USER" as root, then log in again'


def check_docker(runtime: DockerRuntime) -> list[Check]:
    """Run the checks in order, as each needs those before it, and return their results."""
    name = "docker engine"
    try:
        about = runtime.engine.version()
        checks = [Check(name, True, f"{runtime.engine.host}, Docker {about.get('Version', 'of unknown version')}")]
    except RuntimeFailed as error:
        return [Check(name, False, str(error), "systemctl restart docker")]
    except AgentboxError as error:
        is_refused = isinstance(error.__cause__, PermissionError)
        return [Check(name, False, str(error), GROUP_REMEDY if is_refused else START_REMEDY)]
    name = "docker runtime"
    try:
        found = runtime.find_engine_runtime()
    except AgentboxError as error:
        return [*checks, Check(name, False, str(error), SETUP_REMEDY)]
    if runtime.isolation == "gvisor":
        checks.append(Check(name, True, f"{found.name} is {found.path}, with the flags that sandboxes need"))
    else:
        checks.append(Check(name, True, f"{found.name} is {found.path}: NOT ISOLATED BY GVISOR, as the policy says"))
    checks += _check_live_restore(runtime)
    checks.append(_check_sandbox(runtime))
    return checks


def _check_live_restore(runtime: DockerRuntime) -> Iterator[Check]:
    if not runtime.engine.info().get("LiveRestoreEnabled"):
        message = "is off, so sandboxes end when Docker's engine is restarted; set it in /etc/docker/daemon.json"
        yield Check("docker live-restore", True, message)


@contextmanager
def _probe(runtime: DockerRuntime) -> Iterator[tuple[DockerRuntime, Path]]:
    end_probes()
    with suppress(AgentboxError):  # the checks that follow report an engine that does not respond
        for item in runtime.engine.list(f"{LABEL}=sandbox", f"{LABEL}.state-dir="):
            is_old = time.time() - item.get("Created", 0) > 2 * PROBE_LIFE
            if is_old and item["Labels"][f"{LABEL}.sandbox"].startswith("check-"):
                runtime.engine.remove(item["Id"])
    base = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        for name in ("guest", "link"):
            (base / name).mkdir(mode=0o700)
        (base / "guest" / "__main__.py").write_text(PROBE)
        yield (
            type(runtime)(
                host=runtime.engine.host,
                engine_runtime=runtime.engine_runtime,
                guest_dir=str(base / "guest"),
                start_timeout=PROBE_TIMEOUT,
                engine_timeout=runtime.engine_timeout,
            ),
            base,
        )
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _check_sandbox(runtime: DockerRuntime) -> Check:
    name = "docker sandbox"
    with _probe(runtime) as (probe, base):
        up = share_fifo(base / "link", "up", os.O_RDONLY)
        handle = None
        try:
            started = time.monotonic()
            spec = SandboxSpec(limits=replace(Limits(), memory=512 * MIB, cpus=1.0))
            handle = probe.start(base.name.removeprefix("agentbox-"), spec, base)
            _wait_for_hello(up)
            return Check(name, True, f"starts and connects in {time.monotonic() - started:.2f} s")
        except (AgentboxError, OSError) as error:
            remedy = SETUP_REMEDY if isinstance(error, RuntimeUnavailable) else ""
            return Check(name, False, str(error), remedy)
        finally:
            os.close(up)
            if handle is not None:
                probe.kill(handle)
                probe.remove(handle, base)
