"""A server's file browser: whatever code in a sandbox puts into its folder, it reads and writes nothing elsewhere."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_server.services.contents.filecheckpoints import AsyncFileCheckpoints
from send2trash import plat_other
from tornado.httpclient import HTTPClientError
from tornado.web import HTTPError

from jupyter_agentbox import landlock
from jupyter_agentbox.contents import AgentboxContentsManager

NOTEBOOK = {
    "cells": [{"cell_type": "code", "execution_count": None, "id": "a", "metadata": {}, "outputs": [], "source": "1"}],
    "metadata": {},
    "nbformat": 4,
    "nbformat_minor": 5,
}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret.txt").write_text("canary")
    (folder / "book.ipynb").write_text(json.dumps(NOTEBOOK))
    return folder


@pytest.fixture
def trash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where it is when a user's data is there; send2trash has looked already."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    monkeypatch.setattr(plat_other, "HOMETRASH", str(tmp_path / "share" / "Trash"))
    monkeypatch.setattr(plat_other, "HOMETRASH_B", os.fsencode(tmp_path / "share" / "Trash"))
    return tmp_path / "share" / "Trash" / "files"


@pytest.fixture
def jp_server_config(trash: Path) -> dict[str, Any]:
    return {"ServerApp": {"contents_manager_class": "jupyter_agentbox.contents.AgentboxContentsManager"}}


@pytest.fixture
def root(jp_root_dir: Path, outside: Path) -> Path:
    for name, target in (("link.txt", "secret.txt"), ("book.ipynb", "book.ipynb"), ("folder", "")):
        (jp_root_dir / name).symlink_to(outside / target)
    (jp_root_dir / "up.txt").symlink_to(os.path.relpath(outside / "secret.txt", jp_root_dir))
    (jp_root_dir / "kept.txt").write_text("kept")
    (jp_root_dir / "inside.txt").symlink_to("kept.txt")
    return jp_root_dir


def untouched(outside: Path) -> bool:
    names = sorted(path.name for path in outside.iterdir())
    return names == ["book.ipynb", "secret.txt"] and (outside / "secret.txt").read_text() == "canary" and (
        json.loads((outside / "book.ipynb").read_text()) == NOTEBOOK
    )  # fmt: skip


async def refused(answer: Any) -> str:
    with pytest.raises(HTTPClientError) as caught:
        await answer
    assert caught.value.code == 403
    assert caught.value.response is not None
    return str(caught.value.response.body.decode())


async def test_a_link_that_leads_out_is_shown_and_removed_and_not_followed(
    jp_fetch: Any, root: Path, outside: Path
) -> None:
    listed = json.loads((await jp_fetch("api", "contents")).body)["content"]
    assert {"link.txt", "book.ipynb", "folder", "up.txt", "kept.txt"} <= {item["name"] for item in listed}
    for path in ("link.txt", "up.txt", "book.ipynb", "folder", "folder/secret.txt"):
        said = json.loads(await refused(jp_fetch("api", "contents", *path.split("/"))))["message"]
        assert path in said
        assert "AgentboxContentsManager.linked_folders" in said
        assert "canary" not in await refused(jp_fetch("files", *path.split("/")))
    text, book = {"type": "file", "format": "text", "content": "x"}, {"type": "notebook", "content": NOTEBOOK}
    chunk = {**text, "chunk": 1}
    calls = [
        ("PUT", "link.txt", text), ("PUT", "link.txt", chunk), ("PUT", "folder/new.txt", text),
        ("PUT", "book.ipynb", book),
        ("PUT", "folder/made", {"type": "directory"}), ("POST", "folder", {"type": "file"}),
        ("POST", "", {"copy_from": "link.txt"}), ("POST", "folder", {"copy_from": "kept.txt"}),
        ("PATCH", "folder/secret.txt", {"path": "stolen.txt"}), ("PATCH", "kept.txt", {"path": "folder/kept.txt"}),
        ("DELETE", "folder/secret.txt", None), ("POST", "link.txt/checkpoints", {}),
    ]  # fmt: skip
    for verb, path, body in calls:
        parts = [part for part in path.split("/") if part]
        sent = None if body is None else json.dumps(body)
        await refused(jp_fetch("api", "contents", *parts, method=verb, body=sent))
    assert untouched(outside)
    await jp_fetch("api", "contents", "link.txt", method="PATCH", body=json.dumps({"path": "moved.txt"}))
    for name in ("moved.txt", "folder"):
        assert (await jp_fetch("api", "contents", name, method="DELETE")).code == 204
        assert not os.path.lexists(root / name)
    assert untouched(outside)


async def test_all_else_is_as_with_jupyters_own(
    jp_fetch: Any, jp_serverapp: Any, root: Path, trash: Path, tmp_path: Path
) -> None:
    events: list[Any] = []

    async def heard(logger: Any, schema_id: str, data: Any) -> None:
        events.append((threading.current_thread(), data["action"], data["path"]))

    jp_serverapp.event_logger.add_listener(
        schema_id="https://events.jupyter.org/jupyter_server/contents_service/v1", listener=heard
    )

    async def call(verb: str, path: str, body: Any = None) -> Any:
        sent = None if body is None else json.dumps(body)
        answer = await jp_fetch("api", "contents", *path.split("/"), method=verb, body=sent)
        return json.loads(answer.body) if answer.body else None

    assert (await call("GET", "inside.txt"))["content"] == "kept"
    await call("PUT", "a.ipynb", {"type": "notebook", "content": NOTEBOOK})
    assert (await call("GET", "a.ipynb"))["content"]["cells"][0]["metadata"]["trusted"] is True
    made = await call("POST", "a.ipynb/checkpoints", {})
    await call("PUT", "a.ipynb", {"type": "notebook", "content": {**NOTEBOOK, "cells": []}})
    await call("POST", f"a.ipynb/checkpoints/{made['id']}", {})
    assert len(json.loads((root / "a.ipynb").read_text())["cells"]) == 1
    assert [item["id"] for item in await call("GET", "a.ipynb/checkpoints")] == [made["id"]]
    await call("DELETE", f"a.ipynb/checkpoints/{made['id']}")
    await call("PUT", "sub", {"type": "directory"})
    await call("PATCH", "a.ipynb", {"path": "sub/b.ipynb"})
    assert (await call("POST", "sub", {"copy_from": "sub/b.ipynb"}))["path"] == "sub/b-Copy1.ipynb"
    await call("DELETE", "sub/b.ipynb")
    if os.stat(root).st_dev == os.stat(Path.home()).st_dev:
        assert (trash / "b.ipynb").exists()
    part = {"type": "file", "format": "text"}
    for number, content in ((1, "ab"), (2, "cd"), (-1, "ef")):
        await call("PUT", "large.txt", {**part, "chunk": number, "content": content})
    assert (root / "large.txt").read_text() == "abcdef"
    answer = await jp_fetch("files", "large.txt", headers={"Range": "bytes=2-3"})
    assert (answer.code, answer.body) == (206, b"cd")
    assert (await jp_fetch("files", "inside.txt")).body == b"kept"
    with pytest.raises(HTTPClientError, match="404"):
        await call("GET", "nothing.txt")
    await asyncio.sleep(0)
    assert ("save", "a.ipynb") in [event[1:] for event in events]
    assert {event[0] for event in events} == {threading.current_thread()}


@pytest.fixture
def manager(tmp_path: Path, outside: Path, trash: Path) -> Iterator[AgentboxContentsManager]:
    (tmp_path / "root").mkdir()
    made = AgentboxContentsManager(root_dir=str(tmp_path / "root"), checkpoints_class=AsyncFileCheckpoints)
    yield made
    made._threads.shutdown()


async def test_a_folder_that_is_named_may_be_linked_to(tmp_path: Path, outside: Path, trash: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "folder").symlink_to(outside)
    manager = AgentboxContentsManager(root_dir=str(tmp_path / "root"), linked_folders=[str(outside)])
    try:
        assert (await manager.get("folder/secret.txt"))["content"] == "canary"
        await manager.save({"type": "file", "format": "text", "content": "x"}, "folder/new.txt")
        assert (outside / "new.txt").read_text() == "x"
    finally:
        manager._threads.shutdown()


async def test_a_link_that_appears_after_the_look_leads_nowhere_either(
    manager: AgentboxContentsManager, monkeypatch: pytest.MonkeyPatch, outside: Path
) -> None:
    """Code in a sandbox may swap a file for a link at any moment: here it always comes too late to be seen."""
    root = Path(manager.root_dir)
    monkeypatch.setattr(manager, "check", lambda os_path: None)
    (root / "link.txt").symlink_to(outside / "secret.txt")
    (root / "folder").symlink_to(outside)
    (root / "good.txt").write_text("good")
    (root / ".ipynb_checkpoints").symlink_to(outside)
    assert (await manager.get("good.txt"))["content"] == "good"
    text = {"type": "file", "format": "text", "content": "x"}
    attempts = [
        lambda: manager.get("link.txt"), lambda: manager.get("folder"), lambda: manager.save(text, "link.txt"),
        lambda: manager.save(text, "folder/new.txt"), lambda: manager.copy("link.txt", "copy.txt"),
        lambda: manager.delete("folder/secret.txt"), lambda: manager.rename("folder/secret.txt", "stolen.txt"),
        lambda: manager.rename("good.txt", "folder/good.txt"), lambda: manager.create_checkpoint("good.txt"),
    ]  # fmt: skip
    for attempt in attempts:
        with pytest.raises((HTTPError, OSError)):
            await attempt()
    with pytest.raises(PermissionError):
        manager.open_bound(str(root / "link.txt"))
    assert untouched(outside)
    assert not (root / "copy.txt").exists() or (root / "copy.txt").read_text() == ""
    assert (root / "good.txt").read_text() == "good"


async def test_a_fifo_that_takes_the_place_of_a_file_is_not_waited_for(
    manager: AgentboxContentsManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(Path(manager.root_dir, "pipe.txt"))
    monkeypatch.setattr(os.path, "isfile", lambda path: True)  # it was one at the last look
    with pytest.raises(HTTPError, match="no regular file"):
        manager.open_bound(str(Path(manager.root_dir, "pipe.txt")))
    with pytest.raises(HTTPError, match="no regular file"):
        await asyncio.wait_for(manager.get("pipe.txt"), 30)


def test_a_thread_and_what_it_starts_are_kept_to_their_folders(tmp_path: Path) -> None:
    assert landlock.is_available(), "these tests need Linux 5.19 with Landlock"
    for name in ("changed", "read", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    program = "import sys; print(open(sys.argv[1]).read())"
    found: dict[str, Any] = {}

    def run() -> None:
        prefixes = {sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/etc", os.path.dirname(os.__file__)}
        landlock.restrict(
            [str(tmp_path / "changed"), os.devnull, str(tmp_path / "nowhere")], [str(tmp_path / "read"), *prefixes]
        )
        for name in ("changed", "read", "other"):
            path = tmp_path / name / "file"
            for mode in ("r", "a"):
                try:
                    path.open(mode).close()
                except PermissionError:
                    found[f"{name} {mode}"] = "refused"
                else:
                    found[f"{name} {mode}"] = "done"
            command = [sys.executable, "-I", "-c", program, str(path)]
            answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            found[f"{name} by a program"] = answer.stdout.strip()
        os.rename(tmp_path / "changed" / "file", tmp_path / "changed" / "moved")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=120)
    assert found == {
        "changed r": "done", "changed a": "done", "changed by a program": "changed",
        "read r": "done", "read a": "refused", "read by a program": "read",
        "other r": "refused", "other a": "refused", "other by a program": "",
    }  # fmt: skip
    assert (tmp_path / "changed" / "moved").exists()
    assert (tmp_path / "other" / "file").read_text() == "other"  # this thread may
