"""A server's file browser: whatever code in a sandbox puts into its folder, it reads and writes nothing elsewhere."""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import copy
import functools
import inspect
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jupyterlab_jupytext
import pytest
from jupyter_server.services.contents import (
    filecheckpoints,
    fileio,
    filemanager,
    largefilemanager,
)
from jupyter_server.services.contents import (
    manager as manager_module,
)
from jupyter_server.services.contents.filecheckpoints import AsyncFileCheckpoints, AsyncGenericFileCheckpoints
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager
from nbformat import sign
from tornado.httpclient import HTTPClientError
from tornado.web import HTTPError
from traitlets.config import Config

from jupyter_agentbox.jupyter import contents
from jupyter_agentbox.jupyter.contents import AgentboxContentsManager, guard_state
from jupyter_agentbox.storage.files import guarded

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
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    return tmp_path / "share" / "Trash" / "files"


@pytest.fixture
def jp_server_config(trash: Path) -> dict[str, Any]:
    return {"ServerApp": {"contents_manager_class": "jupyter_agentbox.AgentboxContentsManager"}}


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
def manager(tmp_path: Path, outside: Path, trash: Path) -> AgentboxContentsManager:
    (tmp_path / "root").mkdir()
    return AgentboxContentsManager(root_dir=str(tmp_path / "root"), checkpoints_class=AsyncFileCheckpoints)


async def test_a_folder_that_is_named_may_be_linked_to(tmp_path: Path, outside: Path, trash: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "folder").symlink_to(outside)
    manager = AgentboxContentsManager(root_dir=str(tmp_path / "root"), linked_folders=[str(outside)])
    assert (await manager.get("folder/secret.txt"))["content"] == "canary"
    await manager.save({"type": "file", "format": "text", "content": "x"}, "folder/new.txt")
    assert (outside / "new.txt").read_text() == "x"


TEXT = {"type": "file", "format": "text", "content": "new"}
BOOK = {"type": "notebook", "content": NOTEBOOK}


@pytest.fixture
def project(jp_root_dir: Path) -> Path:
    """A notebook's folder beside that of another notebook, which code in a sandbox of the first must not reach."""
    for name in ("proj", "other"):
        (jp_root_dir / name / "sub").mkdir(parents=True)
        (jp_root_dir / name / ".ipynb_checkpoints").mkdir()
        (jp_root_dir / name / "secret.txt").write_text(f"canary of {name}")
        (jp_root_dir / name / "secret.ipynb").write_text(json.dumps(NOTEBOOK))
        (jp_root_dir / name / ".env").write_text(f"canary of {name}")
    return jp_root_dir / "proj"


