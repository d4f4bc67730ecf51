"""``setup --enforce``: nothing but sandboxed kernels, on servers that are started with no setting of their own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.harness import CANARY, wait_until
from support.started import Installation, Started

_MARK = "agentbox-command"
MANAGER = "jupyter_agentbox.AgentboxKernelSpecManager"
#: A kernelspec manager of the kind that lists conda environments, and throws metadata away.
DROPS = """
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager

class Drops(KernelSpecManager):
    def get_kernel_spec(self, name):
        found = super().get_kernel_spec(name)
        return KernelSpec(argv=found.argv, display_name=found.display_name, language=found.language)
"""
#: A server extension that is loaded after all others, and puts its own kernelspec manager in place.
LATE = """
from drops import Drops

def _jupyter_server_extension_points():
    return [{"module": "zzz_late"}]

def _load_jupyter_server_extension(server):
    server.kernel_spec_manager = server.kernel_manager.kernel_spec_manager = Drops(parent=server)
"""


@pytest.fixture
def user(enforced: Installation) -> Iterator[Installation]:
    """The enforced installation; what a test adds to the user's configuration and kernels is gone afterwards."""
    yield enforced
    shutil.rmtree(enforced.data / "kernels", ignore_errors=True)
    for path in enforced.config_dir.rglob("*.*"):
        if path.is_file():
            path.unlink()


def add_module(installation: Installation, name: str, source: str) -> None:
    (find_packages(installation) / f"{name}.py").write_text(source)


def find_packages(installation: Installation) -> Path:
    """Return the folder into which packages are installed."""
    (folder,) = installation.prefix.glob("lib/python*/site-packages")
    return folder


def test_only_sandboxed_kernels_are_offered_and_one_is_the_default(enforced_lab: Started) -> None:
    found = enforced_lab.call("GET", "api/kernelspecs")
    assert (found["default"], list(found["kernelspecs"])) == ("agentbox", ["agentbox"])
    kernel = enforced_lab.call("POST", "api/kernels", {})
    assert kernel["name"] == "agentbox"
    enforced_lab.call("DELETE", f"api/kernels/{kernel['id']}")


@pytest.mark.parametrize("name", ["python3", "python"])
def test_python3_is_the_sandboxed_python(enforced_lab: Started, name: str) -> None:
    kernel = enforced_lab.notebook(f"{name}/book.ipynb", name)
    assert kernel.check("import os; print(os.uname().release)") == "4.4.0\n"
    kernel.shutdown()


def test_a_terminal_runs_in_a_sandbox(enforced_lab: Started) -> None:
    info = enforced_lab.call("GET", "api/agentbox/server")
    assert info["terminals"] == "sandboxed"
    name = enforced_lab.call("POST", "api/terminals", {})["name"]
    (sandbox,) = wait_until(enforced_lab.env.sandboxes, 60, "the terminal's sandbox is there")
    enforced_lab.call("DELETE", f"api/terminals/{name}")
    wait_until(lambda: not sandbox.exists(), 60, "it ends with the terminal")


def test_jupyterlab_installs_no_extension(enforced_lab: Started) -> None:
    answer = enforced_lab.request("POST", "lab/api/extensions", {"cmd": "install", "extension_name": "jupyterlab-x"})
    assert not answer.ok
    assert "Extension Manager is 'readonly'" in enforced_lab.text


def test_the_log_names_what_is_in_use(enforced_lab: Started) -> None:
    path = enforced_lab.env.prefix / "etc" / "jupyter" / "jupyter_agentbox_config.json"
    assert f"sandboxed kernels only ({path}); kernelspecs by {MANAGER}, files by jupyter_agentbox" in enforced_lab.text


