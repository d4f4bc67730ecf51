"""Convert a sandbox's specification into requests for Docker's API.

The functions are pure, and tests compare whole results. The plan of ``runtimes.rootfs`` becomes an image of folders,
links and generated files (:func:`make_image`), which sandboxes with the same layout share, and read-only binds
(:func:`make_mounts`). Writable are only the work folder and file systems in memory, each with a size.
"""

from __future__ import annotations

import errno
import io
import json
import os
import struct
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jupyter_agentbox.errors import InvalidRequest, RuntimeUnavailable
from jupyter_agentbox.guest import covers
from jupyter_agentbox.guest.processes import _FIRST_MARK as FIRST_MARK
from jupyter_agentbox.runtimes import cgroups, machine, oci
from jupyter_agentbox.runtimes.launcher import CLONE_NEWUSER
from jupyter_agentbox.runtimes.namespaces import IdMaps
from jupyter_agentbox.runtimes.oci import COVERS, START
from jupyter_agentbox.runtimes.rootfs import Step
from jupyter_agentbox.spec import GUEST_DIR, HOME, HOSTNAME, MIB, WORKSPACE, Limits, SandboxSpec

REPOSITORY = "jupyter-agentbox"
#: Label of all our containers, and prefix of our other labels.
LABEL = "jupyter-agentbox"
#: Capabilities that the container's root needs to create the guest's user namespace. Nothing inside has them afterward.
CONTAINER_CAPABILITIES = ("SETGID", "SETUID")
#: Groups that mark the processes which a command has started, so that the guest can find them. They own nothing.
MARKS = (FIRST_MARK, FIRST_MARK, 1 << 24)
#: Directory in which the root is built if code is root in the sandbox. It is removed before any code runs.
NEW_ROOT = "/.agentbox"
#: First host id and number of ids (1 to 65533) for the accounts that packages create, if code inside is root.
ROOT_IDS, ROOT_ID_COUNT = 2_000_000_000, 65533
#: Limit on open files if Linux counts them. Every engine allows as many.
MAX_PLAIN_FILES = 4096
#: Files that Docker writes itself, unless something is mounted at their paths.
DOCKERS_OWN = ("resolv.conf", "hosts", "hostname")
#: Maximum number of hidden files and read-only entries in a work folder of a plain container, because the engine makes
#: a mount for each.
MAX_COVERS = 100
#: Calls that no code inside needs, refused if Linux itself serves them.
REFUSED_CALLS = (
    "acct", "add_key", "bpf", "clock_adjtime", "clock_settime", "delete_module", "finit_module", "fsconfig", "fsmount",
    "fsopen", "fspick", "init_module", "io_uring_enter", "io_uring_register", "io_uring_setup", "ioperm", "iopl",
    "kcmp", "kexec_file_load", "kexec_load", "keyctl", "lookup_dcookie", "mbind", "migrate_pages", "mount",
    "mount_setattr", "move_mount", "move_pages", "name_to_handle_at", "nfsservctl", "open_by_handle_at", "open_tree",
    "perf_event_open", "personality", "pivot_root", "process_vm_readv", "process_vm_writev", "ptrace", "quotactl",
    "quotactl_fd", "reboot", "request_key", "setns", "settimeofday", "swapoff", "swapon", "syslog", "umount", "umount2",
    "userfaultfd", "vhangup",
)  # fmt: skip
#: Calls that set a file's mode: indexes of the mode and the flags argument. Without O_CREAT in the flags the mode is
#: unused.
_MODE_ARGUMENTS = {
    "chmod": (1, None), "fchmod": (1, None), "fchmodat": (2, None), "fchmodat2": (2, None), "creat": (1, None),
    "mknod": (1, None), "mknodat": (2, None), "open": (2, 1), "openat": (3, 2),
}  # fmt: skip
_O_CREAT = 0o100
#: By machine: the audit number of its architecture, and the numbers of unshare, clone and clone3.
_NAMESPACE_CALLS = {"x86_64": (0xC000003E, 272, 56, 435), "aarch64": (0xC00000B7, 97, 220, 435)}


