"""Hosts that a person allows for a kernel, a notebook or always, and who may not, on a real server in gVisor."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.harness import Env, KernelClient, Server, wait_until
from support.public_site import PRIVATE, RESOLVE, SITE, Site

BLOCKED = "Blocked by sandbox: {}. Allow it in the Sandboxes panel, or add it to Policy.allowed_hosts."
ASK = "Blocked by sandbox: {}. Ask your administrator to add it to Policy.allowed_hosts."
EXTENSION = "--ServerApp.jpserver_extensions={'jupyter_agentbox': True}"


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    found = Site()
    yield found
    found.listener.close()


def start(env: Env, *arguments: str) -> Any:
    (env.config_dir / "jupyter_server_config.py").write_text(RESOLVE)
    return env.server("server", EXTENSION, *arguments)


@pytest.fixture(scope="module")
def server(make_env: Callable[..., Env]) -> Iterator[Server]:
    policy = {
        "allowed_hosts": ["profile.test"],
        "private_hosts": ["*.test:8080", f"{PRIVATE}:9090"],
        "profiles": {"own": {"allowed_hosts": []}, "closed": {"user_may_allow": ["other.test"]}},
    }
    with start(make_env(config={"Policy": policy})) as server:
        yield server


def fetch(site: Site, host: str = SITE) -> str:
    """Return code that fetches from the site and prints what it gets, or the error."""
    return (
        "import urllib.request\n"
        f"try: print(urllib.request.urlopen('http://{host}:{site.port}/', timeout=60).read().decode())\n"
        "except OSError as error: print(error)"
    )


def rules(kernel: KernelClient, verb: str = "GET", body: Any = None, **query: str) -> Any:
    """Call the API on the hosts of a kernel's sandbox."""
    path = f"api/agentbox/sandboxes/{kernel.id}/egress" + ("" if verb == "GET" else "/rules")
    answer = kernel.server.http.request(verb, kernel.server.url(path), json=body, params=query, timeout=150)
    return answer.json()


def allow(kernel: KernelClient, host: str, scope: str = "kernel") -> Any:
    return rules(kernel, "POST", {"host": host, "scope": scope})


def test_a_blocked_host_can_be_allowed_for_the_kernel_and_revoked_at_once(server: Server, site: Site) -> None:
    host = f"{SITE}:{site.port}"
    kernel, other = server.notebook("one.ipynb"), server.notebook("two.ipynb")
    blocked = kernel.execute(fetch(site))
    assert blocked.notices == BLOCKED.format(host) + "\n"
    assert BLOCKED.format(host) in blocked.text
    info = rules(kernel)
    (verdict,) = info["refused"]
    assert (verdict["host"], verdict["may_allow"]) == (host, True)
    assert verdict["scopes"] == ["kernel", "notebook", "always"]
    allowed = allow(kernel, host)
    assert (allowed["hosts"], allowed["refused"]) == (["profile.test", host], [])
    assert [(rule["host"], rule["scope"], rule["target"]) for rule in allowed["rules"]] == [(host, "kernel", kernel.id)]
    assert kernel.check(fetch(site)) == "hello\n"
    assert BLOCKED.format(host) in other.execute(fetch(site)).text

    kernel.restart()
    assert kernel.check(fetch(site)) == "hello\n"

    # A connection that is open ends with the consent.
    kernel.check(
        f"import socket; line = socket.create_connection(('{SITE}', {site.port}), 60)\n"
        "line.sendall(b'GET / HTTP/1.0\\r\\n\\r\\n'); print(line.recv(15))"
    )
    waiting = kernel.start("line.settimeout(100); data = b'x'\nwhile data: data = line.recv(9999)\nprint('closed')")
    began = time.monotonic()
    assert rules(kernel, "DELETE", host=host)["rules"] == []
    assert kernel.finish(waiting).text == "closed\n"
    assert time.monotonic() - began < 30
    assert BLOCKED.format(host) in kernel.execute(fetch(site)).text

    rows = server.call("GET", "api/agentbox/audit?kind=grant&limit=1000")["rows"]
    told = [(row["detail"].get("event"), row["detail"]["hosts"], row["detail"].get("scope")) for row in rows]
    assert told[-2:] == [("allowed", [host], "kernel"), ("revoked", [host], "kernel")]
    assert all(row["detail"]["by"] for row in rows)
    connected = server.call("GET", f"api/agentbox/sandboxes/{kernel.id}/egress/log?is_allowed=true")["rows"]
    assert [(row["rule"], row["detail"]["allowed_by"]) for row in connected][-1] == (host, "user")
    kernel.shutdown()
    other.shutdown()


