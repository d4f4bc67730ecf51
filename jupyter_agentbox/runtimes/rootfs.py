"""Plan the file system that a sandbox starts with: which host paths are visible, where, and which files are generated.

This module only plans. :mod:`.launcher` carries out the steps in a mount namespace that no other process sees. The root
is a small file system of its own with read-only binds in it, so anything that is not named here does not exist inside:
no ``/root``, ``/home``, ``/var``, ``/run``, ``/opt``, ``/srv``, ``/mnt``, and no device or socket of the host.

The hidden and read-only entries of a work folder are those that exist at the start, at any depth. If the search for
them cannot be completed, the start is refused. An entry that gets such a name later is an ordinary one, and so is a
file that a program outside puts in a covered file's place.

Steps, with paths relative to the stage::

    ("folder", path, mode, inner owner)
    ("file", path, text)
    ("link", path, target)
    ("bind", path, source, is_writable)
    ("workspace", path, source, device, inode, patterns, is_writable)
    ("added", path, source, device, inode, patterns, is_writable)   a folder that a person added
    ("covered", path)                      list of the workspace's covered entries, to cover them inside as well
    ("config", absolute path, text)        the OCI configuration
"""

from __future__ import annotations

import compileall
import functools
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jupyter_agentbox.errors import InvalidRequest
from jupyter_agentbox.guest import covers
from jupyter_agentbox.linux import GUEST, get_runtime_directories
from jupyter_agentbox.names import Names
from jupyter_agentbox.spec import CLAIM_DIR, GUEST_DIR, HOME, HOSTNAME, USER_ID, WORKSPACE, Mount, SandboxSpec

Step = tuple[Any, ...]

#: What the launcher needs on the stage to cover entries; see :class:`.launcher.Covers`.
_STAGE_FILES: tuple[Step, ...] = (
    ("folder", "empty", 0o555, 0),
    ("file", "nothing", covers.NOTE),
    ("folder", "hold", 0o755, 0),
    ("file", "hold-file", ""),
)

#: Entries of the host's root besides /usr. Each becomes a link or a directory, as it is on the host.
TOP_LEVEL = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
#: Entries of the host's /etc. Only files that every user may read are shown.
ETC = (
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "ssl/certs", "ssl/openssl.cnf", "ca-certificates.conf",
    "ca-certificates/extracted", "pki/tls/certs", "pki/tls/openssl.cnf", "pki/ca-trust/extracted", "crypto-policies",
    "timezone", "mime.types", "fonts", "magic", "inputrc", "bash.bashrc", "profile", "services", "protocols",
    "gai.conf", "debian_version", "os-release", "R", "ImageMagick-6", "ImageMagick-7",
)  # fmt: skip
#: Additional entries for package managers, in profiles whose user code is root.
PACKAGE_MANAGER = (
    "etc/apt/sources.list", "etc/apt/sources.list.d", "etc/apt/trusted.gpg.d", "etc/apt/keyrings", "etc/dpkg",
    "etc/debconf.conf", "etc/adduser.conf", "etc/deluser.conf", "etc/login.defs", "var/lib/dpkg",
)  # fmt: skip

#: Certificate authorities that the host trusts, including a company's own. Programs of an image trust them too.
BUNDLE = "etc/ssl/certs/ca-certificates.crt"

#: Folders that cannot be a workspace. For the second group this includes everything beneath them.
NO_WORKSPACE = frozenset({"/", "/home", "/root", "/opt", "/srv", "/mnt", "/media", "/var", "/tmp", "/run"})
SYSTEM_TREES = ("/usr", "/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/boot", "/dev", "/proc", "/sys", "/run")


