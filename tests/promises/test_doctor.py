"""``jupyter agentbox doctor`` tells what a started server uses, not what files say."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

from support.started import Installation, Started

DISABLED = {"ServerApp": {"jpserver_extensions": {"jupyter_agentbox": False}}}


def examine(installation: Installation) -> tuple[int, list[dict[str, Any]]]:
    ran = installation.run("jupyter", "agentbox", "doctor", "--json", check=False)
    found = json.loads(ran.output[ran.output.index("[") :])
    return ran.code, [check for check in found if check["name"] in ("server", "running server")]


def test_it_asks_a_server_that_it_starts_and_those_that_run(enforced: Installation, enforced_lab: Started) -> None:
    code, found = examine(enforced)
    assert (code, [check["name"] for check in found]) == (0, ["server", "running server"]), found
    for check in found:
        assert "offers sandboxed kernels only" in check["message"]
        assert "default kernel: agentbox; terminals: sandboxed" in check["message"]
        assert "kernelspecs by jupyter_agentbox.AgentboxKernelSpecManager" in check["message"]
        assert "files by jupyter_agentbox.AgentboxContentsManager" in check["message"]
    assert f"127.0.0.1:{enforced_lab.port}/" in found[1]["message"] or str(enforced_lab.port) in found[1]["message"]


def test_an_extension_that_is_disabled_is_found(enforced: Installation) -> None:
    path = enforced.write_config(DISABLED, "jupyter_server_config.json")
    try:
        code, (check, *_) = examine(enforced)
    finally:
        path.unlink()
    assert (code, check["is_ok"]) == (1, False)
    assert "has not loaded the extension jupyter_agentbox, so AgentboxExtension.enforce in" in check["message"]
    assert check["remedy"] == "jupyter server extension enable jupyter_agentbox"


def test_a_server_that_refuses_to_start_is_found_with_its_reason(enforced: Installation) -> None:
    config = {"ServerApp": {"kernel_spec_manager_class": "jupyter_client.kernelspec.KernelSpecManager"}}
    path = enforced.write_config(config, "jupyter_server_config.json")
    try:
        code, (check, *_) = examine(enforced)
    finally:
        path.unlink()
    assert (code, check["is_ok"]) == (1, False)
    assert f"the kernelspec manager is jupyter_client.kernelspec.KernelSpecManager, set by {path}" in check["message"]


def test_servers_that_are_not_enforced_are_said_to_offer_the_hosts_kernels_and_one_to_follow_links(
    plain: Installation, plain_lab: Started
) -> None:
    config = {
        "ServerApp": {"contents_manager_class": "jupyter_server.services.contents.filemanager.AsyncFileContentsManager"}
    }
    path = plain.write_config(config, "jupyter_server_config.json")  # not of the server that is running
    try:
        code, found = examine(plain)
    finally:
        path.unlink()
    assert code == 1
    (problem,) = [check for check in found if not check["is_ok"]]
    assert problem["name"] == "server"
    assert "follows links that code in a sandbox creates" in problem["message"]
    assert str(path) in problem["message"]
    here = f":{urlsplit(plain_lab.url('')).port}/"
    (running,) = [check for check in found if check["name"] == "running server" and here in check["message"]]
    assert "files by jupyter_agentbox.AgentboxContentsManager" in running["message"]
    for check in (found[0], running):
        assert "offers kernels on the host too" in check["message"]
        assert "terminals: host" in check["message"]
