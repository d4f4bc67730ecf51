"""The Docker runtime: the contract, the escapes, and what an engine can do to it. On an engine of the tests' own."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
from contract.box import STANDIN, Box
from contract.escapes import EscapeContract
from contract.runtime import RuntimeContract
from support import notebooks
from support.dockerd import Dockerd
from support.harness import Env, KernelClient, Server, wait_until
from traitlets.config import Config

from jupyter_agentbox.cli.doctor import find_runtimes
from jupyter_agentbox.errors import InvalidConfig, InvalidRequest, RuntimeFailed, RuntimeUnavailable
from jupyter_agentbox.linux import is_running
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.runtimes import Runtime, cgroups
from jupyter_agentbox.runtimes.docker import checks as docker_checks
from jupyter_agentbox.runtimes.docker import runtime as docker
from jupyter_agentbox.runtimes.docker.config import make_labels
from jupyter_agentbox.runtimes.docker.engine import RUNTIME_NAME, Engine
from jupyter_agentbox.runtimes.docker.runtime import DockerRuncRuntime, DockerRuntime
from jupyter_agentbox.runtimes.docker.setup import DAEMON_FILE, find_engines, make_runtime, register
from jupyter_agentbox.sandbox.sweep import ContainerSweep, sweep
from jupyter_agentbox.spec import MIB, Cause, Limits, Mount, SandboxSpec

SPEC = SandboxSpec(limits=Limits(memory=512 * MIB, cpus=1.5, processes=40, disk=64 * MIB), owner="somebody")


class TestDocker(RuntimeContract):
    """The contract."""

    has_layer_in_memory = True
    covers_special = False

    @pytest.fixture(scope="class")
    @classmethod
    def runtime(cls, dockerd: Dockerd, state_dir: Path) -> Runtime:
        return DockerRuntime(host=dockerd.host, state_dir=str(state_dir), guest_dir=str(STANDIN))


class TestDockerEscapes(EscapeContract):
    """Isolation, from inside."""

    @pytest.fixture(scope="class")
    @classmethod
    def runtime(cls, dockerd: Dockerd, state_dir: Path) -> Runtime:
        return DockerRuntime(host=dockerd.host, state_dir=str(state_dir), guest_dir=str(STANDIN))


def look(runtime: DockerRuntime, box: Box, *, is_reachable: bool) -> float:
    """Measure until the engine is found there or away; return the longest time that one look took, in seconds."""
    longest, deadline = 0.0, time.monotonic() + 60
    while runtime.is_reachable() is not is_reachable:
        assert time.monotonic() < deadline
        runtime._pinged = 0.0  # or else what was found is believed for a while
        started = time.monotonic()
        assert runtime.usage(box.handle, box.directory).memory > 0
        longest = max(longest, time.monotonic() - started)
    return longest


@pytest.mark.timeout(600)
class TestEngine:
    """What is asked of the engine, and what happens when it fails."""

    @pytest.fixture
    def runtime(self, dockerd: Dockerd, tmp_path: Path) -> DockerRuntime:
        return DockerRuntime(host=dockerd.host, state_dir=str(tmp_path / "state"), guest_dir=str(STANDIN))

    @pytest.fixture
    def box(self, runtime: DockerRuntime, tmp_path: Path) -> Iterator[Box]:
        with Box(runtime, tmp_path / "state", f"{os.getpid()}-engine", SPEC) as box:
            yield box

    def test_a_container_has_all_that_confines_it(self, runtime: DockerRuntime, box: Box) -> None:
        found = runtime.engine.inspect(box.handle.container)
        assert found is not None
        host = found["HostConfig"]
        assert host["Runtime"] == RUNTIME_NAME
        assert (host["NetworkMode"], host["IpcMode"]) == ("none", "none")
        assert host["ReadonlyRootfs"]
        assert not host["Privileged"]
        assert host["CapDrop"] == ["ALL"]
        assert "no-new-privileges" in host["SecurityOpt"]
        assert host["Memory"] == host["MemorySwap"] == SPEC.limits.memory
        assert host["CpuQuota"] == SPEC.limits.cpus * host["CpuPeriod"]
        assert host["PidsLimit"] > SPEC.limits.processes
        assert {"/tmp", "/home/user", "/run"} <= set(host["Tmpfs"])
        writable = [mount["Target"] for mount in host["Mounts"] if not mount.get("ReadOnly")]
        assert sorted(writable) == ["/run/agentbox/link", "/workspace"]
        labels = found["Config"]["Labels"]
        assert labels["jupyter-agentbox.sandbox"] == box.id
        assert labels["jupyter-agentbox.owner"] == "somebody"
        assert labels["jupyter-agentbox.lease"] == "60"
        image = runtime.engine.inspect_image(found["Image"])
        assert image["Config"]["Labels"] == {"jupyter-agentbox": "root"}

    def test_a_root_of_our_own_is_the_tree_with_that_address(self, runtime: DockerRuntime, tmp_path: Path) -> None:
        tree, address = tmp_path / "tree", "5" * 64
        for name in ("etc", "usr", "opt"):
            (tree / name).mkdir(parents=True)
        for name in ("bin", "lib", "lib64"):
            (tree / name).symlink_to(f"usr/{name}")
        (tree / "etc/os-release").write_text("NAME=ours\n")
        (tree / "opt/tool").write_text("as it was\n")
        spec = replace(SPEC, root=tree, image=address, mounts=(Mount(Path("/usr"), "/usr"),))
        with Box(runtime, tmp_path / "state", "image", spec) as box:
            assert box.run("cat /etc/os-release /opt/tool") == "NAME=ours\nas it was\n"
            assert box.run("echo x > /opt/tool; cat /opt/tool", "root") == "x\n"
            (found,) = runtime.engine.list(f"jupyter-agentbox.image={address}")
            assert found["Id"] == box.handle.container
            image = runtime.engine.inspect_image(found["ImageID"])
            assert image["Config"]["Labels"] == {"jupyter-agentbox": "root", "jupyter-agentbox.image": address}
            assert image["Size"] < 100_000  # folders and links: no tree is kept twice
        assert (tree / "opt/tool").read_text() == "as it was\n"

    def test_one_that_is_removed_behind_our_back_is_seen_at_once(
        self, runtime: DockerRuntime, box: Box, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(docker, "NOTICE_TIMEOUT", 60.0)
        remover = threading.Thread(target=runtime.engine.remove, args=(box.handle.container,))
        remover.start()
        deadline = time.monotonic() + 30
        while runtime.is_alive(box.handle):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        end = runtime.why_ended(box.handle, SPEC.limits, box.directory)
        runtime.engine.remove(box.handle.container)  # at the same time: whoever comes second does nothing
        remover.join(60)
        assert (end.cause, end.message) == (Cause.KILLED, "its container was removed from outside")

    def test_an_engine_that_hangs_harms_no_sandbox(self, runtime: DockerRuntime, box: Box, dockerd: Dockerd) -> None:
        runtime.usage(box.handle, box.directory)
        look(runtime, box, is_reachable=True)
        dockerd.signal(signal.SIGSTOP)
        try:
            assert look(runtime, box, is_reachable=False) < 30
            assert runtime.is_alive(box.handle)
            assert box.run("echo fine") == "fine\n"
            hasty = DockerRuntime(host=dockerd.host, engine_timeout=1.0, start_timeout=1.0)
            with pytest.raises(RuntimeFailed, match="did not answer"):
                hasty.engine.info()
            assert [check.is_ok for check in hasty.check()] == [False]
            runtime.start_timeout, runtime.engine.timeout = 3600.0, 1.0
            with pytest.raises(RuntimeFailed, match="did not answer"):
                runtime.start("late", SPEC, box.directory)
        finally:
            runtime.engine.timeout = 10.0
            dockerd.signal(signal.SIGCONT)
        look(runtime, box, is_reachable=True)

    def test_sandboxes_outlive_an_engine_that_is_restarted(
        self, runtime: DockerRuntime, box: Box, dockerd: Dockerd, tmp_path: Path
    ) -> None:
        dockerd.stop()
        try:
            runtime._pinged = 0.0
            runtime.usage(box.handle, box.directory)
            assert not runtime.is_reachable()
            assert runtime.is_alive(box.handle)
            assert box.run("echo fine") == "fine\n"
            with pytest.raises(RuntimeUnavailable, match="Cannot reach"):
                Box(DockerRuntime(host=dockerd.host), tmp_path / "state", "none", SPEC)
        finally:
            dockerd.start()
        assert runtime.is_alive(box.handle)
        assert box.run("echo again") == "again\n"
        # Another process finds it by its handle alone.
        successor = DockerRuntime(host=dockerd.host, state_dir=runtime.state_dir)
        assert successor.is_alive(box.handle)
        successor.kill(box.handle)
        successor.remove(box.handle, box.directory)
        assert runtime.engine.inspect(box.handle.container) is None

    def test_what_a_dead_owner_left_is_swept_and_a_live_owners_is_not(
        self, runtime: DockerRuntime, tmp_path: Path
    ) -> None:
        state = tmp_path / "state"
        with Box(runtime, state, "live", SPEC) as live, Box(runtime, state, "dead", SPEC) as dead:
            assert (state / "engines").read_text() == f"{runtime.host}\n"
            for box in (live, dead):
                (box.directory / "lock").touch()
                record = {"id": box.id, "spec": {}, "handle": box.handle.to_dict(), "lease_timeout": 1.0}
                (box.directory / "state.json").write_text(json.dumps(record))
                os.utime(box.directory / "lock", (time.time() - 61,) * 2)
            with (live.directory / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                assert sweep(state) == ["dead"]
                assert runtime.engine.inspect(dead.handle.container) is None
                assert not runtime.is_alive(dead.handle)
                assert live.run("echo fine") == "fine\n"
                assert runtime.engine.inspect(live.handle.container) is not None
                assert sweep(state) == []

    def test_a_container_is_found_by_its_labels_alone(
        self, runtime: DockerRuntime, box: Box, tmp_path: Path, dockerd: Dockerd
    ) -> None:
        """As an owner leaves it that was killed before it wrote down which; another state directory's is not ours."""
        elsewhere = tmp_path / "elsewhere"
        stranger = DockerRuntime(host=runtime.host, state_dir=str(elsewhere), guest_dir=str(STANDIN))
        with Box(stranger, elsewhere, "other", SPEC) as other:
            box.directory.rename(tmp_path / "aside")
            dockerd.signal(signal.SIGSTOP)
            try:
                sweeper = ContainerSweep(tmp_path / "state")
                sweeper.look()
                assert not sweeper.is_done  # it has begun, and does not wait for an engine that hangs
                assert sweeper.wait() == []
                assert not sweeper.is_done
            finally:
                dockerd.signal(signal.SIGCONT)
            wait_until(lambda: box.id in sweeper.wait(), 60, "the engine answers again")
            assert sweeper.is_done
            assert runtime.engine.inspect(box.handle.container) is None
            assert runtime.engine.inspect(other.handle.container) is not None
        (tmp_path / "aside").rename(box.directory)

    def test_its_end_for_memory_is_told_though_engine_and_kernels_log_missed_it(
        self, runtime: DockerRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        small = replace(SPEC, limits=replace(SPEC.limits, memory=192 * MIB))
        with Box(runtime, tmp_path / "state", "greedy", small) as box:
            monkeypatch.setattr(docker, "_find_in_kernel_log", lambda container: None)
            inspect = runtime.engine.inspect
            seen: list[bool] = []

            def inspect_blindly(container: str) -> dict[str, Any] | None:
                found = inspect(container)
                if found is not None:
                    found["State"]["OOMKilled"] = False
                    seen.append(found["State"]["Running"])
                return found

            monkeypatch.setattr(runtime.engine, "inspect", inspect_blindly)
            assert runtime.is_alive(box.handle)
            box.send("/usr/bin/python3 -c 'x = bytearray(1 << 30); x[::4096] = b\"x\" * len(x[::4096])'")
            wait_until(
                lambda: (
                    cgroups.read_oom_kills(box.handle.cgroups) or not is_running(box.handle.pid, box.handle.start_time)
                ),
                60,
                "the kernel kills",
            )
            runtime.kill(box.handle)
            # As on a busy machine: the control group is gone before anybody has looked at it.
            monkeypatch.setattr(cgroups, "read_oom_kills", lambda paths: 0)
            end = runtime.why_ended(box.handle, small.limits, box.directory)
        assert end.cause is Cause.OUT_OF_MEMORY
        assert seen[-1] is False

    def test_what_this_runtime_cannot_do_is_refused_by_name(
        self, runtime: DockerRuntime, box: Box, tmp_path: Path
    ) -> None:
        with pytest.raises(RuntimeUnavailable, match="'docker' does not support snapshots"):
            runtime.checkpoint(box.handle, box.id, box.directory, tmp_path)
        with pytest.raises(RuntimeUnavailable, match="cannot be root in a plain container"):
            DockerRuncRuntime(host=runtime.host).start("root", replace(SPEC, is_root=True), tmp_path)
        os.mkfifo(tmp_path / ".fifo")
        with pytest.raises(InvalidRequest, match="neither a file nor a folder"):
            Box(runtime, tmp_path / "state", "fifo", replace(SPEC, workspace=tmp_path, hidden=(".*", "state")))

    def test_the_engine_must_have_gvisor_with_its_flags(self, dockerd: Dockerd) -> None:
        engine = Engine(dockerd.host)
        assert engine.find_gvisor().name == RUNTIME_NAME
        with pytest.raises(RuntimeUnavailable, match="bare-runsc lacks --host-uds=none, --host-fifo=open"):
            engine.find_gvisor("bare-runsc")
        with pytest.raises(RuntimeUnavailable, match=r"is not gVisor's runsc\. Register gVisor: jupyter agentbox"):
            engine.find_gvisor("runc")
        with pytest.raises(RuntimeUnavailable, match=r"has no runtime 'crun', only .*runc"):
            engine.find_gvisor("crun")

    def test_an_engine_that_is_away_is_explained(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeUnavailable, match="the socket does not exist"):
            Engine(f"unix://{tmp_path}/none").info()
        with pytest.raises(RuntimeUnavailable, match="must be a UNIX socket"):
            Engine("tcp://127.0.0.1:2375").info()
        (check,) = DockerRuntime(host=f"unix://{tmp_path}/none").check()
        assert not check.is_ok
        assert "docker.io" in check.remedy

    def test_the_doctor_tries_it_all(self, runtime: DockerRuntime) -> None:
        checks = {check.name: check for check in runtime.check()}
        assert set(checks) == {"docker engine", "docker runtime", "docker sandbox"}
        assert all(check.is_ok for check in checks.values()), checks

    def test_a_probe_whose_asker_was_killed_goes_with_the_next_check(
        self, runtime: DockerRuntime, box: Box, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(docker_checks, "PROBE_LIFE", -60.0)
        found = runtime.engine.inspect(box.handle.container)
        assert found is not None
        body = {"Image": found["Image"], "Cmd": ["/bin/true"]}
        made = [
            runtime.engine.create(f"agentbox-{name}", {**body, "Labels": make_labels(name, SPEC, state)})
            for name, state in (("check-0", ""), ("other", ""), ("check-1", "/somebody"))
        ]
        try:
            runtime.check()
            left = [container for container in made if runtime.engine.inspect(container) is not None]
            assert left == made[1:]
            assert runtime.is_alive(box.handle)
        finally:
            for container in made:
                runtime.engine.remove(container)

    def test_plain_containers_say_that_gvisor_does_not_isolate_them(
        self, dockerd: Dockerd, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        # A log of its own: the one that traitlets would give is of whatever Jupyter application this process made last.
        log = logging.getLogger("runtime")
        runtime = DockerRuncRuntime(
            host=dockerd.host, state_dir=str(tmp_path / "state"), guest_dir=str(STANDIN), log=log
        )
        assert runtime.isolation == "none"
        with Box(runtime, tmp_path / "state", "plain", SPEC) as box:
            assert "plain is NOT isolated by gVisor" in caplog.text
            assert box.run("id -u; id -G").split() == ["1000", "1000"]
            assert "gVisor" not in box.run("dmesg 2>&1")
            assert box.run("grep -c . /proc/net/dev").strip() == "3"
            for who in ("user", "root"):
                tried = "mount -t tmpfs x /tmp; unshare -U true; echo $?; cat /etc/shadow; ls /root/.ssh; touch /usr/x"
                said = box.run(f"({tried}) 2>/dev/null", who)
                assert said.split() == ["1"]
            box.run("touch made; chmod 6755 made")
            assert not (box.directory / "work/made").stat().st_mode & 0o6000
        assert any("NOT ISOLATED" in check.message for check in runtime.check())


class TestSetup:
    """``jupyter agentbox setup --docker``."""

    def test_it_keeps_what_is_there_and_does_nothing_twice(self, tmp_path: Path) -> None:
        path = tmp_path / "docker/daemon.json"
        said: list[str] = []
        path.parent.mkdir()
        path.write_text('{"log-driver": "local", "runtimes": {"other": {"path": "/bin/other"}}}')
        path.chmod(0o600)
        link = tmp_path / "link.json"
        link.symlink_to(path)
        before = path.read_text()
        register("/usr/bin/runsc", say=said.append, is_dry=True, path=link)
        assert path.read_text() == before
        register("/usr/bin/runsc", say=said.append, path=link)
        settings = json.loads(path.read_text())
        assert settings["log-driver"] == "local"
        assert settings["runtimes"]["other"] == {"path": "/bin/other"}
        assert settings["runtimes"][RUNTIME_NAME] == make_runtime("/usr/bin/runsc")
        assert (path.stat().st_mode & 0o777, link.is_symlink(), len(list(path.parent.iterdir()))) == (0o600, True, 1)
        assert "no engine with these settings is running" in said[-1]
        register("/usr/bin/runsc", say=said.append, path=path)
        assert "already" in said[-2]

    def test_engines_are_told_apart_by_their_settings(self, tmp_path: Path) -> None:
        lines = {
            "10": ["/usr/bin/dockerd"],
            "11": ["dockerd", "--config-file", "/x/y.json", "--add-runtime=a=/b"],
            "12": ["dockerd", "--config-file=/x/../x/y.json"],
            "13": ["sh", "dockerd"],
            "14": [],
            "self": [],
        }
        for pid, words in lines.items():
            (tmp_path / pid).mkdir()
            (tmp_path / pid / "cmdline").write_text("".join(f"{word}\0" for word in words))
        assert list(find_engines(DAEMON_FILE, tmp_path)) == [10]
        assert sorted(find_engines(Path("/x/y.json"), tmp_path)) == [11, 12]

    def test_it_registers_gvisor_in_an_engine_that_runs(self, dockerd: Dockerd, make_env: Callable[..., Env]) -> None:
        path, engine = dockerd.base / "daemon.json", Engine(dockerd.host)
        before = json.loads(path.read_text())
        env = make_env(config={"DockerRuntime": {"host": dockerd.host}})
        setup = ("jupyter-agentbox", "setup", "--docker", f"--docker-settings={path}")
        bare = {
            **before,
            "runtimes": {name: found for name, found in before["runtimes"].items() if name != RUNTIME_NAME},
        }
        path.write_text(json.dumps(bare))
        try:
            dockerd.signal(signal.SIGHUP)
            wait_until(
                lambda: RUNTIME_NAME not in [found.name for found in engine.runtimes()], 60, "it is unregistered"
            )
            with pytest.raises(RuntimeUnavailable, match="setup --docker"):
                engine.find_gvisor()
            said = env.run(*setup).output
            assert f"adding the runtime {RUNTIME_NAME}" in said
            assert "kill -HUP" in said
            assert json.loads(path.read_text()) == before
            assert RUNTIME_NAME not in [found.name for found in engine.runtimes()]  # it was not told to
            said = env.run(*setup, "--reload").output
            assert f"is already in {path}" in said
            assert engine.find_gvisor().name == RUNTIME_NAME
            assert "and the engine has loaded it" in env.run(*setup, "--reload").output
        finally:
            path.write_text(json.dumps(before))
            dockerd.signal(signal.SIGHUP)
            wait_until(lambda: RUNTIME_NAME in [found.name for found in engine.runtimes()], 60, "it is registered")

    def test_who_may_not_use_the_socket_is_told_what_gives_that(self, dockerd: Dockerd) -> None:
        code = (
            "import os; from jupyter_agentbox.runtimes.docker import checks\n"
            "from jupyter_agentbox.runtimes.docker.runtime import DockerRuntime\n"
            "os.setgroups([]); os.setgid(12399); os.setuid(12399)\n"
            f"for host in ('{dockerd.host}', 'unix:///no/such.sock'):\n"
            "    found, = DockerRuntime(host=host).check(); print(found.is_ok, found.remedy)"
        )
        dockerd.base.chmod(0o711)
        dockerd.socket.chmod(0o660)
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert answer.returncode == 0, answer.stderr
        group, start = answer.stdout.splitlines()
        assert group.startswith("False usermod -aG docker")
        assert start.startswith("False apt-get install docker.io")

    def test_the_doctor_looks_at_what_profiles_name_or_is_asked_for(self) -> None:
        settings = {"profiles": {"boxed": {"runtime": "docker"}}, "allowed_runtimes": ["runsc", "docker"]}
        assert find_runtimes(Policy(config=Config({"Policy": settings})), ()) == ["runsc", "docker"]
        assert find_runtimes(Policy(config=Config({"Policy": {}})), ()) == ["runsc"]
        assert find_runtimes(Policy(config=Config({"Policy": {}})), ("docker",)) == ["runsc", "docker"]

    def test_plain_containers_need_policys_word(self) -> None:
        with pytest.raises(InvalidConfig, match=r"'docker-runc', which is not in Policy\.allowed_runtimes"):
            Policy(config=Config({"Policy": {"runtime": "docker-runc"}}))

    def test_settings_that_cannot_be_read_are_left_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "daemon.json"
        for text in ("{", "[]", '{"runtimes": []}'):
            path.write_text(text)
            with pytest.raises(InvalidConfig, match="Nothing was changed"):
                register("/usr/bin/runsc", say=lambda _: None, path=path)
            assert path.read_text() == text


@pytest.mark.timeout(600)
class TestEndToEnd:
    """Jupyter on the runtime, through its public faces."""

    @pytest.fixture(scope="class")
    @classmethod
    def env(cls, make_env: Callable[..., Env], dockerd: Dockerd) -> Env:
        return make_env(config=cls.config(dockerd))

    @staticmethod
    def config(dockerd: Dockerd) -> dict[str, Any]:
        policy = {"runtime": "docker", "allowed_runtimes": ["docker"], "lease_timeout": 5.0}
        return {"Policy": policy, "DockerRuntime": {"host": dockerd.host}}

    @pytest.mark.network
    def test_a_notebook_runs(self, env: Env) -> None:
        client = notebooks.nbconvert
        cells = [*notebooks.CELLS, "import subprocess\nprint('kernel:', subprocess.check_output('dmesg', text=True))"]
        text = client(env, notebooks.make(env.work / client.__name__, cells))
        notebooks.check(text, client)
        assert "gVisor" in text[text.index("kernel:") :]

    def test_kernels_outlive_their_server_and_nothing_outlives_the_lease(self, env: Env, dockerd: Dockerd) -> None:
        engine = Engine(dockerd.host)
        mine = f"jupyter-agentbox.state-dir={os.path.realpath(env.state_dir)}"
        env.configure(
            config={**self.config(dockerd), "Policy": {**self.config(dockerd)["Policy"], "lease_timeout": 600.0}}
        )
        first = Server(env, "server", (), {})
        first.wait_ready()
        kernel = first.kernel()
        kernel.check("x = 41")
        first.stop(signal.SIGKILL)
        env.configure(config=self.config(dockerd))
        second = Server(env, "server", (), {})
        try:
            second.wait_ready()
            assert [found["id"] for found in second.call("GET", "api/kernels")] == [kernel.id]
            again = KernelClient(second, kernel.id)
            assert again.check("print(x + 1)") == "42\n"
            again.restart()  # so that it has the short lease
            again.check("x = 43")
            (container,) = wait_until(lambda: len(left := engine.list(mine)) == 1 and left, 60, "one is left")
            found = engine.inspect(container["Id"])
            assert found is not None
            # The guest cannot end itself, so it takes the sweeper.
            os.kill(found["State"]["Pid"], signal.SIGSTOP)
        finally:
            second.stop(signal.SIGKILL)
        wait_until(lambda: not engine.list(mine), 120, "the sweeper removes it")

    def test_a_session_over_rest_outlives_a_hung_engine(self, env: Env, dockerd: Dockerd) -> None:
        with env.server("server") as server:
            health = server.call("GET", "api/agentbox/health")
            assert (health["status"], health["runtime"], health["isolation"]) == ("ok", "docker", "gvisor")
            made = server.call("POST", "api/agentbox/sandboxes", {"id": "one"})
            assert (made["state"], made["runtime"], made["isolation"]) == ("running", "docker", "gvisor")
            path = "api/agentbox/sandboxes/one"
            server.call("POST", f"{path}/code", {"code": "x = 41"})
            ran = server.call("POST", f"{path}/exec", {"command": "id -u; cd /tmp && touch there && ls there"})
            assert (ran["stdout"], ran["exit_code"]) == ("1000\nthere\n", 0)
            refused = server.http.post(server.url(f"{path}/snapshots"), json={}, timeout=100)
            assert "does not support snapshots" in refused.text
            dockerd.signal(signal.SIGSTOP)
            try:
                wait_until(lambda: server.call("GET", path)["state"] == "unknown", 60, "its state is unknown")
                ran = server.call("POST", f"{path}/code", {"code": "x + 1"})
                assert "42" in json.dumps(ran)
            finally:
                dockerd.signal(signal.SIGCONT)
            wait_until(lambda: server.call("GET", path)["state"] == "running", 60, "the engine answers again")
            engine = Engine(dockerd.host)
            (container,) = engine.list(f"jupyter-agentbox.sandbox={made['sandbox_id']}")
            engine.remove(container["Id"])
            wait_until(lambda: server.call("GET", path)["state"] == "ended", 60, "its end is seen")
            assert server.call("GET", path)["end"]["cause"] == "killed"
            server.call("DELETE", path)

    def test_an_engine_without_live_restore_is_named_as_the_cause(self, make_env: Callable[..., Env]) -> None:
        dockerd = Dockerd(Path(tempfile.mkdtemp(prefix="abd")), live_restore=False)
        try:
            dockerd.start()
            env = make_env(config=self.config(dockerd))
            with env.server("server", "--ServerApp.jpserver_extensions={'jupyter_agentbox': True}") as server:
                path = "api/agentbox/sandboxes/one"
                server.call("POST", "api/agentbox/sandboxes", {"id": "one"})
                server.call("POST", f"{path}/code", {"code": "x = 41"})
                kernel = server.kernel()
                request = kernel.start("import time; time.sleep(600)")
                dockerd.stop()

                def call() -> requests.Response:
                    return server.http.post(server.url(f"{path}/code"), json={"code": "x"}, timeout=20)

                wait_until(lambda: call().status_code == 410, 30, "its end is seen")
                assert "Docker's engine was stopped or restarted" in call().json()["message"]
                assert "live-restore" in server.call("GET", path)["end"]["message"]
                kernel.finish(request)
                wait_until(lambda: "the kernel ended: Docker's engine was stopped" in server.log.read_text(), 30, "why")
                kernel.shutdown()
                dockerd.start()
                server.call("POST", f"{path}/revive")
                ran = server.call("POST", f"{path}/exec", {"command": "echo again"})
                assert ran["stdout"] == "again\n"
                server.call("DELETE", path)
        finally:
            dockerd.close()