def contents_of(folder: Path) -> dict[str, str]:
    """Return what lies beneath a folder: where links lead, what files hold."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_text()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    } | {str(path.relative_to(folder)) + "/": "" for path in folder.rglob("*") if path.is_dir()}


class Api:
    """The contents API of the server, and what it must leave alone."""

    def __init__(self, fetch: Any, *kept: Path) -> None:
        self._fetch, self._kept = fetch, {folder: contents_of(folder) for folder in kept}

    async def __call__(self, verb: str, path: str, body: Any = None) -> Any:
        sent = None if body is None else json.dumps(body)
        answer = await self._fetch("api", "contents", *filter(None, path.split("/")), method=verb, body=sent,
                                   request_timeout=150)  # fmt: skip
        return json.loads(answer.body) if answer.body else None

    async def refused(self, verb: str, path: str, body: Any = None) -> str:
        """Return what a refusal says."""
        said = json.loads(await refused(self(verb, path, body)))["message"]
        self.check()
        return str(said)

    def check(self) -> None:
        """Fail if what must stay as it was did not."""
        for folder, before in self._kept.items():
            assert contents_of(folder) == before


@pytest.fixture
def api(jp_fetch: Any, project: Path, outside: Path) -> Api:
    (outside / "secret.ipynb").write_text(json.dumps(NOTEBOOK))
    return Api(jp_fetch, outside, project.parent / "other")


@pytest.mark.parametrize("place", ["outside", "other"])
@pytest.mark.parametrize("is_atomic", [True, False])
async def test_no_name_that_jupyter_derives_is_a_way_out(
    api: Api, jp_serverapp: Any, project: Path, outside: Path, place: str, is_atomic: bool
) -> None:
    """Code inside makes ``.~plan.txt`` a link, and the user saves plan.txt."""
    jp_serverapp.contents_manager.use_atomic_writing = is_atomic
    target = outside if place == "outside" else Path("..", "other")
    (project / "plan.txt").write_text("a plan")
    (project / "plan.ipynb").write_text(json.dumps(NOTEBOOK))
    (project / ".~plan.txt").symlink_to(target / "secret.txt")
    (project / ".~plan.ipynb").symlink_to(target / "secret.ipynb")
    for name in ("plan", "fresh"):
        await api("PUT", f"proj/{name}.txt", TEXT)
        await api("PUT", f"proj/{name}.ipynb", BOOK)
        assert (project / f"{name}.txt").read_text() == "new"
    api.check()
    assert (
        is_atomic != (project / ".~plan.txt").is_symlink()
    )  # replaced by a copy of the old content, which is gone now

    # A notebook that cannot be read is looked for in the copy, and this link is none.
    (project / "plan.ipynb").write_text("{")
    (project / ".~plan.ipynb").unlink(missing_ok=True)
    (project / ".~plan.ipynb").symlink_to(target / "book.ipynb")
    with pytest.raises(HTTPClientError) as caught:
        await api("GET", "proj/plan.ipynb")
    assert caught.value.code in (400, 403)
    api.check()

    # Checkpoints: first one of them, then their whole directory, leads elsewhere.
    for name in ("book.ipynb", "note.txt"):
        (project / name).write_text(json.dumps(NOTEBOOK))
        made = await api("POST", f"proj/{name}/checkpoints", {})
        kept = project / ".ipynb_checkpoints" / f"{Path(name).stem}-checkpoint{Path(name).suffix}"
        kept.unlink()
        kept.symlink_to(".." / target / "secret.txt" if place == "other" else target / "secret.txt")
        for path in (f"proj/{name}/checkpoints", f"proj/{name}/checkpoints/{made['id']}"):
            assert "AgentboxContentsManager.linked_folders" in await api.refused("POST", path, {})
        await api("DELETE", f"proj/{name}/checkpoints/{made['id']}")  # the link itself
        api.check()
        assert (project / name).read_text() == json.dumps(NOTEBOOK)
    (project / ".ipynb_checkpoints").rename(project / "moved")
    (project / ".ipynb_checkpoints").symlink_to(target)
    (project / "secret-x.txt").write_text("")
    for verb, path, body in (
        ("POST", "proj/note.txt/checkpoints", {}),
        ("POST", "proj/note.txt/checkpoints/checkpoint", {}),
        ("DELETE", "proj/note.txt/checkpoints/checkpoint", None),
        ("PATCH", "proj/note.txt", {"path": "proj/renamed.txt"}),
        ("PUT", "proj/last.ipynb", BOOK),
    ):
        assert ".ipynb_checkpoints" in await api.refused(verb, path, body)
    assert len(json.loads((project / "last.ipynb").read_text())["cells"]) == 1  # it is saved all the same


@pytest.mark.parametrize("target", ["../other", "{root}/other", "{outside}", "sub/../../other", "..", "/"])
async def test_a_link_that_leaves_its_own_folder_is_followed_nowhere(
    api: Api, jp_fetch: Any, project: Path, outside: Path, target: str
) -> None:
    folder = target.format(root=project.parent, outside=outside)
    place = f"{folder}/other" if target == ".." else folder
    (project / "folder").symlink_to(folder)
    (project / "report.ipynb").symlink_to(f"{place}/secret.ipynb")
    (project / "chained.ipynb").symlink_to("report.ipynb")
    (project / "plan.txt").symlink_to(f"{place}/secret.txt")
    (project / "new.txt").symlink_to(f"{place}/not-there.txt")
    (project / "kept.txt").write_text("kept")
    chunk = {**TEXT, "chunk": 1}
    calls = [
        ("PUT", "plan.txt", TEXT), ("PUT", "plan.txt", chunk), ("PUT", "plan.txt", {**TEXT, "chunk": 2}),
        ("PUT", "new.txt", TEXT), ("PUT", "new.txt", {**TEXT, "chunk": -1}), ("PUT", "report.ipynb", BOOK),
        ("PUT", "chained.ipynb", BOOK), ("PUT", "folder/made.txt", TEXT), ("PUT", "folder/made", {"type": "directory"}),
        ("POST", "folder", {"type": "file"}), ("POST", "folder", {"type": "notebook"}),
        ("POST", "folder", {"copy_from": "proj/kept.txt"}), ("POST", "folder", {"copy_from": "proj/sub"}),
        ("PATCH", "kept.txt", {"path": "proj/folder/kept.txt"}), ("PATCH", "folder/x", {"path": "proj/stolen.txt"}),
        ("DELETE", "folder/sub", None), ("GET", "folder", None),
    ]  # fmt: skip
    if target != "/":
        calls += [
            ("GET", "plan.txt", None), ("GET", "report.ipynb", None), ("GET", "chained.ipynb", None),
            ("POST", "", {"copy_from": "proj/plan.txt"}), ("POST", "", {"copy_from": "proj/folder"}),
            ("POST", "plan.txt/checkpoints", {}),
        ]  # fmt: skip
    for verb, path, body in calls:
        said = await api.refused(verb, f"proj/{path}", body)
        assert "AgentboxContentsManager.linked_folders" in said
    if target != "/":
        for path in ("plan.txt", "report.ipynb", "chained.ipynb"):
            assert "canary" not in await refused(jp_fetch("files", "proj", path))
            asked = {"content": "0", "hash": "1"}
            assert "hash" not in json.loads(await refused(jp_fetch("api", "contents", "proj", path, params=asked)))
        await refused(jp_fetch("nbconvert", "script", "proj", "report.ipynb"))
    # All of them are shown, and can be renamed and deleted.
    listed = {item["name"] for item in (await api("GET", "proj"))["content"]}
    assert {"folder", "report.ipynb", "chained.ipynb", "plan.txt", "new.txt"} <= listed
    for name in ("folder", "report.ipynb", "plan.txt", "new.txt"):
        await api("PATCH", f"proj/{name}", {"path": f"proj/moved-{name}"})
        assert (project / f"moved-{name}").is_symlink()
        await api("DELETE", f"proj/moved-{name}")
        assert not os.path.lexists(project / f"moved-{name}")
    api.check()


async def test_a_link_within_its_own_folder_is_followed(api: Api, jp_fetch: Any, project: Path) -> None:
    for name, target in (
        ("latest.txt", "sub/v3.txt"), ("absolute.txt", project / "sub" / "v3.txt"), ("folder", "sub"),
        ("again.txt", "latest.txt"), ("new.txt", "sub/new.txt"), ("book.ipynb", "sub/book.ipynb"), ("here", "."),
    ):  # fmt: skip
        (project / name).symlink_to(target)
    (project / "sub" / "v3.txt").write_text("three")
    (project / "sub" / "book.ipynb").write_text(json.dumps({**NOTEBOOK, "cells": []}))
    for path in ("latest.txt", "absolute.txt", "again.txt", "folder/v3.txt", "here/latest.txt"):
        assert (await api("GET", f"proj/{path}"))["content"] == "three"
        assert (await jp_fetch("files", "proj", *path.split("/"))).body == b"three"
    assert [item["name"] for item in (await api("GET", "proj/folder"))["content"]]
    for path in ("again.txt", "folder/v3.txt", "new.txt"):
        await api("PUT", f"proj/{path}", {**TEXT, "content": path})
    assert (project / "sub" / "v3.txt").read_text() == "folder/v3.txt"
    assert (project / "sub" / "new.txt").read_text() == "new.txt"
    await api("PUT", "proj/book.ipynb", BOOK)
    await api("PUT", "proj/folder/book.ipynb", BOOK)
    assert len(json.loads((project / "sub" / "book.ipynb").read_text())["cells"]) == 1
    assert (project / "again.txt").is_symlink()
    api.check()


async def test_no_link_leads_to_what_is_hidden_from_sandboxes(
    api: Api, jp_serverapp: Any, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code inside cannot see or write them; the server must not read or write them for it."""
    (project / ".git" / "hooks").mkdir(parents=True)
    (project / ".git" / "hooks" / "pre-commit").write_text("safe")
    (project / "venv").mkdir()
    (project / "venv" / "site.py").write_text("safe")
    monkeypatch.setattr(jp_serverapp.contents_manager, "_private", [str(project / "venv")])
    (project / ".envrc").write_text("safe")
    (project / ".config" / "gcloud").mkdir(parents=True)
    (project / ".config" / "gcloud" / "key").write_text("secret")
    (project / ".git" / "plan.txt").symlink_to("hooks/pre-commit")
    names = (".env", ".git/hooks/pre-commit", ".git/plan.txt", ".envrc", ".config/gcloud/key", "venv/site.py")
    for target in (*names, f"{project}/.env"):
        (project / "plan.txt").symlink_to(target)
        for verb, path, body in (
            ("GET", "proj/plan.txt", None),
            ("PUT", "proj/plan.txt", TEXT),
            ("POST", "proj", {"copy_from": "proj/plan.txt"}),
        ):
            said = await api.refused(verb, path, body)
            assert "hidden from sandboxes" in said or "read-only in sandboxes" in said
        (project / "plan.txt").unlink()
    (project / "plan.txt").symlink_to(".git/hooks/new")
    assert "read-only in sandboxes" in await api.refused("PUT", "proj/plan.txt", TEXT)
    assert (project / ".git" / "hooks" / "pre-commit").read_text() == (project / ".envrc").read_text() == "safe"
    assert os.listdir(project / ".git" / "hooks") == ["pre-commit"]
    assert (project / "venv" / "site.py").read_text() == "safe"


