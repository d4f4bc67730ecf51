"""Installing into an environment that uv made, which has no pip: from a notebook, over REST and at creation."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.api import Api, make_server_config
from support.environments import copy_kernel
from support.harness import Env, Server

pytestmark = [pytest.mark.network, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with a kernel, and without pip."""
    prefix = tmp_path_factory.mktemp("project") / ".venv"
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "venv", "--quiet", "--offline", f"--python={sys.executable}", prefix], check=True, timeout=100)
    (packages,) = prefix.glob("lib/python3*/site-packages")
    copy_kernel(packages)
    assert not list(packages.glob("pip*"))
    return prefix


@pytest.fixture(scope="module")
def server(make_env: Callable[..., Env], project: Path) -> Iterator[Server]:
    env = make_env(config=make_server_config(profiles={"project": {"python": str(project)}}))
    # The second is a kernel of the environment, of which its profile is not told.
    for name, python, config in (("project", "python", {"profile": "project"}), ("own", f"{project}/bin/python", {})):
        spec = {
            "argv": [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": name,
            "language": "python",
            "metadata": {"kernel_provisioner": {"provisioner_name": "agentbox-provisioner", "config": config}},
        }
        (env.data / "kernels" / name).mkdir(parents=True)
        (env.data / "kernels" / name / "kernel.json").write_text(json.dumps(spec))
    with env.server("server", "--ServerApp.jpserver_extensions={'jupyter_agentbox': True}") as server:
        yield server


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[Api]:
    api = Api(server)
    yield api
    api.http.close()


def install(api: Api, id: str, *names: str) -> dict[str, Any]:
    done = api.ok("POST", f"/sandboxes/{id}/packages", {"packages": names, "timeout": 200}, timeout=240)
    assert done["is_ok"], done
    return dict(done)


@pytest.mark.parametrize("name", ["project", "own"])
def test_a_notebook_installs_into_it_by_every_way(server: Server, api: Api, project: Path, name: str) -> None:
    kernel = server.kernel(name)
    assert kernel.check("import sys; print(sys.prefix)") == f"{project}\n"
    assert "Successfully installed six" in kernel.check("%pip install six")
    assert kernel.check("import six; print(six.__file__)").startswith(f"{project}/lib/")
    assert "Successfully installed docopt" in kernel.check("!pip install docopt")
    assert kernel.check("import docopt; print(docopt.__file__)").startswith(f"{project}/lib/")
    assert kernel.check("!command -v pip").strip() == f"{project}/bin/pip"
    install(api, kernel.id, "toml")
    assert kernel.check("import toml; print(toml.__file__)").startswith(f"{project}/lib/")
    ran = api.ok("POST", f"/sandboxes/{kernel.id}/code", {"code": "import sys; sys.prefix", "context": "second"})
    assert str(project) in ran["result"]["data"]["text/plain"]
    kernel.shutdown()


def test_a_sandbox_is_created_with_packages(api: Api, project: Path) -> None:
    info = api.ok("POST", "/sandboxes", {"profile": "project", "packages": ["six"]}, timeout=240)
    ran = api.ok("POST", f"/sandboxes/{info['id']}/exec", {"command": "python -c 'import six; print(six.__file__)'"})
    assert ran["stdout"].startswith(f"{project}/lib/"), ran
    assert "Successfully installed docopt" in install(api, info["id"], "docopt")["message"]
    api.ok("DELETE", f"/sandboxes/{info['id']}")


def test_the_environment_itself_has_not_changed(project: Path) -> None:
    names = {path.name for path in project.glob("lib/python3*/site-packages/*")}
    assert not names & {"pip", "pip.py", "six.py", "docopt.py", "toml"}
    assert not list(project.glob("bin/pip*"))
