"""An image for the tests of languages, built once on each machine for each recipe and way of building."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Callable, Iterator

import pytest
from support.api import Api, make_server_config
from support.harness import Env, Server
from support.images import RESOLVE, Built, Mirror


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
