"""What README and docs/security.md promise of code in a sandbox, asked of servers that users would have."""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.harness import CANARY, KernelClient, wait_until
from support.started import Installation, Started

from jupyter_agentbox.guest.covers import NOTE

#: What the tests of limits and of a server's end have in the user's own file.
SMALL = {
    "Policy": {
        "lease_timeout": 5,
        "profiles": {"default": {"memory": "256 MiB", "processes": 64, "disk": "64 MiB"}},
    },
    "AgentboxExtension": {"terminals": "off"},
}


@pytest.fixture(scope="module")
def kernel(plain_lab: Started) -> Iterator[KernelClient]:
    """A notebook's kernel in JupyterLab, beside which there are secrets."""
    work = plain_lab.env.work
    for path in ("other/secret.txt", "proj/.env", "proj/.aws/credentials", "proj/.ssh/id", "proj/app/.env"):
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        (work / path).write_text(CANARY)
    (work / "proj" / "data.csv").write_text("a,b\n")
    client = plain_lab.notebook("proj/book.ipynb")
    yield client
    client.shutdown()


@pytest.fixture(scope="module")
def small(make_user: Callable[[], Installation]) -> Installation:
    """A user with small limits and a short lease."""
    user = make_user()
    user.write_config(SMALL)
    return user


@pytest.fixture(scope="module")
def small_server(small: Installation) -> Iterator[Started]:
    with small.start("server") as server:
        yield server


def test_code_does_not_see_the_users_files(kernel: KernelClient) -> None:
    env = kernel.server.env
    hidden = [env.home, env.home / "secret.txt", env.state_dir, env.work, env.work / "other", "/etc/shadow"]
    code = f"import os; print([path for path in {list(map(str, hidden))} if os.path.lexists(path)])"
    assert kernel.check(code) == "[]\n"
    assert kernel.check("import os; print(os.listdir('/home'), os.listdir('/var/lib'))") == "['user'] []\n"


def test_code_sees_its_own_folder_and_no_other_notebooks(kernel: KernelClient) -> None:
    assert kernel.check("print(open('data.csv').read())") == "a,b\n\n"
    assert kernel.check("import os; print('other' in os.listdir('..'), os.path.exists('../other'))") == "False False\n"


def test_secrets_beside_the_notebook_are_hidden(kernel: KernelClient) -> None:
    code = (
        "import os\n"
        "for path in ('.env', '.aws', '.ssh', 'app/.env'):\n"
        "    print(open(path).read() if os.path.isfile(path) else os.listdir(path))"
    )
    seen = kernel.check(code)
    assert seen.splitlines() == [NOTE.strip(), "", "[]", "[]", NOTE.strip(), ""]


def test_no_secret_of_the_servers_environment_is_inside(kernel: KernelClient) -> None:
    code = (
        "import glob, os\n"
        "print(dict(os.environ))\n"
        "for path in glob.glob('/proc/*/environ') + glob.glob('/proc/*/cmdline'):\n"
        "    try: print(open(path).read())\n"
        "    except OSError: pass"
    )
    seen = kernel.check(code)
    assert "/workspace" in seen
    for secret in (CANARY, kernel.server.token, "AWS_SECRET_ACCESS_KEY"):
        assert secret not in seen


def test_the_system_cannot_be_changed(kernel: KernelClient) -> None:
    prefix = kernel.server.env.prefix
    code = (
        "import os, sys\n"
        "for path in (sys.prefix + '/made', '/usr/made', '/etc/made'):\n"
        "    try: open(path, 'w').close()\n"
        "    except OSError: pass"
    )
    kernel.check(code)
    assert not [path for path in (prefix / "made", Path("/usr/made"), Path("/etc/made")) if path.exists()]


def test_user_code_has_no_capability(kernel: KernelClient) -> None:
    code = "import os, re; print(os.getuid(), re.findall('CapEff:.*', open('/proc/self/status').read()))"
    assert kernel.check(code) == "1000 ['CapEff:\\t0000000000000000']\n"


def test_no_file_lends_the_users_identity(kernel: KernelClient) -> None:
    kernel.check("import os\nopen('tool', 'w').close()\ntry: os.chmod('tool', 0o6755)\nexcept OSError: pass")
    mode = (kernel.server.env.work / "proj" / "tool").stat().st_mode
    assert not mode & (stat.S_ISUID | stat.S_ISGID)


def test_there_is_no_network_but_names(kernel: KernelClient) -> None:
    assert kernel.check("print([line.split(':')[0].strip() for line in open('/proc/net/dev')][2:])") == "['lo']\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code = (
            "import socket\n"
            f"for address in (('127.0.0.1', {port}), ('127.0.0.1', {kernel.server.port}), ('192.0.2.1', 80)):\n"
            "    try: socket.create_connection(address, 5); print('connected')\n"
            "    except OSError: print('refused')"
        )
        assert kernel.check(code) == "refused\n" * 3
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_name_that_is_not_listed_is_refused_with_the_setting_and_is_in_the_audit_log(kernel: KernelClient) -> None:
    code = (
        "import urllib.request\n"
        "try: urllib.request.urlopen('http://not-listed.example/', timeout=30)\n"
        "except OSError as error: print(error)"
    )
    said = kernel.check(code)
    assert "403" in said
    assert "not-listed.example" in said
    assert "allowed_hosts" in said
    rows = audit_rows(kernel.server.env)  # type: ignore[arg-type]
    assert [row for row in rows if row.get("host") == "not-listed.example" and row["is_allowed"] is False]


