"""The guest's listeners against a stand-in for loop and link; with the real ones see ``tests/egress/test_gate.py``."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest
from support.inside import Inside, is_readable

from jupyter_agentbox.guest import egress

QUERY = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01a\x00\x00\x01\x00\x01"


def test_each_connection_becomes_a_stream_that_says_where_it_came_in(inside: Inside) -> None:
    for count, via in enumerate(("http", "socks"), 1):
        sock = inside.connect(via)
        sock.sendall(b"hello\n")
        inside.run(
            lambda count=count: len(inside.link.streams) == count and inside.link.streams[-1].written == b"hello\n"
        )
        address, port = inside.egress.addresses[via]
        assert inside.link.streams[-1].header == {"kind": "tcp", "via": via, "address": address, "port": port}
        inside.link.streams[-1].on_data(b"answer")
        assert sock.recv(10) == b"answer"


def test_without_an_owner_it_says_so_and_closes(inside: Inside) -> None:
    inside.link.is_down = True
    http, socks, dns = inside.connect("http"), inside.connect("socks"), inside.udp(QUERY)
    http.sendall(b"GET http://a/ HTTP/1.1\r\n\r\n")
    socks.sendall(b"\5\1\0\5\1\0\3\x01a\0\x50")
    inside.run(lambda: is_readable(http) and is_readable(socks) and is_readable(dns))
    assert http.recv(100).startswith(b"HTTP/1.1 503 agentbox: no owner")
    assert socks.recv(2) == b"\5\0"
    assert socks.recv(100) == b"\5\1\0\1" + bytes(6)
    assert dns.recv(100) == b"\x12\x34\x81\x82" + bytes(8)
    http.close()
    socks.close()
    inside.run(lambda: inside.egress._connections == 0)
    assert inside.egress._connections == 0


def test_answers_come_in_any_order_once_their_addresses_listen(inside: Inside) -> None:
    first, second = inside.udp(QUERY), inside.udp(b"\xab" + QUERY[1:])
    inside.run(lambda: inside.link.streams and len(inside.link.streams[0].written) == 2 * (6 + len(QUERY)))
    stream = inside.link.streams[0]
    assert (len(inside.link.streams), stream.header) == (1, {"kind": "dns"})
    with socket.socket() as probe:
        probe.bind(("127.64.0.9", 0))
        port = probe.getsockname()[1]
    body = (2).to_bytes(4, "big") + b"\1\x7f\x40\x00\x09" + port.to_bytes(2, "big") + b"second"
    frame = len(body).to_bytes(2, "big") + body
    for start in range(len(frame)):
        stream.on_data(frame[start : start + 1])
    assert second.recv(100) == b"second"
    assert not is_readable(first)
    with socket.create_connection(("127.64.0.9", port), 60):
        inside.run(lambda: len(inside.link.streams) == 2)
    assert inside.link.streams[1].header == {"kind": "tcp", "via": "direct", "address": "127.64.0.9", "port": port}
    stream.on_reset("owner gone")
    assert first.recv(100)[3] & 15 == 2
    inside.udp(QUERY)
    inside.run(lambda: len(inside.link.streams) == 3)
    assert inside.link.streams[2].header == {"kind": "dns"}


def test_what_is_no_query_is_not_passed_on(inside: Inside) -> None:
    for junk in (b"", b"x" * 11, QUERY[:2] + b"\x81" + QUERY[3:], b"x" * 5000):
        inside.udp(junk)
    inside.run(timeout=0.2)
    assert inside.link.streams == []


def test_queries_wait_within_bounds(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "MAX_QUERIES", 2)
    sockets = [inside.udp(QUERY) for _ in range(3)]
    inside.run(lambda: is_readable(sockets[2]))
    assert [is_readable(sock) for sock in sockets] == [False, False, True]
    inside.link.streams[0].on_reset("owner gone")
    monkeypatch.setattr(egress, "QUERY_TIMEOUT", 0.3)
    unanswered = [inside.udp(QUERY) for _ in range(2)]
    inside.run(lambda: all(map(is_readable, unanswered)))
    assert unanswered[0].recv(100)[3] & 15 == 2
    inside.link.streams[1].credit = 3
    late = inside.udp(QUERY)
    inside.run(lambda: is_readable(late))
    assert late.recv(100)[3] & 15 == 2


def test_the_listener_unused_for_longest_makes_room(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "MAX_LISTENERS", 2)
    with socket.socket() as probe:
        probe.bind(("127.64.0.1", 0))
        port = probe.getsockname()[1]
    for address in ("127.64.0.1", "127.64.0.2", "127.64.0.1", "127.64.0.3"):
        inside.egress.listen((address, port))
    assert [address for address, _ in inside.egress._listeners] == ["127.64.0.1", "127.64.0.3"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.64.0.2", port), 60)


def test_a_port_in_use_harms_nothing_else(inside: Inside, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.64.0.1", 0))
        taken.listen()
        inside.egress.listen(taken.getsockname())
    assert "cannot listen" in capsys.readouterr().err
    other = egress.Egress(inside.loop, inside.link, **inside.egress.addresses)  # type: ignore[arg-type]
    other.start()
    assert other.addresses == {}
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_connections_over_the_limit_wait(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "MAX_CONNECTIONS", 2)
    sockets = [inside.connect(via) for via in ("http", "http", "http", "socks", "http")]
    for sock in sockets:
        sock.sendall(b"hello\n")
    for count in range(2, 6):
        inside.run(lambda count=count: len(inside.link.streams) == count)
        inside.run(timeout=0.1)
        assert len(inside.link.streams) == count
        assert inside.egress._connections == 2
        assert sum(map(is_readable, sockets)) == count - 2
        inside.link.streams[count - 2].on_reset("")


def test_a_stream_that_is_reset_is_no_end(inside: Inside) -> None:
    cut, whole = inside.connect("http"), inside.connect("http")
    for count, sock in enumerate((cut, whole), 1):
        sock.sendall(b"hello\n")
        inside.run(lambda count=count: len(inside.link.streams) == count)
        inside.link.streams[-1].on_data(b"data")
    inside.link.streams[1].on_eof()
    for stream in inside.link.streams:
        stream.on_reset("")
    assert (whole.recv(10), whole.recv(10)) == (b"data", b"")
    with pytest.raises(ConnectionResetError):
        cut.recv(10) and cut.recv(10)


def test_too_few_descriptors_do_not_make_it_spin(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    class Starved:
        """A listener whose accept fails at first."""

        calls = 0

        def __init__(self, sock: socket.socket) -> None:
            self.sock = sock
            self.fileno = sock.fileno

        def accept(self) -> Any:
            self.calls += 1
            if self.calls < 3:
                raise OSError(errno.EMFILE, "too many")
            return self.sock.accept()

    real = egress.listener(("127.0.0.1", 0))
    starved = Starved(real)
    inside.egress._serve(starved, "http")  # type: ignore[arg-type]
    with socket.create_connection(real.getsockname(), 60):
        inside.run(lambda: inside.link.streams)
        assert starved.calls == 3
    inside.loop.watch(real.fileno())
    real.close()


def test_dns_clients_by_tcp_are_bounded_in_number_size_and_time(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(egress, "MAX_DNS_CLIENTS", 1)
    monkeypatch.setattr(egress, "DNS_CLIENT_TIMEOUT", 0.3)
    slow = inside.connect("dns")
    slow.sendall(b"\0")
    inside.run(lambda: len(inside.egress.names._clients) == 1)
    surplus = inside.connect("dns")
    inside.run(lambda: is_readable(surplus))
    assert surplus.recv(10) == b""
    inside.run(lambda: is_readable(slow))
    assert slow.recv(10) == b""
    large = inside.connect("dns")
    large.sendall(b"\xff\xff" + bytes(10))
    inside.run(lambda: is_readable(large))
    assert inside.egress.names._clients == set()