def test_a_server_that_is_set_to_less_does_not_start(user: Installation) -> None:
    add_module(user, "drops", DROPS)
    managers = {
        "kernel_spec_manager_class": "drops.Drops",
        "contents_manager_class": "jupyter_server.services.contents.largefilemanager.AsyncLargeFileManager",
    }
    config = {"ServerApp": managers, "LabApp": {"extension_manager": "pypi"}}
    path = user.write_config(config, "jupyter_server_config.json")
    said = user.start_refused("lab")
    problems = said[said.index("the server does not start: ") :].split(". AgentboxExtension.enforce in")[0].split("; ")
    for problem, sentence in zip(
        problems,
        (
            "the kernelspec manager is drops.Drops",
            f"the contents manager is {managers['contents_manager_class']}",
            "the extension manager of lab is 'pypi'",
        ),
        strict=True,
    ):
        assert sentence in problem
        assert f"set by {path}" in problem
    assert "Traceback" not in said


def test_a_server_whose_kernels_are_on_a_gateway_does_not_start(user: Installation) -> None:
    user.write_config({"GatewayClient": {"url": "http://127.0.0.1:9"}}, "jupyter_server_config.json")
    said = user.start_refused("server")
    assert "the server does not start: kernels run on the gateway http://127.0.0.1:9" in said
    assert "AgentboxExtension.enforce in" in said
    assert "Traceback" not in said


def test_an_extension_that_is_loaded_later_cannot_replace_the_kernelspec_manager(user: Installation) -> None:
    add_module(user, "drops", DROPS)
    add_module(user, "zzz_late", LATE)
    user.write_config({"ServerApp": {"jpserver_extensions": {"zzz_late": True}}}, "jupyter_server_config.json")
    said = user.start_refused("server")
    assert "the kernelspec manager is drops.Drops, set by another extension or package" in said


def test_the_users_own_file_cannot_turn_it_off(user: Installation) -> None:
    path = user.write_config({"AgentboxExtension": {"enforce": False}})
    with user.start("server") as server:
        assert list(server.call("GET", "api/kernelspecs")["kernelspecs"]) == ["agentbox"]
        assert f"AgentboxExtension.enforce is false in {path}, without effect" in server.text
        (problem,) = server.call("GET", "api/agentbox/server")["problems"]
        assert str(path) in problem


def test_a_file_that_may_enforce_and_cannot_be_read_enforces(make_user: Callable[[], Installation]) -> None:
    user = make_user()
    user.write_config({}).write_text('{"AgentboxExtension": {"enforce": tru')
    with user.start("server") as server:
        assert list(server.call("GET", "api/kernelspecs")["kernelspecs"]) == ["agentbox"]


def test_an_extension_that_cannot_be_imported_keeps_the_server_down(user: Installation) -> None:
    module = find_packages(user) / "jupyter_agentbox" / "jupyter" / "enforcement.py"
    source = module.read_text()
    module.write_text("1/0")
    try:
        assert "its extension cannot be imported (ZeroDivisionError" in user.start_refused("server")
    finally:
        module.write_text(source)


@pytest.fixture
def dropping(plain: Installation) -> Iterator[Started]:
    """A server that is not enforced, whose kernelspec manager throws metadata away."""
    add_module(plain, "drops", DROPS)
    config: dict[str, Any] = {"ServerApp": {"kernel_spec_manager_class": "drops.Drops"}}
    path = plain.write_config(config, "jupyter_server_config.json")
    try:
        with plain.start("server") as server:
            yield server
    finally:
        path.unlink()


def test_a_sandboxed_kernel_without_its_stanza_never_runs_on_the_host(dropping: Started) -> None:
    assert "drops.Drops drops the kernel provisioner of 'agentbox'" in dropping.text
    (problem,) = dropping.call("GET", "api/agentbox/server")["problems"]
    assert "jupyter_server_config.json" in problem
    dropping.request("POST", "api/kernels", {"name": "agentbox"})
    wait_until(lambda: "jupyter_agentbox: kernel not started" in dropping.text, 60, "the kernel says why it fails")
    assert not [
        line for line in dropping.env.processes().values() if "ipykernel_launcher -f" in line and _MARK not in line
    ]


