"""Images built from Dockerfiles on a real Docker engine, from an image that it already has: there is no registry."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from support.dockerd import Dockerd
from support.harness import Env, wait_until
from support.serving import run_all
from support.trees import SYSTEM, make_tar
from traitlets.config import Config

from jupyter_agentbox.cli.image import BuildCommand
from jupyter_agentbox.errors import InvalidRequest, NotFound, RuntimeFailed
from jupyter_agentbox.storage.images import ImageStore, dockerfile
from jupyter_agentbox.storage.images.values import make_recipe

#: An image that takes no program to build on.
FROM = "local/system:1"


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """An engine's address, which holds an image."""
    dockerd = Dockerd(Path(tempfile.mkdtemp(prefix="ab-d")))
    try:
        dockerd.start()
        call(dockerd.host, "import", "-", FROM, stdin=make_tar(*SYSTEM).getvalue())
        yield dockerd.host
    finally:
        dockerd.close()


def call(host: str, *arguments: str, stdin: bytes = b"") -> str:
    env = {**os.environ, "DOCKER_HOST": host}
    done = subprocess.run(["docker", *arguments], input=stdin, env=env, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


@pytest.fixture
def store(tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> ImageStore:
    monkeypatch.setenv("DOCKER_HOST", engine)
    return ImageStore(tmp_path / "state")


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """A build handles signals, which are those of the tests again after it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def write(folder: Path, text: str, name: str = "Dockerfile") -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize("copy", ["COPY", "COPY --chmod=755"], ids=["classic", "buildkit"])
def test_a_dockerfile_becomes_an_image_that_a_sandbox_and_docker_can_use(
    store: ImageStore,
    engine: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    copy: str,
) -> None:
    """The engine's own client, as others may lack BuildKit, without which Docker refuses ``--chmod``."""
    monkeypatch.setenv("PATH", f"/usr/bin:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_BUILDKIT", str(int("--chmod" in copy)))
    (tmp_path / "hello").write_text("#!/bin/sh\necho hello\n")
    (tmp_path / "hello").chmod(0o644 if "--chmod" in copy else 0o755)
    file = write(
        tmp_path, f"FROM {FROM}\n{copy} hello /usr/local/bin/\nENV WHERE=there EMPTY=\nENV PATH=/opt/bin:/usr/bin\n"
    )
    command = BuildCommand(title="mine", no_kernelspec=True, extra_args=[str(file)])
    command.update_config(Config({"Policy": {"state_dir": str(store.state_dir)}}))
    assert command.run() == 0
    image = store.get("mine")
    assert capsys.readouterr().out.startswith(f"{image.short}  ")
    assert image.env == {"WHERE": "there", "EMPTY": "", "PATH": "/opt/bin:/usr/bin"}
    assert image.recipe == {"dockerfile": "Dockerfile", "built": "docker"}
    assert os.access(store.root(image) / "usr/local/bin/hello", os.X_OK)
    assert not (store.root(image) / "etc/machine-id").exists()
    store.verify(image)
    assert dockerfile.build_file(store, file, make_recipe("mine"), print).address == image.address, (
        "again, it is the same"
    )
    (inspected,) = json.loads(call(engine, "image", "inspect", "jupyter-agentbox/build:mine"))
    assert "WHERE=there" in inspected["Config"]["Env"]
    assert call(engine, "ps", "--all", "--quiet") == "", "no container is left"


def test_an_image_with_ipykernel_is_offered_by_jupyter_until_it_is_removed(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is that of the settings, which docker's own client does not know."""
    env = Env(tmp_path / "jupyter", config={"DockerRuntime": {"host": engine}})
    try:
        monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent.sock")
        (tmp_path / "__init__.py").touch()
        for name, text in (
            ("Dockerfile", f"FROM {FROM}\nCOPY __init__.py /usr/local/lib/python3.11/dist-packages/ipykernel/\n"),
            ("Dockerfile.venv", f"FROM {FROM}\nCOPY __init__.py /opt/venv/lib/python3.11/site-packages/ipykernel/\n"
             "COPY __init__.py /opt/venv/bin/python3\nENV PATH=/opt/venv/bin:/usr/bin\n"),
            ("Dockerfile.none", f"FROM {FROM}\nCOPY __init__.py /opt/lib/python3.11/site-packages/ipykernel/\n"),
        ):  # fmt: skip
            write(tmp_path, text, name)
        ran = run_all(
            env,
            ("image", "build", str(tmp_path / "Dockerfile"), "--name=mine"),
            ("image", "build", str(tmp_path / "Dockerfile.venv"), "--name=other"),
            ("image", "build", str(tmp_path / "Dockerfile.none"), "--name=none"),
            timeout=200,
        )
        assert [result.status for result in ran] == [0, 0, 0], ran
        assert [("kernels/agentbox-" in result.out) for result in ran] == [True, True, False]
        found = KernelSpecManager(kernel_dirs=[str(env.data / "kernels")]).get_kernel_spec("agentbox-mine")
        assert (found.display_name, found.language) == ("Python (mine) (sandboxed)", "python")
        assert found.metadata["kernel_provisioner"]["config"] == {"image": "mine"}
        changed = env.data / "kernels" / "agentbox-other" / "kernel.json"
        spec = json.loads(changed.read_text())
        spec["metadata"]["kernel_provisioner"]["config"]["memory"] = "1 GiB"
        changed.write_text(json.dumps(spec))
        (removed,) = run_all(env, ("image", "remove", "mine", "other"), timeout=200)
        assert "removed kernelspec" in removed.out
        left = [path.name for path in (env.data / "kernels").iterdir()]
        assert left == ["agentbox-other"], "a kernelspec that someone changed stays"
    finally:
        env.close()


def test_a_container_of_a_build_that_was_killed_goes_with_the_next_and_another_ones_stays(
    store: ImageStore, engine: str, tmp_path: Path
) -> None:
    killed, living = (
        call(engine, "create", f"--label=jupyter-agentbox.build={folder}", FROM, "/bin/true").strip()
        for folder in (tmp_path / "gone", tmp_path)
    )
    dockerfile.build_file(store, write(tmp_path, f"FROM {FROM}\n"), make_recipe("next"), print)
    left = call(engine, "ps", "--all", "--quiet", "--no-trunc").split()
    call(engine, "rm", "--force", *left)
    assert left == [living] != [killed]


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("FROM localhost:1/nothing:1\n", RuntimeFailed, "docker build failed"),
        ("NONSENSE\n", RuntimeFailed, "docker build failed"),
        ("FROM scratch\nCOPY Dockerfile /etc/\n", InvalidRequest, "no folder /usr"),
    ],
)
def test_what_fails_leaves_no_image(
    store: ImageStore, engine: str, tmp_path: Path, text: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        dockerfile.build_file(store, write(tmp_path, text), make_recipe("bad"), print)
    assert not list(store.directory.iterdir())
    assert call(engine, "ps", "--all", "--quiet") == ""


def test_a_build_that_is_ended_leaves_no_program_and_no_folder(tmp_path: Path) -> None:
    slow = write(tmp_path, f"#!/bin/sh\nsleep 3600 &\necho $! > {tmp_path}/pid.new\n"
                 f"mv {tmp_path}/pid.new {tmp_path}/pid\nwait\n", "docker")  # fmt: skip
    slow.chmod(0o755)
    file = write(tmp_path, f"FROM {FROM}\n")
    command = [sys.executable, "-m", "jupyter_agentbox.cli", "image", "build", str(file), "--name=x"]
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen([*command, f"--Policy.state_dir={tmp_path}/state"], env=env) as process:
        try:
            wait_until((tmp_path / "pid").exists, 120, "docker was started")
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 128 + signal.SIGTERM
        finally:
            process.kill()
    sleeper = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_running(sleeper), 60, "what it started has ended")
    assert not list((tmp_path / "state" / "images").iterdir())


def test_a_dockerfile_must_be_there_and_be_given_a_name(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such file"):
        BuildCommand(title="x", extra_args=[str(tmp_path / "Dockerfile")]).run()
    with pytest.raises(InvalidRequest, match="--name"):
        BuildCommand(extra_args=[str(write(tmp_path, "FROM x", "Dockerfile.dev"))]).run()
