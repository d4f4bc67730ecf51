"""Test what every runtime must do. Derive from :class:`RuntimeContract` and provide a ``runtime`` fixture.

The runtime must run the stand-in guest of this directory as PID 1. Attributes of the suite describe permitted
differences between runtimes. Everything else is mandatory.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from jupyter_agentbox.errors import InvalidRequest
from jupyter_agentbox.guest.covers import NOTE
from jupyter_agentbox.runtimes import Handle, Runtime
from jupyter_agentbox.spec import MIB, Cause, Limits, Mount, SandboxSpec

from .box import Box

MakeBox = Callable[..., Box]

LIMITS = Limits(memory=512 * MIB, cpus=2, processes=40, disk=64 * MIB)

#: Prints what programs use to find the number of processors and the size of memory.
MACHINE = """
import ctypes, json, os, re, subprocess
lines = dict(re.findall(r"(\\w+): +(\\d+) kB", open("/proc/meminfo").read()))
info = (ctypes.c_long * 16)()
assert ctypes.CDLL(None).sysinfo(info) == 0
print(json.dumps({
    "processors": [
        os.cpu_count(), len(os.sched_getaffinity(0)), os.sysconf("SC_NPROCESSORS_CONF"),
        int(subprocess.check_output(["nproc"])), int(subprocess.check_output(["nproc", "--all"])),
        open("/proc/cpuinfo").read().count("processor\\t"),
        len(re.findall("^cpu[0-9]", open("/proc/stat").read(), re.M)),
    ],
    "memory": [int(lines["MemTotal"]) * 1024, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), info[4]],
    "disk": [os.statvfs(path).f_blocks * os.statvfs(path).f_frsize for path in ("/tmp", "/home/user")],
    "available": [int(lines["MemAvailable"]) * 1024, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")],
}))
"""


#: Code that tries everything to change read-only entries, in a namespace of its own as well, as if it may mount.
_CHANGE_EVERYTHING = """
import ctypes, os, shutil, subprocess
libc = ctypes.CDLL(None)
names = ['.git/hooks', '.git/config', '.git/commondir', '.git/config.worktree', '.envrc', 'app/.vscode', 'hooks']
names += ['app/repo/.git/' + name for name in ('hooks', 'config', 'commondir')]
names += ['.git', 'app/repo/.git', 'app/repo', 'app']
def attempt(*calls):
    for call in calls:
        try:
            call()
        except OSError:
            pass
def change():
    for name in names:
        for path in (name, name + '/evil', name + '/pre-push', name + '/tasks.json'):
            attempt(
                lambda: open(path, 'w').write('evil'), lambda: os.truncate(path, 0), lambda: os.unlink(path),
                lambda: os.link('data.csv', path), lambda: os.symlink('data.csv', path), lambda: os.chmod(path, 0o777),
                lambda: os.rename('data.csv', path), lambda: os.link(path, 'linked'),
                lambda: open('linked', 'w').write('evil'),
                lambda: os.mkdir(path) if path.endswith(('hooks', 'dir')) else 0,
            )
        attempt(lambda: os.rename(name, 'moved'), lambda: os.rename('moved', name))
change()
if os.fork() == 0:
    libc.unshare(0x10000000 | 0x00020000)
    for name in names:
        target = ('/workspace/' + name).encode()
        libc.mount(b'none', target, b'none', 32 | 4096, None)
        libc.umount2(target, 0)
        libc.umount2(target, 2)
    change()
    os._exit(0)
