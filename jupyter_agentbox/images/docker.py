"""Makes images with Docker, from an image that it has or can pull: the recipe's ``docker``.

The recipe is turned into a Dockerfile; what Docker has built is exported, unpacked and hashed as any other image. The
distribution's packages come from wherever that image gets them.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from pathlib import Path

from jupyter_agentbox.errors import InvalidRequest

from . import dress, tree
from .build import TIMEOUT, default_cache, read_packages
from .commands import Tell, find_program, piped, run
from .store import ImageStore, describe
from .values import Image, Recipe


def build(
    store: ImageStore, recipe: Recipe, tell: Tell, *, cache: Path | None = None, timeout: float = TIMEOUT
) -> Image:
    """Build an image, and keep it. Parameters and errors are those of :func:`.build.build`."""
    if recipe.docker is None:
        raise InvalidRequest(
            f'recipe {recipe.name!r} does not say which image of Docker to begin with: add `docker = "..."`',
            field="docker",
        )
    docker = find_program("docker", "install Docker, or build without --docker")
    cache = cache or default_cache()
    tag = f"jupyter-agentbox/build:{recipe.name}"
    with store.staging() as folder, tempfile.TemporaryDirectory(prefix="agentbox-image-") as context:
        Path(context, "Dockerfile").write_text(make_dockerfile(recipe))
        tell(f"{recipe.name}: docker build, from {recipe.docker}")
        run([docker, "build", "--network=host", "--tag", tag, context], tell, timeout=timeout, what="docker build")
        container = run([docker, "create", tag, "/bin/true"], tell, timeout=60, what="docker create")[-1]
        try:
            root = folder / "rootfs"
            root.mkdir()
            unpacker = tree.Unpacker(root)
            with piped([docker, "export", container], tell, timeout=timeout, what="docker export") as (data, _):
                unpacker.add(data)
                data.read()
            unpacker.finish()
        finally:
            run([docker, "rm", "--force", container], lambda line: None, timeout=60, what="docker rm")
        dress.dress(root, recipe, tell, cache=cache, timeout=timeout)
        tell("hashing")
        image = store.add(folder, recipe, origin={**describe(recipe), "built": "docker"}, packages=read_packages(root))
    tell(f"image {image.short}")
    return image


def make_dockerfile(recipe: Recipe) -> str:
    """Return what Docker is to build: the distribution's packages, all else is added to what comes of it."""
    lines = [f"FROM {recipe.docker}"]
    if recipe.debian:
        packages = " ".join(shlex.quote(package) for package in recipe.debian)
        script = (
            "apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "
            f"{packages} && rm -rf /var/lib/apt/lists/* /var/cache/apt/*"
        )
        lines.append(f"RUN {json.dumps(['/bin/sh', '-c', script])}")
    return "\n".join(lines) + "\n"
