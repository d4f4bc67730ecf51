"""Run as an ordinary user: refuse, then accept by name, then examine one sandbox. Print the results as JSON."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

from contract.box import STANDIN, Box

from jupyter_agentbox.errors import RuntimeUnavailable
from jupyter_agentbox.runtimes.runsc.runtime import RunscRuntime
from jupyter_agentbox.spec import MIB, Limits, SandboxSpec

home = Path.home()
state_dir = home / "state"
workspace = home / "notebooks"
workspace.mkdir()
(workspace / "data.csv").write_text("a,b\n")
(home / "canary").write_text("canary")
runtime = RunscRuntime(state_dir=str(state_dir), guest_dir=str(STANDIN))
spec = SandboxSpec(workspace=workspace, limits=Limits(memory=512 * MIB, cpus=1, processes=64))
found: dict[str, object] = {"uid": os.geteuid()}
try:
    Box(runtime, state_dir, "refused", spec)
except RuntimeUnavailable as error:
    found["refusal"] = str(error)
with Box(runtime, state_dir, "accepted", replace(spec, accept_unenforced=frozenset({"memory", "cpus"}))) as box:
    found["inner"] = box.run("id -u").strip()
    found["data"] = box.run("cat data.csv; echo x > result")
    found["owner"] = (workspace / "result").stat().st_uid
    found["canary"] = box.run(f"cat {home}/canary 2>/dev/null", "root")
    found["processors"] = len(os.sched_getaffinity(box.handle.pid))
    box.run("head -c 5000000 /dev/urandom > $HOME/x")
    (box.directory / "work").mkdir()
    found["usage"] = asdict(runtime.usage(box.handle, box.directory))
    handle = box.handle
found["left"] = sorted(os.listdir(box.directory))
found["is_alive_after"] = runtime.is_alive(handle)
print(json.dumps(found))