os.wait()
"""


def _read_all(top: Path, *names: str) -> dict[str, str]:
    """Return the contents of files, and of the files in folders."""
    files = [path for name in names for path in ([top / name, *(top / name).rglob("*")])]
    return {str(path): path.read_text() for path in files if path.is_file()}


def _make_workspace(parent: Path) -> Path:
    path = parent / "notebooks"
    path.mkdir()
    (path / "data.csv").write_text("a,b\n1,2\n")
    return path


class RuntimeContract:
    """The suite. Tests that leave a sandbox as it was share one.

    Attributes
    ----------
    has_layer_in_memory : bool
        Whether files outside of the work folder count as memory instead of disk.
    covers_special : bool
        Whether hidden symbolic links and FIFOs are covered. If not, links keep their text, and FIFOs are refused.
    has_placeholders : bool
        Whether missing names of a Git directory cannot be created, and the folders of read-only entries not renamed.
    """

    has_layer_in_memory: ClassVar[bool] = False
    covers_special: ClassVar[bool] = True
    has_placeholders: ClassVar[bool] = True

    @pytest.fixture(scope="class")
    @classmethod
    def runtime(cls, state_dir: Path) -> Runtime:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def state_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("contract") / "state"

    @pytest.fixture
    def workspace(self, tmp_path: Path) -> Path:
        return _make_workspace(tmp_path)

    @pytest.fixture
    def spec(self, workspace: Path) -> SandboxSpec:
        return SandboxSpec(workspace=workspace, limits=LIMITS)

    @pytest.fixture(scope="class")
    @classmethod
    def make_box(cls, runtime: Runtime, state_dir: Path) -> MakeBox:
        numbers = itertools.count()

        def make(spec: SandboxSpec) -> Box:
            return Box(runtime, state_dir, f"{os.getpid()}-{next(numbers)}", spec)

        return make

    @pytest.fixture(scope="class")
    @classmethod
    def shared(cls, make_box: MakeBox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
        """Sandbox for tests that leave it as it was, with a work folder of its own."""
        with make_box(SandboxSpec(workspace=_make_workspace(tmp_path_factory.mktemp("shared")), limits=LIMITS)) as box:
            yield box

    @pytest.fixture(scope="class")
    @classmethod
    def other(cls, make_box: MakeBox) -> Iterator[Box]:
        """Second shared sandbox, with a private work folder."""
        with make_box(SandboxSpec(limits=LIMITS)) as box:
            yield box

    # Inside

    def test_user_code_has_no_rights(self, shared: Box) -> None:
        assert shared.run("id -u; id -g; id -G").split() == ["1000"] * 3
        status = dict(line.split(":\t") for line in shared.run("cat /proc/self/status").splitlines() if ":\t" in line)
        assert status["CapEff"] == status["CapPrm"] == status["CapInh"] == "0000000000000000"
        assert int(status["CapBnd"], 16) == 0b100_1110_0010  # the guest's own, out of reach without setuid
        assert "gVisor" in shared.run("dmesg")
        assert shared.run("hostname").strip() == "agentbox"

    def test_there_is_no_network_but_loopback(self, shared: Box) -> None:
        lines = shared.run("cat /proc/net/dev").splitlines()[2:]
        assert [line.split(":")[0].strip() for line in lines] == ["lo"]
        refused = shared.python("import socket;s=socket.socket();s.settimeout(5);print(s.connect_ex(('192.0.2.1',80)))")
        assert refused.strip() in ("101", "113")  # no route; refused at once

    def test_the_users_files_are_out_of_sight(self, shared: Box, other: Box) -> None:
        home = Path.home() / f".agentbox-canary-{os.getpid()}"
        secret = Path(f"/var/tmp/agentbox-canary-{os.getpid()}")
        try:
            for path in (home, secret):
                path.write_text("the secret")
            for path in (home, secret, other.directory / "state.json", Path("/etc/shadow"), Path("/etc/ssh")):
                assert "secret" not in shared.run(f"cat {path}", "root")
                assert "No such file" in shared.run(f"ls {path}", "root")
        finally:
            home.unlink(missing_ok=True)
            secret.unlink(missing_ok=True)
        shown = set(shared.run("ls /").split())
        assert not shown & {"opt", "srv", "mnt", "media", "boot", "lost+found"}
        assert shared.run("ls /home /run /var/lib", "root").split() == [
            "/home:", "user", "/run:", "agentbox", "/var/lib:",
        ]  # fmt: skip
        assert "Permission denied" in shared.run("ls /run/agentbox")

    def test_the_work_folder_is_the_users_and_writable(self, shared: Box) -> None:
        assert shared.spec.workspace is not None
        assert shared.run("cat data.csv") == "a,b\n1,2\n"
        shared.run("echo made inside > result; mkdir sub; echo x >> data.csv")
        assert (shared.spec.workspace / "result").read_text() == "made inside\n"
        assert (shared.spec.workspace / "result").stat().st_uid == os.geteuid()
        assert (shared.spec.workspace / "data.csv").read_text().endswith("x\n")

    def test_a_private_work_folder_is_kept_in_the_directory(self, other: Box) -> None:
        other.run("echo hello > kept; echo dot > .dot")
        assert other.run("cat .dot") == "dot\n"
        assert (other.directory / "work" / "kept").read_text() == "hello\n"

    def test_hidden_entries_of_every_kind_are_covered(
        self, make_box: MakeBox, spec: SandboxSpec, workspace: Path
    ) -> None:
        (workspace / ".git").mkdir()
        (workspace / ".git" / "config").write_text("canary")
        (workspace / ".env").write_text("canary")
        if self.covers_special:
            (workspace / ".link").symlink_to("data.csv")
            os.mkfifo(workspace / ".fifo")
        (workspace / ".wei rd\nname").write_text("canary")
        (workspace / "deep").mkdir()
        (workspace / "deep" / ".env").write_text("canary")
        (workspace / "secrets.txt").write_text("canary")
        for folder in range(3):
            (workspace / f"d{folder}").mkdir()
            for number in range(40):
                (workspace / f"d{folder}" / f".{number}").write_text("kept")
        with make_box(replace(spec, hidden=(".*", "secret*"))) as box:
            assert "canary" not in box.run("cat .git/* .env .wei* deep/.env secrets.txt; grep -r canary .")
            special = "cat .link; timeout 2 cat .fifo;" if self.covers_special else ""
            assert set(box.run(f"ls -A .git; cat .env; {special} echo $?").splitlines()) == {NOTE.strip(), "0"}
            box.run("rm -rf .git .env; mv .git git; mv .env env; ln .env hard; echo x > .env; touch .git/x", "root")
            assert "canary" not in box.run("grep -rs canary /workspace", "root")
            assert box.run("mv deep moved; cat moved/.env; cat data.csv").startswith(f"{NOTE}a,b")
            box.run("rm -rf d0/.* d1/.* d2/.*; for f in d2/.*; do echo x > $f; mv $f y; done", "root")
        assert (workspace / ".env").read_text() == "canary"
        assert (workspace / "moved" / ".env").read_text() == "canary"
        assert sorted(os.listdir(workspace / ".git")) == ["config"]
        kept = list(workspace.glob("d?/.*"))
        assert len(kept) == 120
        assert {path.read_text() for path in kept} == {"kept"}

    def test_what_code_inside_made_uncovers_nothing(self, make_box: MakeBox, shared: Box) -> None:
        assert shared.spec.workspace is not None
        workspace = shared.spec.workspace / "flooded"
        workspace.mkdir()
        deep = "/".join("abcdefgh")
        for folder in ("app", f"node_modules/{deep}"):
            (workspace / folder / ".ssh").mkdir(parents=True)
            (workspace / folder / ".ssh" / "config").write_text("canary")
            (workspace / folder / ".env").write_text("canary")
        flood = (
            "import os\nos.chdir('flooded')\nfor n in range(300): os.mkdir(f'.{n}')\n"
            "for n in range(1000): open(f'f{n}', 'w').close()\n"
            "for n in range(300): os.mkdir(f'd{n}'); os.mkdir(f'd{n}/.x')"
        )
        shared.python(flood)
        with make_box(replace(shared.spec, workspace=workspace)) as box:
            assert "canary" not in box.run("grep -rs canary /workspace; ls -A app")
            assert "canary" not in box.run("grep -rs canary /workspace", "root")

    def test_what_runs_on_the_host_is_visible_and_cannot_be_changed(
        self, make_box: MakeBox, spec: SandboxSpec, workspace: Path
    ) -> None:
        git = "git -c user.name=me -c user.email=me@host.example"
        subprocess.run(
            f"{git} init -q . && {git} add . && {git} commit -qm first && mkdir -p app/.vscode"
            f" && {git} init -q app/repo"
            " && rm -r app/repo/.git/hooks && echo evil=no > .envrc && echo {} > app/.vscode/tasks.json"
            " && ln -s hooks .husky && mkdir hooks && echo kept > hooks/pre-push",
            shell=True, cwd=workspace, check=True, timeout=60,
        )  # fmt: skip
        kept = (".git/config", ".git/hooks", ".envrc", "app/.vscode", "app/repo/.git/config", "hooks")
        before = _read_all(workspace, *kept)
        with make_box(spec) as box:
            assert box.run("cat .envrc app/.vscode/tasks.json hooks/pre-push") == "evil=no\n{}\nkept\n"
            ordinary = "export HOME=/tmp; git config --global safe.directory '*'; echo more >> data.csv"
            commit = "-c user.name=me -c user.email=me@host.example commit -qam"
            assert box.run(f"{ordinary}; git {commit} second && git log --format=%s") == "second\nfirst\n"
            assert "fatal" in box.run(f"{ordinary}; git remote add x y")
            made = f"{ordinary}; cd app/repo && echo 1 > new && git add new && git {commit} made && git log --format=%s"
            assert box.run(made) == "made\n"
            for who in ("user", "root"):
                box.python(_CHANGE_EVERYTHING, who, timeout=120.0)
        assert before == _read_all(workspace, *kept)
        if self.has_placeholders:
            for folder in (".git", "app/repo/.git"):
                assert not {"commondir", "config.worktree"} & set(os.listdir(workspace / folder))
            assert "hooks" not in os.listdir(workspace / "app/repo/.git")

    def test_more_hidden_entries_than_can_be_covered_refuse_the_start(
        self, make_box: MakeBox, spec: SandboxSpec, workspace: Path
    ) -> None:
        for folder in range(11):
            (workspace / f"d{folder}").mkdir()
            for number in range(1000):
                (workspace / f"d{folder}" / f".{number}").touch()
        spec = replace(spec, hidden=(".*",))
        with pytest.raises(InvalidRequest, match=r"hidden_files and read_only_files") as caught, make_box(spec):
            pass
        assert str(workspace) in str(caught.value)
        assert "10001" in str(caught.value)
        assert caught.value.field == "workspace"

    def test_no_socket_of_the_host_can_be_dialled(self, shared: Box, monkeypatch: pytest.MonkeyPatch) -> None:
        assert shared.spec.workspace is not None
        monkeypatch.chdir(shared.spec.workspace)  # the full path may be too long for a socket address
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("service.sock")
            server.listen()
            os.chmod("service.sock", 0o777)
            assert "service.sock" in shared.run("ls")
            dial = "import socket;s=socket.socket(socket.AF_UNIX);print(s.connect_ex('/workspace/service.sock'))"
            assert shared.python(dial, "root").strip() not in ("", "0")
            assert shared.python(dial).strip() not in ("", "0")
        os.unlink("service.sock")

    def test_mounts_appear_under_their_own_path_and_stay_as_they_are(
        self, make_box: MakeBox, spec: SandboxSpec, workspace: Path, tmp_path: Path
    ) -> None:
        private = tmp_path / "closed"
        environment = private / "env"
        environment.mkdir(parents=True)
        (environment / "lib.py").write_text("answer = 42\n")
        private.chmod(0o700)
        (private / "beside").write_text("canary")
        shown = tmp_path / "shown"
        shown.mkdir()
        shown.chmod(0o777)
        file = shown / "file"
        file.write_text("kept")
        file.chmod(0o666)  # so that only the mount can be the reason for a refusal
        (workspace / ".env").write_text("shown")
        flags = ("O_WRONLY", "O_WRONLY|os.O_TRUNC", "O_RDONLY|os.O_TRUNC", "O_RDWR|os.O_TRUNC|os.O_CREAT", "O_APPEND|2")
        calls = [f"os.open({str(file)!r}, os.{flag})" for flag in flags]
        calls += [f"os.{name}({str(file)!r}, {rest})" for name, rest in (
            ("truncate", "1"), ("utime", "(1, 1)"), ("chmod", "0o777"), ("setxattr", "'user.x', b'1'"),
            ("rename", repr(f"{shown}/other")), ("link", repr(f"{shown}/other")),
        )]  # fmt: skip
        calls += [f"os.unlink({str(file)!r})", f"os.mkdir({str(shown)!r} + '/x')", f"os.mkfifo({str(shown)!r} + '/x')"]
        tried = "".join(f"try: {call}\nexcept OSError: pass\n" for call in calls)  # some succeed, on a layer above
        mounts = (Mount(environment, str(environment)), Mount(shown, str(shown)))
        with make_box(replace(spec, mounts=mounts, hidden=())) as box:
            assert box.run("cat .env") == "shown", "nothing is hidden"
            assert box.run(f"cat {environment}/lib.py") == "answer = 42\n"
            box.run(f"echo changed > {environment}/lib.py", "root")
            assert "No such file" in box.run(f"cat {private}/beside", "root")
            before = file.stat()
            for who in ("user", "root"):
                assert box.python("import os\n" + tried + "print('tried')", who) == "tried\n"
                assert file.read_text() == "kept"
            after = file.stat()
            assert (after.st_mode, after.st_mtime_ns, after.st_size) == (before.st_mode, before.st_mtime_ns, 4)
            assert os.listdir(shown) == ["file"]
        assert (environment / "lib.py").read_text() == "answer = 42\n"

    def test_root_inside_can_be_had_by_profile_and_installs_packages(
        self, make_box: MakeBox, spec: SandboxSpec, workspace: Path, tmp_path: Path
    ) -> None:
        control = workspace / "pkg" / "DEBIAN" / "control"
        control.parent.mkdir(parents=True, mode=0o755)
        control.write_text(
            "Package: agentbox-probe\nVersion: 1\nArchitecture: all\nMaintainer: x <x@example.org>\nDescription: x\n"
        )
        tool = workspace / "pkg" / "usr" / "bin" / "agentbox-probe"
        tool.parent.mkdir(parents=True)
        tool.write_text("#!/bin/sh\necho installed\n")
        tool.chmod(0o755)
        subprocess.run(["dpkg-deb", "--build", "pkg", "probe.deb"], cwd=workspace, check=True, stdout=-3, timeout=60)
        shown = tmp_path / "shown"
        shown.mkdir()
        (shown / "file").write_text("kept")
        mounts = (Mount(shown, str(shown)),)
        limits = replace(spec.limits, disk=1024 * MIB)
        with make_box(replace(spec, is_root=True, mounts=mounts, limits=limits)) as box:
            assert box.handle.user == 0
            assert box.run("id -u; touch /tmp/x; chown 42:42 /tmp/x; stat -c %u /tmp/x").split() == ["0", "42"]
            status = dict(line.split(":\t") for line in box.run("cat /proc/self/status").splitlines() if ":\t" in line)
            for name in ("CapEff", "CapPrm", "CapBnd"):
                assert int(status[name], 16) == 0x8004_04FB  # only what package managers need
            made = "for path in /made /etc/made /usr/made /var/lib/made; do echo x > $path || echo no $path; done"
            assert box.run(f"{made}; mv /etc/hosts /etc/other && cat /etc/other | head -1").startswith("127.0.0.1")
            assert "x" in box.run("cat /made /usr/made; echo x > kept; cat kept data.csv")
            assert box.run(f"echo x > {shown}/new && cat {shown}/new {shown}/file") == "x\nkept"
            spoil = f"(echo y > {shown}/file); mount -o remount,rw,bind {shown}; (: > {shown}/file); rm {shown}/file"
            box.run(f"{spoil}; unshare -m sh -c 'mount --bind {shown} /tmp; (: > /tmp/file); rm -f /tmp/file'; echo")
            assert box.run("ls /root/.ssh /home /proc/1/root/root/.ssh 2>/dev/null").split() == ["/home:", "user"]
            path = "export PATH=/usr/sbin:/sbin:$PATH; "
            said = box.run(path + "apt-get install -y ./probe.deb 2>&1; agentbox-probe", timeout=200)
            assert said.endswith("installed\n"), said
        assert not Path("/usr/bin/agentbox-probe").exists()
        assert (shown / "file").read_text() == "kept"
        assert (workspace / "kept").stat().st_uid == os.geteuid()
        assert not [path for path in ("/made", "/etc/made", "/usr/made", "/var/lib/made") if Path(path).exists()]

    # Limits

    def test_out_of_memory_ends_this_sandbox_only_and_says_so(
        self, make_box: MakeBox, spec: SandboxSpec, shared: Box
    ) -> None:
        small = replace(spec, limits=replace(spec.limits, memory=192 * MIB))
        with make_box(small) as box:
            box.send("/usr/bin/python3 -c 'x = bytearray(1 << 30); x[::4096] = b\"x\" * len(x[::4096])'")
            box.wait_for_end(60)
            end = box.runtime.why_ended(box.handle, small.limits, box.directory)
        assert end.cause is Cause.OUT_OF_MEMORY
        assert end.exit_code == 137
        assert end.message == "out of memory (limit 192 MiB)"
        assert shared.run("echo fine") == "fine\n"

    def test_a_fork_bomb_is_stopped_and_the_sandbox_lives(self, shared: Box) -> None:
        bomb = (
            "import os,time\nmade=[]\n"
            "try:\n while len(made)<500:\n  made.append(os.fork())\n  if not made[-1]: time.sleep(300); os._exit(0)\n"
            "except OSError as error: print(len(made), error.errno)\n"
            "for pid in made: os.kill(pid, 9); os.waitpid(pid, 0)"
        )
        count, number = shared.python(bomb).split()
        assert int(count) <= shared.spec.limits.processes
        assert number == "11"
        assert shared.run("echo fine") == "fine\n"

    def test_programs_see_a_machine_as_large_as_the_limits(self, make_box: MakeBox, spec: SandboxSpec) -> None:
        limits = replace(spec.limits, memory=1024 * MIB, cpus=0.5)
        with make_box(replace(spec, limits=limits)) as box:
            seen = json.loads(box.python(MACHINE))
        assert set(seen["processors"]) == {1}, seen
        assert all(0.8 * limits.memory < size <= limits.memory for size in seen["memory"]), seen
        assert all(0 < size < limits.memory for size in seen["available"]), seen
        assert set(seen["disk"]) == {limits.disk}, seen

    def test_files_of_the_work_folder_may_be_large(self, shared: Box) -> None:
        large = (
            "import mmap, os\n"
            "with open('big', 'w+b') as file:\n"
            " file.seek(3 << 30); file.write(b'x'); file.flush(); print(os.stat('big').st_size)\n"
            " file.truncate(1 << 40); size = os.stat('big').st_size\n"
            " view = mmap.mmap(file.fileno(), size); view[900 << 30] = 7; view.flush()\n"
            " file.seek(900 << 30); print(size, file.read(1))\n"
            "os.unlink('big')"
        )
        assert shared.python(f"import os; os.chdir('/workspace')\n{large}").split("\n")[:2] == [
            str((3 << 30) + 1),
            f"{1 << 40} b'\\x07'",
        ]

    def test_one_file_cannot_fill_the_disk(self, shared: Box, other: Box) -> None:
        said = shared.run("dd if=/dev/zero of=/tmp/big bs=1M count=70 2>&1; rm /tmp/big")
        assert "No space left on device" in said, said
        said = other.run("dd if=/dev/zero of=/workspace/big bs=1M count=70 2>&1; stat -c %s big; rm big")
        assert "File too large" in said or "limit" in said, said
        assert str(64 * MIB) in said

    def test_usage_shows_what_many_files_take(self, other: Box) -> None:
        before = other.runtime.usage(other.handle, other.directory)
        assert before.memory > 10 * MIB
        assert before.cpu > 0
        other.run("for i in 1 2 3 4; do head -c 6000000 /dev/urandom > /var/tmp/$i; cp /var/tmp/$i .; done")
        after = other.runtime.usage(other.handle, other.directory)
        assert after.disk - before.disk > (20 if self.has_layer_in_memory else 40) * MIB
        if self.has_layer_in_memory:
            assert after.memory - before.memory > 20 * MIB
        assert after.cpu > before.cpu
        other.run("touch /proc/x; truncate -s 100T sparse")
        assert other.runtime.usage(other.handle, other.directory).disk < 100 * MIB
        other.run("rm sparse [1-4] /var/tmp/[1-4]")

    def test_disk_shared_memory_and_processor_time_are_bounded_even_unwatched(
        self, make_box: MakeBox, spec: SandboxSpec
    ) -> None:
        with make_box(replace(spec, limits=Limits(512 * MIB, cpus=0.5, processes=32, disk=1024 * MIB))) as box:
            before, started = box.runtime.usage(box.handle, box.directory), time.monotonic()
            box.run("for i in 1 2 3; do timeout 2 sh -c 'while :; do :; done' & done; wait")
            spent = box.runtime.usage(box.handle, box.directory).cpu - before.cpu
            assert spent < 0.5 * (time.monotonic() - started) + 0.3
            # Many files
            said = box.run(
                "cd /tmp; for i in 1 2 3 4 5 6; do fallocate -l 500M $i || echo refused; done; rm ?; echo fine"
            )
            assert said.count("refused") >= 2
            assert said.endswith("fine\n")
            # Half of the memory
            assert "No space left" in box.run("dd if=/dev/zero of=/dev/shm/x bs=1M count=400 2>&1; rm /dev/shm/x")

    # Lifecycle

    def test_an_end_is_quick_and_leaves_nothing(self, make_box: MakeBox, spec: SandboxSpec) -> None:
        tool = Path("/usr/lib") / f"agentbox-{os.getpid()}"
        with make_box(spec) as box:
            assert box.run(f"echo x > {tool}; echo y > $HOME/new; cat {tool} $HOME/new", "root") == "x\ny\n"
            assert not tool.exists()
            made = "echo z > $HOME/mine && touch ~/.cache/x /tmp/x /var/tmp/x /dev/shm/x && cat $HOME/mine"
            assert box.run(made) == "z\n"
            handle, runtime = box.handle, box.runtime
            assert str(box.directory) not in Path("/proc/mounts").read_text()
            started = time.monotonic()
            runtime.kill(handle)
            assert time.monotonic() - started < 30
            assert not runtime.is_alive(handle)
            assert runtime.why_ended(handle, spec.limits, box.directory).cause is Cause.KILLED
            runtime.kill(handle)  # may be repeated
            runtime.remove(handle, box.directory)
            runtime.remove(handle, box.directory)
            assert sorted(os.listdir(box.directory)) == ["link", "log"]
            assert not [path for path in handle.cgroups if Path(path).exists()]
        with make_box(spec) as box:
            assert "No such file" in box.run(f"ls {tool} $HOME/mine")
            box.send("", "quit")
            box.wait_for_end()
            assert box.runtime.usage(box.handle, box.directory).memory == 0, "the guest's own end is seen"

    def test_another_process_can_judge_and_end_it_even_frozen(self, make_box: MakeBox, spec: SandboxSpec) -> None:
        with make_box(spec) as box:
            handle = Handle.from_dict(json.loads(json.dumps(box.handle.to_dict())))
            assert handle == box.handle
            assert box.runtime.is_alive(handle)
            # It stands still while frozen, and goes on.
            assert box.runtime.freeze(box.handle)
            assert box.runtime.is_alive(box.handle)
            box.send("echo on")
            with pytest.raises(TimeoutError):
                box.read(1)
            box.runtime.thaw(box.handle)
            assert box.read() == "on\n"
            box.runtime.thaw(box.handle)
            assert box.runtime.freeze(box.handle)
            somebody_else = replace(handle, pid=os.getpid(), helpers=())
            assert not box.runtime.is_alive(somebody_else)
            box.runtime.kill(somebody_else)  # our pid, but not our start time: this test keeps running
            box.runtime.kill(handle)
            assert not box.runtime.is_alive(box.handle)
        assert not box.runtime.freeze(box.handle)
        box.runtime.thaw(box.handle)

    @pytest.mark.parametrize("folder", ["/", "/etc", "/usr/lib", "/proc/self", "/var", "/root", "/dev/shm"])
    def test_the_system_is_no_work_folder(self, make_box: MakeBox, spec: SandboxSpec, folder: str) -> None:
        with pytest.raises(InvalidRequest) as caught:
            make_box(replace(spec, workspace=Path(folder), hidden=()))
        assert caught.value.field == "workspace"

    def test_our_own_state_is_no_work_folder(
        self, make_box: MakeBox, spec: SandboxSpec, state_dir: Path, tmp_path: Path
    ) -> None:
        state_dir.mkdir(exist_ok=True)
        for folder in (state_dir, state_dir.parent):
            with pytest.raises(InvalidRequest) as caught:
                make_box(replace(spec, workspace=folder))
            assert caught.value.field == "workspace"
        (tmp_path / "link").symlink_to(state_dir)
        with pytest.raises(InvalidRequest):
            make_box(replace(spec, workspace=tmp_path / "link"))