def make_plan(
    spec: SandboxSpec,
    *,
    guest: Path,
    workspace: Path,
    is_private: bool,
    user: int,
    host: Path = Path("/"),
    python: Path | None = None,
) -> list[Step]:
    """Return the steps that build the root at ``root/`` and the work folder at ``workspace/`` of the stage.

    Parameters
    ----------
    spec : SandboxSpec
        The sandbox's specification.
    guest : Path
        Directory of the guest program.
    workspace : Path
        Host folder for ``/workspace``, already checked.
    is_private : bool
        Whether the folder belongs to the sandbox itself, so that nothing in it is covered.
    user : int
        Inner id of user code.
    host : Path
        Root of the host; only tests use another one.
    python : Path, optional
        Installation prefix of the interpreter that runs the guest.
    """
    steps = [
        *_make_folders(user),
        *(_show_image(spec.root, spec.mounts, host) if spec.root else _show_host(host, spec.is_root)),
        *_make_etc(user, accounts=(spec.root or host) / "etc" if spec.is_root else None),
    ]
    if python and not spec.root:
        # Under both the given and the real path: an interpreter finds its library through either.
        for prefix in dict.fromkeys((str(python), os.path.realpath(python))):
            steps += _bind_once(steps, prefix, prefix, is_writable=False)
    for item in spec.mounts:
        if item.is_added:
            steps += _show_added(item, spec)
            continue
        steps += _bind_once(steps, item.target, str(item.source), item.is_writable)
    steps.append(("bind", f"root{GUEST_DIR}/guest", str(guest), False))
    if spec.layout != "plain":
        # The folder is mounted beneath another mount, because a process that has a mount's root open does not see what
        # is mounted over that root.
        steps += [
            ("folder", "claim/work", 0o755, 0),
            ("folder", f"root{CLAIM_DIR}", 0o700, 0),
        ]
    if spec.layout != "plain" or has_covers(spec):
        steps += [("file", f"root{GUEST_DIR}/{name}", text) for name, text in covers.FILES.items()]
    if spec.layout != "waiting":
        steps.append(_show_workspace(spec, workspace, is_private))
    return steps


def has_covers(spec: SandboxSpec) -> bool:
    """Return whether the work folder may contain entries that must be covered."""
    return spec.workspace is not None and bool(spec.hidden or spec.read_only)


def make_claim_plan(spec: SandboxSpec, workspace: Path, *, is_private: bool) -> list[Step]:
    """Return the steps that build only the workspace, for a ``waiting`` sandbox; see :func:`make_plan`."""
    return [
        ("folder", "claim/work", 0o755, 0),
        *_STAGE_FILES,
        _show_workspace(spec, workspace, is_private),
    ]


def _show_workspace(spec: SandboxSpec, workspace: Path, is_private: bool) -> Step:
    found = workspace.stat()
    patterns: tuple[list[str], list[str]] = ([], []) if is_private else (list(spec.hidden), list(spec.read_only))
    is_writable = getattr(spec, "workspace_mode", "rw") == "rw"
    path = "workspace" if spec.layout == "plain" else "claim/work"
    return ("workspace", path, str(workspace), found.st_dev, found.st_ino, patterns, is_writable)


def _show_added(item: Mount, spec: SandboxSpec) -> list[Step]:
    """Show a folder that a person added, read-only and with its hidden entries covered."""
    found = item.source.stat()
    path = f"root{item.target}"
    return [
        ("folder", path, 0o755, 0),
        ("added", path, str(item.source), found.st_dev, found.st_ino, (list(spec.hidden), []), False),
    ]


def _make_folders(user: int) -> list[Step]:
    folders: list[Step] = [
        ("folder", "root", 0o755, 0),
        ("folder", "workspace", 0o755, 0),
        *_STAGE_FILES,
    ]
    folders += [
        ("folder", f"root/{name}", 0o755, 0) for name in ("proc", "sys", "dev", "dev/shm", "etc", "run", "home")
    ]
    # runsc would mount an unbounded file system of its own over an empty /tmp.
    folders += [
        ("folder", "root/tmp", 0o1777, 0),
        ("folder", "root/tmp/.X11-unix", 0o1777, 0),
        ("folder", f"root{GUEST_DIR}", 0o700, 0),
        ("folder", f"root{GUEST_DIR}/link", 0o700, 0),
        ("folder", f"root{GUEST_DIR}/layer", 0o700, 0),
        ("folder", f"root{WORKSPACE}", 0o755, 0),
        ("folder", f"root{HOME}", 0o755, user),
        ("folder", f"root{HOME}/.cache", 0o755, user),
    ]
    return folders


