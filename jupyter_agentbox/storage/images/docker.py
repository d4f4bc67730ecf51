"""Makes images with Docker: of a recipe, from an image that it has or can pull, or of a Dockerfile of yours.

A recipe is turned into a Dockerfile; what Docker has built is exported, unpacked and hashed as any other image. The
distribution's packages come from wherever that image gets them, and all else is the same as without Docker.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from jupyter_agentbox.errors import InvalidRequest, RuntimeFailed, RuntimeUnavailable

from . import customize, tree
from .build import TIMEOUT, default_cache, find_release, read_packages, settle
from .commands import Tell, find_program, piped, run
from .kernelspecs import add_kernels
from .store import ImageStore, describe
from .values import Image, Recipe, read_environment

#: Seconds for what the engine does at once.
_SHORT_TIMEOUT = 60.0
#: Label of a container that a tree is taken from: the folder that it is for.
_BUILD = "jupyter-agentbox.build"
#: What Docker sets by itself, of which sandboxes have their own.
_OWN_VARIABLES = ("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=")


def build(
    store: ImageStore,
    recipe: Recipe,
    tell: Tell,
    *,
    pip_environment: Mapping[str, str],
    cache: Path | None = None,
    timeout: float = TIMEOUT,
) -> Image:
    """Build an image, and keep it. Parameters and errors are those of :func:`.build.build`."""
    if recipe.docker is None:
        raise InvalidRequest(
            f'recipe {recipe.name!r} does not say which image of Docker to begin with: add `docker = "..."`',
            field="docker",
        )
    cache = cache or default_cache()
    try:
        release = find_release()
    except RuntimeUnavailable:
        release = None
    with store.staging() as folder, tempfile.TemporaryDirectory(prefix="agentbox-image-") as context:
        file = Path(context, "Dockerfile")
        file.write_text(make_dockerfile(recipe))
        tell(f"{recipe.name}: docker build, from {recipe.docker}")
        root, _ = _build(folder, recipe.name, file, tell, timeout)
        settle(root, release)
        packages = read_packages(root)
        customize.dress(root, recipe, tell, pip_environment=pip_environment, cache=cache, timeout=timeout)
        recipe = add_kernels(recipe, root)
        tell("hashing")
        image = store.add(folder, recipe, origin={**describe(recipe), "built": "docker"}, packages=packages)
    tell(f"image {image.short}")
    return image


def build_file(store: ImageStore, file: Path, recipe: Recipe, tell: Tell, *, timeout: float = TIMEOUT) -> Image:
    """Build an image of a Dockerfile, with its folder as the context, and keep it as Docker has made it.

    Parameters
    ----------
    store : ImageStore
    file : Path
    recipe : Recipe
        Name and whatever is set of what the Dockerfile can't say; its packages are not installed.
    tell : callable
    timeout : float
        Seconds for each part.

    Raises
    ------
    InvalidRequest
        No sandbox could have it as its root.
    RuntimeUnavailable, RuntimeFailed
        As for :func:`.build.build`.
    """
    with store.staging() as folder:
        tell(f"{recipe.name}: docker build, by {file}")
        root, variables = _build(folder, recipe.name, file, tell, timeout)
        recipe = add_kernels(msgspec.structs.replace(recipe, env={**variables, **recipe.env}), root)
        tell("hashing")
        origin = {"dockerfile": file.name, "built": "docker"}
        image = store.add(folder, recipe, origin=origin, packages=read_packages(root))
    tell(f"image {image.short}")
    return image


def _build(folder: Path, name: str, file: Path, tell: Tell, timeout: float) -> tuple[Path, dict[str, str]]:
    """Have Docker build, and unpack what it has built; return the tree, and the variables that the image sets."""
    docker = find_program("docker", "install Docker, or build without --docker")
    tag = f"jupyter-agentbox/build:{name}"
    command = [docker, "build", "--network=host", "--tag", tag, "--file", str(file), str(file.parent)]
    run(command, tell, timeout=timeout, what="docker build")
    root = folder / "rootfs"
    root.mkdir()
    unpacker = tree.Unpacker(root)
    with (
        _container(docker, tag, folder, tell) as container,
        piped([docker, "export", container], tell, timeout=timeout, what="docker export") as (data, _),
    ):
        unpacker.add(data)
        data.read()
    unpacker.finish()
    said = _ask(docker, "image", "inspect", "--format={{json .Config.Env}}", tag, tell=tell)
    variables = [item for item in said or () if not item.startswith(_OWN_VARIABLES)]
    return root, read_environment(variables)


@contextlib.contextmanager
def _container(docker: str, tag: str, folder: Path, tell: Tell) -> Iterator[str]:
    """Make a container that never runs; its name. Those of builds that were killed, whose folders are gone, go."""

    def call(*words: str, tell: Tell = lambda line: None) -> list[str]:
        return run([docker, *words], tell, timeout=_SHORT_TIMEOUT, what=f"docker {words[0]}")

    filters = f"--filter=label={_BUILD}"
    for left in call("ps", "--all", filters, f'--format={{{{.ID}}}} {{{{.Label "{_BUILD}"}}}}'):
        if not Path(left.partition(" ")[2]).is_dir():
            call("rm", "--force", left.partition(" ")[0])
    name = call("create", f"--label={_BUILD}={folder}", tag, "/bin/true", tell=tell)[-1]
    try:
        yield name
    finally:
        call("rm", "--force", name)


def _ask(*command: str, tell: Tell) -> Any:
    with piped(command, tell, timeout=_SHORT_TIMEOUT) as (data, _):
        said = data.read(1 << 20)
    try:
        return json.loads(said)
    except ValueError:
        raise RuntimeFailed(f"{' '.join(command[1:3])} answered what is no JSON") from None


def make_dockerfile(recipe: Recipe) -> str:
    """Return what Docker is to build: the distribution's packages, all else is added to what comes of it."""
    lines = [f"FROM {recipe.docker}"]
    if recipe.debian:
        packages = " ".join(shlex.quote(package) for package in recipe.debian)
        script = (
            "apt-get update && export DEBIAN_FRONTEND=noninteractive && apt-get upgrade -y --no-install-recommends && "
            f"apt-get install -y --no-install-recommends {packages} && rm -rf /var/lib/apt/lists/* /var/cache/apt/*"
        )
        lines.append(f"RUN {json.dumps(['/bin/sh', '-c', script])}")
    return "\n".join(lines) + "\n"
