"""Commands run in a sandbox, over one stream of the link each.

:mod:`jupyter_agentbox.guest.processes` is the other end and says what the messages are. Only on the
link's thread.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from .errors import LinkClosed
from .guest.framing import MessageReader, ProtocolError, load_json, pack_message
from .link import Stream
from .spec import MIB

_CHUNK = 64 * 1024


@dataclass(frozen=True)
class CommandResult:
    """What a command gave.

    Parameters
    ----------
    exit_code : int
        128 + n after signal n.
    stdout, stderr : bytes
        All it printed, or the first part.
    is_truncated : bool
        It printed more than was kept.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    is_truncated: bool = False


async def run_command(
    stream: Stream, stdin: bytes = b"", timeout: float = 30.0, max_output: int = 10 * MIB
) -> CommandResult:
    """Feed and watch a command to its end.

    Parameters
    ----------
    stream : Stream
        Opened with the header of a command.
    stdin : bytes
        All that it can read.
    timeout : float
        Seconds after which it is killed, group and all.
    max_output : int
        Bytes kept of each output; the rest is read and dropped.

    Raises
    ------
    TimeoutError
    LinkClosed
        The sandbox ended, or what came back is no command's output.
    """
    stream.grant(MIB)
    feeding = asyncio.ensure_future(_feed(stream, stdin))
    try:
        return await asyncio.wait_for(_collect(stream, max_output), timeout)
    except asyncio.TimeoutError:
        raise TimeoutError(f"the command did not end within {timeout:g} s and was killed") from None
    finally:
        feeding.cancel()
        stream.reset()


async def _feed(stream: Stream, stdin: bytes) -> None:
    try:
        for start in range(0, len(stdin), _CHUNK):
            await stream.write(pack_message(b"0", stdin[start : start + _CHUNK]))
        await stream.write(pack_message(b"0", b""))
    except LinkClosed:
        pass  # the reading side says so


async def _collect(stream: Stream, max_output: int) -> CommandResult:
    reader = MessageReader(MIB)
    outputs = {b"1": bytearray(), b"2": bytearray()}
    is_truncated = False
    try:
        while data := await stream.read():
            for tag, part in reader.feed(data):
                if tag == b"exit":
                    code = int(load_json(part)["code"])
                    return CommandResult(code, bytes(outputs[b"1"]), bytes(outputs[b"2"]), is_truncated)
                kept = outputs[tag]
                is_truncated = is_truncated or len(kept) + len(part) > max_output
                kept += part[: max(0, max_output - len(kept))]
    except (ProtocolError, KeyError, ValueError, TypeError):
        pass
    raise LinkClosed("the command's output ended without its exit status")
