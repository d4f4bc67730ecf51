"""Notebooks' kernels that are parked: saved to the disk, alive for whoever looks, and woken by the first who speaks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from support.harness import Env, KernelClient, Server, wait_until
from support.parking import EXTENSION, call, is_parked, park
from support.snapshot_images import make_store, put

from jupyter_agentbox.errors import Damaged


@pytest.fixture(scope="module")
def server(make_env: Callable[..., Env]) -> Iterator[Server]:
    env = make_env(config={"Policy": {"lease_timeout": 30.0, "max_sandboxes": 2, "templates": False}})
    # Long, so that a shutdown that is not obeyed is told from one on a slow machine.
    patient = "--KernelManager.shutdown_wait_time=80"
    with env.server("server", EXTENSION, patient) as running:
        yield running


@pytest.fixture
def kernel(server: Server) -> Iterator[KernelClient]:
    made = server.kernel()
    yield made
    if made.id in {item["id"] for item in server.call("GET", "api/kernels")}:
        made.shutdown()


def saved(env: Env) -> list[Path]:
    return [*env.state_dir.glob("parked/*"), *env.state_dir.glob("snapshots/owners/*/snapshots/*")]


def state_of(kernel: KernelClient) -> str:
    return str(kernel.server.call("GET", f"api/kernels/{kernel.id}")["execution_state"])


def test_a_parked_kernel_takes_nothing_and_any_message_wakes_it(kernel: KernelClient) -> None:
    server, env = kernel.server, kernel.server.env
    kernel.check("x = 41\nopen('kept.txt', 'w').write('kept')\nopen('/tmp/layer', 'w').write('too')")
    wait_until(lambda: state_of(kernel) == "idle", 60, "it is idle")
    park(kernel)
    assert env.sandboxes() == []
    # The import cache, which a server makes once, may be in the making.
    wait_until(
        lambda: not [line for line in env.processes().values() if "jupyter-server" not in line],
        60,
        "no process is left",
    )
    (listed,) = call(server, "GET", "sandboxes?state=parked")["sandboxes"]
    assert listed["kernels"] == [{"id": kernel.id, "state": "parked"}]
    table = json.loads(env.run("jupyter-agentbox", "list", "--json").output)
    assert [(item["kernel_id"], item["state"], item["memory"]) for item in table] == [(kernel.id, "parked", 0)]
    time.sleep(4)  # longer than what the restarter waits between two looks
    assert state_of(kernel) == "idle"
    kernel.interrupt()
    assert is_parked(kernel), "there is nothing to interrupt"
    assert kernel.check("print(x + 1, open('kept.txt').read(), open('/tmp/layer').read())") == "42 kept too\n"
    assert not is_parked(kernel)
    wait_until(lambda: not saved(env), 60, "what was saved is removed")
    assert "restart" not in server.log.read_text()

    park(kernel)
    ran = call(server, "POST", f"sandboxes/{kernel.id}/code", {"code": "x"})
    assert ran["result"]["data"]["text/plain"] == "41"
    park(kernel)
    ran = call(server, "POST", f"sandboxes/{kernel.id}/exec", {"command": "cat kept.txt"})
    assert ran["stdout"] == "kept"
    park(kernel)
    assert call(server, "POST", f"sandboxes/{kernel.id}/wake")["state"] == "running"
    park(kernel)
    with ThreadPoolExecutor(3) as pool:
        others = [KernelClient(server, kernel.id) for _ in range(3)]  # each asks for its state
        assert list(pool.map(lambda client: client.check("print(x)"), others)) == ["41\n"] * 3
    assert [item["state"] for item in call(server, "GET", "sandboxes")["sandboxes"]] == ["running"]


def connections(server: Server) -> int:
    """Count the server's sockets."""
    found = 0
    for path in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just been closed
            found += os.readlink(path).startswith("socket:")
    return found


def leave(kernel: KernelClient) -> None:
    """Close its page."""
    kernel.socket.close()
    wait_until(lambda: kernel.server.call("GET", f"api/kernels/{kernel.id}")["connections"] == 0, 60, "it is closed")


def shown(client: KernelClient) -> str:
    """Return the first that is put out to this page."""
    deadline = time.monotonic() + 60
    while (message := client.receive(deadline))["msg_type"] != "stream":
        pass
    return str(message["content"]["text"])


