"""What a notebook reaches of what it was granted, in gVisor and on a real server, and how it is refused the rest."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tornado.httpserver
import tornado.netutil
import tornado.web
import tornado.websocket
from support.harness import Env, KernelClient, Server

SITE, OTHER, DENIED = "site.test", "other.test", "denied.test"
#: The server's configuration: its resolver finds these names on this machine, and no others of theirs.
RESOLVE = f"""\
import socket
find = socket.getaddrinfo
names = ("{SITE}", "{OTHER}", "{DENIED}")
socket.getaddrinfo = lambda host, *more, **named: find("127.0.0.1" if host in names else host, *more, **named)
"""
SETTING = "allowed_hosts"


class Echo(tornado.websocket.WebSocketHandler):
    def on_message(self, message: str | bytes) -> None:
        self.write_message(message[::-1])


class Hello(tornado.web.RequestHandler):
    def get(self) -> None:
        self.write(f"hello from {self.request.host.partition(':')[0]}")


class Site:
    """A site by HTTP and by HTTPS, with a repository of git's."""

    def __init__(self, folder: Path) -> None:
        git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-C", str(folder)]
        subprocess.run(["git", "init", "-q", folder / "x"], check=True, timeout=60)
        (folder / "x" / "a.txt").write_text("of git")
        for command in (["add", "."], ["commit", "-q", "-m", "first"]):
            subprocess.run([*git[:-1], str(folder / "x"), *command], check=True, timeout=60)
        subprocess.run([*git, "clone", "-q", "--bare", "x", "x.git"], check=True, timeout=60)
        subprocess.run([*git[:-1], str(folder / "x.git"), "update-server-info"], check=True, timeout=60)
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={SITE}",
             "-addext", f"subjectAltName=DNS:{SITE}", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"],
            check=True, timeout=60, capture_output=True,
        )  # fmt: skip
        self.certificate = (folder / "cert.pem").read_text()
        self.ports: list[int] = []
        is_ready = threading.Event()

        async def serve() -> None:
            self.loop, self.is_over = asyncio.get_running_loop(), asyncio.Event()
            files = (r"/(x\.git/.*)", tornado.web.StaticFileHandler, {"path": str(folder)})
            app = tornado.web.Application([("/hello", Hello), ("/echo", Echo), files])
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
            servers = [tornado.httpserver.HTTPServer(app, ssl_options=options) for options in (None, context)]
            for server in servers:
                sockets = tornado.netutil.bind_sockets(0, "127.0.0.1")
                server.add_sockets(sockets)
                self.ports.append(sockets[0].getsockname()[1])
            is_ready.set()
            await self.is_over.wait()
            for server in servers:
                server.stop()
                await server.close_all_connections()

        self.thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        self.thread.start()
        assert is_ready.wait(60)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.is_over.set)
        self.thread.join(30)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("site"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(make_env: Callable[..., Env], site: Site) -> Iterator[Server]:
    allowed = [*(f"{SITE}:{port}" for port in site.ports), f"{OTHER}:{site.ports[0]}"]
    env = make_env(config={"Policy": {"allowed_hosts": allowed, "private_hosts": allowed}})
    (env.config_dir / "jupyter_server_config.py").write_text(RESOLVE)
    (env.work / "cert.pem").write_text(site.certificate)
    with env.server("server", "--ServerApp.jpserver_extensions={'jupyter_agentbox': True}") as server:
        yield server


def narrow(server: Server, kernel: KernelClient, site: Site) -> str:
    """Have a kernel's sandbox reach no more than the one site; return its path."""
    known = server.call("GET", "api/agentbox/sandboxes")["sandboxes"]
    (name,) = [item["id"] for item in known if kernel.id in [inner["id"] for inner in item["kernels"]]]
    granted = [f"{SITE}:{port}" for port in site.ports]
    server.call("PATCH", f"api/agentbox/sandboxes/{name}", {"allowed_hosts": granted})
    return f"/sandboxes/{name}"


@pytest.fixture(scope="module")
def kernel(server: Server, site: Site) -> Iterator[KernelClient]:
    kernel = server.notebook("one.ipynb")
    plain, tls = site.ports
    narrow(server, kernel, site)
    kernel.check(
        f"import os, socket, ssl, subprocess, urllib.request\n"
        f"site, other, denied, plain, tls = {SITE!r}, {OTHER!r}, {DENIED!r}, {plain}, {tls}\n"
        "context = ssl.create_default_context(cafile='cert.pem')\n"
        "def fetch(host): return urllib.request.urlopen(f'http://{host}:{plain}/hello', timeout=60).read().decode()\n"
        "def talk(sock, host):\n"
        "    sock.settimeout(60)\n"
        "    sock.sendall(f'GET /hello HTTP/1.1\\r\\nHost: {host}\\r\\nConnection: close\\r\\n\\r\\n'.encode())\n"
        "    parts = []\n"
        "    while data := sock.recv(9999): parts.append(data)\n"
        "    return b''.join(parts).decode().rpartition('\\n')[2]\n"
        "def run(command):\n"
        "    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=100)\n"
        "    return done.returncode, done.stdout + done.stderr"
    )
    yield kernel
    kernel.shutdown()


HELLO = f"hello from {SITE}"


@pytest.mark.parametrize(
    "code",
    [
        "print(fetch(site))",
        # Programs that know no proxy.
        "print(talk(socket.create_connection((site, plain), 60), site))",
        "print(talk(context.wrap_socket(socket.create_connection((site, tls), 60), server_hostname=site), site))",
        "no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}),\n"
        "                                       urllib.request.HTTPSHandler(context=context))\n"
        "print(no_proxy.open(f'https://{site}:{tls}/hello', timeout=60).read().decode())",
        "print(urllib.request.urlopen(f'https://{site}:{tls}/hello', context=context, timeout=60).read().decode())",
        # SOCKS5, by name.
        "sock = socket.create_connection(('127.0.0.1', 1080), 60)\n"
        "sock.sendall(b'\\5\\1\\0'); assert sock.recv(2) == b'\\5\\0'\n"
        "sock.sendall(b'\\5\\1\\0\\3' + bytes([len(site)]) + site.encode() + plain.to_bytes(2, 'big'))\n"
        "assert sock.recv(10)[1] == 0\nprint(talk(sock, site))",
    ],
    ids=["by the proxy", "plain socket", "plain TLS", "HTTPS without a proxy", "HTTPS by the proxy", "SOCKS5"],
)
def test_what_is_granted_is_reached_every_way(kernel: KernelClient, code: str) -> None:
    assert kernel.check(code).strip() == HELLO


def test_git_and_websockets_work_as_they_are(kernel: KernelClient) -> None:
    assert kernel.check("print(run(f'git clone -q http://{site}:{plain}/x.git /tmp/one && cat /tmp/one/a.txt'))") == (
        "(0, 'of git')\n"
    )
    over_tls = "GIT_SSL_CAINFO=cert.pem git clone -q https://{site}:{tls}/x.git /tmp/two && cat /tmp/two/a.txt"
    assert kernel.check(f"print(run(f'{over_tls}'))") == "(0, 'of git')\n"
    echo = (
        "import websocket\nend = websocket.create_connection(f'ws://{site}:{plain}/echo', timeout=60)\n"
        "end.send('abc'); print(end.recv()); end.close()"
    )
    assert kernel.check(echo) == "cba\n"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print(run(f'git clone -q http://{denied}:{plain}/x.git /tmp/no'))", (DENIED, SETTING)),
        ("print(run(f'pip --disable-pip-version-check download -i https://{denied}:{plain}/simple x'))",
         (DENIED, SETTING)),
        ("try: fetch(denied)\nexcept OSError as error: print(error)", (DENIED, SETTING)),
        ("try: fetch(other)\nexcept OSError as error: print(error)", (OTHER, SETTING)),
        ("try: urllib.request.urlopen(f'http://{site}:{1}/')\nexcept OSError as error: print(error)",
         (SITE, SETTING)),
        ("try: socket.create_connection((denied, plain), 60)\nexcept socket.gaierror: print('no such name')",
         ("no such name",)),
        ("try: socket.create_connection((site, 1), 60)\nexcept ConnectionError as error: print('refused')",
         ("refused",)),
        ("free = ssl.create_default_context(); free.check_hostname = False; free.verify_mode = ssl.CERT_NONE\n"
         "try: free.wrap_socket(socket.create_connection((site, tls), 60), server_hostname=denied)\n"
         "except OSError as error: print('another name')", ("another name",)),
    ],
    ids=["git", "pip", "denied", "not granted", "port", "name", "plain port", "server name"],
)  # fmt: skip
def test_what_is_not_is_refused_and_named(kernel: KernelClient, code: str, words: tuple[str, ...]) -> None:
    said = kernel.execute(code)
    assert said.reply["status"] == "ok", said
    assert all(word in said.text for word in words), said.text


