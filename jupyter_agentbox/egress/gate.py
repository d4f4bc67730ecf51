"""Decide on and carry the outgoing connections of one sandbox. Runs on the host, on the link's event loop.

The guest only carries bytes, and everything that it sends is hostile. The resources that one sandbox can hold here
are bounded: its connections, the bytes buffered for each, its names, its lookups, and the time of every wait.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import ipaddress
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from jupyter_agentbox.errors import AgentboxError, LinkClosed
from jupyter_agentbox.spec import HOSTNAME, Grant

from . import http1, wire
from .dial import Connect, Resolve, Resolver, check_public, connect_stream, dial, is_own_address, refused_answer
from .forward import (
    TLS_ALERT,
    KeptOpen,
    Refused,
    Source,
    Stream,
    Timeouts,
    Upstream,
    check_hello,
    finish,
    relay,
    send_and_close,
)
from .http_forward import HttpForwarder
from .rules import Decision, check_grant, decide, explain_refusal, normal_name, ports_of, printable

log = logging.getLogger(__name__)

#: Network of the addresses that stand for host names inside. The guest listens on those that the gate returns.
NAME_NETWORK = ipaddress.ip_network("127.64.0.0/10")
#: Called with host, port and a sentence when something is refused.
OnRefusal = Callable[[str, int, str], None]

_PHRASES = {400: "bad request", 403: "refused", 502: "unreachable", 503: "unavailable", 504: "timed out"}


class Audit(Protocol):
    """Log to which the gate writes its decisions, for example :class:`~jupyter_agentbox.storage.audit.log.AuditLog`."""

    async def arecord(self, kind: str, sandbox: str, **columns: Any) -> int:
        """Write a row and return its number once it is durable. Raises AgentboxError."""

    def note(self, kind: str, sandbox: str, **columns: Any) -> None:
        """Write a row without waiting for it."""


@dataclass(frozen=True)
class GateLimits:
    """Limits on what one sandbox may hold at the gate.

    Parameters
    ----------
    connections : int
        Concurrent connections to servers. Further ones wait for ``timeouts.slot`` seconds and are then refused. While
        they wait, connections to the HTTP proxy without a request are closed, and those that their server has closed.
    names : int
        Names that have an address inside.
    lookups : int
        Concurrent lookups.
    dns_streams : int
        Concurrent streams of DNS queries.
    timeouts : Timeouts
        Timeouts of every wait.
    """

    connections: int = 256
    names: int = 1024
    lookups: int = 4
    dns_streams: int = 4
    timeouts: Timeouts = field(default_factory=Timeouts)


class Gate:
    """Egress gate of one sandbox, through which all its connections leave.

    Parameters
    ----------
    sandbox_id : str
        Sandbox id for the audit log.
    grant : Grant
        What the sandbox may reach. Assigning a new grant closes the connections that it does not cover.
    audit : Audit
        Log to which each decision is written before it takes effect. A connection that cannot be logged is refused.
    resolve, connect : callable, optional
        Replacements for the lookup and for the connection.
    is_own : callable, optional
        Returns whether an address belongs to this machine.
    on_refusal : callable, optional
        Called for each refusal.
    limits : GateLimits
        Limits of this sandbox.
    """

    def __init__(
        self,
        sandbox_id: str,
        grant: Grant,
        audit: Audit,
        *,
        resolve: Resolve | None = None,
        connect: Connect | None = None,
        is_own: Callable[[str], bool] = is_own_address,
        on_refusal: OnRefusal | None = None,
        limits: GateLimits | None = None,
    ) -> None:
        check_grant(grant)
        self.sandbox_id = sandbox_id
        self.on_refusal = on_refusal
        self.limits = limits or GateLimits()
        self._times = self.limits.timeouts
        self._grant = grant
        self._audit = audit
        self._resolve = resolve or Resolver(self.limits.lookups)
        self._connect = connect or connect_stream
        self._is_own = is_own
        self._names: OrderedDict[str, str] = OrderedDict()
        self._addresses: dict[str, str] = {}
        self._next_address = 0
        self._upstreams: set[Upstream] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._streams = 0
        self._slots = self.limits.connections
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._kept = KeptOpen(lambda: bool(self._waiting))
        self._dns_streams = 0
        self._is_closed = False

    # -- for the owner -------------------------------------------------------------------------

    @property
    def grant(self) -> Grant:
        """Current grant: what the sandbox may reach."""
        return self._grant

    @grant.setter
    def grant(self, grant: Grant) -> None:
        check_grant(grant)
        self._grant = grant
        for upstream in list(self._upstreams):
            decision = decide(upstream.host, upstream.port, grant)
            if not decision.is_allowed or self._refused_answer(decision, upstream.port, [upstream.address]):
                upstream.close()

    async def check_public(self, host: str) -> None:
        """Check a host that a person wants to allow; see :func:`~jupyter_agentbox.egress.dial.check_public`."""
        await check_public(host, self._resolve, self._is_own, self._times.lookup)

    @property
    def is_busy(self) -> bool:
        """Whether a connection or a stream of DNS queries is open."""
        return self._streams > 0 or self._dns_streams > 0

    async def handle(self, stream: Stream) -> None:
        """Serve one stream of the guest, of kind "tcp" or "dns", until it ends. Never raises."""
        task = asyncio.current_task()
        assert task is not None
        if self._is_closed:
            stream.reset("the gate is closed")
            return
        self._tasks.add(task)
        try:
            if stream.header.get("kind") == "dns":
                await self._handle_dns(stream)
            elif stream.header.get("kind") == "tcp":
                await self._handle_tcp(stream)
        except (LinkClosed, OSError, asyncio.TimeoutError, wire.WireError) as error:
            log.debug("egress stream of %s ended: %r", self.sandbox_id, error)
        except Exception:
            log.exception("egress stream of %s failed", self.sandbox_id)
        finally:
            self._tasks.discard(task)
            stream.reset()

    async def aclose(self) -> None:
        """Close every connection and refuse all later ones."""
        self._is_closed = True
        await finish([t for t in self._tasks if t is not asyncio.current_task()])
        for upstream in list(self._upstreams):
            upstream.close()

    # -- connections ---------------------------------------------------------------------------

    async def _handle_tcp(self, stream: Stream) -> None:
        via = stream.header.get("via")
        serve = {"http": self._serve_proxy, "socks": self._serve_socks, "direct": self._serve_direct}.get(str(via))
        if serve is None:
            return
        self._streams += 1
        try:
            await serve(stream, Source(stream.read))
        finally:
            self._streams -= 1

    async def _serve_proxy(self, stream: Stream, client: Source) -> None:
        forwarder = HttpForwarder(
            client,
            stream,
            self._open,
            self._is_allowed,
            self._times,
            connect=functools.partial(self._serve_connect, stream, client),
            kept=self._kept,
        )
        await self._run_http(forwarder, stream, ("", 0))

    async def _run_http(
        self, forwarder: HttpForwarder, stream: Stream, target: tuple[str, int], upstream: Upstream | None = None
    ) -> None:
        try:
            try:
                await forwarder.run(upstream)
            except wire.WireError as error:
                host, port = target
                raise Refused(f"{host}:{port} was closed: {error}" if host else f"{error}", 400, host, port) from None
        except Refused as refused:
            await self._log_refusal(refused)
            if not forwarder.has_answered:
                answer = http1.refusal(
                    refused.status, _PHRASES.get(refused.status, ""), refused.sentence, forwarder.method
                )
                await send_and_close(stream, answer, self._times.linger)

    async def _serve_connect(self, stream: Stream, client: Source, host: str, port: int) -> None:
        upstream = await self._open(host, port)
        try:
            await stream.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await self._carry(stream, client, upstream)
        finally:
            upstream.close()

    async def _serve_socks(self, stream: Stream, client: Source) -> None:
        timeout = self._times.head

        async def read(parse: Callable[[bytes], Any]) -> Any:
            while (found := parse(bytes(client.buffer))) is None:
                if not await client.fill():
                    raise wire.WireError("the SOCKS5 request is incomplete")
            return found

        size, is_open = await asyncio.wait_for(read(wire.socks_greeting), timeout)
        client.take(size)
        if not is_open:
            await send_and_close(stream, wire.SOCKS_NO_METHOD, self._times.linger)
            return
        await stream.write(wire.SOCKS_NO_AUTH)
        request: wire.SocksRequest = await asyncio.wait_for(read(wire.socks_request), timeout)
        client.take(request.size)
        try:
            if request.error == wire.SOCKS_NO_COMMAND:
                shown = printable(request.host)
                raise Refused(f"SOCKS5 to {shown}:{request.port}: only CONNECT is supported", 403, shown, request.port)
            upstream = await self._open(request.host, request.port)
        except Refused as refused:
            await self._log_refusal(refused)
            refusal = request.error or wire.SOCKS_REFUSED
            code = {400: refusal, 403: refusal, 502: wire.SOCKS_UNREACHABLE}.get(refused.status)
            await send_and_close(stream, wire.socks_reply(code or wire.SOCKS_FAILED), self._times.linger)
            return
        try:
            await stream.write(wire.socks_reply(wire.SOCKS_OK))
            await self._carry(stream, client, upstream)
        finally:
            upstream.close()

    async def _serve_direct(self, stream: Stream, client: Source) -> None:
        name = self._addresses.get(str(stream.header.get("address")))
        port = stream.header.get("port")
        if name is None or not isinstance(port, int) or not 0 < port <= 65535:
            return
        try:
            upstream = await self._open(name, port)
        except Refused as refused:
            await self._log_refusal(refused)
            return
        try:
            await self._carry(stream, client, upstream)
        finally:
            upstream.close()

    async def _carry(self, stream: Stream, client: Source, upstream: Upstream) -> None:
        """Carry a connection that leads to one host and port, for all three ways in (proxy, SOCKS and direct)."""
        host, port = upstream.host, upstream.port
        if port == 80:
            fixed = HttpForwarder(client, stream, self._open, self._is_allowed, self._times, (host, port))
            await self._run_http(fixed, stream, (host, port), upstream)
            return
        try:
            check = functools.partial(check_hello, client, host, port, self._times.head)
            await relay(client, stream, upstream, self._times, check, self._kept)
        except Refused as refused:
            await self._log_refusal(refused)
            is_tls = bool(client.buffer) and wire.may_be_tls(bytes(client.buffer[:2]))
            await send_and_close(stream, TLS_ALERT if is_tls else b"", self._times.linger)

    # -- decisions -----------------------------------------------------------------------------

    def _is_allowed(self, host: str, port: int) -> bool:
        return decide(host, port, self._grant).is_allowed

    def _refused_answer(self, decision: Decision, port: int, addresses: list[str]) -> tuple[str, str] | None:
        """Return the address that refuses a name, if there is one. A person's consent never covers private ones."""
        grant = dataclasses.replace(self._grant, private_hosts=()) if decision.is_users else self._grant
        return refused_answer(decision.host, port, addresses, grant, self._is_own)

    async def _open(self, host: str, port: int) -> Upstream:
        """Decide, wait for others to end, look up, log and connect. Raises :class:`Refused`."""
        decision = decide(host, port, self._grant)
        name = decision.host
        if not decision.is_allowed:
            raise Refused(decision.reason, 400 if decision.is_malformed else 403, name, port)
        await self._take_slot(name, port)
        try:
            upstream = await self._connect_to(decision, port)
        except BaseException:
            self._return_slot()
            raise
        self._upstreams.add(upstream)
        if self._is_closed or not self._is_allowed(name, port):
            upstream.close()  # the grant has changed in the meantime
            raise Refused(f"{name}:{port} is no longer allowed", 403, name, port)
        return upstream

    async def _take_slot(self, name: str, port: int) -> None:
        """Wait until another connection may be opened, in the order of arrival. Raises :class:`Refused`."""
        if self._slots > 0:
            self._slots -= 1
            return
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(slot)
        self._kept.make_room()
        try:
            await asyncio.wait((slot,), timeout=self._times.slot)
        except BaseException:
            if slot.done():
                self._return_slot()
            raise
        finally:
            if not slot.done():
                self._waiting.remove(slot)
        if not slot.done():
            why = (
                f"{name}:{port} is refused: this sandbox has {self.limits.connections} open connections, the maximum, "
                f"and none was closed for {self._times.slot:g} s; close connections that are not in use"
            )
            raise Refused(why, 503, name, port)

    def _return_slot(self) -> None:
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self._slots += 1

    async def _connect_to(self, decision: Decision, port: int) -> Upstream:
        name = decision.host
        failure: Refused | None = None
        addresses: list[str] = []
        try:
            addresses = await asyncio.wait_for(self._resolve(name, port), self._times.lookup)
        except asyncio.TimeoutError:
            failure = Refused(f"{name}:{port} is allowed, but the lookup of its name timed out", 504, name, port)
        except OSError:
            pass
        if not addresses:
            failure = failure or Refused(f"{name}:{port} is allowed, but its name was not found", 502, name, port)
        elif refused := self._refused_answer(decision, port, addresses):
            raise Refused(refused[1], 403, name, port, {"address": refused[0]})
        if failure is not None:
            raise failure
        await self._log_allowed(decision, port, addresses)
        try:
            address, reader, writer = await dial(addresses, port, self._connect, self._times.connect)
        except OSError as error:
            why = error.strerror or str(error)
            raise Refused(f"{name}:{port} is allowed, but the connection failed: {why}", 502, name, port) from None
        return Upstream(name, port, decision.rule, address, reader, writer, self._closed)

    async def _log_allowed(self, decision: Decision, port: int, addresses: list[str]) -> None:
        try:
            await self._audit.arecord(
                "egress",
                self.sandbox_id,
                is_allowed=True,
                host=decision.host,
                port=port,
                rule=decision.rule,
                detail={"addresses": addresses[:8], **({"allowed_by": "user"} if decision.is_users else {})},
            )
        except AgentboxError as error:
            log.error("egress of %s refused: %s", self.sandbox_id, error)
            why = f"{decision.host}:{port} is refused: the audit log cannot be written"
            raise Refused(why, 503, decision.host, port) from None

    async def _log_refusal(self, refused: Refused) -> None:
        """Log and report a refusal. Only 400 and 403 are decisions; other statuses are failures."""
        if self.on_refusal is not None:
            try:
                self.on_refusal(refused.host, refused.port, refused.sentence)
            except Exception:
                log.exception("could not report a refusal")
        try:
            await self._audit.arecord(
                "egress" if refused.status in (400, 403) else "egress_failed",
                self.sandbox_id,
                is_allowed=False if refused.status in (400, 403) else None,
                host=refused.host or None,
                port=refused.port or None,
                reason=refused.sentence,
                detail=refused.detail,
            )
        except AgentboxError as error:
            log.error("refused egress of %s could not be logged: %s", self.sandbox_id, error)

    def _closed(self, upstream: Upstream) -> None:
        self._upstreams.discard(upstream)
        self._return_slot()
        self._audit.note(
            "egress_closed",
            self.sandbox_id,
            host=upstream.host,
            port=upstream.port,
            rule=upstream.rule,
            bytes_up=upstream.bytes_up,
            bytes_down=upstream.bytes_down,
            duration=time.monotonic() - upstream.started,
            detail={"address": upstream.address},
        )

    # -- names ---------------------------------------------------------------------------------

    async def _handle_dns(self, stream: Stream) -> None:
        if self._dns_streams >= self.limits.dns_streams:
            return
        self._dns_streams += 1
        try:
            client = Source(stream.read)
            while True:
                while (frame := wire.query_frame(client.buffer)) is None:
                    if not await client.fill():
                        return
                number, packet, size = frame
                client.take(size)
                # One query at a time: each answer is computed here without waiting, and a flood waits for its own log
                # rows.
                await self._answer(stream, number, packet)
        finally:
            self._dns_streams -= 1

    async def _answer(self, stream: Stream, number: int, packet: bytes) -> None:
        query = wire.dns_query(packet)
        if query is None:
            await stream.write(wire.answer_frame(number, [], b""))
            return
        code, address, listen, refused = self._resolve_inside(query)
        await stream.write(wire.answer_frame(number, listen, wire.dns_answer(query, code, address)))
        if refused is not None:
            await self._log_refusal(refused)

    def _resolve_inside(self, query: wire.DnsQuery) -> tuple[int, str | None, list[tuple[str, int]], Refused | None]:
        """Answer a query from the grant alone. No query from inside ever causes a lookup outside."""
        if query.error != wire.NOERROR:
            return query.error, None, [], None
        is_address_query = query.type == wire.TYPE_A
        shown = query.name.lower()
        if shown in ("localhost", HOSTNAME) or shown.endswith(".localhost"):
            return wire.NOERROR, "127.0.0.1" if is_address_query else None, [], None
        if shown.endswith(".arpa"):
            return wire.NXDOMAIN, None, [], None  # reverse lookups and the like; the gate has no data for them
        record = {wire.TYPE_SRV: "SRV", wire.TYPE_TXT: "TXT"}.get(query.type)
        asked = wire.service_host(query.name) if record else query.name
        try:
            name = normal_name(asked)
            ports = ports_of(name, self._grant)[: wire.MAX_LISTENERS]
        except ValueError:
            name, ports = printable(asked), ()
        if not ports:
            sentence = explain_refusal(name, 0, self._grant)
            return wire.NXDOMAIN, None, [], Refused(sentence, 403, name, 0, {"via": "dns"})
        if record:
            sentence = (
                f"{record} records of {name} are not available: sandboxes look up addresses only; "
                "give the program host names and ports instead, such as mongodb://HOST:27017"
            )
            return wire.NOERROR, None, [], Refused(sentence, 403, name, 0, {"via": "dns", "type": record})
        if not is_address_query:
            return wire.NOERROR, None, [], None
        address = self._address_of(name)
        return wire.NOERROR, address, [(address, port) for port in ports], None

    def _address_of(self, name: str) -> str:
        """Return the address that stands for a name inside. A full table evicts its least recently used name."""
        if name in self._names:
            self._names.move_to_end(name)
            return self._names[name]
        if len(self._names) >= self.limits.names:
            _, old = self._names.popitem(last=False)
            del self._addresses[old]
        # Addresses are assigned round-robin over the whole network. An address is reused as late as possible, so that a
        # program that caches an answer for too long does not reach another host.
        while True:
            self._next_address = self._next_address % (NAME_NETWORK.num_addresses - 2) + 1
            address = str(NAME_NETWORK[self._next_address])
            if address not in self._addresses:
                break
        self._names[name] = address
        self._addresses[address] = name
        return address
