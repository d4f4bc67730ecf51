"""The proxies' own part inside: which connections stay in the sandbox, from bytes of any kind and over real sockets."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inside import Inside, is_readable

from jupyter_agentbox.guest import proxy
from jupyter_agentbox.guest.connect import LOCALHOST, own_addresses

OWN = [
    "localhost", "LOCALHOST.", "a.b.localhost", "127.0.0.1", "127.9.8.7", "127.1", "0x7f.1", "2130706433", "0",
    "0.0.0.0", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::FFFF:0.0.0.0]", socket.gethostname(),
    socket.gethostname().upper(),
]  # fmt: skip
OTHER = [
    "example.org", "localhost.example.org", "notlocalhost", "128.0.0.1", "10.0.0.1", "0.0.0.1", "[::2]", "[fe80::1]",
    "", "[]", ":", "127.0.0.1.example.org", "[::ffff:10.0.0.1]", "[::1%lo]", "a\0b", "\xe9", "127.0.0.1.5.6",
]  # fmt: skip


@pytest.mark.parametrize("host", OWN)
def test_the_sandboxs_own_names_and_addresses(host: str) -> None:
    assert set(own_addresses(host)) & {*LOCALHOST, "127.9.8.7"}


@pytest.mark.parametrize("host", OTHER)
def test_all_others_are_others(host: str) -> None:
    assert own_addresses(host) == ()


@given(st.ip_addresses())
def test_an_address_is_ones_own_only_if_it_stays_inside(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    plain = getattr(address, "ipv4_mapped", None) or address
    assert bool(own_addresses(str(address))) == (plain.is_loopback or plain.is_unspecified)


@given(st.text())
def test_whatever_the_host_only_loopback_is_dialled(host: str) -> None:
    assert all(ipaddress.ip_address(found).is_loopback for found in own_addresses(host))


pieces = st.sampled_from(
    [b"CONNECT ", b"GET ", b"http://", b"localhost", b"127.0.0.1", b"[::1]", b":", b"80", b"@", b"?", b"/", b" ",
     b"\r\n", b"\n", b" HTTP/1.1", b"Connection: x", b"\5", b"\1", b"\0", b"\3"]
) | st.binary(max_size=8)  # fmt: skip


@given(st.lists(pieces, max_size=30).map(b"".join), st.integers(0, 200))
def test_any_bytes_are_decided_once(data: bytes, cut: int) -> None:
    for read in (proxy.read_http, proxy.read_socks_greeting, proxy.read_socks_request):
        whole, early = read(data), read(data[:cut])
        if early is False:
            assert whole is False
        for found in (whole, early):
            if isinstance(found, proxy.Own):
                assert own_addresses(found.host)
                assert 0 < found.port < 65536


@given(
    st.sampled_from(OWN), st.integers(1, 65535), st.sampled_from([b"", b"/", b"/a?b=http://c/d", b"?e/f"]), st.binary()
)
def test_a_request_reaches_the_server_in_its_own_form(host: str, port: int, path: bytes, body: bytes) -> None:
    head = b"POST http://u:p@%b:%d%b HTTP/1.1\r\nHost: x\r\nProxy-Connection: keep-alive\r\nA: b\r\n\r\n"
    found = proxy.read_http(head % (host.encode(), port, path) + body)
    assert isinstance(found, proxy.Own)
    assert (found.host, found.port, found.accepted) == (host, port, b"")
    expected = path if path.startswith(b"/") else b"/" + path
    assert found.to_server == b"POST %b HTTP/1.1\r\nHost: x\r\nA: b\r\nConnection: close\r\n\r\n" % expected + body
    tunnel = proxy.read_http(b"CONNECT %b:%d HTTP/1.1\r\n\r\n" % (host.encode(), port) + body)
    assert isinstance(tunnel, proxy.Own)
    assert (tunnel.host, tunnel.port, tunnel.to_server) == (host, port, body)


def test_an_upgrade_keeps_its_connection() -> None:
    found = proxy.read_http(b"GET http://0.0.0.0:9/ HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
    assert isinstance(found, proxy.Own)
    assert found.to_server == b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [b"CONNECT 127.0.0.1 HTTP/1.1\r\n\r\n", b"CONNECT 127.0.0.1:0 HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n",
     b"CONNECT 127.0.0.1:99999 HTTP/1.1\r\n\r\n", b"GET https://localhost/ HTTP/1.1\r\n\r\n", b"\n", b"a b\n",
     b"CONNECT 127.0.0.1:8\xb2 HTTP/1.1\r\n\r\n"],
)  # fmt: skip
def test_what_is_no_request_for_oneself_is_the_gates(data: bytes) -> None:
    assert proxy.read_http(data) is False


# -- over sockets


@contextlib.contextmanager
def echo(address: str) -> Iterator[int]:
    """A server that repeats what it gets until the client's end, in capitals."""
    server = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client = server.accept()[0]
                with client:
                    while data := client.recv(65536):
                        client.sendall(data.upper())

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(30)


