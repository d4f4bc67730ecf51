"""Match lines in a process that can be killed: ``storage.files.search`` runs this file as a program.

It uses the standard library only, and nothing of the package. It communicates over one socket: first a request with the
pattern, then for each file one byte with its descriptor. Answers are JSON, each preceded by its length.
"""

from __future__ import annotations

import collections
import json
import os
import re
import resource
import socket
import struct
import sys
from typing import Any


def main(fd: int) -> None:
    """Serve requests until the other end closes."""
    with socket.socket(fileno=fd) as peer:
        (size,) = struct.unpack("!I", _read(peer, 4))
        request = json.loads(_read(peer, size))
        seconds = request["seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            source = re.escape(request["pattern"]) if request["is_literal"] else request["pattern"]
            pattern = re.compile(source, re.IGNORECASE if request["ignore_case"] else 0)
        except (re.error, OverflowError, RecursionError, MemoryError) as error:
            _answer(peer, {"error": str(error) or type(error).__name__})
            return
        _answer(peer, {})
        left = request["limit"]
        while True:
            data, fds, _, _ = socket.recv_fds(peer, 1, 1)
            if not data:
                return
            try:
                answer = search(fds[0], pattern, left, request)
            finally:
                os.close(fds[0])
            left -= len(answer.get("matches", ()))
            request["max_text"] = answer.pop("room", request["max_text"])
            _answer(peer, answer)


def search(fd: int, pattern: re.Pattern[str], left: int, request: dict[str, Any]) -> dict[str, Any]:
    """Return the matches in one file: line number, text, lines before, lines after."""
    max_file, max_line = request["max_file"], request["max_line"]
    data = b""
    while len(data) <= max_file:
        more = os.pread(fd, min(1 << 20, max_file + 1 - len(data)), len(data))
        if not more:
            break
        data += more
        if len(data) == len(more) and b"\0" in data[:8192]:
            return {"is_binary": True}
    end_of_data = min(len(data), max_file)

    def end_of_line(start: int) -> int:
        end = data.find(b"\n", start, end_of_data)
        return end_of_data if end < 0 else end

    def text(start: int, end: int) -> str:
        # Cut before decoding, because a line may be the whole file.
        line = data[start : min(end, start + 4 * max_line)]
        return line.removesuffix(b"\r").decode("utf-8", "replace")[:max_line]

    matches: list[tuple[int, str, list[str], list[str]]] = []
    recent: collections.deque[tuple[int, int]] = collections.deque(maxlen=request["before"])
    room = request["max_text"]
    start = number = 0
    while start < end_of_data and len(matches) < left and room > 0:
        number += 1
        end = end_of_line(start)
        line = text(start, end)
        if pattern.search(line):
            before = [text(*span) for span in recent]
            after: list[str] = []
            following = end + 1
            while len(after) < request["after"] and following < end_of_data:
                stop = end_of_line(following)
                after.append(text(following, stop))
                following = stop + 1
            matches.append((number, line, before, after))
            room -= len(line) + sum(map(len, before)) + sum(map(len, after))
        recent.append((start, end))
        start = end + 1
    return {"matches": matches, "is_cut": len(data) > max_file, "is_full": room <= 0, "room": room}


def _read(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = peer.recv(size - len(data))
        if not more:
            raise SystemExit
        data += more
    return data


def _answer(peer: socket.socket, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode()
    peer.sendall(struct.pack("!I", len(data)) + data)


if __name__ == "__main__":
    main(int(sys.argv[1]))
