"""Recognize cells that are commands for the host and not for the kernel. ``service.live.magics`` executes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from jupyter_agentbox.sandbox.drivers.messages import Request, header_index, parse

#: Longest content of a request that is parsed, in bytes.
MAX_CONTENT = 8 * 1024
_COMMAND = re.compile(r"%(snapshots|snapshot|restore|fork)(?:[ \t]+(.*))?")
_COMMENTS = ("#", "//")


class HostCell(NamedTuple):
    """A cell that is a command for the host.

    Parameters
    ----------
    request : Request
        The sender, and the header of the request.
    code, name, argument : str
        The whole cell, and the command's name and argument.
    is_silent : bool
        Whether to show nothing.
    """

    request: Request
    code: str
    name: str
    argument: str
    is_silent: bool


def read_host_cell(identity: bytes, frames: Sequence[bytes]) -> HostCell | None:
    """Return the host command in an execute request, or None for any other message.

    Parameters
    ----------
    identity : bytes
        The client's identity.
    frames : sequence of bytes
        The message, from the frames before the delimiter on. The caller has to check its signature.
    """
    index = header_index(frames)
    if index is None or len(frames[index + 3]) > MAX_CONTENT or b"%" not in frames[index + 3]:
        return None
    if parse(frames[index]).get("msg_type") != "execute_request":
        return None
    content = parse(frames[index + 3])
    code = content.get("code")
    if not isinstance(code, str):
        return None
    lines = [line.strip() for line in code.splitlines()]
    lines = [line for line in lines if line and not line.startswith(_COMMENTS)]
    found = _COMMAND.fullmatch(lines[0]) if len(lines) == 1 else None
    if found is None:
        return None
    argument = (found[2] or "").strip()
    if len(argument) > 1 and argument[0] == argument[-1] and argument[0] in "'\"":
        argument = argument[1:-1]
    request = Request(identity, frames[index], content.get("stop_on_error") is not False)
    return HostCell(request, code, found[1], argument, content.get("silent") is True)