def test_consent_for_a_notebook_holds_for_its_next_kernel(server: Server, site: Site) -> None:
    host = f"{SITE}:{site.port}"
    kernel, other = server.notebook("book.ipynb"), server.notebook("beside.ipynb")
    assert allow(kernel, host, "notebook")["rules"][0]["target"] == str(server.env.work / "book.ipynb")
    assert kernel.check(fetch(site)) == "hello\n"
    kernel.shutdown()
    kernel = server.notebook("book.ipynb")
    assert kernel.check(fetch(site)) == "hello\n"
    assert BLOCKED.format(host) in other.execute(fetch(site)).text

    # A kernel without a notebook is offered no consent for one.
    bare = server.kernel()
    bare.execute(fetch(site))
    assert rules(bare)["refused"][0]["scopes"] == ["kernel", "always"]
    assert allow(bare, host, "notebook")["reason"] == "policy_refused"

    # The notebook is renamed: what is allowed now is for its new path.
    (session,) = [item for item in server.call("GET", "api/sessions") if item["path"] == "beside.ipynb"]
    server.call("PATCH", f"api/sessions/{session['id']}", {"path": "renamed.ipynb", "name": "renamed.ipynb"})
    target = str(server.env.work / "renamed.ipynb")
    assert allow(other, host, "notebook")["rules"][0]["target"] == target
    other.restart()
    assert other.check(fetch(site)) == "hello\n"

    found = server.call("GET", "api/agentbox/egress/rules")["rules"]
    assert {rule["target"] for rule in found} >= {target, str(server.env.work / "book.ipynb")}
    server.http.delete(server.url("api/agentbox/egress/rules"), params={"host": host}, timeout=60).raise_for_status()
    assert server.call("GET", "api/agentbox/egress/rules")["rules"] == []
    for item in (kernel, other):
        assert BLOCKED.format(host) in item.execute(fetch(site)).text
    for item in (kernel, other, bare):
        item.shutdown()


def test_the_command_line_allows_lists_and_revokes(server: Server, site: Site) -> None:
    host, env = f"{SITE}:{site.port}", server.env
    kernel = server.notebook("cli.ipynb")
    kernel.execute(fetch(site))
    said = env.run("jupyter", "agentbox", "egress", "allow", host).output
    assert f"allowed {host} always, for profile default" in said

    def hosts() -> list[str]:
        return list(rules(kernel)["hosts"])

    wait_until(lambda: host in hosts(), 10, "the running kernel has it")
    assert kernel.check(fetch(site)) == "hello\n"
    other = server.notebook("cli2.ipynb")
    assert other.check(fetch(site)) == "hello\n"
    (rule,) = json.loads(env.run("jupyter", "agentbox", "egress", "list", "--json").output)
    assert (rule["host"], rule["scope"], rule["target"]) == (host, "always", "default")
    assert host in env.run("jupyter", "agentbox", "egress", "list").output

    # An agent's sandbox has it too, unless its request names its own hosts.
    made = server.call("POST", "api/agentbox/sandboxes", {"id": "usual"})
    own = server.call("POST", "api/agentbox/sandboxes", {"id": "own", "allowed_hosts": []})
    assert (host in made["allowed_hosts"], own["allowed_hosts"]) == (True, [])
    for name in ("usual", "own"):
        server.call("DELETE", f"api/agentbox/sandboxes/{name}")

    env.run("jupyter", "agentbox", "egress", "revoke", host)
    wait_until(lambda: host not in hosts(), 10, "the running kernel has it no more")
    assert BLOCKED.format(host) in kernel.execute(fetch(site)).text
    failed = env.run("jupyter", "agentbox", "egress", "revoke", host, check=False)
    assert (failed.code, "is not among the hosts that you allowed" in failed.output) == (1, True)
    refused = env.run("jupyter", "agentbox", "egress", "allow", "x.test", "--profile=closed", check=False)
    assert (refused.code, "policy does not let you allow x.test" in refused.output) == (1, True)
    rows = [json.loads(line) for line in env.run("jupyter", "agentbox", "audit", "export").output.splitlines()]
    told = [row["detail"]["event"] for row in rows if row["kind"] == "grant" and row["sandbox"] == "-"]
    assert told[-2:] == ["allowed", "revoked"]
    kernel.shutdown()
    other.shutdown()