def audit_rows(installation: Installation) -> list[dict[str, object]]:
    installation.run("jupyter", "agentbox", "audit", "verify")
    return [json.loads(line) for line in installation.run("jupyter", "agentbox", "audit", "export").output.splitlines()]


def test_the_file_browser_follows_no_link_out_of_its_root(kernel: KernelClient) -> None:
    server: Started = kernel.server  # type: ignore[assignment]
    target = server.env.home / "secret.txt"
    (server.env.work / "proj" / "plan.txt").write_text("plan")
    kernel.check(f"import os; os.remove('plan.txt'); os.symlink({str(target)!r}, 'plan.txt')")
    read = server.request("GET", "api/contents/proj/plan.txt")
    assert not read.ok
    assert CANARY not in read.text
    body = {"type": "file", "format": "text", "content": "overwritten"}
    assert not server.request("PUT", "api/contents/proj/plan.txt", body).ok
    assert target.read_text() == CANARY


@pytest.mark.parametrize("config", [{"memory": "64 GiB"}, {"mounts": {"/": "/host"}}, {"allowed_hosts": ["*"]}])
def test_a_kernelspec_widens_nothing(plain_lab: Started, config: dict[str, object]) -> None:
    spec = json.loads((plain_lab.env.prefix / "share/jupyter/kernels/agentbox/kernel.json").read_text())  # type: ignore[attr-defined]
    spec["metadata"]["kernel_provisioner"]["config"] = config
    directory = plain_lab.env.data / "kernels" / "wide"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "kernel.json").write_text(json.dumps(spec))
    assert not plain_lab.request("POST", "api/kernels", {"name": "wide"}).ok
    assert next(iter(config)) in plain_lab.text


def test_memory_is_bounded(small_server: Started) -> None:
    kernel = small_server.notebook("memory/book.ipynb")
    assert kernel.execute("data = bytearray(400 * 1024 * 1024)").error == "MemoryError"
    assert kernel.execute("data = [bytearray(40 * 1024 * 1024) for _ in range(10)]").death
    wait_until(lambda: "out of memory (limit 256 MiB)" in small_server.text, 60, "the log says why")
    kernel.shutdown()


def test_processes_and_the_disk_are_bounded(small_server: Started) -> None:
    kernel = small_server.notebook("processes/book.ipynb")
    code = (
        "import subprocess\n"
        "made = []\n"
        "try:\n"
        "    while len(made) < 200: made.append(subprocess.Popen(['sleep', '100']))\n"
        "except OSError: pass\n"
        "for process in made: process.kill()\n"
        "for process in made: process.wait()\n"
        "print(len(made))"
    )
    assert int(kernel.check(code)) < 64
    code = "with open('/tmp/big', 'wb') as file:\n    for _ in range(300): file.write(bytes(1024 * 1024)); file.flush()"
    assert kernel.execute("x = 1\n" + code).error == "OSError"
    assert kernel.check("print(x)") == "1\n", "the kernel continues"
    kernel.shutdown()


def test_settings_of_the_extension_hold_from_our_own_file(small_server: Started) -> None:
    assert small_server.call("GET", "api/agentbox/server")["terminals"] == "off"
    assert small_server.request("POST", "api/terminals", {}).status_code == 404


def test_a_killed_server_leaves_nothing_once_the_lease_is_over(small: Installation, small_server: Started) -> None:
    before = set(small.sandboxes())
    with small.start("server") as server:
        server.notebook("left/book.ipynb").start("import time; time.sleep(1000)")
        server.call("POST", "api/agentbox/sandboxes", {"id": "left"})
        assert len(set(small.sandboxes()) - before) >= 2  # a template may be in the making, too
        server.kill()
        left = set(small.sandboxes()) - before
        assert left
        wait_until(lambda: not any(path.exists() for path in left), 90, "the sandboxes are gone")


def test_a_token_is_for_one_sandbox_and_its_verbs(served: Started) -> None:
    for name in ("mine", "theirs"):
        served.call("POST", "api/agentbox/sandboxes", {"id": name})
    made = served.call("POST", "api/agentbox/sandboxes/mine/tokens", {"verbs": ["read"], "name": "agent"})
    token = made["token"]
    assert served.request_as(token, "GET", "api/agentbox/sandboxes/mine").ok
    run = {"argv": ["true"]}
    for method, path, body in (
        ("POST", "sandboxes/mine/exec", run),
        ("GET", "sandboxes/theirs", None),
        ("POST", "sandboxes/theirs/exec", run),
        ("POST", "sandboxes/mine/tokens", {"verbs": ["execute"]}),
        ("POST", "sandboxes", {"id": "more"}),
    ):
        answer = served.request_as(token, method, f"api/agentbox/{path}", body)
        assert answer.status_code in (403, 404), f"{method} {path}: {answer.status_code} {answer.text}"
    for path in ("api/kernels", "api/kernelspecs"):
        assert served.request_as(token, "GET", path).status_code in (401, 403)
    for name in ("mine", "theirs"):
        served.call("DELETE", f"api/agentbox/sandboxes/{name}")
    rows = audit_rows(served.env)  # type: ignore[arg-type]
    assert [row for row in rows if row["kind"] in ("call", "refusal") and row["is_allowed"] is False]


def test_without_a_token_nothing_answers(served: Started, plain_lab: Started) -> None:
    for server in (served, plain_lab):
        for path in ("api/agentbox/sandboxes", "api/agentbox/server", "api/kernels"):
            answer = server.request_as(None, "GET", path)
            assert answer.status_code in (401, 403), f"{path}: {answer.status_code}"