def make_image(steps: Sequence[Step], maps: IdMaps) -> bytes:
    """Return the image as a tar archive, the same bytes for the same steps.

    Parameters
    ----------
    steps : list
        From :func:`~jupyter_agentbox.runtimes.rootfs.make_plan`.
    maps : IdMaps
        The maps that determine the owners' ids.
    """
    outer = {inner: (uid, gid) for (inner, uid, _), (_, gid, _) in zip(maps.uids, maps.gids, strict=False)}
    data = io.BytesIO()
    made: set[str] = set()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as archive:

        def add(path: str, kind: bytes, mode: int, owner: int = 0, target: str = "", text: str = "") -> None:
            if path in made or path in ("", "."):
                return
            add(str(Path(path).parent), tarfile.DIRTYPE, 0o755)
            made.add(path)
            item = tarfile.TarInfo(path)
            item.type, item.mode, item.linkname, item.size = kind, mode, target, len(text.encode())
            item.uid, item.gid = outer[owner]
            archive.addfile(item, io.BytesIO(text.encode()))

        for step, path, *rest in steps:
            name = path.removeprefix("root/")
            if not path.startswith("root/") or f"/{name}".startswith("/run/"):
                continue
            if step == "folder":
                add(name, tarfile.DIRTYPE, rest[0], rest[1])
            elif step == "file":
                add(name, tarfile.REGTYPE, 0o644, text=rest[0])
            elif step == "link":
                add(name, tarfile.SYMTYPE, 0o777, target=rest[0])
            elif step == "bind":
                add(name, tarfile.DIRTYPE if Path(rest[0]).is_dir() else tarfile.REGTYPE, 0o755)
    return data.getvalue()


def make_mounts(
    steps: Sequence[Step],
    entries: Sequence[tuple[str, str]],
    own: Path,
    link: Path,
    *,
    covers_inside: bool = False,
) -> list[dict[str, Any]]:
    """Return Docker's mounts: the binds, the work folder with its entries covered, and the link.

    Parameters
    ----------
    steps : list
        From :func:`~jupyter_agentbox.runtimes.rootfs.make_plan`.
    entries : list of (str, str)
        Relative paths of the entries of the work folder to cover, and how; see :mod:`jupyter_agentbox.guest.covers`.
    own : Path
        Directory that contains the files of :data:`DOCKERS_OWN` and those of :data:`covers.FILES`.
    link : Path
        Directory of the link's two FIFOs.
    covers_inside : bool
        Whether PID 1 covers the entries that the file ``covered`` of `own` lists, so that they need no mounts.
    """
    mounts, workspace = [_bind(f"/etc/{name}", own / name) for name in DOCKERS_OWN], ""
    for step, path, *rest in steps:
        if step == "bind":
            mounts.append(_bind(path.removeprefix("root"), rest[0], is_writable=rest[1]))
        elif step == "workspace":
            workspace = rest[0]
            mounts.append(_bind(WORKSPACE, workspace, is_writable=rest[-1]))
    binds = 0
    if covers_inside:
        mounts += [_bind(f"{GUEST_DIR}/{name}", own / name) for name in ("covered", *covers.FILES)]
        mounts.append(_bind(covers.SHOWN, workspace))
        entries = ()
    for name, kind in entries:
        target = f"{WORKSPACE}/{name}"
        binds += kind in "fr"
        if binds > MAX_COVERS:
            raise InvalidRequest(
                f"Cannot cover the entries of the work folder: it has more than {MAX_COVERS} hidden files and read-only"
                " entries, the limit of the runtime docker-runc. Put the notebook into a folder of its own, or use the"
                " runtime runsc or docker",
                field="workspace",
            )
        if kind == "d":
            options = {"SizeBytes": 4096, "Mode": 0o555}
            mounts.append({"Type": "tmpfs", "Target": target, "ReadOnly": True, "TmpfsOptions": options})
        elif kind == "f":
            mounts.append(_bind(target, own / "nothing"))
        elif kind == "r":
            mounts.append(_bind(target, f"{workspace}/{name}"))
    mounts.append(_bind(f"{GUEST_DIR}/link", link, is_writable=True))
    return list({mount["Target"]: mount for mount in mounts}.values())  # the last mount at a path is visible