def exchange(inside: Inside, via: str, first: bytes, answer: bytes, rest: bytes) -> bytes:
    """Send a request, and more once it is answered, then the end. Return all that came after the answer."""
    sock = inside.connect(via)
    got = bytearray()

    def run() -> None:
        sock.settimeout(60)
        sock.sendall(first)
        while len(got) < len(answer):
            got.extend(sock.recv(len(answer) - len(got)))
        sender = threading.Thread(target=lambda: (sock.sendall(rest), sock.shutdown(socket.SHUT_WR)))
        sender.start()
        while data := sock.recv(65536):
            got.extend(data)
        sender.join(60)

    thread = threading.Thread(target=run)
    thread.start()
    inside.run(lambda: not thread.is_alive())
    assert bytes(got[: len(answer)]) == answer
    return bytes(got[len(answer) :])


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("via", ["http", "socks"])
def test_a_server_inside_is_reached_without_the_host(inside: Inside, address: str, via: str) -> None:
    data = b"some text " * 300_000
    with echo(address) as port:
        if via == "http":
            first, answer = b"CONNECT localhost:%d HTTP/1.1\r\n\r\nhello" % port, proxy._CONNECTED + b"HELLO"
        else:
            target = b"\3\x09localhost" + port.to_bytes(2, "big")
            first, answer = b"\5\1\0\5\1\0" + target, b"\5\0\5\0\0\1" + bytes(6)
        assert exchange(inside, via, first, answer, data) == data.upper()
    assert inside.link.streams == []
    inside.run(lambda: inside.egress._connections == 0)
    assert inside.egress._connections == 0


def test_where_nothing_listens_it_says_so(inside: Inside) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    http, socks = inside.connect("http"), inside.connect("socks")
    http.sendall(b"GET http://0.0.0.0:%d/ HTTP/1.1\r\n\r\n" % port)
    socks.sendall(b"\5\1\0\5\1\0\1\x7f\0\0\1" + port.to_bytes(2, "big"))
    inside.run(lambda: is_readable(http) and is_readable(socks))
    assert http.recv(1000).startswith(
        b"HTTP/1.1 502 agentbox: nothing listens on 0.0.0.0:%d in this sandbox\r\n" % port
    )
    inside.run(timeout=0.1)
    assert socks.recv(100) == b"\5\0\5\5\0\1" + bytes(6)
    assert inside.link.streams == []


def test_a_socks_client_of_another_host_gets_one_greeting(inside: Inside) -> None:
    client = inside.connect("socks")
    client.sendall(b"\5\2\0\2")
    inside.run(lambda: is_readable(client))
    assert client.recv(10) == b"\5\0"
    client.sendall(b"\5\1\0\3\x01a\0\x50and more")
    inside.run(lambda: inside.link.streams and inside.link.streams[0].written.endswith(b"and more"))
    (stream,) = inside.link.streams
    assert stream.written == b"\5\2\0\2\5\1\0\3\x01a\0\x50and more"
    for byte in b"\5\0\5\0answer":
        stream.on_data(bytes((byte,)))
    inside.run(timeout=0.1)
    assert client.recv(100) == b"\5\0answer"


def test_silence_is_the_gates_to_end(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "HEAD_TIMEOUT", 0.1)
    inside.connect("http").sendall(b"GET http://loc")
    inside.run(lambda: inside.link.streams and inside.link.streams[0].written)
    assert inside.link.streams[0].written == b"GET http://loc"


def test_a_client_that_leaves_early_leaves_nothing(inside: Inside) -> None:
    with inside.connect("http") as client:
        client.sendall(b"GET http://loc")
    inside.run(lambda: inside.link.streams)  # the gate sees the end
    inside.run(lambda: inside.link.streams[0].written == b"GET http://loc<eof>")
    inside.link.streams[0].on_reset("")
    assert inside.egress._connections == 0
    assert inside.egress._clients == set()