def test_a_page_that_comes_back_is_shown_what_others_ran_after_it_was_parked(kernel: KernelClient) -> None:
    server, path = kernel.server, f"sandboxes/{kernel.id}"
    kernel.check("import os, time; x = 41")
    leave(kernel)
    before = connections(server)

    # Jupyter holds no connections for a page that was closed.
    park(kernel)
    wait_until(lambda: connections(server) <= before - 8, 60, "the connections of the page are closed")
    again = KernelClient(server, kernel.id, kernel.session)
    assert again.check("print(x)") == "41\n"
    leave(again)

    for turn in range(2):
        park(kernel)
        wait_until(lambda: connections(server) <= before - 8, 60, "the connections of the page are closed")
        if turn == 0:
            # Nothing that the page has missed: those for it are closed once more.
            assert call(server, "POST", f"{path}/exec", {"command": "echo said"})["stdout"] == "said\n"
            wait_until(lambda: connections(server) > before - 8, 60, "it is listened to for the page")
    assert call(server, "POST", f"{path}/code", {"code": "print(x + 1)"})["status"] == "ok"
    park(kernel)
    again = KernelClient(server, kernel.id, kernel.session)
    assert shown(again) == "42\n"
    assert again.check("print(x)") == "41\n"

    # What a closed page has not seen is kept over parking.
    request = again.start("while not os.path.exists('left'): time.sleep(0.05)\nprint('late')")
    leave(again)
    call(server, "PUT", f"{path}/files/content", {"path": "left", "text": ""})
    wait_until(lambda: state_of(kernel) == "idle", 60, "the cell is done")
    park(kernel)
    time.sleep(3)  # longer than what is waited before the connections are looked at
    again = KernelClient(server, kernel.id, kernel.session)
    assert again.finish(request).text == "late\n"


def test_a_kernel_that_works_is_not_parked_and_one_that_is_saved_answers(kernel: KernelClient) -> None:
    server = kernel.server
    wait = "import os, time\nwhile not os.path.exists('refused'): time.sleep(0.05)"
    running = kernel.start(f"print('begun', flush=True)\n{wait}\ny = 1")
    while kernel.receive(time.monotonic() + 100)["msg_type"] != "stream":
        pass
    answer = server.http.post(server.url(f"api/agentbox/sandboxes/{kernel.id}/park"), timeout=100)
    assert (answer.status_code, answer.json()["reason"]) == (409, "conflict")
    call(server, "PUT", f"sandboxes/{kernel.id}/files/content", {"path": "refused", "text": ""})
    assert kernel.finish(running).reply["status"] == "ok"
    assert kernel.check("print(y)") == "1\n"

    # What is sent while it is saved is answered.
    kernel.check("x = 0")
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            saving = pool.submit(call, kernel.server, "POST", f"sandboxes/{kernel.id}/snapshots", {})
            kernel.check("x += 1")
            while not saving.done():
                kernel.check("x += 1")
            call(kernel.server, "DELETE", f"snapshots/{saving.result()['id']}")
    assert int(kernel.check("print(x)")) > 1


def test_it_counts_as_none_of_those_that_run(server: Server, kernel: KernelClient) -> None:
    other = server.kernel()
    refused = server.http.post(server.url("api/agentbox/sandboxes"), json={}, timeout=100)
    assert (refused.status_code, refused.json()["reason"]) == (429, "limit_reached")
    kernel.check("x = 1")
    park(kernel)
    made = call(server, "POST", "sandboxes", {})
    answer = kernel.execute("x")
    assert answer.reply["status"] == "error"
    assert "Policy.max_sandboxes" in answer.reply["evalue"], "to wake is to be one more"
    assert is_parked(kernel)
    fork = server.http.post(
        server.url(f"api/agentbox/sandboxes/{other.id}/fork"), json={"as_kernel": True}, timeout=100
    )
    assert (fork.status_code, fork.json()["setting"]) == (429, "Policy.max_sandboxes")
    call(server, "DELETE", f"sandboxes/{made['id']}")
    assert kernel.check("print(x)") == "1\n"
    other.shutdown()


def test_shutdown_removes_what_was_saved_and_restart_makes_a_fresh_kernel(kernel: KernelClient) -> None:
    server, env = kernel.server, kernel.server.env
    kernel.check("x = 1\nopen('kept.txt', 'w').write('kept')")
    park(kernel)
    kernel.restart()
    assert kernel.check("print('x' in globals(), open('kept.txt').read())") == "False kept\n"
    assert saved(env) == []
    park(kernel)
    began = time.monotonic()
    server.call("DELETE", f"api/kernels/{kernel.id}")
    assert time.monotonic() - began < 38, "it obeyed, and was not killed after a wait"
    assert saved(env) == []
    assert env.sandboxes() == []
    events = [row["detail"]["event"] for row in call(server, "GET", "audit?kind=lifecycle&limit=3")["rows"]]
    assert "woken" not in events


def test_memory_that_lies_compressed_is_as_it_was_or_refused(tmp_path: Path) -> None:
    store, pages = make_store(tmp_path / "state"), b"state" * 1_000_003 + os.urandom(100_000)
    made = put(store, pages, kind="park")
    assert made.cost < 500_000 < made.size
    with store.checkout(made.id, "ada") as path:
        assert (path / "image" / "pages.img").read_bytes() == pages
    (packed,) = (tmp_path / "state").glob("snapshots/owners/*/snapshots/*/packed/pages.img")
    kept = packed.read_bytes()
    packed.chmod(0o600)
    middle = len(kept) // 2
    flipped = [kept[:at] + bytes([kept[at] ^ 1]) + kept[at + 1 :] for at in (0, middle, len(kept) - 1)]
    for wrong in (*flipped, kept[:-1], kept + b"x", b""):
        packed.write_bytes(wrong)
        with pytest.raises(Damaged), store.checkout(made.id, "ada"):
            pass
    packed.unlink()
    packed.symlink_to("/dev/zero")
    with pytest.raises(Damaged), store.checkout(made.id, "ada"):
        pass
    assert os.listdir(tmp_path / "state" / "snapshots" / "live") == []