def _bind(target: str, source: Path | str, *, is_writable: bool = False) -> dict[str, Any]:
    # Recursive, because mounts beneath belong to the folder; private, so that later mounts do not appear.
    return {
        "Type": "bind",
        "Source": str(source),
        "Target": target,
        "ReadOnly": not is_writable,
        "BindOptions": {"Propagation": "rprivate"},
    }


def find_layers(steps: Sequence[Step]) -> list[str]:
    """Return the read-only directories over which the container mounts writable layers.

    Directories that contain other mounts are left out, because a layer would hide these mounts. So are names that a
    mount option cannot contain.
    """
    shown = _list_shown(steps)
    return [
        target
        for target, source in shown.items()
        if Path(source).is_dir()
        and not target.startswith("/etc/")
        and not any(other.startswith(target + "/") for other in shown)
    ]


def find_root_layers(steps: Sequence[Step]) -> tuple[list[str], list[str]]:
    """Return all read-only directories, and the files of /etc, for a sandbox in which code is root."""
    shown = _list_shown(steps)
    files = [target for target, source in shown.items() if target.startswith("/etc/") and not Path(source).is_dir()]
    files += [f"/etc/{name}" for name in DOCKERS_OWN]
    return [target for target, source in shown.items() if Path(source).is_dir()], files


def _list_shown(steps: Sequence[Step]) -> dict[str, str]:
    """Return the sources of read-only paths, without the guest and without names that a mount option cannot contain."""
    binds = {path.removeprefix("root"): str(rest[0]) for step, path, *rest in steps if step == "bind" and not rest[1]}
    return {
        target: source
        for target, source in binds.items()
        if not target.startswith(GUEST_DIR) and not set(target) & set(",:\\")
    }


def widen_maps(maps: IdMaps, uid: int) -> IdMaps:
    """Return the id maps for a sandbox in which code is root, with ids for the accounts of packages.

    These ids belong to no one outside. If ``uid``, the server's, is an ordinary user's, the system's files belong to
    the user ``nobody`` inside, as with runsc. Root inside may override their permissions only if gVisor has a mapping
    for ``nobody``.
    """
    more = ((1, ROOT_IDS, ROOT_ID_COUNT), (1 + ROOT_ID_COUNT, 0, 1)) if uid else ((1, ROOT_IDS, ROOT_ID_COUNT + 1),)
    return replace(maps, uids=(*maps.uids, *more), gids=(*maps.gids, *more))