def test_commands_that_are_run_directly_say_why_they_fail_and_plain_ones_start(
    plain: Installation, plain_lab: Started
) -> None:
    plain.run("jupyter", "agentbox", "kernelspec", "python3", "--name=guarded")
    code = (
        "import json, subprocess, sys\n"
        "from jupyter_client.kernelspec import KernelSpecManager\n"
        "for name in ('agentbox', 'guarded'):\n"
        "    argv = KernelSpecManager().get_kernel_spec(name).argv\n"
        "    ran = subprocess.run([sys.executable, *argv[1:]], stderr=subprocess.PIPE, text=True, timeout=60)\n"
        "    print(ran.returncode, ran.stderr.strip())"
    )
    said = plain.run("python", "-c", code).output
    assert [line.startswith("1 jupyter_agentbox: kernel not started: ") for line in said.splitlines()] == [True, True]

    directory = plain.data / "kernels" / "earlier"
    directory.mkdir(parents=True)
    spec = json.loads((plain.data / "kernels" / "guarded" / "kernel.json").read_text())
    assert "agentbox-command" in spec["argv"]
    start = spec["argv"].index("agentbox-command") + 1
    (directory / "kernel.json").write_text(json.dumps({**spec, "argv": spec["argv"][start:]}))
    for name in ("guarded", "earlier"):
        kernel = plain_lab.notebook("twins/book.ipynb", name)
        assert kernel.check("import os; print(os.uname().release)") == "4.4.0\n"
        kernel.shutdown()


def test_serve_takes_python3_and_lists_what_it_has(served: Started) -> None:
    for name in ("python3", "python", "agentbox"):
        kernel = served.kernel(name)
        assert kernel.check("import os; print(os.uname().release)") == "4.4.0\n"
        kernel.shutdown()
    answer = served.request("POST", "api/kernels", {"name": "julia-1.10"})
    assert answer.status_code == 404
    assert answer.json()["message"].startswith(
        "This server offers no kernel named 'julia-1.10'. Offered kernels: agentbox"
    )


def test_without_enforcement_python3_stays_the_hosts(plain_lab: Started) -> None:
    found = plain_lab.call("GET", "api/kernelspecs")
    assert {"agentbox", "python3"} <= set(found["kernelspecs"])
    kernel = plain_lab.notebook("host/book.ipynb", "python3")
    assert kernel.check(f"print(open('{plain_lab.env.home}/secret.txt').read())") == f"{CANARY}\n"
    kernel.shutdown()


def test_jupyters_default_provisioner_does_not_matter_to_a_sandboxed_kernel(enforced: Installation) -> None:
    # The servers of the other tests have Jupyter's own as the default.
    with enforced.start("server", env={"JUPYTER_DEFAULT_PROVISIONER_NAME": "agentbox-provisioner"}) as server:
        # With ours as the default, a kernelspec that names none runs in a sandbox, and so is offered.
        assert set(server.call("GET", "api/kernelspecs")["kernelspecs"]) == {"agentbox", "python3"}
        for name in sorted({"agentbox", "python3"}):
            kernel = server.notebook("defaults/book.ipynb", name)
            assert kernel.check("import os; print(os.uname().release)") == "4.4.0\n"
            kernel.shutdown()


def test_a_list_of_allowed_kernels_holds_for_names_too(user: Installation) -> None:
    user.run("jupyter", "agentbox", "kernelspec", "python3", "--name=other")
    user.write_config({"KernelSpecManager": {"allowed_kernelspecs": ["other"]}}, "jupyter_server_config.json")
    with user.start("server") as server:
        assert list(server.call("GET", "api/kernelspecs")["kernelspecs"]) == ["other"]
        for name in ("agentbox", "python3"):
            assert server.request("POST", "api/kernels", {"name": name}).status_code == 404