@pytest.mark.parametrize("host", [f"{PRIVATE}:443", f"{PRIVATE}:8080", f"{PRIVATE}:9090", "localhost:8888"])
def test_a_private_address_is_never_allowed_this_way(server: Server, host: str) -> None:
    kernel = server.notebook("private.ipynb")
    refused = allow(kernel, host)
    assert (refused["reason"], refused["setting"]) == ("policy_refused", "Policy.private_hosts")
    assert host not in rules(kernel)["hosts"]
    for address in ("10.1.2.3", "127.0.0.1:8888", "[::1]:8888", "http://site.test/"):
        assert allow(kernel, address)["reason"] in ("invalid_request", "policy_refused")
    assert rules(kernel)["rules"] == []


def test_a_name_that_becomes_private_after_consent_is_refused(server: Server) -> None:
    # The name is not found when it is allowed; Policy.private_hosts has a pattern for it.
    kernel = server.notebook("private.ipynb")
    allow(kernel, "*.test:8080")
    code = (
        "import urllib.request\n"
        f"try: urllib.request.urlopen('http://{PRIVATE}:8080/', timeout=60)\n"
        "except OSError as error: print(error)"
    )
    assert f"{PRIVATE}:8080 resolves to a non-public address" in kernel.execute(code).text
    rules(kernel, "DELETE", host="*.test:8080")
    kernel.shutdown()


def test_agents_ask_and_never_allow(server: Server, site: Site) -> None:
    host = f"{SITE}:{site.port}"
    kernel = server.notebook("agent.ipynb")
    path = f"api/agentbox/sandboxes/{kernel.id}"
    made = server.call("POST", f"{path}/tokens", {"verbs": ["read", "write", "execute", "restore"]})
    headers = {"Authorization": f"Bearer {made['token']}"}

    def call(verb: str, tail: str, body: Any = None, **query: str) -> Any:
        url = server.url(path + tail)
        return server.http.request(verb, url, json=body, params=query, headers=headers, timeout=60)

    for scope in ("kernel", "notebook", "always"):
        assert call("POST", "/egress/rules", {"host": host, "scope": scope}).status_code == 403
    verdict = call("GET", "/egress", host=host).json()
    assert (verdict["verdict"]["may_allow"], verdict["verdict"]["scopes"]) == (False, [])
    asked = call("POST", "/egress/asks", {"host": host, "why": "to say hello"})
    assert (asked.status_code, asked.json()["state"]) == (202, "pending")
    ask = asked.json()["id"]
    assert call("POST", f"/egress/asks/{ask}", {"decision": "allow"}).status_code == 403
    assert rules(kernel)["rules"] == []
    server.call("POST", f"{path}/egress/asks/{ask}", {"decision": "allow"})
    assert kernel.check(fetch(site)) == "hello\n"
    assert call("DELETE", "/egress/rules", host=host).status_code == 403
    rules(kernel, "DELETE", host=host)
    kernel.shutdown()


