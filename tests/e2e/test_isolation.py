"""What code inside can see and reach, tried from a notebook of a real JupyterLab."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.harness import CANARY, Env, KernelClient, Server, files_with

PROXIES = {"HTTP_PROXY": "http://corporate.example:3128", "HTTPS_PROXY": "http://corporate.example:3128",
           "http_proxy": "http://corporate.example:3128", "https_proxy": "http://corporate.example:3128"}  # fmt: skip


@pytest.fixture(scope="module")
def server(make_env: Callable[..., Env]) -> Iterator[Server]:
    """A JupyterLab whose own environment names a proxy and no exception from it."""
    env = make_env()
    enforced = (
        "--ServerApp.kernel_spec_manager_class=jupyter_agentbox.AgentboxKernelSpecManager",
        "--MultiKernelManager.default_kernel_name=agentbox",
    )
    with env.server("lab", "--debug", *enforced, env={**PROXIES, "NO_PROXY": "", "no_proxy": ""}) as server:
        yield server


@pytest.fixture(scope="module")
def kernel(server: Server) -> Iterator[KernelClient]:
    """One kernel that all tests of the module look out of."""
    (server.env.work / "a").mkdir()
    for name in (".env", ".aws/credentials", ".ssh/id_ed25519"):
        path = server.env.work / "a" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(CANARY)
    kernel = server.notebook("a/one.ipynb")
    yield kernel
    kernel.shutdown()


def test_the_kernel_runs_on_gvisor(kernel: KernelClient) -> None:
    assert "gVisor" in kernel.check("import subprocess; print(subprocess.check_output(['dmesg'], text=True))")


def test_there_is_no_interface_but_loopback(kernel: KernelClient) -> None:
    lines = kernel.check("print(open('/proc/net/dev').read())").splitlines()[2:]
    assert [line.split(":")[0].strip() for line in lines if line.strip()] == ["lo"]


def test_the_user_is_nobody_special(kernel: KernelClient) -> None:
    status = kernel.check("print(open('/proc/self/status').read())")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["1000"] * 4
    assert fields["Gid"].split() == ["1000"] * 4
    for name in ("CapInh", "CapPrm", "CapEff"):
        assert int(fields[name], 16) == 0, name
    no_new_privileges = "import ctypes; print(ctypes.CDLL(None).prctl(39, 0, 0, 0, 0))"
    assert kernel.check(no_new_privileges).strip() == "1"  # so that setuid programs do not regain any
    # One, which names the kernel's processes and owns nothing: the guest's groups begin there.
    (group,) = map(int, kernel.check("import os; print(*os.getgroups())").split())
    assert group > 1 << 30


def test_a_kernelspecs_program_shows_nothing_that_lies_beside_it(server: Server) -> None:
    app = server.env.base / "app"
    (app / "bin").mkdir(parents=True)
    (app / "secret.txt").write_text(CANARY)
    program = app / "bin" / "python"
    program.write_text(
        f"#!{sys.executable}\nfrom ipykernel.kernelapp import launch_new_instance\nlaunch_new_instance()\n"
    )
    program.chmod(0o755)
    folder = server.env.data / "kernels" / "app"
    folder.mkdir(parents=True)
    provisioner = {"kernel_provisioner": {"provisioner_name": "agentbox-provisioner", "config": {}}}
    spec = {"argv": [str(program), "-f", "{connection_file}"], "display_name": "app", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps({**spec, "metadata": provisioner}))
    kernel = server.kernel("app")
    found = kernel.check(f"import os; print([names + files for _, names, files in os.walk({str(app)!r})])")
    assert found == "[['bin'], ['python']]\n"
    kernel.shutdown()

    # Once it is an environment it is shown whole, unless it lies in a project.
    (app / "pyvenv.cfg").write_text(f"home = {os.path.dirname(os.path.realpath(sys.executable))}\n")
    (app / ".env").write_text(CANARY)
    answer = server.http.post(server.url("api/kernels"), json={"name": "app"}, timeout=100)
    assert not answer.ok
    assert f"the Python environment {app} in the sandbox: it also contains .env" in server.log.read_text()


def test_files_of_the_servers_user_cannot_be_read(kernel: KernelClient, server: Server) -> None:
    env = server.env
    secrets = [env.home / "secret.txt", Path.home(), Path("/root"), Path("/home"), env.state_dir, env.config_dir,
               env.runtime, Path("/etc/shadow"), Path("/var/lib"), server.log]  # fmt: skip
    seen = kernel.check(
        f"import os\nfor path in {[str(path) for path in secrets]}:\n"
        "    try:\n"
        "        what = os.listdir(path) if os.path.isdir(path) else open(path).read()\n"
        "        print(path, 'READ', what) if what else None\n"
        "    except OSError: pass"
    )
    # Of /home only the user's own inside; of the way to a Python that lies there only that.
    shown = [line for line in seen.splitlines() if line != "/home READ ['user']"]
    interpreter = {f"{path} READ" for path in Path(os.path.realpath("/proc/self/exe")).parents}
    assert [line for line in shown if not any(line.startswith(prefix) for prefix in interpreter)] == []
    assert CANARY not in seen


def test_secrets_in_the_workspace_are_hidden(kernel: KernelClient) -> None:
    seen = kernel.check(
        "import os\nprint(os.getcwd())\nfor name in ('.env', '.aws/credentials', '.ssh/id_ed25519'):\n"
        "    try: print(repr(open(name).read()))\n    except OSError as error: print(type(error).__name__)"
    )
    assert seen.startswith("/workspace")
    assert CANARY not in seen


def test_another_sandboxs_files_cannot_be_read(kernel: KernelClient, server: Server) -> None:
    (server.env.work / "b").mkdir()
    other = server.notebook("b/two.ipynb")
    other.check(
        f"import os\nfor folder in ('.', '/tmp', os.environ['HOME'], '/dev/shm'):\n"
        f"    open(folder + '/others.txt', 'w').write('{CANARY}')"
    )
    assert (server.env.work / "b" / "others.txt").read_text() == CANARY
    found = kernel.check(
        "import os\nfor top in ('/workspace', '/tmp', '/home', '/dev', '/run', '/mnt', '/var'):\n"
        "    for folder, _, files in os.walk(top):\n"
        "        if 'others.txt' in files: print(folder)"
    )
    assert found == ""
    pids = kernel.check("import os; print([p for p in os.listdir('/proc') if p.isdigit()])")
    assert pids.count(",") < 6  # the guest, this kernel, and at most a child of theirs
    other.shutdown()


def test_no_host_port_can_be_reached(kernel: KernelClient, server: Server) -> None:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        ports = [listener.getsockname()[1], server.port]
        addresses = ["127.0.0.1", "127.0.0.2", "0.0.0.0", "169.254.169.254", "10.0.0.1", socket.gethostname()]
        said = kernel.check(
            "import socket, time, urllib.request\n"
            f"for address in {addresses}:\n    for port in {ports}:\n"
            "        begin = time.monotonic()\n"
            "        try: socket.create_connection((address, port), 20).close(); print('CONNECTED', address, port)\n"
            "        except OSError: pass\n"
            "        try: urllib.request.urlopen(f'http://{address}:{port}/', timeout=20); print('READ', address)\n"
            "        except OSError: pass\n"
            "        if time.monotonic() - begin > 19: print('HUNG', address, port)",
            timeout=200,
        )
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody is in its queue
            listener.accept()
    assert said == ""


def test_no_address_can_be_sent_anything(kernel: KernelClient) -> None:
    """Not by UDP, ICMP or raw sockets either, nor to the ports of DNS: without an interface there is no way."""
    said = kernel.check(
        "import socket, time\n"
        "INET, INET6, STREAM, DGRAM, RAW = (getattr(socket, name) for name in\n"
        "    ('AF_INET', 'AF_INET6', 'SOCK_STREAM', 'SOCK_DGRAM', 'SOCK_RAW'))\n"
        "ICMP = socket.IPPROTO_ICMP\n"
        "ways = [(INET, STREAM, 0, 53), (INET, STREAM, 0, 853), (INET6, STREAM, 0, 853), (INET, DGRAM, 0, 53),\n"
        "        (INET, DGRAM, 0, 443), (INET6, DGRAM, 0, 443), (INET, DGRAM, ICMP, 0), (INET, RAW, ICMP, 0),\n"
        "        (INET, RAW, socket.IPPROTO_RAW, 0), (socket.AF_PACKET, RAW, 0, 0)]\n"
        "for family, kind, protocol, port in ways:\n"
        "    begin = time.monotonic()\n"
        "    try:\n"
        "        with socket.socket(family, kind, protocol) as way:\n"
        "            way.settimeout(20)\n"
        "            if family == socket.AF_PACKET: way.bind(('lo', 0)); way.send(b'x' * 60)\n"
        "            else:\n"
        "                way.connect(('192.0.2.7' if family == INET else '2001:db8::7', port)); way.send(b'x' * 60)\n"
        "        print('SENT', family, kind, protocol, port)\n"
        "    except OSError: pass\n"
        "    if time.monotonic() - begin > 15: print('SLOW', family, kind, protocol, port)",
    )
    assert said == ""


def test_metadata_and_names_not_granted_get_no_answer(kernel: KernelClient) -> None:
    said = kernel.check(
        "import socket, time\n"
        "for name in ('metadata.google.internal', 'not-listed.example', 'example.com'):\n"
        "    for port in (443, 22):\n"
        "        begin = time.monotonic()\n"
        "        try: print('ANSWER', socket.create_connection((name, port), 20))\n"
        "        except socket.gaierror: pass\n"
        "        if time.monotonic() - begin > 8: print('SLOW', name)"
    )
    assert said == ""


def test_host_files_and_devices_are_not_writable(kernel: KernelClient) -> None:
    said = kernel.check(
        "import os\nfor path in ('/proc/sys/kernel/hostname', '/sys/x', '/etc/hosts.x', '/run/agentbox/x',\n"
        "             '/proc/sysrq-trigger', '/dev/mem', '/boot/x'):\n"
        "    try: open(path, 'w').write('x'); print('WROTE', path)\n"
        "    except OSError: pass\n"
        "try: print(os.listdir('/run/agentbox'))\nexcept OSError: pass"
    )
    assert "/run/agentbox" not in said
    assert "[" not in said
    assert not Path("/etc/hosts.x").exists()
    for path in ("/proc", "/sys", "/dev/mem"):
        assert f"WROTE {path}" not in said


def test_the_servers_proxy_does_not_replace_the_sandboxs_own(kernel: KernelClient) -> None:
    seen = kernel.check("import os; print(os.environ['HTTPS_PROXY'], os.environ['http_proxy'], os.environ['NO_PROXY'])")
    assert "corporate.example" not in seen
    assert seen.count("127.0.0.1:3128") == 2
    assert {"localhost", "127.0.0.1", "::1"} <= set(seen.split()[-1].split(","))


def test_a_cell_that_unsets_the_proxy_gains_nothing(kernel: KernelClient) -> None:
    said = kernel.check(
        "import os, urllib.request\n"
        "saved = dict(os.environ)\n"
        "for proxy in ('', 'http://192.0.2.1:3128'):\n"
        "    for name in ('HTTPS_PROXY', 'https_proxy', 'HTTP_PROXY', 'http_proxy'): os.environ[name] = proxy\n"
        "    for url in ('https://not-listed.example/', 'https://192.0.2.7/', 'http://not-listed.example/'):\n"
        "        try: urllib.request.urlopen(url, timeout=5); print('READ', proxy, url)\n"
        "        except OSError as error: pass\n"
        "os.environ.update(saved)"
    )
    assert "READ" not in said


def test_a_server_inside_is_reached_without_the_proxy(kernel: KernelClient) -> None:
    said = kernel.check(
        "import http.server, threading, requests\n"
        "httpd = http.server.ThreadingHTTPServer(('127.0.0.1', 0), http.server.SimpleHTTPRequestHandler)\n"
        "httpd.RequestHandlerClass.log_message = lambda *a: None\n"
        "threading.Thread(target=httpd.serve_forever, daemon=True).start()\n"
        "print(requests.get(f'http://127.0.0.1:{httpd.server_port}/').status_code,\n"
        "      requests.get(f'http://localhost:{httpd.server_port}/').status_code)\n"
        "httpd.shutdown()"
    )
    assert said.split()[-2:] == ["200", "200"]


def test_plots_need_no_cache_of_the_hosts(kernel: KernelClient) -> None:
    code = (
        "import glob, os, subprocess, sys\n"
        "run = subprocess.run([sys.executable, '-W', 'error', '-c', 'import matplotlib.pyplot'],\n"
        "                     capture_output=True, text=True)\n"
        "fonts = glob.glob(os.environ['MPLCONFIGDIR'] + '/**/fontlist*.json', recursive=True)\n"
        # Where it takes matplotlib more than five seconds, it says so.
        "said = [line for line in run.stderr.splitlines() if 'building the font cache' not in line]\n"
        "print(run.returncode, said, [(path, os.stat(path).st_mtime_ns) for path in fonts])\n"
    )
    first, second = kernel.check(code), kernel.check(code)
    assert first.startswith("0 [] [('/"), first  # the fonts were looked for once, and what was found is kept
    assert second == first
    said = kernel.check(
        "import os\nfor name in ('HOME', 'MPLCONFIGDIR', 'IPYTHONDIR', 'XDG_CACHE_HOME'):\n"
        "    os.makedirs(os.environ[name], exist_ok=True); print(name, os.access(os.environ[name], os.W_OK))\n"
        "print(os.access('/tmp', os.W_OK), os.access('/dev/shm', os.W_OK))"
    )
    assert "False" not in said


def test_the_log_holds_no_secret(server: Server, kernel: KernelClient) -> None:
    kernel.check("1")
    assert CANARY not in server.log.read_text()
    found = files_with(CANARY, server.env.state_dir)
    assert [file for file in found if not {"work", "fs"} & set(file.parts)] == []


def test_only_sandboxed_kernels_are_offered(server: Server) -> None:
    specs = server.call("GET", "api/kernelspecs")
    assert "python3" not in specs["kernelspecs"]
    assert specs["default"] in specs["kernelspecs"]
    kernel = server.kernel("python3")  # the sandboxed Python
    assert kernel.check("import os; print(os.uname().release)") == "4.4.0\n"
    kernel.shutdown()
    answer = server.http.post(server.url("api/kernels"), json={"name": "ir"}, timeout=30)
    assert answer.status_code == 404
