"""The OCI configuration, as a whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from jupyter_agentbox.runtimes.oci import COVERS, make_config
from jupyter_agentbox.spec import MIB, Limits, SandboxSpec

SPEC = SandboxSpec(limits=Limits(memory=512 * MIB, cpus=1, processes=50, disk=100 * MIB), env={"TOKEN": "canary"})
RLIMITS = {"CORE": 0, "DATA": 512 * MIB, "FSIZE": 100 * MIB, "NOFILE": 65536, "NPROC": 50}


def make(spec: SandboxSpec = SPEC, user: int = 1000) -> dict[str, object]:
    return make_config(spec, stage=Path("/s/stage"), link=Path("/s/link"), python="/usr/bin/python3", user=user)


def test_the_whole() -> None:
    capabilities = ["CAP_DAC_OVERRIDE", "CAP_KILL", "CAP_NET_BIND_SERVICE", "CAP_SETGID", "CAP_SETUID"]
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
            "capabilities": {"bounding": capabilities, "effective": capabilities, "permitted": capabilities},
            "rlimits": [{"type": f"RLIMIT_{name}", "soft": value, "hard": value} for name, value in RLIMITS.items()],
            "env": ["PATH=/usr/bin:/bin", f"AGENTBOX_GUEST={json.dumps(guest)}"],
            "args": ["/usr/bin/python3", "-I", "-S", "-B", "/run/agentbox/guest", "--lease", "60"],
        },
        "root": {"path": "/s/stage/root", "readonly": False},
        "hostname": "agentbox",
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


def test_where_entries_are_hidden_they_are_covered_before_the_guest_runs() -> None:
    plain, covering = make(), make(replace(SPEC, workspace=Path("/w")))
    process, usual = covering.pop("process"), plain.pop("process")
    assert covering == plain
    assert isinstance(process, dict)
    assert isinstance(usual, dict)
    assert set(process["capabilities"]["bounding"]) - set(usual["capabilities"]["bounding"]) == {
        "CAP_SETPCAP",
        "CAP_SYS_ADMIN",
    }
    assert process["args"] == [*usual["args"][:4], "-c", COVERS.read_text(), *usual["args"][4:]]
    assert make(replace(SPEC, workspace=Path("/w"), hidden=())) == make()


def test_root_inside_adds_only_what_package_managers_need() -> None:
    process = make(replace(SPEC, is_root=True), 0)["process"]
    assert isinstance(process, dict)
    assert set(process["capabilities"]["bounding"]) == {
        "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_NET_BIND_SERVICE", "CAP_SETFCAP",
        "CAP_SETGID", "CAP_SETUID", "CAP_SYS_CHROOT",
    }  # fmt: skip
    assert process["noNewPrivileges"] is True
