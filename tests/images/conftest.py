"""An image for the tests of languages, built once on each machine for each recipe and way of building."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest
from e2e.harness import Env, Server
from handlers.conftest import Api, make_server_config

from jupyter_agentbox.egress.presets import pip_environment
from jupyter_agentbox.storage import images
from jupyter_agentbox.storage.images import Image, ImageStore, values
from jupyter_agentbox.storage.images import build as builder

if TYPE_CHECKING:
    from jupyter_agentbox.testing.sandboxes import SandboxContract

RECIPE = Path(__file__).with_name("languages.toml")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jupyter-agentbox-tests"
BUILD_TIMEOUT = 1500
MIRROR = "cran.test"
#: The server's configuration: its resolver finds the mirror on this machine.
RESOLVE = f"""\
import socket
find = socket.getaddrinfo
socket.getaddrinfo = lambda host, *more, **named: find("127.0.0.1" if host == "{MIRROR}" else host, *more, **named)
"""


@dataclass(frozen=True)
class Built:
    """An image in a store that tests share; nobody changes it."""

    store: ImageStore
    image: Image

    def lend(self, state: Path) -> None:
        """Put it into another state directory."""
        (state / "images").mkdir(mode=0o700, parents=True)
        (state / "images" / self.image.address).symlink_to(self.store.directory / self.image.address)


def build(state: Path) -> Image:
    """Build it by the command."""
    command = [sys.executable, "-m", "jupyter_agentbox.cli", "image", "build", str(RECIPE), "--no-kernelspec"]
    answer = subprocess.run(
        [*command, f"--cache={CACHE / 'downloads'}", f"--Policy.state_dir={state}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT,
    )
    assert answer.returncode == 0, answer.stderr[-6000:]
    image = ImageStore(state).get("languages")
    assert answer.stdout.startswith(f"{image.short}  ")
    assert "installing remaining packages" in answer.stderr, "each step is told"
    return image


def build_once(recipe: Path, build: Callable[[Path], Image]) -> Built:
    """Return the image of a recipe, from the cache where an earlier run has built it in the same way."""
    sources = [*sorted(Path(images.__file__).parent.glob("*.py")), *sorted(recipe.parent.glob("*.toml"))]
    text = b"".join((recipe.name.encode(), *(path.read_bytes() for path in sources)))
    key = hashlib.sha256(text).hexdigest()[:16]
    state = CACHE / key
    state.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        store = ImageStore(state)
        image = next(iter(store.list()), None) or build(state)
    return Built(store, image)


@pytest.fixture(scope="session")
def built(has_runsc: None) -> Built:
    """The image of all languages."""
    return build_once(RECIPE, build)


def build_ours(name: str) -> Built:
    """Return the image of a recipe that comes with agentbox."""
    file = values.find_recipe(name)

    def make(state: Path) -> Image:
        return builder.build(
            ImageStore(state),
            values.read_recipe(file),
            print,
            pip_environment=pip_environment(),
            cache=CACHE / "downloads",
        )

    return build_once(file, make)


class OnRecipe:
    """The suite of sandboxes on an image that comes with agentbox."""

    image: ClassVar[str]

    @pytest.fixture(scope="class")
    @classmethod
    def images(cls, has_runsc: None) -> Path:
        return build_ours(cls.image).store.state_dir


def on_every_recipe(suite: type[SandboxContract]) -> dict[str, type]:
    """Return the suite once for each image that comes with agentbox, by name; none unless AGENTBOX_IMAGES is all."""
    names = values.list_recipes() if os.environ.get("AGENTBOX_IMAGES") == "all" else []
    made = {f"{suite.__name__}On{name.capitalize()}": name for name in names}
    return {title: type(title, (OnRecipe, suite), {"image": name}) for title, name in made.items()}


@dataclass(frozen=True)
class Mirror:
    """A site of packages on this machine, called as none in the world is."""

    folder: Path
    port: int

    @property
    def host(self) -> str:
        return f"{MIRROR}:{self.port}"


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mirror]:
    folder = tmp_path_factory.mktemp("mirror")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as site:
        thread = threading.Thread(target=site.serve_forever, daemon=True)
        thread.start()
        yield Mirror(folder, site.server_address[1])
        site.shutdown()
        thread.join(30)


@pytest.fixture(scope="module")
def env(make_env: Callable[..., Env], built: Built, mirror: Mirror) -> Env:
    """A Jupyter with the image, kernelspecs for its kernels, and a mirror of R's that its policy allows."""
    line = f"echo 'options(repos = \"http://{mirror.host}\")' > ~/.Rprofile"
    env = make_env(
        config=make_server_config(
            allowed_hosts=["pypi", "npm", mirror.host],
            private_hosts=[mirror.host],
            profiles={"own": {"image": "languages"}, "r": {"image": "languages", "init": [line]}},
        )
    )
    (env.config_dir / "jupyter_server_config.py").write_text(RESOLVE)
    built.lend(env.state_dir)
    env.run("jupyter-agentbox", "kernelspec", "--image=languages")
    return env


@pytest.fixture(scope="module")
def server(env: Env) -> Iterator[Server]:
    extensions = "--ServerApp.jpserver_extensions={'jupyter_agentbox': True}"
    with env.server("server", extensions) as server:
        yield server


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[Api]:
    api = Api(server)
    yield api
    api.http.close()