def test_the_folders_that_the_server_runs_from_count_as_hidden(manager: AgentboxContentsManager) -> None:
    assert os.path.realpath(sys.prefix) in manager._private
    assert manager._names.is_hidden([".env"])
    assert not manager._names.is_hidden(["env"])


async def test_content_is_saved_as_jupyter_saves_it(api: Api, project: Path) -> None:
    """In place: the same file with its mode and its other names; with a copy beside it while it is written."""
    path = project / "plan.txt"
    path.write_text("old")
    path.chmod(0o640)
    os.link(path, project / "name2.txt")
    inode = path.stat().st_ino
    await api("PUT", "proj/plan.txt", {**TEXT, "content": "ä\r\nnew"})
    assert (path.stat().st_ino, path.stat().st_mode & 0o777) == (inode, 0o640)
    assert path.read_bytes() == (project / "name2.txt").read_bytes() == "ä\r\nnew".encode()
    assert not (project / ".~plan.txt").exists()
    await api("PUT", "proj/plan.txt", {**TEXT, "content": ""})
    assert path.read_bytes() == b""
    await api("PUT", "proj/data.bin", {**TEXT, "format": "base64", "content": "AAEC/w=="})
    assert (project / "data.bin").read_bytes() == b"\0\1\2\xff"


async def test_a_checkpoint_that_is_the_file_itself_does_not_empty_it(api: Api, project: Path) -> None:
    (project / "plan.txt").write_text("a plan")
    os.link(project / "plan.txt", project / ".ipynb_checkpoints" / "plan-checkpoint.txt")
    for path in ("checkpoints", "checkpoints/checkpoint"):
        with pytest.raises(HTTPClientError):
            await api("POST", f"proj/plan.txt/{path}", {})
    assert (project / "plan.txt").read_text() == "a plan"