def test_a_service_record_is_refused_with_a_sentence(kernel: KernelClient, server: Server, site: Site) -> None:
    path = narrow(server, kernel, site)
    said = kernel.execute(
        "labels = b''.join(bytes([len(x)]) + x.encode() for x in ('_mongodb', '_tcp', *site.split('.')))\n"
        "query = b'\\1\\2\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0' + labels + b'\\0\\0\\x21\\0\\1'\n"
        "resolver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); resolver.settimeout(60)\n"
        "resolver.sendto(query, ('127.0.0.1', 53)); answer = resolver.recv(999); resolver.close()\n"
        "import time; time.sleep(1)\nprint(answer[3] & 15, answer[7])"
    )
    sentence = f"SRV records of {SITE} are not available"
    assert said.text == "0 0\n", said
    assert sentence in said.notices
    rows = server.call("GET", f"api/agentbox{path}/egress/log?limit=1000")["rows"]
    assert any(sentence in (row.get("reason") or "") for row in rows)


#: Servers of the sandbox's own, and each program's way to ask them.
OWN_SERVERS = """\
import http.server, threading
class Own(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'own')
    do_HEAD = do_GET
    def log_message(self, *words): pass
class Own6(http.server.ThreadingHTTPServer): address_family = socket.AF_INET6
own = http.server.ThreadingHTTPServer(('0.0.0.0', 0), Own)
port = own.server_address[1]
for each in (own, Own6(('::1', port), Own)): threading.Thread(target=each.serve_forever, daemon=True).start()
own_hosts = ['0.0.0.0', socket.gethostname(), '127.0.0.2', '[::1]', 'localhost', 'app.localhost', '[::]', '127.1']
def ask_all(ask):
    for host in own_hosts: assert '200' in str(ask(f'http://{host}:{port}/')), (host, ask(f'http://{host}:{port}/'))
    print('all')
"""
OWN_CLIENTS = {
    "urllib": "ask_all(lambda url: urllib.request.urlopen(url, timeout=60).status)",
    "requests": "import requests; ask_all(lambda url: requests.get(url, timeout=60))",
    "one session": "import requests; one = requests.Session(); ask_all(lambda url: one.get(url, timeout=60))",
    "httpx": "import httpx; ask_all(lambda url: httpx.head(url, timeout=60))",
    "curl": "ask_all(lambda url: run(f'curl -sSg -m 60 -o /dev/null -w %{{http_code}} {url}'))",
    "curl by the proxy": (
        "ask_all(lambda url: run(f'curl -sSgp --noproxy no -m 60 -o /dev/null -w %{{http_code}} {url}'))"
    ),
    "curl by SOCKS": (
        "socks = '--noproxy no --proxy socks5h://127.0.0.1:1080'\n"
        "ask_all(lambda url: run(f'curl -sSg {socks} -m 60 -o /dev/null -w %{{http_code}} {url}'))"
    ),
    "node": "ask_all(lambda url: run(f\"node -e 'fetch(process.argv[1]).then(r => console.log(r.status))' {url}\"))",
}


