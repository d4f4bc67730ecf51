"""Act as the guest: answer each line on the link with the output of running it, and exit on ``quit``.

A line is ``user <command>`` or ``root <command>``. The answer ends with a zero byte.
"""

import json
import os
import select
import subprocess
import sys
import time

config = json.loads(os.environ["AGENTBOX_GUEST"])
LINK = "/run/agentbox/link"


def open_link() -> tuple[int, int]:
    while True:
        try:
            up = os.open(LINK + "/up", os.O_WRONLY | os.O_NONBLOCK)
            return os.open(LINK + "/down", os.O_RDONLY | os.O_NONBLOCK), up
        except OSError:
            time.sleep(0.02)


def run(line: str) -> bytes:
    who, _, command = line.partition(" ")
    if who == "quit":
        sys.exit(0)
    ids = {"user": config["uid"], "group": config["gid"], "extra_groups": []} if who == "user" else {}
    result = subprocess.run(
        command, shell=True, stdin=subprocess.DEVNULL, stdout=-1, stderr=-2, cwd="/workspace",
        env={"PATH": "/usr/bin:/bin", "HOME": config["home"]}, **ids,
    )  # fmt: skip
    return bytes(result.stdout)


while True:
    down, up = open_link()
    os.set_blocking(up, True)
    os.write(up, b"ready\0")
    data = b""
    while True:
        select.select([down], [], [], 1)
        try:
            chunk = os.read(down, 65536)
        except BlockingIOError:
            continue
        if not chunk:
            if not data:
                time.sleep(0.01)
            if not os.path.exists(LINK + "/down"):
                break
            continue
        data += chunk
        while b"\n" in data:
            line, _, data = data.partition(b"\n")
            answer = run(line.decode()) + b"\0"
            while answer:
                answer = answer[os.write(up, answer) :]
    os.close(down)
    os.close(up)
