"""Claim an unclaimed sandbox: configure it before any code of its new owner runs.

An unclaimed sandbox has the layout ``waiting``. This is the host's side of the claim.
:mod:`jupyter_agentbox.guest.claim` is the guest's, and ``guest.ipykernel.embedded_claim`` the kernel's.
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

#: Seconds that the guest may take to mount the workspace.
TIMEOUT = 30.0
#: Bytes of one message to the guest, which accepts 64 KiB.
MAX_BATCH = 32 * 1024


def begin(record: Record, directory: Path, lock: Lock) -> None:
    """Record the claim, so that no other process can claim the sandbox if this process dies now.

    Call it before anything is done to the sandbox.

    Parameters
    ----------
    record : Record
        The sandbox's new record.
    directory : Path
        The sandbox's directory.
    lock : Lock
        Held by the caller. Released on error.

    Raises
    ------
    RuntimeFailed
        The sandbox was already claimed. Nothing has changed.
    """
    try:
        if Record.load(directory).spec.layout != "waiting":
            raise RuntimeFailed(f"sandbox {record.id} was already claimed")
        # The kernel is left out: no other owner may use it before the claim is complete.
        replace(record, kernels=[], owner_pid=os.getpid()).save(directory)
    except BaseException:
        lock.release()
        raise


async def apply_claim(link: Link, claim: Claim, covered: list[tuple[str, str]], lease: float) -> None:
    """Have the guest mount the workspace, cover its entries, and give up its right to mount.

    Parameters
    ----------
    link : Link
        A connected link.
    claim : Claim
    covered : list of (str, bool)
        Entries of the workspace to cover, and how; see :mod:`jupyter_agentbox.guest.covers`.
    lease : float
        Seconds that the sandbox outlives its owner.

    Raises
    ------
    RuntimeFailed
        The guest did not do so. The caller has to end the sandbox.
    """
    try:
        await asyncio.wait_for(_ask(link, claim, covered, lease), TIMEOUT)
    except (LinkClosed, ProtocolError, asyncio.TimeoutError, IndexError) as error:
        raise RuntimeFailed(f"cannot claim the prestarted sandbox: {error}") from None


async def _ask(link: Link, claim: Claim, covered: list[tuple[str, str]], lease: float) -> None:
    stream = link.open({"kind": "claim"})
    try:
        for masks in in_batches(covered):
            await stream.write(pack_json({"masks": masks}))
        await stream.write(pack_json({"rlimits": dict(claim.rlimits), "lease": lease}))
        reader = MessageReader(MIB)
        while not (messages := reader.feed(await stream.read() or pack_json({}))):
            pass
        if load_json(messages[0][0]).get("ok") is not True:
            raise LinkClosed("the guest rejected the claim")
    finally:
        stream.reset()


def in_batches(values: Iterable[T]) -> Iterator[list[T]]:
    """Split values for the guest into lists that each fit into one JSON message."""
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
    """Record in the audit log how a sandbox started and how many seconds it took.

    The row is not awaited for a warm start, nor for an adopted sandbox, which already runs and continues without it.
    """
    event = {"saved": "restored", "adopted": "adopted"}.get(how, "started")
    detail = {"event": event, "how": how, "profile": record.spec.profile, "kernel_id": record.spec.kernel_id}
    if how in ("template", "pool", "adopted"):
        audit.note("lifecycle", record.id, duration=duration, detail=detail)
    else:
        await audit.arecord("lifecycle", record.id, duration=duration, detail=detail)