def test_a_token_is_good_again_when_its_sandbox_was_woken_and_one_that_cannot_be_woken_says_why(
    kernel: KernelClient,
) -> None:
    server, path = kernel.server, f"sandboxes/{kernel.id}"
    kernel.check("x = 41")
    made = [call(server, "POST", f"{path}/tokens", {"verbs": ["read", "execute"]}) for _ in range(2)]
    headers = [{"Authorization": f"Bearer {item['token']}"} for item in made]
    url = server.url(f"api/agentbox/{path}")
    park(kernel)
    assert requests.get(url, headers=headers[0], timeout=100).json()["state"] == "parked"
    ran = requests.post(f"{url}/code", headers=headers[0], json={"code": "x"}, timeout=100)
    assert ran.json()["result"]["data"]["text/plain"] == "41"
    listed = call(server, "GET", f"{path}/tokens")["tokens"]
    assert {item["id"] for item in listed} == {item["info"]["id"] for item in made}
    call(server, "DELETE", f"{path}/tokens/{made[1]['info']['id']}")
    park(kernel)
    assert requests.get(url, headers=headers[1], timeout=100).status_code == 401
    kernel.check("1")
    assert requests.get(url, headers=headers[1], timeout=100).status_code == 401
    assert requests.get(url, headers=headers[0], timeout=100).json()["state"] == "running"

    # One that cannot be woken says why, and stays.
    park(kernel)
    (image,) = server.env.state_dir.glob("snapshots/owners/*/snapshots/*/packed")
    moved = image.rename(image.parent.parent / ".moved")
    answer = kernel.execute("x")
    assert answer.reply["status"] == "error"
    assert "cannot wake the parked kernel" in answer.reply["evalue"]
    assert is_parked(kernel)
    moved.rename(image)
    assert kernel.check("print(x)") == "41\n"


@pytest.mark.timeout(600)
def test_an_idle_kernel_is_parked_by_policy_found_by_the_next_server_and_culled_asleep(agentbox_env: Env) -> None:
    policy = {"lease_timeout": 120.0, "park_kernels_after": 4.0, "freeze_after": 1.0}
    agentbox_env.configure({"Policy": policy})
    first = Server(agentbox_env, "server", (EXTENSION,), {})
    first.wait_ready()
    kernel = first.kernel()
    kernel.check("x = 41")
    call(first, "PATCH", f"sandboxes/{kernel.id}", {"allowed_hosts": []})
    asked = call(first, "POST", f"sandboxes/{kernel.id}/egress/asks", {"host": "github.com"})
    # The living one wins where there are both, so it has to be gone.
    wait_until(lambda: is_parked(kernel) and not agentbox_env.sandboxes(), 100, "it is parked")
    first.stop(signal.SIGKILL)
    # As it is left by a server that was killed when it had removed what it woke.
    stray = agentbox_env.state_dir / "parked" / ("0" * 20)
    (stray / "tokens").mkdir(parents=True)

    with agentbox_env.server("server", EXTENSION) as second:
        assert [item["id"] for item in second.call("GET", "api/kernels")] == [kernel.id]
        assert call(second, "GET", f"sandboxes/{kernel.id}/egress/asks")["asks"] == [asked]
        assert agentbox_env.sandboxes() == []
        assert not stray.exists()
        # The page comes back, and is shown what others ran meanwhile.
        call(second, "POST", f"sandboxes/{kernel.id}/code", {"code": "print('by another')"})
        again = KernelClient(second, kernel.id, kernel.session)
        assert shown(again) == "by another\n"
        assert again.check("print(x + 1)") == "42\n"
        wait_until(lambda: is_parked(again), 100, "it is parked once more")
        again.socket.close()
        (kept,) = call(second, "GET", "egress/asks")["asks"]
        assert (kept["id"], kept["state"]) == (asked["id"], "pending")

    # Also by a server that ends in peace. What is culled is not woken for it.
    cull = [f"--MappingKernelManager.cull_{name}" for name in ("idle_timeout=3", "interval=1")]
    with agentbox_env.server("server", EXTENSION, *cull) as third:
        wait_until(lambda: not third.call("GET", "api/kernels"), 100, "it is culled")
        wait_until(lambda: not list(agentbox_env.state_dir.glob("parked/*")), 60, "what was saved is removed")
        assert "woken" not in [
            row["detail"]["event"] for row in call(third, "GET", "audit?kind=lifecycle&limit=2")["rows"]
        ]
