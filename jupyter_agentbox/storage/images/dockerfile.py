"""Build images from Dockerfiles: Docker's result is exported, then unpacked and hashed like any other image."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from jupyter_agentbox.errors import RuntimeFailed

from . import tree
from .build import TIMEOUT, read_packages
from .commands import OnProgress, find_program, make_environment, piped, run
from .kernelspecs import add_kernels, add_python
from .store import ImageStore
from .values import Image, Recipe, read_environment

#: Seconds for short answers of the engine.
_SHORT_TIMEOUT = 60.0
#: Label of a container whose tree is exported. Its value is the folder that receives the tree.
_BUILD = "jupyter-agentbox.build"
#: Variables that Docker sets itself and that sandboxes replace by their own.
_OWN_VARIABLES = ("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=")


def build_file(
    store: ImageStore,
    file: Path,
    recipe: Recipe,
    on_progress: OnProgress,
    *,
    host: str = "",
    timeout: float = TIMEOUT,
) -> Image:
    """Build an image from a Dockerfile, with its folder as the context, and add it to the store.

    Parameters
    ----------
    store : ImageStore
    file : Path
    recipe : Recipe
        The image's name, and settings that a Dockerfile cannot express. Its packages are not installed.
    on_progress : callable
        Called with each line of progress.
    host : str
        Address of Docker's engine; empty selects the one that Docker's own client would use.
    timeout : float
        Seconds for each step.

    Raises
    ------
    InvalidRequest
        The tree cannot be the root of a sandbox.
    RuntimeUnavailable, RuntimeFailed
        As for :func:`.build.build`.
    """
    with store.staging() as folder:
        on_progress(f"{recipe.name}: docker build --file {file}")
        root, variables = _build(folder, recipe.name, file, on_progress, _make_environment(host), timeout)
        recipe = add_kernels(msgspec.structs.replace(recipe, env={**variables, **recipe.env}), root)
        recipe = add_python(recipe, root)
        on_progress("hashing")
        origin = {"dockerfile": file.name, "built": "docker"}
        image = store.add(folder, recipe, origin=origin, packages=read_packages(root))
    on_progress(f"image {image.short}")
    return image


def _make_environment(host: str) -> dict[str, str]:
    env = make_environment()
    if host:
        env.pop("DOCKER_CONTEXT", None)  # it would take precedence
        env["DOCKER_HOST"] = host
    return env


def _build(
    folder: Path, name: str, file: Path, on_progress: OnProgress, env: Mapping[str, str], timeout: float
) -> tuple[Path, dict[str, str]]:
    """Build with Docker and unpack the result. Return the tree and the variables that the image sets."""
    docker = find_program("docker", "apt-get install docker.io")
    tag = f"jupyter-agentbox/build:{name}"
    command = [docker, "build", "--network=host", "--tag", tag, "--file", str(file), str(file.parent)]
    run(command, on_progress, env=env, timeout=timeout, what="docker build")
    root = folder / "rootfs"
    root.mkdir()
    unpacker = tree.Unpacker(root)
    with (
        _container(docker, tag, folder, on_progress, env) as container,
        piped([docker, "export", container], on_progress, env=env, timeout=timeout, what="docker export") as (data, _),
    ):
        unpacker.add(data)
        data.read()
    unpacker.finish()
    found = _query(docker, "image", "inspect", "--format={{json .Config.Env}}", tag, on_progress=on_progress, env=env)
    variables = [item for item in found or () if not item.startswith(_OWN_VARIABLES)]
    return root, read_environment(variables)


@contextlib.contextmanager
def _container(docker: str, tag: str, folder: Path, on_progress: OnProgress, env: Mapping[str, str]) -> Iterator[str]:
    """Create a container that never runs, and yield its name. Also remove the containers of killed builds."""

    def call(*words: str, on_progress: OnProgress = lambda line: None) -> list[str]:
        return run([docker, *words], on_progress, env=env, timeout=_SHORT_TIMEOUT, what=f"docker {words[0]}")

    filters = f"--filter=label={_BUILD}"
    for left in call("ps", "--all", filters, f'--format={{{{.ID}}}} {{{{.Label "{_BUILD}"}}}}'):
        if not Path(left.partition(" ")[2]).is_dir():
            call("rm", "--force", left.partition(" ")[0])
    name = call("create", f"--label={_BUILD}={folder}", tag, "/bin/true", on_progress=on_progress)[-1]
    try:
        yield name
    finally:
        call("rm", "--force", name)


def _query(*command: str, on_progress: OnProgress, env: Mapping[str, str]) -> Any:
    with piped(command, on_progress, env=env, timeout=_SHORT_TIMEOUT) as (data, _):
        output = data.read(1 << 20)
    try:
        return json.loads(output)
    except ValueError:
        raise RuntimeFailed(
            f"docker {' '.join(command[1:3])} failed: its output is not JSON. Check that {command[0]} is Docker's own"
            " client"
        ) from None
