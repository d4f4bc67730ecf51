"""Run programs as ordinary users: as other ones if root runs the tests, otherwise as the user who runs them."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jupyter_agentbox.runtimes import cgroups, namespaces


@dataclass(frozen=True)
class User:
    """Ordinary user.

    Parameters
    ----------
    uid, gid : int
    has_ids : bool
        Whether the user has subordinate ids.
    unenforced : frozenset of str
        Limits that cannot be enforced, because no control group is delegated to the user.
    """

    uid: int
    gid: int
    has_ids: bool
    unenforced: frozenset[str]

    def run(self, command: Sequence[str], home: Path, python_path: str, timeout: float) -> str:
        """Run a program with a new home directory. Return its output; it must succeed."""
        home.mkdir()
        os.chown(home, self.uid, self.gid)
        home.chmod(stat.S_IRWXU)
        become = ["setpriv", f"--reuid={self.uid}", f"--regid={self.gid}", "--clear-groups"]
        ran = subprocess.run(
            [*(become if os.geteuid() == 0 else []), *command],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": python_path, "HOME": str(home)},
            cwd=home,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout


@contextmanager
def ordinary_user(*, has_ids: bool) -> Iterator[User]:
    """Yield an ordinary user, with subordinate ids or without. Only root can choose: others are what they are."""
    if os.geteuid() != 0:
        reasons = cgroups.detect().enforceable()
        unenforced = frozenset(limit for limit, reason in reasons.items() if reason is not None)
        spare = namespaces.find_spare_ids(os.geteuid())
        yield User(os.geteuid(), os.getegid(), spare is not None, unenforced)
    elif not has_ids:
        yield User(12345, 12345, False, frozenset({"memory", "cpus"}))
    else:
        name = f"agentbox{os.getpid()}"
        subprocess.run(["useradd", "--no-create-home", "--user-group", name], check=True, timeout=60)
        try:
            ids = [
                int(subprocess.run(["id", option, name], capture_output=True, text=True, check=True, timeout=60).stdout)
                for option in ("-u", "-g")
            ]
            yield User(*ids, True, frozenset({"memory", "cpus"}))
        finally:
            subprocess.run(["userdel", "--force", name], check=True, timeout=60)
