"""The OCI configuration, as a whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from jupyter_agentbox.runtimes.oci import CAPABILITIES, COVERS, START, make_config, make_rlimits
from jupyter_agentbox.spec import MIB, Limits, SandboxSpec

SPEC = SandboxSpec(limits=Limits(memory=512 * MIB, cpus=1, processes=50, disk=100 * MIB), env={"TOKEN": "canary"})
USUAL = ["CAP_DAC_OVERRIDE", "CAP_KILL", "CAP_NET_BIND_SERVICE", "CAP_SETGID", "CAP_SETUID"]
#: What makes the layer has more than what runs afterward.
FIRST = sorted([*CAPABILITIES, "CAP_MKNOD"])
RLIMITS = {"CORE": 0, "DATA": 512 * MIB, "NOFILE": 65536, "NPROC": 50, "FSIZE": 100 * MIB}


def make(spec: SandboxSpec = SPEC, user: int = 1000) -> dict[str, object]:
    folders = {"stage": Path("/s/stage"), "link": Path("/s/link"), "layer": Path("/s/fs")}
    return make_config(spec, **folders, python="/usr/bin/python3", user=user)


def make_start(spec: SandboxSpec = SPEC, user: int = 1000) -> dict[str, Any]:
    """Return the settings of the first program."""
    process = make(spec, user)["process"]
    assert isinstance(process, dict)
    found: dict[str, Any] = json.loads(process["args"][-1])
    return found


def test_the_whole() -> None:
    guest = {"lease": 60.0, "uid": 1000, "gid": 1000, "home": "/home/user", "rlimits": RLIMITS,
             "memory": 512 * MIB, "python": "", "path": ""}  # fmt: skip
    found = make()
    assert found == {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": {"bounding": FIRST, "effective": FIRST, "permitted": FIRST},
            "rlimits": [{"type": f"RLIMIT_{name}", "soft": value, "hard": value} for name, value in RLIMITS.items()],
            "env": ["PATH=/usr/bin:/bin", f"AGENTBOX_GUEST={json.dumps(guest)}"],
            "args": [
                "/usr/bin/python3", "-I", "-S", "-B", "-c", START.read_text(), "/run/agentbox/guest",
                json.dumps(make_start(), separators=(",", ":")),
            ],
        },
        "root": {"path": "/s/stage/root", "readonly": True},
        "hostname": "agentbox",
        "annotations": {
            "dev.gvisor.spec.mount.layer.source": "/s/fs",
            "dev.gvisor.spec.mount.layer.type": "tmpfs",
            "dev.gvisor.spec.mount.layer.share": "container",
            "dev.gvisor.spec.mount.layer.options": f"size={100 * MIB},mode=700",
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "nodev", "noexec"]},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "nodev", "noexec", "ro"]},
            {
                "destination": "/dev/shm",
                "type": "tmpfs",
                "source": "tmpfs",
                "options": ["nosuid", "nodev", f"size={256 * MIB}", "mode=1777"],
            },
            {
                "destination": "/workspace",
                "type": "bind",
                "source": "/s/stage/workspace",
                "options": ["rbind", "rw", "nosuid", "nodev"],
            },
            {
                "destination": "/run/agentbox/layer",
                "type": "bind",
                "source": "/s/fs",
                "options": ["rw", f"size={100 * MIB}", "mode=700"],
            },
            {
                "destination": "/run/agentbox/link",
                "type": "bind",
                "source": "/s/link",
                "options": ["bind", "rw", "nosuid", "nodev", "noexec"],
            },
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")],
            "maskedPaths": [
                "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list",
                "/proc/sched_debug", "/proc/scsi", "/sys/firmware",
            ],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        },
    }  # fmt: skip
    assert "canary" not in json.dumps(found), "the environment of user code comes over the link"


def test_the_first_program_keeps_only_the_guests_capabilities() -> None:
    assert make_start() == {
        "uid_map": "", "processors": 0, "capabilities": [CAPABILITIES[name] for name in USUAL],
        "new_root": "/run/agentbox/layer", "files": [],
        "folders": [], "layers": [], "covers": "", "filter": "", "arguments": ["--lease", "60"],
    }  # fmt: skip
    waiting = make_start(replace(SPEC, layout="waiting"))["capabilities"]
    assert set(waiting) - set(make_start()["capabilities"]) == {8, 21}, "it mounts the folder later"


def test_where_entries_are_hidden_they_are_covered_before_the_guest_runs() -> None:
    assert make_start(replace(SPEC, workspace=Path("/w"))) == {**make_start(), "covers": COVERS.read_text()}
    assert make_start(replace(SPEC, workspace=Path("/w"), hidden=(), read_only=())) == make_start()


def test_root_inside_adds_only_what_package_managers_need() -> None:
    root = make_start(replace(SPEC, is_root=True), 0)["capabilities"]
    more = ("CAP_CHOWN", "CAP_FOWNER", "CAP_FSETID", "CAP_SETFCAP", "CAP_SYS_CHROOT")
    assert set(root) == {CAPABILITIES[name] for name in (*USUAL, *more)}
    process = make(replace(SPEC, is_root=True), 0)["process"]
    assert isinstance(process, dict)
    assert process["noNewPrivileges"] is True


def test_only_files_beside_a_private_workspace_have_a_size_limit() -> None:
    folder = replace(SPEC, workspace=Path("/w"))
    assert [make_rlimits(spec).get("FSIZE") for spec in (SPEC, folder, replace(SPEC, layout="waiting"))] == [
        100 * MIB, None, None,
    ]  # fmt: skip
