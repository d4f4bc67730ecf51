"""The host's side of a claim: what a sandbox that waited is told before any code of its new owner's runs.

The guest's is :mod:`jupyter_agentbox.guest.claim`, the kernel's ``guest.ipykernel.embedded_claim``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from jupyter_agentbox.errors import LinkClosed, RuntimeFailed
from jupyter_agentbox.guest.framing import MessageReader, ProtocolError, load_json, pack_json
from jupyter_agentbox.spec import MIB
from jupyter_agentbox.storage.audit.log import AuditLog

from .drivers.embedded import Claim
from .link.link import Link
from .record import Lock, Record

T = TypeVar("T")

#: Seconds that the guest may take to mount.
TIMEOUT = 30.0
#: Bytes of one message to the guest, which takes 64 KiB.
MAX_BATCH = 32 * 1024


def begin(record: Record, directory: Path, lock: Lock) -> None:
    """Write down that it waits no more, before anything is done to it: if we end now, nobody may have it after us.

    Parameters
    ----------
    record : Record
        What it becomes.
    directory : Path
        The sandbox's.
    lock : Lock
        Held; let go of after an error.

    Raises
    ------
    RuntimeFailed
        It waits no more. Nothing has changed.
    """
    try:
        if Record.load(directory).spec.layout != "waiting":
            raise RuntimeFailed(f"sandbox {record.id} waits no more")
        # Without its kernel, which is nobody's to go on with before it was claimed.
        replace(record, kernels=[], owner_pid=os.getpid()).save(directory)
    except BaseException:
        lock.release()
        raise


async def put_in_place(link: Link, claim: Claim, covered: list[tuple[str, bool]], lease: float) -> None:
    """Have the guest put the work folder in its place, hide what is to be, and give up its right to mount.

    Parameters
    ----------
    link : Link
        Connected.
    claim : Claim
    covered : list of (str, bool)
        The folder's hidden entries, and whether each is a folder.
    lease : float
        Seconds that the sandbox outlives its owner.

    Raises
    ------
    RuntimeFailed
        It did not; it is to be ended.
    """
    try:
        await asyncio.wait_for(_ask(link, claim, covered, lease), TIMEOUT)
    except (LinkClosed, ProtocolError, asyncio.TimeoutError, IndexError) as error:
        raise RuntimeFailed(f"the sandbox that waited could not be claimed: {error}") from None


async def _ask(link: Link, claim: Claim, covered: list[tuple[str, bool]], lease: float) -> None:
    stream = link.open({"kind": "claim"})
    try:
        for masks in in_batches(covered):
            await stream.write(pack_json({"masks": masks}))
        await stream.write(pack_json({"rlimits": dict(claim.rlimits), "lease": lease}))
        reader = MessageReader(MIB)
        while not (messages := reader.feed(await stream.read() or pack_json({}))):
            pass
        if load_json(messages[0][0]).get("ok") is not True:
            raise LinkClosed("the guest refused")
    finally:
        stream.reset()


def in_batches(values: Iterable[T]) -> Iterator[list[T]]:
    """Split what is sent to the guest as JSON into lists that fit into a message each."""
    batch: list[T] = []
    size = 0
    for value in values:
        length = len(pack_json({"": value}))
        if batch and size + length > MAX_BATCH:
            yield batch
            batch, size = [], 0
        batch.append(value)
        size += length
    if batch:
        yield batch


async def record_start(audit: AuditLog, record: Record, duration: float, how: str) -> None:
    """Tell the audit log how a sandbox started, after so many seconds.

    The row of a warm start is not waited for; nor is that of a sandbox that runs already, which goes on without it.
    """
    event = {"saved": "restored", "adopted": "adopted"}.get(how, "started")
    detail = {"event": event, "how": how, "profile": record.spec.profile, "kernel_id": record.spec.kernel_id}
    if how in ("template", "pool", "adopted"):
        audit.note("lifecycle", record.id, duration=duration, detail=detail)
    else:
        await audit.arecord("lifecycle", record.id, duration=duration, detail=detail)
