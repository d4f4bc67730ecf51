"""The import cache: the modules that ipykernel imports at startup, compiled, in one file instead of hundreds.

Opening a file takes twenty times as long in gVisor as outside, and each import looks at several files. So one file in
the state directory contains the code of these modules. :mod:`.import_gather` builds it from the server's own
environment. A new sandbox gets a copy in its link's directory, unless a file or folder that the cache was built from
has changed since. The cache is only for a kernel that is the first program in the sandbox and uses the same interpreter
with the same search path; see ``guest.ipykernel.launch_ipykernel``. The environment's files remain authoritative: all
other imports, and later ones, read them.
"""

from __future__ import annotations

import functools
import logging
import marshal
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jupyter_agentbox.linux import GUEST, NEW, PACKAGE, remove_unfinished
from jupyter_agentbox.spec import SandboxSpec

from .import_gather import make_stamp

log = logging.getLogger(__name__)

#: Name of the cache's folder in the state directory, and of the cache file in a sandbox's link directory.
FOLDER, NAME = "imports", "imports"
#: Seconds for building the cache, and its maximum size in bytes.
MAKE_TIMEOUT, MAX_SIZE = 60.0, 64 * 1024 * 1024
_GATHER = Path(__file__).with_name("import_gather.py")


def read(state_dir: Path) -> bytes | None:
    """Return the content of the cache, or None if there is none or its sources have changed. Blocks."""
    path = _find(state_dir)
    try:
        content = path.read_bytes() if path.stat().st_size <= MAX_SIZE else b""
        header: dict[str, Any] = marshal.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        stamps = header["stamps"]
    except (OSError, ValueError, EOFError, TypeError, KeyError):
        return None
    return content if all(make_stamp(path) == stamp for path, stamp in stamps.items()) else None


def install(directory: Path, spec: SandboxSpec) -> None:
    """Give the guest of a new sandbox a copy of the cache, if the guest can use it. Blocks.

    Parameters
    ----------
    directory : Path
        The sandbox's directory, in ``sandboxes`` of the state directory.
    spec : SandboxSpec
    """
    # If a mount shows something other than the host has at that path, the modules may differ.
    if spec.root is not None or any(str(mount.source) != mount.target for mount in spec.mounts):
        return
    content = read(directory.parents[1])
    if content is not None:
        # A copy, because code inside may be able to write to it. The rename makes it appear atomically.
        fresh = directory / NAME
        try:
            fresh.write_bytes(content)
            fresh.replace(directory / "link" / NAME)
        except OSError as error:
            log.warning("a sandbox starts without the import cache: %s", error)
            fresh.unlink(missing_ok=True)


def measure(directory: Path) -> int:
    """Return the allocated bytes of the copies that :func:`install` makes for a sandbox's directory."""
    try:
        return _find(directory.parents[1]).stat().st_blocks * 512
    except OSError:
        return 0


def make(state_dir: Path) -> bool:
    """Build the cache unless it is up to date, and return whether it exists afterward. Blocks for some seconds.

    If it cannot be built, kernels start without it, and the log gives the reason.
    """
    clear(state_dir)
    if read(state_dir) is not None:
        return True
    target = _find(state_dir)
    target.parent.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=NEW, dir=target.parent) as folder:
        made = Path(folder) / NAME
        command = [sys.executable, "-I", "-B", str(_GATHER), str(GUEST / "ipykernel"), str(made)]
        # Nothing from the server's environment: the same modules as inside the sandbox must be imported.
        env = {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": folder, "IPYTHONDIR": f"{folder}/ipython"}
        try:
            subprocess.run(
                command, env=env, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, timeout=MAKE_TIMEOUT,
                check=True,
            )  # fmt: skip
            made.replace(target)
        except subprocess.CalledProcessError as error:
            words = error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            log.warning("cannot build the import cache, so cold starts are slower: %s", words[:500])
        except (OSError, subprocess.TimeoutExpired) as error:
            log.warning("cannot build the import cache, so cold starts are slower: %s", error)
    return read(state_dir) is not None


def clear(state_dir: Path) -> None:
    """Remove incomplete caches that killed builds have left."""
    remove_unfinished(state_dir / FOLDER, 2 * MAKE_TIMEOUT)


@functools.lru_cache(maxsize=16)
def _find(state_dir: Path) -> Path:
    """Return the path of the cache. Each interpreter and installation of this package has its own."""
    import hashlib

    name = hashlib.sha256(f"{sys.executable}\0{sys.version}\0{PACKAGE}".encode()).hexdigest()[:16]
    return state_dir / FOLDER / name