def test_consent_follows_the_kernel_and_not_its_copies(server: Server, site: Site) -> None:
    host = f"{SITE}:{site.port}"
    kernel = server.notebook("state.ipynb")
    path = f"api/agentbox/sandboxes/{kernel.id}"
    kernel.check("x = 1")
    before = server.call("POST", f"{path}/snapshots", {})["id"]
    allow(kernel, host)
    during = server.call("POST", f"{path}/snapshots", {})["id"]

    server.call("POST", f"{path}/restore", {"snapshot": before})
    assert kernel.check(fetch(site)) == "hello\n"
    server.call("POST", f"{path}/park")
    assert kernel.check(fetch(site)) == "hello\n"
    for body in ({"as_kernel": True}, {"snapshot": during, "as_kernel": True}, {"id": "copy"}):
        made = server.call("POST", f"{path}/fork", body)
        assert made["allowed_hosts"] == ["profile.test"], body
        if body.get("as_kernel"):
            server.call("DELETE", f"api/kernels/{made['kernels'][0]['id']}")
        else:
            server.call("DELETE", "api/agentbox/sandboxes/copy")

    # What was revoked comes back by no restore, and not by waking.
    server.call("POST", f"{path}/park")
    server.http.delete(server.url("api/agentbox/egress/rules"), params={"host": host}, timeout=60).raise_for_status()
    assert BLOCKED.format(host) in kernel.execute(fetch(site)).text
    server.call("POST", f"{path}/restore", {"snapshot": during})
    assert BLOCKED.format(host) in kernel.execute(fetch(site)).text
    kernel.shutdown()


def test_a_sandbox_with_hosts_of_its_own_request_keeps_to_them(server: Server, site: Site) -> None:
    host = f"{SITE}:{site.port}"
    kernel = server.notebook("narrow.ipynb")
    path = f"api/agentbox/sandboxes/{kernel.id}"
    allow(kernel, host, "always")
    assert server.call("PATCH", path, {"allowed_hosts": []})["allowed_hosts"] == []
    assert rules(kernel, host=host)["verdict"]["scopes"] == ["kernel"]
    kernel.restart()
    assert host not in rules(kernel)["hosts"]
    allow(kernel, host)
    assert server.call("PATCH", path, {"allowed_hosts": [host, "profile.test"]})["allowed_hosts"] == [
        "profile.test", host,
    ]  # fmt: skip
    assert server.call("PATCH", path, {"allowed_hosts": ["profile.test"]})["allowed_hosts"] == ["profile.test"]
    server.http.delete(server.url("api/agentbox/egress/rules"), params={"host": host}, timeout=60).raise_for_status()
    kernel.shutdown()


def test_consent_outlives_a_server_that_is_killed(make_env: Callable[..., Env], site: Site) -> None:
    env, host = make_env(config={"Policy": {"allowed_hosts": [], "lease_timeout": 300.0}}), f"{SITE}:{site.port}"
    (env.config_dir / "jupyter_server_config.py").write_text(RESOLVE)
    first = Server(env, "server", (EXTENSION,), {})
    first.wait_ready()
    kernel = first.notebook("kept.ipynb")
    allow(kernel, host)
    assert kernel.check(fetch(site)) == "hello\n"
    first.stop(signal.SIGKILL)
    with start(env) as second:
        kernel = KernelClient(second, kernel.id)
        assert kernel.check(fetch(site)) == "hello\n"
        assert [rule["host"] for rule in rules(kernel)["rules"]] == [host]
        assert rules(kernel, "DELETE", host=host)["rules"] == []
        assert BLOCKED.format(host) in kernel.execute(fetch(site)).text
        # What is revoked while no server runs is refused by the next one.
        allow(kernel, host, "always")
        assert kernel.check(fetch(site)) == "hello\n"
        second.stop(signal.SIGKILL)
    env.run("jupyter", "agentbox", "egress", "revoke", host)
    with start(env) as third:
        kernel = KernelClient(third, kernel.id)
        assert BLOCKED.format(host) in kernel.execute(fetch(site)).text
        kernel.shutdown()
    env.assert_clean()