def make_tmpfs(limits: Limits, maps: IdMaps, *, is_root: bool = False) -> dict[str, str]:
    """Return the file systems in memory and their options. Their contents count as the sandbox's memory."""
    uids, gids = ({inner: outer for inner, outer, _ in entries} for entries in (maps.uids, maps.gids))
    size = min(limits.disk, limits.memory // 2)
    shared = min(limits.memory // 2, 2048 * MIB)
    user = f"uid={uids[maps.user]},gid={gids[maps.user]}"
    guest = f"uid={uids[0]},gid={gids[0]}"
    common = "rw,nosuid,nodev,exec"  # Docker itself would add noexec
    return {
        "/tmp": f"{common},mode=1777,size={size}",
        "/var/tmp": f"{common},mode=1777,size={size}",
        HOME: f"{common},mode=755,size={size},{user}",
        "/dev/shm": f"{common},mode=1777,size={shared}",
        "/run": f"{common},mode=755,size={MIB},{guest}",
        GUEST_DIR: f"{common},mode=700,size={MIB},{guest}",
        "/sys/fs/cgroup": "ro,nosuid,nodev,noexec,mode=555,size=4k",  # otherwise Docker shows control groups there
        **({NEW_ROOT: f"{common},mode=700,size={size},{guest}"} if is_root else {}),
    }


def make_seccomp(*, is_isolated: bool) -> dict[str, Any]:
    """Return the system call filter. It prevents set-user-id files, because files outside belong to the user.

    Without gVisor, it also keeps code from parts of Linux that it does not need.
    """
    rules: list[dict[str, Any]] = []
    for name, (mode, flags) in _MODE_ARGUMENTS.items():
        for bit in (0o4000, 0o2000):
            arguments = [_masked(mode, bit)] + ([] if flags is None else [_masked(flags, _O_CREAT)])
            rules.append({"names": [name], "action": "SCMP_ACT_ERRNO", "args": arguments})
    if not is_isolated:
        rules.append({"names": list(REFUSED_CALLS), "action": "SCMP_ACT_ERRNO", "args": []})
    return {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules}


def _masked(index: int, bits: int) -> dict[str, Any]:
    return {"index": index, "value": bits, "valueTwo": bits, "op": "SCMP_CMP_MASKED_EQ"}


def make_namespace_filter(machine: str) -> bytes:
    """Return a filter, in Linux's own form, that forbids user namespaces, in which code could reach more of Linux.

    Raises RuntimeUnavailable if the filter for this machine is not known.
    """
    if machine not in _NAMESPACE_CALLS:
        raise RuntimeUnavailable(
            f"Cannot start a plain container: no system call filter exists for {machine}. Use the runtime runsc or"
            " docker"
        )
    audit, unshare, clone, clone3 = _NAMESPACE_CALLS[machine]

    def step(code: int, yes: int, no: int, value: int) -> bytes:
        return struct.pack("=HBBI", code, yes, no, value)

    load, equal, any_bit, end = 0x20, 0x15, 0x45, 0x06
    allow, kill, refused, unknown = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    return b"".join(
        [
            step(load, 0, 0, 4),
            step(equal, 1, 0, audit),
            step(end, 0, 0, kill),
            step(load, 0, 0, 0),
            step(equal, 0, 1, unshare),
            step(end, 0, 0, refused),
            step(equal, 0, 1, clone3),  # the flags of clone3 cannot be inspected; C libraries fall back to clone
            step(end, 0, 0, unknown),
            step(equal, 0, 3, clone),
            step(load, 0, 0, 16),
            step(any_bit, 0, 1, CLONE_NEWUSER),
            step(end, 0, 0, refused),
            step(end, 0, 0, allow),
        ]
    )


def name_state_dir(state_dir: str | Path) -> str:
    """Return the label value that identifies a state directory, independent of how its path is written."""
    return os.path.realpath(state_dir)


def make_labels(sandbox_id: str, spec: SandboxSpec, state_dir: str) -> dict[str, str]:
    """Return the labels of a container: its sandbox, its owner, and its lease timeout."""
    return {
        LABEL: "sandbox",
        f"{LABEL}.sandbox": sandbox_id,
        f"{LABEL}.owner": spec.owner,
        f"{LABEL}.lease": f"{spec.lease_timeout:g}",
        **({f"{LABEL}.image": spec.image} if spec.image else {}),
        f"{LABEL}.state-dir": name_state_dir(state_dir) if state_dir else "",
    }


def make_container(
    spec: SandboxSpec,
    *,
    image: str,
    runtime: str,
    python: str,
    maps: IdMaps,
    mounts: Sequence[Mapping[str, Any]],
    labels: Mapping[str, str],
    layers: Sequence[str],
    files: Sequence[str] = (),
    is_isolated: bool = True,
    covers_inside: bool = False,
    filter_steps: bytes = b"",
) -> dict[str, Any]:
    """Return the body of ``POST /containers/create``.

    Parameters
    ----------
    spec : SandboxSpec
        The sandbox's specification.
    image, runtime : str
        Name of the image, and name of the runtime in the engine.
    python : str
        Interpreter inside.
    maps : IdMaps
        Id maps of the user namespace that is created inside.
    mounts, labels
        From :func:`make_mounts` and :func:`make_labels`.
    layers, files : list of str
        From :func:`find_layers` or :func:`find_root_layers`.
    is_isolated : bool
        Whether gVisor is the kernel.
    covers_inside : bool
        See :func:`make_mounts`.
    filter_steps : bytes
        System call filter to set after the user namespace exists.
    """
    rlimits = oci.make_rlimits(spec)
    if not is_isolated:
        del rlimits["DATA"]  # in Linux, it includes reserved memory
        rlimits["NOFILE"] = MAX_PLAIN_FILES  # gVisor counts this itself; Linux refuses a limit above the engine's own
    guest = {"lease": spec.lease_timeout, "uid": maps.user, "gid": maps.user, "home": HOME, "rlimits": rlimits,
             "memory": spec.limits.memory, "python": spec.python, "path": spec.env.get("PATH", "")}  # fmt: skip
    capabilities = oci.ROOT_CAPABILITIES if spec.is_root else oci.GUEST_CAPABILITIES
    settings = {
        "uid_map": _map_text(maps.uids),
        "gid_map": _map_text([*maps.gids, MARKS]),
        "capabilities": [oci.CAPABILITIES[name] for name in capabilities],
        "new_root": NEW_ROOT if spec.is_root else "",
        "files": list(files),
        "folders": [(f"{HOME}/.cache", 0o755, maps.user), ("/tmp/.X11-unix", 0o1777, 0)],
        "layers": list(layers) if is_isolated else [],  # not every Linux allows overlays in a user namespace
        "layer_size": min(spec.limits.disk, spec.limits.memory // 2),
        "processors": machine.count_processors(spec.limits) if is_isolated else 0,  # without gVisor, it cannot mount
        "covers": COVERS.read_text(encoding="utf-8") if covers_inside else "",
        "filter": filter_steps.hex(),
        "arguments": ["--lease", f"{spec.lease_timeout:g}"],
    }
    limits = spec.limits
    seccomp = json.dumps(make_seccomp(is_isolated=is_isolated), separators=(",", ":"))
    return {
        "Image": image,
        "Entrypoint": [python, "-I", "-S", "-B", "-c", START.read_text(encoding="utf-8")],
        "Cmd": [f"{GUEST_DIR}/guest", json.dumps(settings, separators=(",", ":"))],
        "Env": ["PATH=/usr/bin:/bin", f"AGENTBOX_GUEST={json.dumps(guest)}"],
        "User": "0:0",
        "WorkingDir": "/",
        "Hostname": HOSTNAME,
        "NetworkDisabled": True,
        "Labels": dict(labels),
        "HostConfig": {
            "Runtime": runtime,
            "NetworkMode": "none",
            "IpcMode": "none",
            "Memory": limits.memory,
            "MemorySwap": limits.memory,
            "CpuPeriod": cgroups.CPU_PERIOD,
            "CpuQuota": max(1000, round(limits.cpus * cgroups.CPU_PERIOD)),
            # A backstop behind the limit inside, because gVisor has processes and threads of its own.
            "PidsLimit": limits.processes * cgroups.TASKS_PER_PROCESS + cgroups.TASKS_BASE
            if is_isolated
            else limits.processes,
            "ReadonlyRootfs": True,
            "CapDrop": ["ALL"],
            # Linux requires the third capability of a process that maps uid 0 of the parent namespace.
            "CapAdd": [*CONTAINER_CAPABILITIES, *([] if is_isolated else ["SETFCAP"])],
            "SecurityOpt": ["no-new-privileges", f"seccomp={seccomp}"],
            "MaskedPaths": list(oci.MASKED),
            "ReadonlyPaths": list(oci.READ_ONLY),
            "Ulimits": [{"Name": name.lower(), "Soft": value, "Hard": value} for name, value in rlimits.items()],
            "Tmpfs": make_tmpfs(limits, maps, is_root=spec.is_root),
            "Mounts": list(mounts),
            "LogConfig": {"Type": "json-file", "Config": {"max-size": "1m", "max-file": "1"}},
            "RestartPolicy": {"Name": "no"},
            "AutoRemove": False,
        },
    }


def _map_text(entries: Sequence[tuple[int, int, int]]) -> str:
    return "".join(f"{inner} {outer} {count}\n" for inner, outer, count in entries)


__all__ = ["LABEL", "make_container", "make_image", "make_labels", "make_mounts"]
