"""A person adds folders of the host to notebooks, read-only. Agents and code inside cannot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.harness import Env, Server

LOOK = "import os; print(sorted(os.listdir({path!r})), open({path!r} + '/x.csv').read())"


@pytest.fixture(scope="module")
def env(has_runsc: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Env]:
    env = Env(tmp_path_factory.mktemp("added"))
    yield env
    env.close()


@pytest.fixture(scope="module")
def server(env: Env) -> Iterator[Server]:
    with env.server("server") as server:
        yield server


@pytest.fixture
def data(env: Env, tmp_path: Path) -> Path:
    data = tmp_path / "data"
    (data / "deep" / ".ssh").mkdir(parents=True)
    (data / "x.csv").write_text("a,b")
    (data / "deep" / ".ssh" / "id").write_text("private key")
    (data / ".env").write_text("KEY=1")
    return data


def folders_of(server: Server, kernel: str) -> str:
    return f"api/agentbox/sandboxes/{kernel}/folders"


def test_a_folder_is_added_for_a_notebook_and_seen_after_a_restart(server: Server, env: Env, data: Path) -> None:
    (env.work / "project").mkdir()
    kernel = server.notebook("project/book.ipynb")
    path = folders_of(server, kernel.id)
    listed = server.call("GET", path)
    assert (listed["folders"], listed["may_add"], listed["scopes"]) == ([], True, ["notebook", "always"])
    assert kernel.execute(f"open({str(data / 'x.csv')!r})").error == "FileNotFoundError"
    [added] = server.call("POST", path, {"source": str(data)})["folders"]
    assert (added["source"], added["scope"], added["is_shown"]) == (str(data), "notebook", False)
    kernel.restart()
    assert kernel.check(LOOK.format(path=str(data))) == "['.env', 'deep', 'x.csv'] a,b\n"
    hidden = kernel.check(f"print(open({str(data / '.env')!r}).read())")
    assert hidden == "# This file is hidden in sandboxes (Policy.hidden_files).\n\n"
    assert kernel.check(f"import os; print(os.listdir({str(data / 'deep' / '.ssh')!r}))") == "[]\n"
    assert kernel.check(f"open({str(data / 'new')!r}, 'w').write('x'); print('layer')") == "layer\n"
    assert not (data / "new").exists(), "what is written there stays inside"
    [shown] = server.call("GET", path)["folders"]
    assert shown["is_shown"]
    kernel.check("x = 'then'")
    snapshot = server.call("POST", f"api/agentbox/sandboxes/{kernel.id}/snapshots", {"name": "then"})
    kernel.check("x = 'now'")
    server.call("POST", f"api/agentbox/sandboxes/{kernel.id}/restore", {"snapshot": snapshot["id"]})
    assert kernel.check(f"print(x, open({str(data / 'x.csv')!r}).read())") == "then a,b\n"
    other = server.notebook("project/other.ipynb")
    assert other.execute(f"open({str(data / 'x.csv')!r})").error == "FileNotFoundError"
    other.shutdown()
    assert server.call("DELETE", f"{path}?source={data}")["folders"] == []
    answer = server.http.post(
        server.url(f"api/agentbox/sandboxes/{kernel.id}/restore"), json={"snapshot": snapshot["id"]}, timeout=60
    )
    assert answer.status_code == 403
    assert f"the sandbox shows the folder {data}, which is no longer added to it" in answer.json()["message"]
    kernel.restart()
    assert kernel.execute(f"open({str(data / 'x.csv')!r})").error == "FileNotFoundError"
    kernel.shutdown()


def test_a_folder_beside_the_notebooks_is_found_by_its_relative_path(server: Server, env: Env) -> None:
    (env.work / "shop" / "notebooks").mkdir(parents=True)
    (env.work / "shop" / "data").mkdir()
    (env.work / "shop" / "data" / "x.csv").write_text("a,b")
    kernel = server.notebook("shop/notebooks/book.ipynb")
    refused = kernel.execute("open('../data/x.csv')")
    assert "`../data/x.csv` is outside the notebook's folder. To read it, add its folder" in refused.notices
    kernel.shutdown()
    said = env.run("jupyter", "agentbox", "folder", "add", "shop/data", "--notebook=shop/notebooks/book.ipynb").output
    assert f"added {env.work}/shop/data for notebook {env.work}/shop/notebooks/book.ipynb" in said
    (env.work / "shop" / "notebooks" / "data").symlink_to("../data")
    kernel = server.notebook("shop/notebooks/book.ipynb")
    assert kernel.check("print(open('../data/x.csv').read(), open('data/x.csv').read())") == "a,b a,b\n"
    kernel.shutdown()
    [listed] = json.loads(env.run("jupyter", "agentbox", "folder", "list", "--json").output)
    assert listed["source"] == f"{env.work}/shop/data"
    env.run("jupyter", "agentbox", "folder", "remove", "shop/data")
    assert json.loads(env.run("jupyter", "agentbox", "folder", "list", "--json").output) == []
    rows = env.run("jupyter", "agentbox", "audit", "export").output
    assert f'"folder":"{env.work}/shop/data"' in rows.replace('": "', '":"')


#: What cannot be added, and a part of the reason.
REFUSED = {
    "relative": "must be an absolute path",
    "/no/such/folder": "does not exist",
    "/usr/share": "system directory",
    "/root": "system or home directory",
    "~": "system or home directory",
    "{work}": "contains the notebook's folder",
    "{work}/refused/inner": "is in the notebook's folder",
    "{data}/agentbox/x": "private state",
}


def test_what_cannot_be_added_is_refused_with_the_reason(server: Server, env: Env) -> None:
    (env.work / "refused" / "inner").mkdir(parents=True)
    (env.data / "agentbox" / "x").mkdir(parents=True)
    kernel = server.notebook("refused/book.ipynb")
    for source, sentence in REFUSED.items():
        body = {"source": source.format(work=env.work, data=env.data)}
        answer = server.http.post(server.url(folders_of(server, kernel.id)), json=body, timeout=60)
        assert answer.status_code in (400, 403), source
        assert sentence in answer.json()["message"], answer.text
    kernel.shutdown()


def test_agents_get_none_and_cannot_add_any(server: Server, env: Env, data: Path) -> None:
    env.run("jupyter", "agentbox", "folder", "add", data)
    made = server.call("POST", "api/agentbox/sandboxes", {"profile": "default"})
    ran = server.call("POST", f"api/agentbox/sandboxes/{made['id']}/exec", {"argv": ["ls", str(data)]})
    assert ran["exit_code"] != 0
    answer = server.http.post(server.url(folders_of(server, made["id"])), json={"source": str(data)}, timeout=60)
    assert (answer.status_code, "notebooks only" in answer.text) == (400, True)
    kernel = server.notebook("free.ipynb")
    assert kernel.check(LOOK.format(path=str(data))) == "['.env', 'deep', 'x.csv'] a,b\n", "always, for the profile"
    token = server.call("POST", f"api/agentbox/sandboxes/{kernel.id}/tokens", {"verbs": ["read", "write", "execute"]})
    with server.http.__class__() as http:
        http.trust_env = False
        refused = http.post(
            server.url(folders_of(server, kernel.id)),
            json={"source": "/srv"},
            headers={"Authorization": f"Bearer {token['token']}"},
            timeout=60,
        )
    assert refused.status_code == 403, refused.text
    kernel.shutdown()
    server.call("DELETE", f"api/agentbox/sandboxes/{made['id']}")
    env.run("jupyter", "agentbox", "folder", "remove", data)


def test_an_enforced_server_lets_a_person_add_only_what_the_administrator_names(
    has_runsc: None, tmp_path: Path, data: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    env = Env(tmp_path / "enforced", {"AgentboxExtension": {"enforce": True}})
    with env.server("server") as server:
        kernel = server.notebook("book.ipynb")
        listed = server.call("GET", folders_of(server, kernel.id))
        assert (listed["may_add"], "Policy.user_may_add_folders" in listed["message"]) == (False, True)
        answer = server.http.post(server.url(folders_of(server, kernel.id)), json={"source": str(data)}, timeout=60)
        assert (answer.status_code, answer.json()["setting"]) == (403, "Policy.user_may_add_folders")
        kernel.shutdown()
    env.configure(
        {"AgentboxExtension": {"enforce": True}, "Policy": {"user_may_add_folders": [str(shared)], "lease_timeout": 5}}
    )
    with env.server("server") as server:
        kernel = server.notebook("book.ipynb")
        assert server.call("POST", folders_of(server, kernel.id), {"source": str(shared)})["folders"]
        answer = server.http.post(server.url(folders_of(server, kernel.id)), json={"source": str(data)}, timeout=60)
        assert answer.status_code == 403
        kernel.shutdown()
    env.close()
