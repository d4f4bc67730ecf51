"""The client for plain programs, on a real server and real sandboxes."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.serving import Serving
from support.waiting import wait_until

from jupyter_agentbox import errors
from jupyter_agentbox.client import (
    ChecksumMismatch,
    Client,
    CommandFailed,
    Conflict,
    InvalidRequest,
    NotAuthenticated,
    NotAuthorized,
    NotFound,
    Output,
    PolicyRefused,
    Sandbox,
    SandboxEnded,
)
from jupyter_agentbox.client.wire import check_digest
from jupyter_agentbox.models import ExitEvent
from jupyter_agentbox.models.outputs import DoneEvent, StreamEvent

MIB = 1024 * 1024


# -- sandboxes ---------------------------------------------------------------------------------------


def test_a_sandbox_ends_with_its_block_unless_it_was_there_or_is_kept(client: Client) -> None:
    with client.create(id="brief", files={"a.txt": "text", "b.bin": b"\0\xff"}) as box:
        assert box.info is not None
        assert box.info.state == "running"
        assert box.files.read_bytes("b.bin") == b"\0\xff"
        with client.create(id="brief", files={"a.txt": "text", "b.bin": b"\0\xff"}) as same:
            assert same.is_kept
        with client.get("brief") as found, client.sandbox("brief"):
            assert found.refresh().state == "running"
        assert [info.id for info in client.list(state="running") if info.id == "brief"] == ["brief"]
    with pytest.raises(NotFound) as caught:
        client.get("brief")
    assert (caught.value.status, caught.value.reason) == (404, "not_found")
    assert isinstance(caught.value, errors.NotFound)


def test_a_block_that_fails_ends_its_sandbox_and_tells_what_failed(client: Client) -> None:
    with pytest.raises(ZeroDivisionError), client.create(id="failing") as box:
        box.delete()
        raise ZeroDivisionError
    assert all(info.id != "failing" for info in client.list())


def test_errors_are_typed_and_name_field_and_setting(client: Client, box: Sandbox) -> None:
    with pytest.raises(PolicyRefused) as refused:
        client.create(memory="1 TiB")
    assert refused.value.field == "memory"
    assert refused.value.setting
    with pytest.raises(InvalidRequest) as invalid:
        client.create(tools=["no-such-tool"])
    assert (invalid.value.field, invalid.value.status) == ("tools", 400)
    with pytest.raises(Conflict):
        client.create(id="shared", labels={"for": "something else"})
    with pytest.raises(InvalidRequest, match="is not a valid name"):
        client.get("..")
    with pytest.raises(NotFound):
        client.get("a/../shared")


def test_what_has_ended_says_why(client: Client) -> None:
    with client.create(id="short", max_life=1.5) as box:
        wait_until(lambda: box.refresh().state == "ended", 60, "it ends", pause=0.2)
        with pytest.raises(SandboxEnded, match=r"it reached its maximum lifetime of 1\.5 s") as ended:
            box.exec("true")
        assert (ended.value.status, ended.value.setting) == (410, "Policy.max_life")


def test_terms_can_be_changed_and_are_left_alone_otherwise(box: Sandbox) -> None:
    before = box.refresh()
    after = box.patch(labels={"for": "tests", "n": "1"})
    assert (after.labels, after.allowed_hosts) == ({"for": "tests", "n": "1"}, before.allowed_hosts)
    assert box.patch(idle_timeout=600).idle_timeout == 600
    box.patch(labels={"for": "tests"})


def test_the_service_describes_itself(client: Client) -> None:
    assert client.health().status == "ok"
    assert "bash" in {tool.name for tool in client.tools()}
    assert client.openapi()["openapi"].startswith("3.1")


# -- commands ----------------------------------------------------------------------------------------


def test_commands_run_with_all_that_they_are_given(box: Sandbox) -> None:
    result = box.exec('echo "$A $(pwd) $(cat)"; echo err >&2; exit 3', env={"A": "1"}, stdin="in", workdir="/tmp")
    assert (result.stdout, result.stderr, result.exit_code) == ("1 /tmp in\n", "err\n", 3)
    assert box.exec(["echo", "a b", "$A"]).stdout == "a b $A\n"
    data = box.exec(["cat"], stdin=b"\0\xff", encoding="base64").stdout
    assert base64.b64decode(data) == b"\0\xff"
    assert box.exec("sleep 20", timeout=0.5).timed_out
    with pytest.raises(CommandFailed, match="status 2: no luck") as failed:
        box.exec("echo no luck >&2; exit 2", check=True)
    assert failed.value.result.exit_code == 2


def test_output_comes_as_it_is_printed_byte_for_byte(box: Sandbox) -> None:
    data, text = b"", ""
    # It goes on when its first word has been heard, and not before.
    wait = "until [ -e heard ]; do sleep 0.1; done"
    with box.stream(rf"printf '\303'; {wait}; printf '\251\377'; echo err >&2; exit 4", timeout=60) as events:
        for event in events:
            if isinstance(event, Output) and event.stream == "stdout":
                data, text = data + event.data, text + event.text
                assert event.offset + len(event.data) == len(data)
                box.files.write("heard", "")
            last = event
    assert (data, text) == (b"\xc3\xa9\xff", "é\N{REPLACEMENT CHARACTER}")
    assert isinstance(last, ExitEvent)
    assert last.exit_code == 4


def test_who_stops_listening_ends_the_command(box: Sandbox) -> None:
    with box.stream("echo begun; sleep 960; touch /workspace/went-on", timeout=1000) as events:
        assert isinstance(next(events), Output)
    wait_until(lambda: "sleep 960" not in box.exec("ps ax").stdout, 60, "the command ends", pause=0.2)
    with pytest.raises(StopIteration):
        next(events)


def test_a_process_in_the_background_is_fed_followed_and_ended(box: Sandbox) -> None:
    process = box.start("while read line; do echo got $line; done; echo over >&2")
    process.write("one\n")
    with process.follow() as events:
        event = next(events)
        assert isinstance(event, Output)
        assert event.text == "got one\n"
        process.write("two\n", is_last=True)
        rest = list(events)
    assert isinstance(rest[-1], ExitEvent)
    assert process.wait(60).state == "exited"
    assert process.read(8).data == "got two\n"
    assert process.read(stream="stderr").data == "over\n"
    assert process.id in [other.id for other in box.processes()]
    assert box.process(process.id).info.exit_code == 0
    process.remove()
    with pytest.raises(NotFound):
        process.refresh()
    sleeper = box.start(["sleep", "60"])
    sleeper.signal("TERM")
    assert sleeper.wait(60).exit_code == 128 + 15
    assert box.start("sleep 60").kill().exit_code == 128 + 9


def test_a_terminal_is_typed_on_and_has_a_size(box: Sandbox) -> None:
    terminal = box.open_terminal(["/bin/sh"], rows=11, columns=33)
    terminal.resize(12, 34)
    terminal.write("stty size; exit 5\n")
    with terminal.follow() as events:
        *outputs, last = events
    assert "12 34" in "".join(event.text for event in outputs if isinstance(event, Output))
    assert isinstance(last, ExitEvent)
    assert last.exit_code == 5


# -- code --------------------------------------------------------------------------------------------


def test_code_keeps_its_variables_and_streams_its_outputs(box: Sandbox) -> None:
    assert box.run_code("x = 20").status == "ok"
    with box.stream_code("print('out'); x + 1") as events:
        *some, last = events
    assert StreamEvent("stdout", "out\n") in some
    assert isinstance(last, DoneEvent)
    assert last.result.result is not None
    assert last.result.result.data["text/plain"] == "21"
    assert box.run_code("1 / 0").error.ename == "ZeroDivisionError"  # type: ignore[union-attr]
    shown = box.run_code("from IPython.display import JSON; JSON({'a': [1]})").result
    assert shown is not None
    assert shown.data["application/json"] == {"a": [1]}


def test_contexts_are_started_interrupted_restarted_and_ended(box: Sandbox) -> None:
    assert box.create_context("second").state in ("idle", "starting")
    box.run_code("y = 1", context="second")
    with box.stream_code("print('begun', flush=True)\nimport time; time.sleep(60)", context="second") as events:
        assert next(events) == StreamEvent("stdout", "begun\n")
        box.interrupt_context("second")
        *_, last = events
    assert isinstance(last, DoneEvent)
    assert last.result.status in ("interrupted", "error")
    box.restart_context("second")
    assert box.run_code("y", context="second").status == "error"
    assert box.run_code("print(x)", language="Python").stdout == "20\n"
    with pytest.raises(InvalidRequest, match="available languages: python"):
        box.run_code("1", language="cobol")
    box.delete_context("second")
    assert "second" not in [context.name for context in box.contexts()]


# -- files -------------------------------------------------------------------------------------------


def test_files_are_written_read_found_and_changed(box: Sandbox) -> None:
    files = box.files
    files.write("d/a.txt", "one\ntwo\n")
    files.append("d/a.txt", b"three\n")
    assert files.edit("d/a.txt", "two", "zwei").replacements == 1
    assert files.read_text("d/a.txt") == "one\nzwei\nthree\n"
    assert files.read("d/a.txt", offset=-6).data == "three\n"
    assert files.stat("d/a.txt").size == 15
    assert [entry.path for entry in files.list("d").entries] == ["d/a.txt"]
    assert [entry.path for entry in files.glob("**/*.txt", "d").entries] == ["d/a.txt"]
    assert files.grep("ZW", "d", ignore_case=True).matches[0].line == 2
    files.copy("d/a.txt", "d/b.txt")
    files.move("d/b.txt", "e/c.txt")
    assert files.exists("e/c.txt")
    assert not files.exists("d/b.txt")
    files.mkdir("d/sub")
    assert files.delete("d", recursive=True) == 3
    with pytest.raises(NotFound):
        files.read_text("d/a.txt")


def test_uploads_and_downloads_are_verified_whatever_they_come_from(box: Sandbox, tmp_path: Path) -> None:
    data = bytes(range(256)) * 20_000  # 5 MB
    digest = hashlib.sha256(data).hexdigest()
    source = tmp_path / "source"
    source.write_bytes(data)

    def chunks() -> Iterator[bytes]:
        yield data[:MIB]
        yield data[MIB:]

    handle = io.BytesIO(b"skipped" + data)
    handle.seek(7)
    for thing in (data, source, handle, chunks()):
        box.files.upload("big", thing)  # type: ignore[arg-type]
        target = tmp_path / "target"
        found = box.files.download("big", target, sha256=digest)
        assert (found.size, found.sha256) == (len(data), digest)
        assert target.read_bytes() == data
        box.files.delete("big")
    with pytest.raises(InvalidRequest):
        box.files.upload("bad", chunks(), sha256="0" * 64)
    assert not box.files.exists("bad")
    box.files.upload("small", b"data")
    (tmp_path / "target").write_text("as it was")
    with pytest.raises(ChecksumMismatch):
        box.files.download("small", tmp_path / "target", sha256=digest)
    assert (tmp_path / "target").read_text() == "as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]
    assert b"".join(box.files.download_chunks("small", offset=2)) == b"ta"
    with pytest.raises(ChecksumMismatch):
        check_digest(f"sha-256=:{base64.b64encode(hashlib.sha256(b'sent').digest()).decode()}:", b"what came")


def test_archives_and_folders_of_the_host(box: Sandbox, folders: dict[str, Path]) -> None:
    box.files.write("tree/a/b.txt", "b")
    archive = io.BytesIO()
    box.files.pack(archive, "tree")
    archive.seek(0)
    assert box.files.unpack(archive, "again").entries >= 1
    assert box.files.read_text("again/a/b.txt") == "b"
    box.files.import_("a.csv", "in.csv", folder="datasets")
    box.files.export("in.csv", "out.csv", folder="results")
    assert (folders["results"] / "out.csv").read_text() == "x\n1\n"


# -- egress, tokens, the log -------------------------------------------------------------------------


def test_hosts_are_asked_for_decided_and_logged(client: Client, tmp_path: Path) -> None:
    with client.create(allowed_hosts=[]) as box:
        refused = box.exec("curl -sS -m 25 https://not-listed.example/ 2>&1 || true").refused
        assert [item.host for item in refused] == ["not-listed.example"]
        assert box.egress().hosts == []
        ask = box.ask("github", "to look")
        assert ask.id in [item.id for item in client.asks()]
        assert box.get_ask(ask.id).state == "pending"
        assert box.decide(ask.id, "deny", "no").state == "denied"
        assert [item.state for item in box.asks()] == ["denied"]
        with pytest.raises(PolicyRefused):
            box.http("https://not-listed.example/")
        assert {row.host for row in box.egress_log()} >= {"not-listed.example"}
        assert {row.is_allowed for row in box.audit(kind="egress")} == {False}
        box.export_audit(tmp_path / "log")
        assert client.audit(limit=1)
        assert client.export_audit(io.BytesIO()).size > 0
        verified = client.verify_audit()
        assert verified.is_ok
        assert client.verify_audit(verified.head).is_ok
    rows = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert "not-listed.example" in {row["host"] for row in rows}


def test_a_token_for_one_sandbox_is_enough_for_that_one(client: Client, serving: Serving, box: Sandbox) -> None:
    made = box.create_token("read", "write", name="narrow")
    assert [info.name for info in box.tokens()] == ["narrow"]
    with Client(serving.url, made.token) as narrow:
        mine = narrow.sandbox("shared")
        mine.files.write("narrow.txt", "x")
        assert mine.files.read_text("narrow.txt") == "x"
        with pytest.raises(NotAuthorized):
            mine.exec("true")
        with pytest.raises(NotAuthorized):
            narrow.create()
        box.revoke_token(made.info.id)
        with pytest.raises(NotAuthenticated):
            mine.files.read_text("narrow.txt")


def test_an_installation_that_is_refused_says_so(client: Client) -> None:
    with client.create(profile="offline") as box:
        with box.stream_install("left-pad") as events:
            *_, last = events
        assert last.is_ok is False  # type: ignore[union-attr]
        with pytest.raises(InvalidRequest):
            box.install("--index-url=x")


def test_a_sandbox_is_saved_taken_back_and_forked(client: Client) -> None:
    with client.create() as box:
        box.files.write("n", "1")
        saved = box.take_snapshot("first")
        box.files.write("n", "2")
        with box.fork(snapshot=saved.id) as other:
            assert (other.files.read_text("n"), box.files.read_text("n")) == ("1", "2")
        box.restore(saved.id)
        assert box.files.read_text("n") == "1"
        assert [item.id for item in box.snapshots()] == [saved.id]
        assert client.get_snapshot(saved.id).name == "first"
        client.delete_snapshot(saved.id)
        assert saved.id not in [item.id for item in client.snapshots()]
