"""Convert a sandbox's specification into an OCI runtime configuration.

The functions are pure, and tests compare whole results. :mod:`.rootfs` plans the file system that the configuration
refers to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jupyter_agentbox.linux import GUEST
from jupyter_agentbox.spec import CLAIM_DIR, GUEST_DIR, HOME, HOSTNAME, MIB, WORKSPACE, SandboxSpec

from .rootfs import has_covers

#: Capabilities of the guest: to run programs as another user, to bind low ports on loopback, and to read the user's
#: files.
GUEST_CAPABILITIES = ("CAP_DAC_OVERRIDE", "CAP_KILL", "CAP_NET_BIND_SERVICE", "CAP_SETGID", "CAP_SETUID")
#: Additional capabilities for package managers, if user code is root inside.
ROOT_CAPABILITIES = (*GUEST_CAPABILITIES, "CAP_CHOWN", "CAP_FOWNER", "CAP_FSETID", "CAP_SETFCAP", "CAP_SYS_CHROOT")

MASKED = (
    "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list", "/proc/sched_debug",
    "/proc/scsi", "/sys/firmware",
)  # fmt: skip
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
OPEN_FILES = 65536
#: The first program of a sandbox, and the program that covers entries of the work folder before the guest starts.
START = Path(__file__).with_name("sandbox_start.py")
COVERS = GUEST / "covers.py"
#: Numbers of the capabilities that the guest keeps.
CAPABILITIES = {
    "CAP_CHOWN": 0, "CAP_DAC_OVERRIDE": 1, "CAP_FOWNER": 3, "CAP_FSETID": 4, "CAP_KILL": 5, "CAP_SETGID": 6,
    "CAP_SETUID": 7, "CAP_SETPCAP": 8, "CAP_NET_BIND_SERVICE": 10, "CAP_SYS_CHROOT": 18, "CAP_SYS_ADMIN": 21,
    "CAP_SETFCAP": 31,
}  # fmt: skip
#: Capabilities to mount, and to drop capabilities. Only PID 1 has them, and gives them up before any user code runs.
MOUNT_CAPABILITIES = ("CAP_SETPCAP", "CAP_SYS_ADMIN")
#: Capabilities to create the writable layer. gVisor accesses the files in it with those of the creator.
LAYER_CAPABILITIES = (*ROOT_CAPABILITIES, *MOUNT_CAPABILITIES, "CAP_MKNOD")
#: Mount point of the file system that receives what is written. It is not visible to user code.
LAYER_DIR = f"{GUEST_DIR}/layer"


def make_rlimits(spec: SandboxSpec) -> dict[str, int]:
    """Return the resource limits of all processes inside, by their names without the prefix ``RLIMIT_``.

    In gVisor, ``DATA`` is the size of the heap (brk), which C libraries try to extend when they cannot map memory. Only
    a private workspace needs ``FSIZE``, because nothing else bounds a file there until it is measured.
    """
    limits = spec.limits
    found = {"CORE": 0, "DATA": limits.memory, "NOFILE": OPEN_FILES, "NPROC": limits.processes}
    if spec.workspace is None and spec.layout != "waiting":  # an unclaimed sandbox gets its folder later
        found["FSIZE"] = limits.disk
    return found


def make_config(
    spec: SandboxSpec,
    *,
    stage: Path,
    link: Path,
    layer: Path,
    python: str,
    user: int,
) -> dict[str, Any]:
    """Return the OCI configuration of a sandbox.

    Parameters
    ----------
    spec : SandboxSpec
        The sandbox's specification.
    stage : Path
        Directory in which the launcher builds ``root`` and ``workspace``.
    link : Path
        Directory of the link's two FIFOs.
    layer : Path
        Empty directory for the file that receives what is written to the root.
    python : str
        Interpreter inside the sandbox that runs the guest.
    user : int
        Inner id of user code.
    """
    rlimits = make_rlimits(spec)
    guest = {"lease": spec.lease_timeout, "uid": user, "gid": user, "home": HOME, "rlimits": rlimits,
             "memory": spec.limits.memory, "python": spec.python, "path": spec.env.get("PATH", "")}  # fmt: skip
    if spec.layout == "waiting":
        guest["is_waiting"] = True
    capabilities: tuple[str, ...] = ROOT_CAPABILITIES if spec.is_root else GUEST_CAPABILITIES
    if spec.layout == "waiting":
        capabilities += MOUNT_CAPABILITIES  # the guest mounts the work folder when the sandbox is claimed
    start = {
        "uid_map": "",
        "processors": 0,
        "capabilities": [CAPABILITIES[name] for name in capabilities],
        "new_root": LAYER_DIR,
        "files": [],
        "folders": [],
        "layers": [],
        "covers": COVERS.read_text(encoding="utf-8") if spec.layout == "plain" and has_covers(spec) else "",
        "filter": "",
        "arguments": ["--lease", f"{spec.lease_timeout:g}"],
    }
    # The name is a label for people who look at the process list from inside. The program is the same for all.
    process = {
        "terminal": False,
        "user": {"uid": 0, "gid": 0},
        "cwd": "/",
        "noNewPrivileges": True,
        "capabilities": dict.fromkeys(
            ("bounding", "effective", "permitted"), sorted({*LAYER_CAPABILITIES, *capabilities})
        ),
        "rlimits": [{"type": f"RLIMIT_{name}", "soft": value, "hard": value} for name, value in rlimits.items()],
        "env": ["PATH=/usr/bin:/bin", f"AGENTBOX_GUEST={json.dumps(guest)}"],
        "args": [
            *(python, "-I", "-S", "-B", "-c", START.read_text(encoding="utf-8")),
            *(f"{GUEST_DIR}/guest", json.dumps(start, separators=(",", ":"))),
        ],
    }
    shm = min(spec.limits.memory // 2, 2048 * MIB)
    is_writable = getattr(spec, "workspace_mode", "rw") == "rw"
    mode = "rw" if is_writable else "ro"
    size = [f"size={spec.limits.disk}", "mode=700"]
    return {
        "ociVersion": "1.0.2",
        "process": process,
        "root": {"path": str(stage / "root"), "readonly": True},
        "hostname": HOSTNAME,
        # The mount of `layer` becomes a file system in memory whose contents are in a file of that directory.
        "annotations": {
            f"dev.gvisor.spec.mount.layer.{name}": value
            for name, value in (
                ("source", str(layer)),
                ("type", "tmpfs"),
                ("share", "container"),
                ("options", ",".join(size)),
            )
        },
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
            _mount(LAYER_DIR, "bind", str(layer), ["rw", *size]),
            # Writes to the root go to this layer. Folders whose contents must be kept are mounted separately.
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
