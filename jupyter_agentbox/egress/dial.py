"""Look a name up once and connect to one of the answers. There is no second lookup that could return another address.

Only :mod:`.gate` uses this module, on the link's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path

from jupyter_agentbox.errors import PolicyRefused
from jupyter_agentbox.spec import Grant

from .rules import Kind, classify_address, parse_pattern, ports_of, private_rule

#: Returns the addresses of a name.
Resolve = Callable[[str, int], Awaitable[list[str]]]
#: Connects to an address, never to a name.
Connect = Callable[[str, int], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]

#: Maximum number of addresses to try.
MAX_ADDRESSES = 8
#: Bytes that one connection buffers from the server.
BUFFER_SIZE = 64 * 1024


class Resolver:
    """Lookups with the system's resolver, with a limit on how many run at a time.

    Each lookup has its own thread. The system's resolver cannot be interrupted, so slow names of one sandbox
    must not block the threads of another, or delay the exit of the process.

    Parameters
    ----------
    limit : int
        Concurrent lookups; further ones wait.
    """

    def __init__(self, limit: int = 4) -> None:
        self._semaphore = asyncio.Semaphore(limit)

    async def __call__(self, host: str, port: int) -> list[str]:
        """Return the addresses of a name in the order in which to try them. Raises OSError."""
        loop = asyncio.get_running_loop()
        await self._semaphore.acquire()
        answer: asyncio.Future[list[str]] = loop.create_future()

        def finish(addresses: list[str], error: OSError | None) -> None:
            self._semaphore.release()
            if answer.cancelled():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(addresses)

        def work() -> None:
            addresses: list[str] = []
            failure: OSError | None = None
            try:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
            except (OSError, UnicodeError) as error:
                failure = error if isinstance(error, OSError) else OSError(str(error))
            with contextlib.suppress(RuntimeError):  # the event loop has ended in the meantime
                loop.call_soon_threadsafe(finish, addresses, failure)

        threading.Thread(target=work, name="agentbox-lookup", daemon=True).start()
        return await answer


def is_own_address(address: str) -> bool:
    """Return whether an address, public or not, belongs to this machine, by trying to bind it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    version = "ipv6" if family == socket.AF_INET6 else "ipv4"
    try:
        # With this option any address can be bound, and the test is meaningless.
        if Path(f"/proc/sys/net/{version}/ip_nonlocal_bind").read_text().strip() == "1":
            return False
    except OSError:
        pass
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def refused_answer(
    name: str, port: int, addresses: Iterable[str], grant: Grant, is_own: Callable[[str], bool] = is_own_address
) -> tuple[str, str] | None:
    """Return the first address of a lookup that must not be connected to. One such address refuses the name.

    Returns
    -------
    tuple of (str, str) or None
        The address, and the sentence for the guest, which does not contain the address.
    """
    also = "" if port in ports_of(name, replace(grant, user_hosts=())) else " and Policy.allowed_hosts"
    for address in addresses:
        try:
            kind = classify_address(address)
        except ValueError:
            return address, f"{name}:{port} is refused: its lookup returned an invalid address"
        if is_own(address):
            kind = Kind(kind.what if kind is not None else "this machine's own")
        if kind is not None and private_rule(name, port, grant, is_ordinary=kind.is_ordinary) is None:
            return address, (
                f"Blocked by sandbox: {name}:{port} resolves to a non-public address ({kind.what}). "
                f"To allow it, add {name}:{port} to Policy.private_hosts{also}."
            )
    return None


async def check_public(
    host: str, resolve: Resolve, is_own: Callable[[str], bool] = is_own_address, timeout: float = 10.0
) -> None:
    """Check that a host that a person wants to allow does not resolve to an address that is not public.

    Each connection is checked again. A name that is not found passes, and so does a wildcard.

    Parameters
    ----------
    host : str
        A host pattern.
    resolve, is_own : callable
        The lookup, and whether an address belongs to this machine.
    timeout : float
        Seconds for the lookup.

    Raises
    ------
    PolicyRefused
        Only ``Policy.private_hosts`` can allow the host.
    """
    pattern = parse_pattern(host)
    if not pattern.is_exact:
        return
    port = pattern.ports[-1]
    try:
        addresses = await asyncio.wait_for(resolve(pattern.name, port), timeout)
    except (OSError, asyncio.TimeoutError):
        return
    if (refused := refused_answer(pattern.name, port, addresses, Grant(), is_own)) is not None:
        raise PolicyRefused(refused[1], field="host", setting="Policy.private_hosts")


async def connect_stream(address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a numeric address."""
    return await asyncio.open_connection(address, port, limit=BUFFER_SIZE)


async def dial(
    addresses: Iterable[str], port: int, connect: Connect, timeout: float
) -> tuple[str, asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first address that answers.

    Parameters
    ----------
    addresses : iterable of str
        Approved addresses.
    port : int
        Port number.
    connect : callable
        Connects to one address.
    timeout : float
        Seconds for each address.

    Raises
    ------
    OSError
        No address answered. This is the last error.
    """
    failure: OSError = OSError("no address found")
    for address in list(addresses)[:MAX_ADDRESSES]:
        try:
            reader, writer = await asyncio.wait_for(connect(address, port), timeout)
        except asyncio.TimeoutError:
            failure = OSError(f"no response within {timeout:g} s")
        except OSError as error:
            failure = error
        else:
            return address, reader, writer
    raise failure