@pytest.mark.parametrize("client", OWN_CLIENTS)
def test_the_sandboxs_own_servers_are_no_egress(kernel: KernelClient, server: Server, site: Site, client: str) -> None:
    path = narrow(server, kernel, site)
    kernel.check("if 'own' not in globals():\n" + textwrap.indent(OWN_SERVERS, "    "))
    log = f"api/agentbox{path}/egress/log?limit=1000"
    before = server.call("GET", log)["rows"]
    said = kernel.execute(OWN_CLIENTS[client])
    assert (said.text.strip(), said.notices) == ("all", ""), said
    assert len(server.call("GET", log)["rows"]) == len(before)


def test_a_frame_of_a_server_inside_says_why_it_stays_empty(kernel: KernelClient) -> None:
    said = kernel.execute("from IPython.display import IFrame\nIFrame('http://127.0.0.1:8050', 300, 200)")
    assert "Cannot show http://127.0.0.1:8050: the browser cannot reach servers in a notebook's sandbox" in said.notices
    assert "iframe" in said.data[0]["text/html"]


#: Opens many connections at a time, by name and by the proxy, each for one request.
MANY = """\
import asyncio
address = socket.gethostbyname(site)
async def one(number):
    host, tunnel = (address, False) if number % 2 else ('127.0.0.1', True)
    reader, writer = await asyncio.open_connection(host, 3128 if tunnel else plain)
    target = f'{site}:{plain}'
    if tunnel:
        writer.write(f'CONNECT {target} HTTP/1.1\\r\\nHost: {target}\\r\\n\\r\\n'.encode())
        assert b' 200 ' in await reader.readuntil(b'\\r\\n\\r\\n')
    writer.write(f'GET /hello HTTP/1.1\\r\\nHost: {site}\\r\\nConnection: close\\r\\n\\r\\n'.encode())
    text = await reader.read()
    writer.close()
    return text.endswith(f'hello from {site}'.encode())
async def many(): return await asyncio.gather(*map(one, range(1000)), return_exceptions=True)
import collections; print(collections.Counter(map(repr, await many())))
"""


