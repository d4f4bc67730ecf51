"""Try published container escapes from inside: as user code, and as the guest, which may be compromised too.

Only effects *outside* count. Each test therefore checks the host afterwards, or looks for data that only the host has.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_agentbox.runtimes import Runtime
from jupyter_agentbox.spec import MIB, Limits, SandboxSpec

from .box import STANDIN, Box

#: Try each escape as both: the guest has the most privileges of all programs inside.
WHO = pytest.mark.parametrize("who", ["user", "root"])


class EscapeContract:
    """The suite. All tests share one sandbox, in its own directory."""

    @pytest.fixture(scope="class")
    @classmethod
    def runtime(cls, state_dir: Path) -> Runtime:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def state_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("escapes") / "state"

    @pytest.fixture(scope="class")
    @classmethod
    def workspace(cls, state_dir: Path) -> Path:
        path = state_dir.parent / "notebooks"
        path.mkdir()
        return path

    @pytest.fixture(scope="class")
    @classmethod
    def box(cls, runtime: Runtime, state_dir: Path, workspace: Path) -> Iterator[Box]:
        limits = Limits(memory=512 * MIB, cpus=2, processes=60, disk=64 * MIB)
        with Box(runtime, state_dir, f"{os.getpid()}-escapes", SandboxSpec(workspace=workspace, limits=limits)) as box:
            yield box

    @pytest.fixture
    def mark(self, state_dir: Path) -> Iterator[Path]:
        """File on the host that an escape would create, in a directory that is not visible inside."""
        path = state_dir.parent / "escaped"
        yield path
        assert not path.exists(), "code inside has run a program outside"

    @WHO
    def test_release_agent_of_a_control_group(self, box: Box, mark: Path, who: str) -> None:
        box.run(
            "mkdir -p /tmp/cg; for kind in memory rdma cpu pids; do mount -t cgroup -o $kind cgroup /tmp/cg && break;"
            f" done; mkdir -p /tmp/cg/x; printf '#!/bin/sh\\ntouch {mark}\\n' > /tmp/agent; chmod +x /tmp/agent;"
            " for top in /tmp/cg /sys/fs/cgroup/*; do echo 1 > $top/x/notify_on_release;"
            f" echo /tmp/agent > $top/release_agent; echo '{mark.parent}/agent' > $top/release_agent;"
            ' sh -c "echo \\$\\$ > $top/x/cgroup.procs"; done',
            who,
        )
        for path in Path("/sys/fs/cgroup").glob("*/release_agent"):
            assert "agent" not in path.read_text().replace("release_agent", "")

    @WHO
    def test_core_pattern_and_its_like(self, box: Box, mark: Path, who: str) -> None:
        before = [path.read_text() for path in _HANDLERS]
        for path in _HANDLERS:
            box.run(f"echo '|/bin/touch {mark}' > {path}", who)
        box.run("ulimit -c unlimited; sh -c 'kill -SEGV $$'", who)
        assert [path.read_text() for path in _HANDLERS] == before

    @WHO
    def test_the_program_that_started_us_cannot_be_overwritten(self, box: Box, who: str) -> None:
        programs = [path for name in ("runsc", "runc", "python3", "sh") if (path := shutil.which(name))]
        before = [_identify(path) for path in programs]
        box.run(
            f"for exe in /proc/self/exe /proc/1/exe /proc/1/root/proc/self/exe {' '.join(programs)}; do"
            " (exec 3>>$exe && echo x >&3); done; true",  # last, because programs inside keep running
            who,
        )
        assert [_identify(path) for path in programs] == before
        assert "runsc" not in box.run("readlink /proc/1/exe", "root")

    @WHO
    def test_no_device_of_the_hosts_can_be_made_or_opened(self, box: Box, who: str) -> None:
        said = box.run(
            "cd /tmp; for node in 'b 8 0' 'b 254 0' 'b 259 0' 'c 1 1' 'c 1 2' 'c 10 200' 'c 10 229'; do"
            " rm -f node; mknod node $node && head -c 1 node >/dev/null && echo READ $node; done 2>/dev/null;"
            " for path in /dev/mem /dev/kmem /dev/port /dev/kmsg /dev/sda /dev/vda /dev/kvm /dev/net/tun /dev/fuse; do"
            " [ -e $path ] && head -c 1 $path >/dev/null 2>&1 && echo OPENED $path; done; true",
            who,
        )
        assert "READ" not in said
        assert not [line for line in said.splitlines() if line.startswith("OPENED") and "kmsg" not in line]

    def test_a_setuid_program_gives_nothing(self, box: Box, workspace: Path) -> None:
        said = box.run(
            "for name in su mount passwd newgrp chsh; do path=$(command -v $name) && echo | timeout 5 $path"
            " >/dev/null 2>&1; done; cp /usr/bin/id own; chmod 755 own; chmod 6755 own 2>/dev/null; ./own -u;"
            " touch made; chmod g+s made 2>/dev/null; install -m 4755 /usr/bin/id own2 2>/dev/null; ./own2 -u"
        )
        assert [line for line in said.splitlines() if line.isdigit()] in (["1000"], ["1000", "1000"]), said
        for path in workspace.iterdir():
            assert not path.stat().st_mode & 0o6000, path

    @WHO
    def test_a_user_namespace_gives_nothing_outside(self, box: Box, mark: Path, who: str) -> None:
        said = box.run(
            "unshare -Urm sh -c 'id -u; mount -t tmpfs none /mnt; mount -t proc none /tmp; mount --bind / /mnt;"
            f' echo "|/bin/touch {mark}" > /proc/sys/kernel/core_pattern; cat /etc/shadow; ls /root/.ssh;'
            " mount -t ext4 /dev/vda /mnt && echo MOUNTED; mount -t overlay overlay -o lowerdir=/ /mnt && ls"
            " /mnt/var/log/dpkg.log' 2>/dev/null; true",
            who,
        )
        assert "MOUNTED" not in said
        assert "dpkg.log" not in said
        assert "$" not in said  # a password hash from a shadow file

    @WHO
    def test_proc_and_sys_change_nothing_outside(self, box: Box, who: str) -> None:
        paths = [
            Path(path)
            for path in (
                "/proc/sys/kernel/hostname", "/proc/sys/vm/overcommit_memory", "/proc/sys/vm/drop_caches",
                "/proc/sys/kernel/randomize_va_space", "/proc/sys/net/ipv4/tcp_sack", "/sys/kernel/uevent_helper",
                "/sys/kernel/mm/transparent_hugepage/enabled", "/sys/power/state",
            )
        ]  # fmt: skip
        before = {path: _read(path) for path in paths}
        for path in paths:
            box.run(f"echo 7 > {path}; mount -o remount,rw /proc; mount -o remount,rw /sys; echo 7 > {path}", who)
        assert {path: _read(path) for path in paths} == before
        assert "WROTE" not in box.run("(echo h > /proc/sysrq-trigger) 2>/dev/null && echo WROTE; true", who)

    @WHO
    def test_what_is_mounted_inside_shows_nothing_of_the_host(self, box: Box, who: str) -> None:
        secret = Path(f"/var/tmp/agentbox-escape-{os.getpid()}")
        secret.write_text("the secret")
        try:
            said = box.run(
                "mkdir -p /tmp/m; for kind in proc sysfs devtmpfs 9p overlay ext4 xfs btrfs debugfs tracefs securityfs"
                " bpf cgroup2; do mount -t $kind none /tmp/m 2>/dev/null && find /tmp/m -maxdepth 3 2>/dev/null | head"
                f" -50; umount /tmp/m 2>/dev/null; done; cat {secret} /proc/*/root{secret} /proc/1/cwd{secret}"
                f" /../..{secret} /proc/self/fd/*/../../..{secret} 2>/dev/null; true",
                who,
            )
        finally:
            secret.unlink()
        assert "the secret" not in said
        assert secret.name not in said

    @WHO
    def test_no_process_of_the_hosts_is_seen_or_traced(self, box: Box, who: str) -> None:
        said = box.python(
            "import ctypes,os\n"
            "libc=ctypes.CDLL(None,use_errno=True)\n"
            f"print('SEEN') if os.path.exists('/proc/{os.getpid()}') and {os.getpid()} > 200 else None\n"
            f"for pid in (1, {os.getpid()}, {os.getppid()}):\n"
            "  if pid != 1 and libc.ptrace(16, pid, 0, 0) == 0: print('TRACED', pid)\n"
            "print(sorted(int(p) for p in os.listdir('/proc') if p.isdigit())[-1] < 1000)",
            who,
        )
        assert said.split() == ["True"]

    def test_user_code_can_neither_trace_nor_read_the_guest(self, box: Box) -> None:
        said = box.python(
            "import ctypes,os\n"
            "libc=ctypes.CDLL(None,use_errno=True)\n"
            "print(libc.ptrace(16, 1, 0, 0))\n"
            "for name in ('mem', 'root', 'cwd'):\n"
            "  try: print('READ', os.listdir('/proc/1/'+name) if name != 'mem'"
            " else open('/proc/1/'+name,'rb').read(9) or 1/0)\n"
            "  except (OSError, ZeroDivisionError): pass"
        )
        assert said.splitlines()[0] == "-1"
        assert "READ" not in said

    @WHO
    def test_the_guests_program_and_link_are_not_the_users(self, box: Box, who: str) -> None:
        listing = "ls /run/agentbox/link"
        if who == "user":
            assert "Permission denied" in box.run(listing)
        box.run(
            "echo x > /run/agentbox/guest/__main__.py; rm -rf /run/agentbox/guest; mv /run/agentbox /run/other", who
        )
        assert (STANDIN / "__main__.py").stat().st_size > 100

    @WHO
    def test_modules_namespaces_and_kernel_interfaces_are_refused(self, box: Box, who: str) -> None:
        said = box.python(
            "import ctypes,os\n"
            "libc=ctypes.CDLL(None,use_errno=True)\n"
            "calls={'init_module':175,'finit_module':313,'kexec_load':246,'open_by_handle_at':304,'bpf':321,"
            "'perf_event_open':298,'userfaultfd':323,'add_key':248,'swapon':167,'reboot':169,'iopl':172,"
            "'io_uring_setup':425,'settimeofday':164}\n"
            "for name,number in calls.items():\n"
            "  if libc.syscall(number,-1,0,0,0,0)>=0: print('DONE',name)\n",
            who,
        )
        assert "DONE" not in said


_HANDLERS = tuple(
    path
    for path in map(
        Path, ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/poweroff_cmd")
    )
    if path.exists()
)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _identify(path: str) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


__all__ = ["EscapeContract"]
