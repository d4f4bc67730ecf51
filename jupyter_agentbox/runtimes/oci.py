"""Turn a decided sandbox into an OCI runtime configuration: a pure function, tested by comparing whole results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jupyter_agentbox.linux import GUEST
from jupyter_agentbox.spec import CLAIM_DIR, GUEST_DIR, HOME, MIB, WORKSPACE, Limits, SandboxSpec

from .rootfs import HOSTNAME, hides_entries

#: What the guest needs to run programs as another user, to bind low ports on loopback, and to read what is the user's.
GUEST_CAPABILITIES = ("CAP_DAC_OVERRIDE", "CAP_KILL", "CAP_NET_BIND_SERVICE", "CAP_SETGID", "CAP_SETUID")
#: And what package managers need, where user code is root inside.
ROOT_CAPABILITIES = (*GUEST_CAPABILITIES, "CAP_CHOWN", "CAP_FOWNER", "CAP_FSETID", "CAP_SETFCAP", "CAP_SYS_CHROOT")

MASKED = (
    "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list", "/proc/sched_debug",
    "/proc/scsi", "/sys/firmware",
)  # fmt: skip
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
OPEN_FILES = 65536
#: The program that covers hidden entries inside before the guest runs.
COVERS = GUEST / "covers.py"


def make_rlimits(limits: Limits) -> dict[str, int]:
    """Return the resource limits of everything inside, by their names without the prefix."""
    return {"CORE": 0, "FSIZE": limits.disk, "NOFILE": OPEN_FILES, "NPROC": limits.processes}


def make_config(
    spec: SandboxSpec,
    *,
    stage: Path,
    link: Path,
    python: str,
    user: int,
) -> dict[str, Any]:
    """Return the configuration.

    Parameters
    ----------
    spec : SandboxSpec
        What was decided.
    stage : Path
        Where the launcher builds ``root`` and ``workspace``.
    link : Path
        Directory of the link's two FIFOs.
    python : str
        Interpreter inside that runs the guest.
    user : int
        Inner id of user code.
    """
    rlimits = make_rlimits(spec.limits)
    guest = {"lease": spec.lease_timeout, "uid": user, "gid": user, "home": HOME, "rlimits": rlimits}
    if spec.layout == "waiting":
        guest["is_waiting"] = True
    capabilities = sorted(ROOT_CAPABILITIES if spec.is_root else GUEST_CAPABILITIES)
    covers_first = spec.layout == "plain" and hides_entries(spec)
    if spec.layout == "waiting" or covers_first:
        # PID 1's alone, until it has covered what is hidden, before which no user's code runs: to mount, and to give
        # that up.
        capabilities += ["CAP_SETPCAP", "CAP_SYS_ADMIN"]
    # The name is a label for people who look at the process list from inside; what runs is the same for all.
    process = {
        "terminal": False,
        "user": {"uid": 0, "gid": 0},
        "cwd": "/",
        "noNewPrivileges": True,
        "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
        "rlimits": [{"type": f"RLIMIT_{name}", "soft": value, "hard": value} for name, value in rlimits.items()],
        "env": ["PATH=/usr/bin:/bin", f"AGENTBOX_GUEST={json.dumps(guest)}"],
        "args": [
            *(python, "-I", "-S", "-B"),
            *(("-c", COVERS.read_text(encoding="utf-8")) if covers_first else ()),
            *(f"{GUEST_DIR}/guest", "--lease", f"{spec.lease_timeout:g}"),
        ],
    }
    shm = min(spec.limits.memory // 2, 2048 * MIB)
    is_writable = getattr(spec, "workspace_mode", "rw") == "rw"
    mode = "rw" if is_writable else "ro"
    return {
        "ociVersion": "1.0.2",
        "process": process,
        "root": {"path": str(stage / "root"), "readonly": False},
        "hostname": HOSTNAME,
        "mounts": [
            _mount("/proc", "proc", "proc", ["nosuid", "nodev", "noexec"]),
            _mount("/sys", "sysfs", "sysfs", ["nosuid", "nodev", "noexec", "ro"]),
            _mount("/dev/shm", "tmpfs", "tmpfs", ["nosuid", "nodev", f"size={shm}", "mode=1777"]),
            _mount(
                WORKSPACE if spec.layout == "plain" else CLAIM_DIR,
                "bind",
                str(stage / ("workspace" if spec.layout == "plain" else "claim")),
                ["rbind", mode, "nosuid", "nodev"],
            ),
            # What is written to the root stays in the layer above it; what is meant to be kept is mounted by itself.
            *(
                _mount(item.target, "bind", f"{stage}/root{item.target}", ["rbind", "rw", "nosuid", "nodev"])
                for item in spec.mounts
                if item.is_writable
            ),
            _mount(f"{GUEST_DIR}/link", "bind", str(link), ["bind", "rw", "nosuid", "nodev", "noexec"]),
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")],
            "maskedPaths": list(MASKED),
            "readonlyPaths": list(READ_ONLY),
        },
    }


def _mount(target: str, kind: str, source: str, options: Sequence[str]) -> Mapping[str, Any]:
    return {"destination": target, "type": kind, "source": source, "options": list(options)}