def test_a_thousand_requests_at_a_time_all_succeed(kernel: KernelClient, server: Server, site: Site) -> None:
    narrow(server, kernel, site)
    said = kernel.execute(MANY)
    assert (said.text.strip(), said.notices) == ("Counter({'True': 1000})", "")


#: Asks for a page on each of many connections to the proxy, and keeps all of them open.
KEEP = """\
import asyncio, collections, time
async def keep(number):
    reader, writer = await asyncio.open_connection('127.0.0.1', 3128)
    writer.write(f'GET http://{site}:{plain}/hello HTTP/1.1\\r\\nHost: {site}:{plain}\\r\\n\\r\\n'.encode())
    head = await reader.readuntil(b'\\r\\n\\r\\n')
    kept.append(writer)
    return head[:12], await reader.readexactly(len(f'hello from {site}'))
kept = []
async def keep_all(): return await asyncio.gather(*map(keep, range(400)), return_exceptions=True)
start = time.monotonic()
answers = collections.Counter(map(repr, await keep_all()))
took = time.monotonic() - start
print(answers)
"""


def test_kept_connections_without_a_request_make_room(kernel: KernelClient, server: Server, site: Site) -> None:
    narrow(server, kernel, site)
    said = kernel.execute(KEEP)
    answer = repr((b"HTTP/1.1 200", HELLO.encode()))
    assert (said.text.strip(), said.notices) == (str(Counter({answer: 400})), "")
    assert float(kernel.check("print(took)")) < 20
    kernel.check("for writer in kept: writer.close()")


#: Holds as many connections as a sandbox may have, and asks for three more.
HOLD = """\
import threading
def hold(via, kept):
    target = f'{site}:{plain}'
    ways = {'http': ('127.0.0.1', 3128), 'socks': ('127.0.0.1', 1080), 'name': (site, plain)}
    sock = socket.create_connection(ways[via], 100)
    if via == 'http':
        sock.sendall(f'CONNECT {target} HTTP/1.1\\r\\nHost: {target}\\r\\n\\r\\n'.encode())
    elif via == 'socks':
        name = bytes([len(site)]) + site.encode()
        sock.sendall(b'\\5\\1\\0'); sock.recv(2)
        sock.sendall(b'\\5\\1\\0\\3' + name + plain.to_bytes(2, 'big'))
    try: answer = sock.recv(999)
    except OSError as error: answer = type(error).__name__
    kept.append((via, answer, sock))
def hold_all(ways):
    kept = []
    threads = [threading.Thread(target=hold, args=(via, kept)) for via in ways]
    for each in threads: each.start()
    for each in threads: each.join()
    return kept
"""