def _show_host(host: Path, has_package_manager: bool) -> list[Step]:
    steps: list[Step] = [("bind", "root/usr", str(host / "usr"), False)]
    for name in TOP_LEVEL:
        path = host / name
        if path.is_symlink():
            steps.append(("link", f"root/{name}", os.readlink(path)))
        elif path.is_dir():
            steps.append(("bind", f"root/{name}", str(path), False))
    steps += [("folder", f"root/var/{name}", 0o755, 0) for name in ("lib", "cache", "log")]
    steps.append(("folder", "root/var/tmp", 0o1777, 0))
    shown = [f"etc/{name}" for name in ETC] + list(PACKAGE_MANAGER if has_package_manager else ())
    for name in shown:
        path = host / name
        if path.is_symlink():
            steps.append(("link", f"root/{name}", os.readlink(path)))
        elif _is_public(path):
            steps.append(("bind", f"root/{name}", str(path), False))
    zone = host / "etc/localtime"
    if zone.is_symlink():
        steps.append(("link", "root/etc/localtime", os.readlink(zone)))
    elif _is_public(zone):
        steps.append(("bind", "root/etc/localtime", str(zone), False))
    if has_package_manager:
        steps += [("folder", f"root/var/{name}/partial", 0o755, 0) for name in ("lib/apt/lists", "cache/apt/archives")]
        steps += [("folder", "root/var/cache/debconf", 0o755, 0), ("folder", "root/var/log/apt", 0o755, 0)]
        steps += [("folder", f"root/etc/apt/{name}", 0o755, 0) for name in ("preferences.d", "apt.conf.d")]
        # One user namespace with few ids has no second user to drop privileges to.
        steps.append(("file", "root/etc/apt/apt.conf.d/00sandbox", 'APT::Sandbox::User "root";\n'))
    return steps


def _show_image(image: Path, mounts: Sequence[Mount], host: Path) -> list[Step]:
    if (image / "etc").is_symlink():  # the link would show the host's /etc
        raise InvalidRequest(f"the image directory {image} must contain a folder /etc, not a link", field="root")
    targets = [item.target for item in mounts]
    own = {"proc", "sys", "dev", "run", "tmp", "home", "etc", WORKSPACE.strip("/")}
    names = set(os.listdir(image)) - own
    steps = _show_entries(image, "", names, targets)
    steps += _show_entries(image, "/etc", set(os.listdir(image / "etc")) - ETC_MADE, targets)
    bundle = host / BUNDLE
    is_there = not any((image / part).is_symlink() for part in ("etc/ssl", "etc/ssl/certs", BUNDLE))
    if is_there and (image / BUNDLE).is_file() and _is_public(bundle):
        steps.append(("bind", f"root/{BUNDLE}", str(bundle), False))
    return steps


def _show_entries(image: Path, base: str, names: set[str], targets: Sequence[str]) -> list[Step]:
    """Bind the entries of an image's folder. A folder that must contain a mount point is created instead."""
    steps: list[Step] = []
    for name in sorted(names):
        inside = f"{base}/{name}"
        path = image / inside[1:]
        if path.is_symlink():
            steps.append(("link", f"root{inside}", os.readlink(path)))
        elif path.is_dir() and any(target.startswith(inside + "/") for target in targets):
            steps.append(("folder", f"root{inside}", 0o755, 0))
            steps += _show_entries(image, inside, set(os.listdir(path)), targets)
        elif path.is_dir() or path.is_file():
            steps.append(("bind", f"root{inside}", str(path), False))
    return steps


#: Files of /etc that are always generated.
ETC_MADE = frozenset({"passwd", "group", "hosts", "hostname", "resolv.conf", "nsswitch.conf", "shells"})


def _make_etc(user: int, *, accounts: Path | None) -> list[Step]:
    shell = "/bin/bash"
    passwd = [
        f"root:x:0:0:root:{'/root' if user else HOME}:{shell}",
        f"user:x:{USER_ID}:{USER_ID}:user:{HOME}:{shell}",
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin",
    ]
    group = ["root:x:0:", f"user:x:{USER_ID}:", "nogroup:x:65534:"]
    if accounts:
        # Packages refer to system accounts by name; accounts of people are left out.
        passwd += _read_accounts(accounts / "passwd", 7)
        group += _read_accounts(accounts / "group", 4)
    texts = {
        "passwd": passwd,
        "group": group,
        "hostname": [HOSTNAME],
        "hosts": [f"127.0.0.1 localhost {HOSTNAME}", "::1 localhost ip6-localhost ip6-loopback"],
        "resolv.conf": ["nameserver 127.0.0.1", "options timeout:5 attempts:1"],
        "nsswitch.conf": ["passwd: files", "group: files", "hosts: files dns", "networks: files", "services: files"],
        "shells": ["/bin/sh", "/bin/bash"],
    }
    return [("file", f"root/etc/{name}", "\n".join(lines) + "\n") for name, lines in texts.items()]


