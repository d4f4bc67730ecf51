"""Act as an owner to be killed: start a sandbox whose guest ignores the lease, print its handle, and wait."""

from __future__ import annotations

import fcntl
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from contract.box import STANDIN, Box

from jupyter_agentbox.runtimes.runsc.runtime import RunscRuntime
from jupyter_agentbox.sandbox.sweep import ensure_sweeper
from jupyter_agentbox.spec import MIB, Limits, SandboxSpec

state_dir, lease = Path(sys.argv[1]), float(sys.argv[2])
runtime = RunscRuntime(state_dir=str(state_dir), guest_dir=str(STANDIN))
spec = SandboxSpec(limits=replace(Limits(), memory=256 * MIB, cpus=1.0), lease_timeout=lease)
with Box(runtime, state_dir, "orphan", spec) as box:
    with (box.directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = {"id": box.id, "spec": {}, "handle": box.handle.to_dict(), "lease_timeout": lease}
        (box.directory / "state.json").write_text(json.dumps(state))
        ensure_sweeper(state_dir)
        print(json.dumps(box.handle.to_dict()), flush=True)
        time.sleep(300)