async def test_the_copy_of_a_sparse_file_takes_no_space(api: Api, project: Path) -> None:
    """Code inside makes a file of a TiB out of nothing; saving it must not fill the disk."""
    with (project / "huge.txt").open("wb") as file:
        file.truncate(2**40)
    await api("POST", "proj/huge.txt/checkpoints", {})
    assert (project / ".ipynb_checkpoints" / "huge-checkpoint.txt").stat().st_blocks < 2**11
    await api("PUT", "proj/huge.txt", TEXT)
    assert (project / "huge.txt").read_text() == "new"


async def test_the_root_directory_is_not_deleted(manager: AgentboxContentsManager) -> None:
    Path(manager.root_dir, "kept.txt").write_text("kept")
    for manager.delete_to_trash in (True, False):
        manager.always_delete_dir = True
        with pytest.raises(HTTPError, match="root directory"):
            await manager.delete(".")
    assert Path(manager.root_dir, "kept.txt").exists()


async def test_a_save_that_fails_leaves_the_old_content(manager: AgentboxContentsManager) -> None:
    path = Path(manager.root_dir, "plan.txt")
    path.write_text("old")
    with pytest.raises(RuntimeError, match="full"):
        with manager.atomic_writing(str(path)) as file:
            file.write("half of")
            file.flush()
            assert (path.parent / ".~plan.txt").read_text() == "old"
            raise RuntimeError("the disk is full")
    assert path.read_text() == "old"
    assert [entry.name for entry in path.parent.iterdir()] == ["plan.txt"]

    # As a server leaves it that is killed in between.
    book = path.with_name("book.ipynb")
    book.write_text("{half")
    book.with_name(".~book.ipynb").write_text(json.dumps(NOTEBOOK))
    assert len((await manager.get("book.ipynb"))["content"]["cells"]) == 1
    assert json.loads(book.read_text()) == NOTEBOOK
    assert book.with_name("book.ipynb.invalid").read_text() == "{half"


async def test_checkpoints_that_are_configured_to_be_elsewhere(tmp_path: Path, outside: Path) -> None:
    root, kept = tmp_path / "root", tmp_path / "kept"
    (root / "sub").mkdir(parents=True)
    kept.mkdir()
    (root / "sub" / "a.ipynb").write_text(json.dumps(NOTEBOOK))
    config = Config(FileCheckpoints={"root_dir": str(kept)})
    manager = AgentboxContentsManager(
        root_dir=str(root), checkpoints_class=AsyncGenericFileCheckpoints, config=config, delete_to_trash=False
    )
    made = await manager.create_checkpoint("sub/a.ipynb")
    assert (kept / "sub" / ".ipynb_checkpoints" / "a-checkpoint.ipynb").exists()
    (root / "sub" / "a.ipynb").write_text(json.dumps({**NOTEBOOK, "cells": []}))
    await manager.restore_checkpoint(made["id"], "sub/a.ipynb")
    assert len(json.loads((root / "sub" / "a.ipynb").read_text())["cells"]) == 1
    await manager.rename("sub/a.ipynb", "sub/b.ipynb")
    assert [each["id"] for each in await manager.list_checkpoints("sub/b.ipynb")] == [made["id"]]
    (root / "sub" / "c.ipynb").symlink_to(outside / "book.ipynb")
    with pytest.raises(HTTPError, match="linked_folders"):
        await manager.create_checkpoint("sub/c.ipynb")
    await manager.delete("sub/b.ipynb")
    assert not list(kept.rglob("*.ipynb"))
    assert await manager.list_checkpoints("nowhere/b.ipynb") == []
    assert not (root / "nowhere").exists()


