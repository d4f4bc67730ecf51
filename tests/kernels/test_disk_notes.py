"""Which outputs are said to be of a full disk."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from support.notes import explain

from jupyter_agentbox.kernels import look
from jupyter_agentbox.kernels.disk_notes import DiskNotes
from jupyter_agentbox.sandbox.drivers.messages import Signer
from jupyter_agentbox.spec import GIB, Limits, SandboxSpec

SPEC = SandboxSpec(limits=Limits(disk=3 * GIB))
STREAM = {"name": "stdout", "text": "ERROR: Could not install: [Errno 28] No space left on device\n"}
ERROR = {"ename": "OSError", "evalue": "[Errno 28] No space left on device", "traceback": []}


@pytest.mark.parametrize(("kind", "content"), [("stream", STREAM), ("error", ERROR)])
def test_a_full_disk_is_explained_once_with_the_lines_that_allow_more(
    tmp_path: Path, kind: str, content: dict[str, object]
) -> None:
    notes = DiskNotes(SPEC, tmp_path)
    (sentence,) = explain(notes, Signer(b"").message(b"topic", kind, content))
    assert sentence.startswith("The disk of this sandbox is full (limit 3 GiB). ")
    assert "c.Policy.max_disk = '6 GiB'" in sentence
    assert explain(notes, Signer(b"").message(b"topic", kind, content)) == []


def test_a_full_disk_of_the_host_is_told_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = list(os.statvfs(tmp_path))
    facts[3] = facts[4] = 1
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(facts))
    (sentence,) = explain(DiskNotes(SPEC, tmp_path), Signer(b"").message(b"topic", "error", ERROR))
    assert sentence.startswith("The disk that contains the notebook's folder is full.")


def test_a_private_folder_that_is_too_large_is_explained_too(tmp_path: Path) -> None:
    message = Signer(b"").message(b"topic", "error", {**ERROR, "evalue": "[Errno 27] File too large"})
    (sentence,) = explain(DiskNotes(SPEC, tmp_path), message)
    assert sentence.startswith("The disk of this sandbox is full (limit 3 GiB). Delete files. ")
    assert explain(DiskNotes(replace(SPEC, workspace=tmp_path), tmp_path), message) == []


def test_a_folder_that_does_not_respond_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    responds = threading.Event()
    monkeypatch.setattr(look, "TIMEOUT", 0.1)
    monkeypatch.setattr(os, "statvfs", lambda path: responds.wait(60))
    message = Signer(b"").message(b"topic", "error", ERROR)

    async def ask() -> list[str]:
        found = await DiskNotes(SPEC, tmp_path).explain(message)
        assert not responds.is_set()
        responds.set()
        return found

    assert asyncio.run(ask()) == []


def test_all_else_is_not(tmp_path: Path) -> None:
    for message in (
        Signer(b"").message(b"topic", "display_data", {"data": {"text/plain": STREAM["text"]}}),
        Signer(b"").message(b"topic", "stream", {"name": "stdout", "text": "no space"}),
        [b"No space left on device"],
    ):
        assert explain(DiskNotes(SPEC, tmp_path), message) == []