def test_a_kernel_that_was_started_in_advance_has_what_is_allowed(make_env: Callable[..., Env]) -> None:
    env = make_env(config={"Policy": {"allowed_hosts": [], "templates": True, "pool_size": 1, "lease_timeout": 30.0}})
    env.run("jupyter", "agentbox", "warm", timeout=280)
    env.run("jupyter", "agentbox", "egress", "allow", SITE)
    with start(env) as server:
        pool = env.state_dir / "sandboxes"
        for how in ("template", "pool"):
            kernel = server.notebook(f"{how}.ipynb")
            rows = server.call("GET", "api/agentbox/audit?kind=lifecycle&limit=1000")["rows"]
            assert [row["detail"]["how"] for row in rows if row["detail"].get("kernel_id") == kernel.id] == [how]
            assert rules(kernel)["hosts"] == [SITE]
            kernel.shutdown()
            wait_until(lambda: list(pool.glob("*/pooled")), 150, "a kernel waits in the pool")
        env.run("jupyter", "agentbox", "egress", "revoke", SITE)
        kernel = server.notebook("last.ipynb")
        assert rules(kernel)["hosts"] == []
        env.run("jupyter", "agentbox", "egress", "allow", SITE)
        wait_until(lambda: rules(kernel)["hosts"] == [SITE], 10, "it has the host")
        kernel.shutdown()


@pytest.fixture(scope="module")
def enforced(make_env: Callable[..., Env]) -> Iterator[Server]:
    policy = {"allowed_hosts": [], "profiles": {"closed": {}}}
    config = {"Policy": policy, "AgentboxExtension": {"enforce": True}}
    with start(make_env(config=config)) as server:
        yield server


def test_on_an_enforced_server_only_the_administrator_allows(enforced: Server, site: Site) -> None:
    host = f"{SITE}:{site.port}"
    kernel = enforced.notebook("one.ipynb")
    blocked = kernel.execute(fetch(site))
    assert blocked.notices == ASK.format(host) + "\n"
    info = rules(kernel)
    assert (info["may_allow"], info["refused"][0]["may_allow"], info["refused"][0]["scopes"]) == ([], False, [])
    for scope in ("kernel", "notebook", "always"):
        refused = allow(kernel, host, scope)
        assert (refused["reason"], refused["setting"]) == ("policy_refused", "Policy.allowed_hosts")
        assert refused["message"] == ASK.format(host)
    failed = enforced.env.run("jupyter", "agentbox", "egress", "allow", host, check=False)
    assert (failed.code, "policy does not let you allow" in failed.output) == (1, True)
    # The user's own file has no effect.
    rule = {"host": host, "scope": "always", "target": "default"}
    (enforced.env.state_dir / "allowed_hosts.json").write_text(json.dumps([rule]))
    kernel.restart()
    assert ASK.format(host) in kernel.execute(fetch(site)).text
    (enforced.env.state_dir / "allowed_hosts.json").unlink()
    kernel.shutdown()


def test_an_administrator_can_name_what_persons_may_allow(make_env: Callable[..., Env], site: Site) -> None:
    config = {
        "Policy": {"allowed_hosts": [], "user_may_allow": [f"{SITE}:*"]},
        "AgentboxExtension": {"enforce": True},
    }
    with start(make_env(config=config)) as server:
        host = f"{SITE}:{site.port}"
        kernel = server.notebook("one.ipynb")
        assert kernel.execute(fetch(site)).notices == BLOCKED.format(host) + "\n"
        assert ASK.format(f"other.test:{site.port}") in kernel.execute(fetch(site, "other.test")).text
        assert [verdict["may_allow"] for verdict in rules(kernel)["refused"]] == [True, False]
        allow(kernel, host)
        assert kernel.check(fetch(site)) == "hello\n"
        assert allow(kernel, "other.test")["reason"] == "policy_refused"
        kernel.shutdown()