async def test_directories_are_copied_moved_and_deleted_with_their_links(
    tmp_path: Path, outside: Path, trash: Path
) -> None:
    root = tmp_path / "root"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "file").write_text("x")
    (root / "a" / "inner").symlink_to("b/file")
    (root / "a" / "outer").symlink_to(outside)
    manager = AgentboxContentsManager(root_dir=str(root), always_delete_dir=True)
    copied = await manager.copy("a", "")
    assert contents_of(root / copied["path"]) == {"b/": "", "b/file": "x", "inner": "b/file"}
    await manager.rename("a", "moved")
    with pytest.raises(HTTPError, match="exists"):
        await manager.rename("moved", copied["path"])
    await manager.delete("moved")
    if os.stat(root).st_dev == os.stat(Path.home()).st_dev:
        assert (trash / "moved" / "outer").is_symlink()
        info = (trash.parent / "info" / "moved.trashinfo").read_text()
        assert f"Path={root}/moved\n" in info
    manager.delete_to_trash = False
    (root / copied["path"] / "outer").symlink_to(outside)
    await manager.delete(copied["path"])
    assert [path.name for path in root.iterdir()] == [".ipynb_checkpoints"]  # made when Jupyter looks for checkpoints
    assert untouched(outside)


async def test_a_fifo_in_the_place_of_a_file_is_not_waited_for(manager: AgentboxContentsManager) -> None:
    for name in ("pipe.txt", ".~plan.txt"):
        os.mkfifo(Path(manager.root_dir, name))
    Path(manager.root_dir, "plan.txt").write_text("a plan")

    async def attempt() -> None:
        with pytest.raises(HTTPError, match=r"non-file|not a regular file"):
            await manager.get("pipe.txt")
        with pytest.raises(HTTPError, match="not a regular file"):
            await manager.save(dict(TEXT), "pipe.txt")
        with pytest.raises(HTTPError, match="not a regular file"):
            await manager.save({**TEXT, "chunk": 2}, "pipe.txt")
        await manager.save(dict(TEXT), "plan.txt")

    await asyncio.wait_for(attempt(), 60)


# -- races: at each moment at which the server asks the kernel for something, code inside replaces something ---------