def _read_accounts(path: Path, fields: int) -> list[str]:
    """Return the rows of system accounts, without members or descriptions."""
    try:
        rows = [line.split(":") for line in path.read_text(errors="replace").splitlines()]
    except OSError:
        return []
    found = []
    for row in rows:
        if len(row) == fields and row[2].isdigit() and 0 < int(row[2]) < 1000:
            rest = [row[3], "", *row[5:]] if fields == 7 else [""]
            found.append(":".join([row[0], "x", row[2], *rest]))
    return found


def _bind_once(steps: list[Step], target: str, source: str, is_writable: bool) -> list[Step]:
    """Bind a path, unless the same host path is already visible there, such as an interpreter in /usr."""
    for step, path, *rest in steps:
        if step == "bind" and not is_writable:
            shown, where = str(rest[0]).rstrip("/"), path.removeprefix("root")
            if source == target and (target + "/").startswith(where + "/") and shown == where:
                return []
    return [("bind", f"root{target}", source, is_writable)]


def _is_public(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    wanted = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) else 0)
    return mode & wanted == wanted and (stat.S_ISDIR(mode) or stat.S_ISREG(mode))


def find_workspace(spec: SandboxSpec, directory: Path, state_dir: str) -> Path:
    """Return the folder to mount at ``/workspace``, which is created if the sandbox has one of its own.

    Raises
    ------
    InvalidRequest
        See :func:`check_workspace`.
    """
    if spec.workspace is None:
        workspace = directory / "work"
        workspace.mkdir(mode=0o700, exist_ok=True)
        return workspace
    own = [Path(state_dir)] if state_dir else []
    return check_workspace(spec.workspace, spec.hidden, (*own, directory, *get_runtime_directories()))


def check_workspace(folder: Path, hidden: tuple[str, ...], forbidden: tuple[Path, ...]) -> Path:
    """Return the real path of a folder after checking that it may be mounted at ``/workspace``.

    Parameters
    ----------
    folder : Path
        The requested folder.
    hidden : tuple of str
        Patterns of entries that stay hidden.
    forbidden : tuple of Path
        Directories of this package: the state, sockets and logs of all sandboxes.

    Raises
    ------
    InvalidRequest
        The path is not a folder, belongs to the system, or would expose a forbidden directory.
    """
    try:
        real = folder.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise InvalidRequest(f"cannot open the work folder {folder}: {error}", field="workspace") from error
    if not real.is_dir():
        raise InvalidRequest(f"the work folder {folder} is not a folder", field="workspace")
    text = str(real)
    is_system = any(text == tree or text.startswith(tree + "/") for tree in SYSTEM_TREES)
    if (text in NO_WORKSPACE and not (text == os.path.expanduser("~") and hidden)) or is_system:
        raise InvalidRequest(
            f"{real} cannot be a work folder, because it is a system folder; put the notebook into a folder of its own",
            field="workspace",
        )
    for own in forbidden:
        below = os.path.realpath(own)
        if text == below or text.startswith(below + "/"):
            raise InvalidRequest(f"{real} belongs to agentbox itself; choose another work folder", field="workspace")
        if below.startswith(text + "/"):
            parts = below[len(text) + 1 :].split("/")
            if not Names(hidden).is_hidden(parts):
                raise InvalidRequest(
                    f"{real} contains {below}, which belongs to agentbox; choose another folder, or add {parts[0]}"
                    " to hidden_files of the profile",
                    field="workspace",
                )
    return real


def find_guest_python() -> tuple[str, Path]:
    """Return the path and installation prefix of the interpreter that runs the guest in the view of the host."""
    compile_guest(GUEST)
    return getattr(sys, "_base_executable", None) or sys.executable, Path(sys.base_prefix)


@functools.lru_cache(maxsize=1)
def compile_guest(folder: Path) -> None:
    """Compile the guest program, once per process, because nothing is written to its folder from inside.

    ``pip install`` also compiles it. Without this call, each start from a source checkout would compile the guest
    again.
    """
    if os.access(folder, os.W_OK):
        compileall.compile_dir(folder, quiet=2)
