"""The import cache: what ipykernel imports as it starts, compiled, in one file instead of hundreds.

To open a file costs twenty times as much in gVisor as outside, and an import looks at several. So the code of those
modules lies in one file of the state directory, made from the server's own environment by :mod:`.import_gather`. A new
sandbox gets a copy in its link's directory, if not one of the files and folders that it was made of has changed since.
It is for a kernel that is the first program there, of the same interpreter with the same search path; see
``guest.ipykernel.launch_ipykernel``. The files of the environment stay the truth: what else is imported, or later, is
theirs.
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

#: Its name in the state directory, and in the directory of a sandbox's link.
FOLDER, NAME = "imports", "imports"
#: Seconds that making it may take, and bytes that it may have.
MAKE_TIMEOUT, MAX_SIZE = 60.0, 64 * 1024 * 1024
_GATHER = Path(__file__).with_name("import_gather.py")


def read(state_dir: Path) -> bytes | None:
    """Return its content, if there is one and all is as it was; else None. Blocks."""
    path = _find(state_dir)
    try:
        content = path.read_bytes() if path.stat().st_size <= MAX_SIZE else b""
        header: dict[str, Any] = marshal.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        stamps = header["stamps"]
    except (OSError, ValueError, EOFError, TypeError, KeyError):
        return None
    return content if all(make_stamp(path) == stamp for path, stamp in stamps.items()) else None


def give(directory: Path, spec: SandboxSpec) -> None:
    """Put a copy where the guest of a new sandbox finds it, if it can be of use there. Blocks.

    Parameters
    ----------
    directory : Path
        The sandbox's, in ``sandboxes`` of the state directory.
    spec : SandboxSpec
    """
    # Where something else is mounted than lies there on the host, modules may be other ones.
    if spec.root is not None or any(str(mount.source) != mount.target for mount in spec.mounts):
        return
    content = read(directory.parents[1])
    if content is not None:
        # A copy, as code inside may be able to write it; whole or not at all.
        fresh = directory / NAME
        try:
            fresh.write_bytes(content)
            fresh.replace(directory / "link" / NAME)
        except OSError as error:
            log.warning("a sandbox starts without the import cache: %s", error)
            fresh.unlink(missing_ok=True)


def measure(directory: Path) -> int:
    """Return the allocated bytes of the copies that :func:`give` makes for a sandbox's directory."""
    try:
        return _find(directory.parents[1]).stat().st_blocks * 512
    except OSError:
        return 0


def make(state_dir: Path) -> bool:
    """Make it anew, unless all is as it was; whether there is one now. Blocks for some seconds.

    Where it can't be made kernels start without it, and the log says why.
    """
    clear(state_dir)
    if read(state_dir) is not None:
        return True
    target = _find(state_dir)
    target.parent.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=NEW, dir=target.parent) as folder:
        made = Path(folder) / NAME
        command = [sys.executable, "-I", "-B", str(_GATHER), str(GUEST / "ipykernel"), str(made)]
        # Nothing of the server's: what is imported then is what is imported inside.
        env = {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": folder, "IPYTHONDIR": f"{folder}/ipython"}
        try:
            subprocess.run(
                command, env=env, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, timeout=MAKE_TIMEOUT,
                check=True,
            )  # fmt: skip
            made.replace(target)
        except subprocess.CalledProcessError as error:
            words = error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            log.warning("no import cache was made, so kernels start cold without: %s", words[:500])
        except (OSError, subprocess.TimeoutExpired) as error:
            log.warning("no import cache was made, so kernels start cold without: %s", error)
    return read(state_dir) is not None


def clear(state_dir: Path) -> None:
    """Remove what those that were killed as they made one have left."""
    remove_unfinished(state_dir / FOLDER, 2 * MAKE_TIMEOUT)


@functools.lru_cache(maxsize=16)
def _find(state_dir: Path) -> Path:
    """One for each interpreter and installation of this package that share the state directory."""
    import hashlib

    name = hashlib.sha256(f"{sys.executable}\0{sys.version}\0{PACKAGE}".encode()).hexdigest()[:16]
    return state_dir / FOLDER / name