class Swapper:
    """Does something before the n-th call to the kernel that has to do with names or content of files."""

    CALLS = (
        *("open", "stat", "lstat", "access", "readlink", "listdir", "scandir", "mkdir", "unlink", "rmdir", "rename"),
        *("replace", "symlink", "link", "ftruncate", "copy_file_range", "utime"),
    )

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.swap: Any = None
        self.count = self.at = 0
        for owner, names in ((os, self.CALLS), (builtins, ("open",)), (guarded.libc, ("rename_new",))):
            for name in names:
                monkeypatch.setattr(owner, name, self._wrap(getattr(owner, name)))

    def set(self, swap: Any, at: int) -> None:
        self.swap, self.count, self.at = swap, 0, at

    def _wrap(self, function: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self.swap is not None:
                self.count += 1
                if self.count == self.at:
                    swap, self.swap = self.swap, None
                    swap()
            return function(*args, **kwargs)

        return wrapped


CHECKPOINTS = ".ipynb_checkpoints"
#: What is done, and which names are replaced meanwhile, beside the whole folder.
OPERATIONS: dict[str, tuple[tuple[str, ...], Any]] = {
    "save": (("plan.txt", ".~plan.txt"), lambda manager: manager.save(dict(TEXT), "proj/plan.txt")),
    "save a notebook": (
        ("book.ipynb", ".~book.ipynb", CHECKPOINTS),
        lambda manager: manager.save(json.loads(json.dumps(BOOK)), "proj/book.ipynb"),
    ),
    "append": (("plan.txt",), lambda manager: manager.save({**TEXT, "chunk": -1}, "proj/plan.txt")),
    "make": (("fresh.txt", ".~fresh.txt"), lambda manager: manager.save(dict(TEXT), "proj/fresh.txt")),
    "make a directory": (("fresh",), lambda manager: manager.save({"type": "directory"}, "proj/fresh")),
    "read": (("plan.txt",), lambda manager: manager.get("proj/plan.txt", require_hash=True)),
    "read a notebook": (("book.ipynb",), lambda manager: manager.get("proj/book.ipynb")),
    "read a broken notebook": (("sub", "sub/bad.ipynb"), lambda manager: manager.get("proj/sub/bad.ipynb")),
    "copy": (("plan.txt", "plan-Copy1.txt"), lambda manager: manager.copy("proj/plan.txt", "proj")),
    "copy a directory": (("sub", "sub-Copy1"), lambda manager: manager.copy("proj/sub", "proj")),
    "rename": (
        ("plan.txt", "renamed.txt", CHECKPOINTS),
        lambda manager: manager.rename("proj/plan.txt", "proj/renamed.txt"),
    ),
    "delete": (("sub", "sub/a.txt", CHECKPOINTS), lambda manager: manager.delete("proj/sub")),
    "checkpoint": (
        ("plan.txt", CHECKPOINTS, f"{CHECKPOINTS}/plan-checkpoint.txt"),
        lambda manager: manager.create_checkpoint("proj/plan.txt"),
    ),
    "restore": (
        ("book.ipynb", CHECKPOINTS, f"{CHECKPOINTS}/book-checkpoint.ipynb"),
        lambda manager: manager.restore_checkpoint("checkpoint", "proj/book.ipynb"),
    ),
    "delete a checkpoint": (
        (CHECKPOINTS, f"{CHECKPOINTS}/book-checkpoint.ipynb"),
        lambda manager: manager.delete_checkpoint("checkpoint", "proj/book.ipynb"),
    ),
}


def populate(folder: Path, word: str) -> None:
    book = {**NOTEBOOK, "metadata": {"word": word}}
    for name in ("plan.txt", f"{CHECKPOINTS}/book-checkpoint.ipynb", "book.ipynb", "sub/a.txt", "sub/.~bad.ipynb"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(book) if name.endswith(".ipynb") else word)
    (folder / "sub" / "bad.ipynb").write_text(f"{{{word}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("operation", [*OPERATIONS, "delete for good"])
async def test_nothing_that_is_replaced_at_any_moment_is_a_way_out(
    operation: str, tmp_path: Path, trash: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No check comes before a use: what is swapped between any two system calls leads nowhere."""
    is_trash = operation != "delete for good"
    names, work = OPERATIONS[operation if is_trash else "delete"]

    async def here(function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    monkeypatch.setattr(contents, "to_thread", here)
    for module in (fileio, filemanager, filecheckpoints, largefilemanager):
        monkeypatch.setattr(module, "run_sync", here)

    base, root, elsewhere = tmp_path / "base", tmp_path / "base" / "root", tmp_path / "base" / "elsewhere"
    root.mkdir(parents=True)
    manager = AgentboxContentsManager(root_dir=str(root), delete_to_trash=is_trash, always_delete_dir=True)
    manager.log.setLevel("CRITICAL")
    manager.notary.store = sign.MemorySignatureStore()
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # hundreds of saves are not to wait for the disk
    swapper, swaps = Swapper(monkeypatch), 0
    for name in ("proj", *names):
        victim, target = (root / name, elsewhere) if name == "proj" else (root / "proj" / name, elsewhere / name)
        shutil.rmtree(elsewhere, ignore_errors=True)
        populate(elsewhere, "canary")
        if not target.exists():
            target.write_text("canary")  # which a name that is made can lead to
        before = contents_of(elsewhere)
        for at in range(1, 1000):
            # The trash too: a full one takes more calls each time, to find a name that is free.
            for folder in (root, base / "aside", trash.parent):
                shutil.rmtree(folder, ignore_errors=True)
            populate(root / "proj", "mine")
            (base / "aside").mkdir()

            def swap(victim: Path = victim, target: Path = target) -> None:
                if os.path.lexists(victim):
                    os.rename(victim, base / "aside" / "it")
                if os.path.isdir(victim.parent):
                    victim.symlink_to(target)

            result: Any = None
            swapper.set(swap, at)
            with contextlib.suppress(HTTPError, OSError):
                result = await work(manager)
            was_late = swapper.swap is not None
            swapper.set(None, 0)
            when = f"{name} was replaced before call {at}"
            assert contents_of(elsewhere) == before, when
            assert "canary" not in json.dumps(result, default=str), when
            inside = [contents_of(folder) for folder in (root, base / "aside")]
            assert "canary" not in str([list(texts.values()) for texts in inside]), when
            if was_late:
                break  # all was done by then
            swaps += 1
    assert swaps > 20


def test_what_jupyter_opens_or_changes_by_path_is_known() -> None:
    """A new release of Jupyter Server may open files in new places; each must be guarded here, or be harmless."""
    changing = {
        *("open", "copy2_safe", "async_copy2_safe", "replace_file", "async_replace_file", "send2trash"),
        *("ensure_dir_exists", "_simple_writing", "atomic_writing", "rm"),
    }
    owners = {"shutil": None, "tempfile": None, "subprocess": None, "asyncio": {"create_subprocess_exec"}} | {
        "os": {
            "open",
            "mkdir",
            "makedirs",
            "remove",
            "unlink",
            "rmdir",
            "rename",
            "replace",
            "symlink",
            "link",
            "listdir",
        }
        | {"chmod", "chown", "utime", "truncate", "scandir", "walk"}
    }
    found: set[str] = set()

    def is_changing(node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in changing
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = owners.get(node.value.id, set())
            return node.value.id in owners and (names is None or node.attr in names)
        return False

    for module in (fileio, filemanager, filecheckpoints, largefilemanager, manager_module):
        for owner in ast.parse(inspect.getsource(module)).body:
            for part in owner.body if isinstance(owner, ast.ClassDef) else [owner]:
                if not isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    continue
                if any(is_changing(node) for node in ast.walk(part)):
                    where = owner.name if isinstance(owner, ast.ClassDef) else ""
                    found.add(f"{where}.{part.name}".lstrip("."))
    helpers = {
        "replace_file",
        "async_replace_file",
        "copy2_safe",
        "async_copy2_safe",
        "atomic_writing",
        "_simple_writing",
    }
    synchronous = {name for name in found if name.split(".")[0] in ("FileContentsManager", "LargeFileManager")}
    guarded = {
        *("FileManagerMixin.open", "FileManagerMixin.atomic_writing", "FileManagerMixin._copy"),
        *("FileManagerMixin._read_notebook", "AsyncFileManagerMixin._copy", "AsyncFileManagerMixin._read_notebook"),
        *("AsyncFileContentsManager.delete_file", "AsyncFileContentsManager.rename_file"),
        *("AsyncFileContentsManager._save_directory", "AsyncFileContentsManager._copy_dir"),
        *("AsyncLargeFileManager._save_large_file", "FileCheckpoints.checkpoint_path"),
        *("AsyncFileCheckpoints.rename_checkpoint", "AsyncFileCheckpoints.delete_checkpoint"),
        *("FileCheckpoints.rename_checkpoint", "FileCheckpoints.delete_checkpoint"),
    }
    harmless = {
        "AsyncFileContentsManager._dir_model",  # lists names, when the guard has seen the directory
        "AsyncFileContentsManager._get_dir_size",  # runs du, which follows no link
    }
    assert found - helpers - synchronous - guarded - harmless == set()
    for name in guarded:
        method = name.split(".")[1]
        kind = contents.GuardedCheckpoints if "Checkpoints." in name else AgentboxContentsManager
        assert getattr(kind, method).__module__ == contents.__name__


async def test_saving_is_about_as_quick_as_with_jupyters_own(tmp_path: Path) -> None:
    (cell,) = NOTEBOOK["cells"]  # type: ignore[misc]
    cells = [{**cell, "id": f"cell-{number}"} for number in range(200)]
    book = {"type": "notebook", "content": {**NOTEBOOK, "cells": cells}}
    took: dict[type, list[float]] = {AsyncLargeFileManager: [], AgentboxContentsManager: []}
    managers = []
    for kind in took:
        (tmp_path / kind.__name__).mkdir()
        managers.append(kind(root_dir=str(tmp_path / kind.__name__)))
    for _ in range(15):
        for manager in managers:
            began = time.perf_counter()
            await manager.save(copy.deepcopy(book), "a.ipynb")
            took[type(manager)].append(time.perf_counter() - began)
    theirs, ours = (statistics.median(times) for times in took.values())
    assert ours < 2 * theirs + 0.005


# -- hooks and classes of other packages -----------------------------------------------------------


async def test_hooks_run_outside_of_any_bounds_and_may_start_programs(
    api: Api, jp_serverapp: Any, project: Path, tmp_path: Path
) -> None:
    """The hooks that people copy from one another: convert the notebook, stage it, write it elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run(["git", "init", "-q", project], check=True, timeout=60)

    def run(*command: str, os_path: str) -> None:
        subprocess.check_call(command, cwd=os.path.dirname(os_path), timeout=120)

    def convert(model: Any, os_path: str, contents_manager: Any, **more: Any) -> None:
        if model["type"] == "notebook":  # nbconvert itself takes seconds
            code = "import json, sys; open('nb.py', 'w').writelines(json.load(open(sys.argv[1]))['cells'][0]['source'])"
            run(sys.executable, "-c", code, os_path, os_path=os_path)

    def stage(model: Any, os_path: str, contents_manager: Any, **more: Any) -> None:
        run("git", "add", os_path, os_path=os_path)
        shutil.copy(os_path, elsewhere)
        with tempfile.NamedTemporaryFile() as file:
            file.write(Path("/etc/hostname").read_bytes())

    def strip(model: Any, path: str, contents_manager: Any, **more: Any) -> None:
        subprocess.check_call(["cp", "/etc/hostname", elsewhere / "before"], timeout=60)
        if model["type"] == "notebook":
            model["content"]["metadata"]["stripped"] = True

    manager = jp_serverapp.contents_manager
    manager.pre_save_hook = strip
    manager.post_save_hook = convert
    manager.register_post_save_hook(stage)
    await api("PUT", "proj/nb.ipynb", BOOK)
    assert (project / "nb.py").read_text() == "1"
    assert (elsewhere / "nb.ipynb").read_bytes() == (project / "nb.ipynb").read_bytes()
    assert json.loads((project / "nb.ipynb").read_text())["metadata"]["stripped"] is True
    assert (elsewhere / "before").exists()
    staged = subprocess.run(["git", "diff", "--cached", "--name-only"], cwd=project, capture_output=True, timeout=60)
    assert staged.stdout.split() == [b"nb.ipynb"]
    api.check()


@pytest.mark.parametrize("body", [BOOK, TEXT, {**TEXT, "chunk": -1}])
async def test_a_hook_that_fails_says_that_the_file_is_saved(
    api: Api, jp_serverapp: Any, project: Path, body: dict[str, Any]
) -> None:
    def fail(code: int, **more: Any) -> None:
        subprocess.check_call(["sh", "-c", f"exit {code}"], timeout=60)

    # A partial has no name, which Jupyter's own message of the error stumbles over.
    jp_serverapp.contents_manager.post_save_hook = functools.partial(fail, 7)
    name = "nb.ipynb" if body is BOOK else "nb.txt"
    with pytest.raises(HTTPClientError) as caught:
        await api("PUT", f"proj/{name}", body)
    assert caught.value.code == 500
    assert caught.value.response is not None
    said = json.loads(caught.value.response.body)["message"]
    assert said.startswith(f"proj/{name} was saved, but a post-save hook failed: ")
    assert "FileContentsManager.post_save_hook" in said
    assert (project / name).exists()

    # As in plain Jupyter, one that runs before the save, and fails, is logged and does not keep anybody from saving.
    jp_serverapp.contents_manager._trait_values["post_save_hook"] = None

    def fail_before(**more: Any) -> None:
        raise RuntimeError("no")

    jp_serverapp.contents_manager.pre_save_hook = fail_before
    await api("PUT", f"proj/{name}", body)


async def test_the_guard_says_whether_it_is_in_place(manager: AgentboxContentsManager, tmp_path: Path) -> None:
    assert guard_state(manager) is None
    said = guard_state(AsyncLargeFileManager(root_dir=str(tmp_path)))
    assert said is not None
    assert "largefilemanager.AsyncLargeFileManager" in said
    assert "must be jupyter_agentbox.AgentboxContentsManager" in said

    class Derived(AgentboxContentsManager):
        async def save(self, model: Any, path: str = "") -> Any:
            return await super().save(model, path)

    class Unguarded(Derived):
        def open(self, os_path: str, *args: Any, **kwargs: Any) -> Any:
            return open(os_path, *args, **kwargs)

    assert guard_state(Derived(root_dir=str(tmp_path))) is None
    said = guard_state(Unguarded(root_dir=str(tmp_path)))
    assert said is not None
    assert "overrides open of" in said
    manager.checkpoints = AsyncFileCheckpoints(parent=manager)
    assert "AsyncFileCheckpoints" in str(guard_state(manager))


class TestJupytext:
    """jupytext replaces the server's contents manager by a class that it derives from the configured one."""

    @pytest.fixture
    def paired(self, jp_serverapp: Any) -> dict[str, Any]:
        jupyterlab_jupytext.load_jupyter_server_extension(jp_serverapp)  # as a server does where it is enabled
        manager = jp_serverapp.contents_manager
        assert type(manager).__name__ == "AsyncJupytextContentsManager"
        assert isinstance(manager, AgentboxContentsManager)
        assert guard_state(manager) is None
        book = copy.deepcopy(NOTEBOOK)
        book["metadata"] = {"jupytext": {"formats": "ipynb,py:percent"}}
        return {"type": "notebook", "content": book}

    async def test_text_notebooks_and_pairs_work(
        self, api: Api, jp_fetch: Any, paired: dict[str, Any], project: Path
    ) -> None:
        (project / "a.md").write_text("# Title\n\n```python\n1 + 1\n```\n")
        answer = await jp_fetch("api", "contents", "proj", "a.md", params={"type": "notebook"})
        model = json.loads(answer.body)
        assert [cell["cell_type"] for cell in model["content"]["cells"]] == ["markdown", "code"]
        model["content"]["cells"][1]["source"] = "2 + 2"
        await api("PUT", "proj/a.md", {"type": "notebook", "content": model["content"]})
        assert "2 + 2" in (project / "a.md").read_text()
        await api("PUT", "proj/b.ipynb", paired)
        assert "# %%\n1\n" in (project / "b.py").read_text()
        assert (await api("GET", "proj/b.ipynb"))["content"]["cells"][0]["source"] == "1"
        await api("PATCH", "proj/b.ipynb", {"path": "proj/c.ipynb"})
        assert (project / "c.py").exists()
        assert not (project / "b.py").exists()
        assert b"# %%" in (await jp_fetch("files", "proj", "c.py")).body
        api.check()

    async def test_a_pair_is_not_written_through_a_link(
        self, api: Api, paired: dict[str, Any], project: Path, outside: Path
    ) -> None:
        await api("PUT", "proj/a.ipynb", paired)
        for target in (outside / "secret.txt", "../other/secret.txt"):
            (project / "a.py").unlink()
            (project / "a.py").symlink_to(target)
            for verb, body in (("PUT", paired), ("GET", None)):
                with pytest.raises(HTTPClientError) as caught:
                    await api(verb, "proj/a.ipynb", body)
                assert caught.value.response is not None
                assert b"AgentboxContentsManager.linked_folders" in caught.value.response.body
            api.check()
        (project / "a.py").unlink()
        (project / ".~a.py").symlink_to(outside / "secret.txt")
        (project / "a.py").write_text("# %%\n1\n")
        await api("PUT", "proj/a.ipynb", paired)
        api.check()

    async def test_no_configuration_that_is_code_is_run(
        self, api: Api, jp_serverapp: Any, paired: dict[str, Any], project: Path, tmp_path: Path
    ) -> None:
        """With hidden files shown jupytext would run ``.jupytext.py``, of whoever writes the folder, in the server."""
        jp_serverapp.contents_manager.allow_hidden = True
        ran = tmp_path / "ran"
        (project / ".jupytext.py").write_text(f"open({str(ran)!r}, 'w')\n")
        await api("PUT", "proj/a.ipynb", paired)
        await api("GET", "proj/a.ipynb")
        assert not ran.exists()
