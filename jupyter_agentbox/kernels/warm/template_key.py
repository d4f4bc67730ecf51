"""Compute the key of a prestarted kernel: everything that it depends on.

If any input differs, another kernel is needed.

These are pure functions of a resolved spec. Everything that is not among the inputs is given to the kernel when it is
claimed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from jupyter_agentbox.linux import PACKAGE
from jupyter_agentbox.runtimes.machine import count_processors
from jupyter_agentbox.sandbox.drivers import prepare_argv
from jupyter_agentbox.spec import LIMIT_NAMES, WORKSPACE, Grant, SandboxSpec

#: Largest environment that an unclaimed kernel can be given, in bytes.
MAX_ENV = 48 * 1024
#: Variables that Python, ipykernel and the C library read when they start.
_STARTUP = re.compile(
    r"PYTHON.*|IPYTHON.*|JUPYTER_(?!SESSION).*|LD_.*|LC_.*|LANG|LANGUAGE|GLIBC_.*|MALLOC_.*|TZ|PATH|HOME|USER|LOGNAME"
    r"|SHELL|TMPDIR|XDG_.*|MPL.*|PYDEVD_.*|ZMQ_.*|OPENBLAS_CORETYPE"
)
#: Variables of one start or one terminal, which nothing reads before it runs code.
_TRANSIENT = re.compile(r"JPY_SESSION_NAME|KERNEL_.*|TERM|COLORTERM|NO_COLOR")
_CODE = (
    "guest",
    "sandbox/drivers/__init__.py",
    "runtimes/machine.py",
    "runtimes/oci.py",
    "runtimes/rootfs.py",
    "kernels/warm/template_key.py",
    "kernels/warm/templates.py",
)


def can_be_warm(spec: SandboxSpec, argv: Sequence[str]) -> bool:
    """Return whether a kernel can be started warm.

    It has to be an ipykernel with the embedded driver, whose settings can be applied when it is claimed.
    """
    return (
        spec.warm is not None
        and spec.driver == "auto"
        and not spec.is_root
        and prepare_argv(argv) != list(argv)
        and not spec.python.startswith(f"{WORKSPACE}/")  # an unclaimed sandbox has no work folder
        and len(json.dumps(dict(spec.env))) <= MAX_ENV
        and not any(mount.is_writable for mount in spec.mounts)
        and not (spec.init or spec.services)
        and all(getattr(spec.limits, name) <= getattr(spec.warm.limits, name) for name in LIMIT_NAMES)
    )


def unclaimed_spec(spec: SandboxSpec, *, lease: float) -> SandboxSpec:
    """Return the spec of an unclaimed sandbox: nothing that belongs to one user.

    Its limits are the profile's, except for those that programs see as the size of the machine.

    Parameters
    ----------
    spec : SandboxSpec
        The spec of some user's sandbox.
    lease : float
        Seconds that the sandbox lives without a process that renews its lease.
    """
    assert spec.warm is not None
    return replace(
        spec,
        limits=replace(spec.warm.limits, memory=spec.limits.memory, cpus=spec.limits.cpus),
        grant=Grant(),
        workspace=None,
        hidden=(),
        read_only=(),
        env=startup_environment(spec),
        lease_timeout=lease,
        freeze_after=0.0,
        kernel_id="",
        kernel_name="",
        owner="",
        notebook="",
        consent_id="",
        origin="",
        layout="waiting",
    )


def startup_environment(spec: SandboxSpec) -> dict[str, str]:
    """Return the variables that a kernel needs from its start.

    Others, such as an administrator's database passwords, are never in an unclaimed kernel. Preloaded modules may read
    any variable. With a preload, the result is therefore everything except the variables that differ from start to
    start.
    """
    assert spec.warm is not None
    if spec.warm.preload:
        return {name: value for name, value in spec.env.items() if not _TRANSIENT.fullmatch(name)}
    return {name: value for name, value in spec.env.items() if _STARTUP.fullmatch(name)}


def find_inputs(spec: SandboxSpec, argv: Sequence[str], fingerprint: Mapping[str, str]) -> dict[str, str]:
    """Return all inputs of the key as comparable texts. Blocks, because it inspects the environment's files.

    Parameters
    ----------
    spec, argv
        Of some user's kernel.
    fingerprint : mapping
        The runtime's fingerprint.
    """
    assert spec.warm is not None
    values = {
        "code": _hash_code(),
        # "python" and "python3" of one environment count as the same.
        "argv": [os.path.dirname(argv[0]), os.path.realpath(argv[0]), *argv[1:]],
        "env": startup_environment(spec),
        "limits": vars(spec.warm.limits),
        "machine": [spec.limits.memory, count_processors(spec.limits)],
        "preload": spec.warm.preload,
        "profile": spec.profile,
        "root": [str(spec.root), *(_stat(path) for path in _find_root_files(spec.root))],
        "mounts": [(item.target, str(item.source)) for item in spec.mounts],
        "packages": _hash_packages(spec),
        "runtime": spec.runtime,
    }
    return {**fingerprint, **{name: _hash(value) for name, value in values.items()}}


def make_key(inputs: Mapping[str, str]) -> str:
    """Return the key for these inputs."""
    return _hash(dict(inputs))


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def _stat(path: Path | str) -> str:
    try:
        found = os.stat(path)
    except OSError:
        return "none"
    return f"{found.st_ino} {found.st_size} {found.st_mtime_ns}"


def _hash_code() -> str:
    files: list[Path] = []
    for name in _CODE:
        files += sorted((PACKAGE / name).rglob("*.py")) if (PACKAGE / name).is_dir() else [PACKAGE / name]
    return _hash([(str(path), _stat(path)) for path in files])


def _find_root_files(root: Path | None) -> Iterator[Path]:
    if root is not None:
        for name in (".", "usr", "usr/bin", "usr/lib", "etc", "usr/lib/python3/dist-packages", "usr/local/lib"):
            yield root / name


def _hash_packages(spec: SandboxSpec) -> str:
    """Return a hash of the installed packages. Every installation creates or removes entries of these directories."""
    bases = (
        [spec.root / "usr", spec.root / "usr/local"] if spec.root is not None else [Path("/usr"), Path("/usr/local")]
    )
    seen: list[tuple[str, str]] = []
    for base in (*(item.source for item in spec.mounts), *bases):
        seen.append((str(base), _stat(base / "pyvenv.cfg")))
        for folder in (base, *sorted(base.glob("lib/python3*/*-packages"))):
            seen += [(str(path), _stat(path)) for path in (folder, *sorted(folder.glob("*.pth")))]
    return _hash(seen)