def test_too_many_are_refused_with_a_sentence_and_harm_no_other_sandbox(
    kernel: KernelClient, server: Server, site: Site
) -> None:
    path = narrow(server, kernel, site)
    kernel.check(HOLD + "held = hold_all(['http'] * 256)")
    assert kernel.check("print({answer.splitlines()[0] for _, answer, _ in held})").startswith("{b'HTTP/1.1 200")
    more = kernel.start("more = hold_all(['http', 'socks', 'name'])")
    other = server.notebook("two.ipynb")
    told = other.check(
        f"import urllib.request\nprint(urllib.request.urlopen('http://{SITE}:{site.ports[0]}/hello').read())"
    )
    assert HELLO in told
    other.shutdown()
    sentence = f"{SITE}:{site.ports[0]} is refused: this sandbox has 256 open connections, the maximum"
    assert sentence in kernel.finish(more).notices
    assert sentence in kernel.check("print([answer for via, answer, _ in more if via == 'http'][0].decode())")
    assert kernel.check("print([answer[1] for via, answer, _ in more if via == 'socks'])") == "[1]\n"
    assert kernel.check("print([answer for via, answer, _ in more if via == 'name'])") == "['ConnectionResetError']\n"
    rows = server.call("GET", f"api/agentbox{path}/egress/log?limit=1000&kind=egress_failed")["rows"]
    assert len([row for row in rows if sentence in (row.get("reason") or "")]) == 3
    kernel.check("for _, _, sock in held + more: sock.close()\ndel held, more")
    assert kernel.check("print(fetch(site))").strip() == HELLO


def test_a_host_that_is_asked_for_is_reached_once_allowed_and_cut_off_once_narrowed(
    kernel: KernelClient, server: Server, site: Site
) -> None:
    def call(verb: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return server.call(verb, "api/agentbox" + path, body)

    path = narrow(server, kernel, site)
    asked = call("POST", path + "/egress/asks", {"host": f"{OTHER}:{site.ports[0]}", "why": "to greet"})
    assert asked["state"] == "pending"
    assert OTHER in kernel.check("try: fetch(other)\nexcept OSError as error: print(error)")
    assert DENIED in kernel.check("try: fetch(denied)\nexcept OSError as error: print(error)")
    call("POST", f"{path}/egress/asks/{asked['id']}", {"decision": "allow"})
    assert kernel.check("print(fetch(other))").strip() == f"hello from {OTHER}"
    kernel.check("held = socket.create_connection((other, plain), 60)")
    narrow(server, kernel, site)
    assert kernel.check("held.settimeout(60)\ntry: print(held.recv(1))\nexcept OSError: print(b'')").strip() == "b''"
    assert OTHER in kernel.check("try: fetch(other)\nexcept OSError as error: print(error)")
    assert kernel.check("print(fetch(site))").strip() == HELLO
    rows = call("GET", path + "/egress/log?limit=1000")["rows"]
    decisions = {(row["detail"].get("host") or row.get("host"), row["is_allowed"]) for row in rows}
    assert {(SITE, True), (OTHER, True), (OTHER, False), (DENIED, False)} <= decisions, json.dumps(rows[:3])


def test_a_connection_that_was_open_fails_at_once_after_a_restore(
    kernel: KernelClient, server: Server, site: Site
) -> None:
    path = "api/agentbox" + narrow(server, kernel, site)
    kernel.check("held = socket.create_connection((site, plain), 60); held.settimeout(60); kept = 41")
    snapshot = server.call("POST", path + "/snapshots", {})["id"]
    server.call("POST", path + "/restore", {"snapshot": snapshot})
    said = kernel.check("try: print(repr(held.recv(1)))\nexcept OSError as error: print(type(error).__name__)")
    assert said.strip() in ("ConnectionResetError", "b''")
    assert kernel.check("print(fetch(site), kept + 1)").strip() == f"{HELLO} 42"
    server.call("DELETE", f"api/agentbox/snapshots/{snapshot}")
