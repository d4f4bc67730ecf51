"""Tokens for one sandbox: good for what they say and as long as they say, and nothing else is one."""

from __future__ import annotations

import base64
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from jupyter_agentbox.errors import (
    InvalidConfig,
    LimitReached,
    NotAuthenticated,
    NotAuthorized,
    NotFound,
    PolicyRefused,
)
from jupyter_agentbox.sandbox.tokens import MAX_LENGTH, MAX_TOKENS, TokenRecord, TokenStore, Verb, choose_life
from jupyter_agentbox.service.registry import Caller

Make = Callable[..., tuple[str, TokenRecord]]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        (tmp_path / "sandboxes" / name).mkdir(parents=True)
    return tmp_path


@pytest.fixture
def store(state: Path) -> TokenStore:
    return TokenStore(state)


@pytest.fixture
def make(store: TokenStore) -> Make:
    def make(sandbox: str = "one", verbs: tuple[Verb, ...] = ("read",), life: float = 60.0) -> tuple[str, TokenRecord]:
        return store.create(sandbox, owner="ann", verbs=verbs, life=life, name="agent", made_by="bob")

    return make


def test_a_token_stands_for_what_it_was_made_for(state: Path, store: TokenStore, make: Make) -> None:
    text, record = make(verbs=("execute", "read", "read"))
    assert text.startswith("agentbox_")
    assert len(text) < 200
    assert TokenStore(state).authenticate(text) == record
    assert (record.sandbox, record.owner, record.verbs, record.made_by) == ("one", "ann", ("read", "execute"), "bob")
    assert 20 < record.expires - time.time() <= 60
    other, _ = make("two")
    assert store.authenticate(other).sandbox == "two"
    assert [item.sandbox for item in store.list()] == ["one", "two"]
    assert [item.id for item in store.list("one")] == [record.id]


def test_only_this_user_can_read_what_is_kept_and_no_token_is_in_it(state: Path, make: Make) -> None:
    old = os.umask(0)
    try:
        text, _ = make()
    finally:
        os.umask(old)
    kept = [path for path in state.rglob("*") if path.is_file()]
    assert sorted(path.name.rpartition(".")[2] for path in kept) == ["json", "key"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}
    assert stat.S_IMODE((state / "sandboxes" / "one" / "tokens").stat().st_mode) == 0o700
    payload, signature = text.removeprefix("agentbox_").split(".")
    for path in kept:
        assert signature.encode() not in path.read_bytes()
        assert payload.encode() not in path.read_bytes()


def test_what_is_changed_is_no_token(store: TokenStore, make: Make, state: Path, tmp_path: Path) -> None:
    text, record = make()
    payload, signature = text.removeprefix("agentbox_").split(".")
    content = base64.urlsafe_b64decode(payload + "==")
    wider = base64.urlsafe_b64encode(content.replace(b'"one"', b'"two"')).rstrip(b"=").decode()
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "sandboxes" / "one").mkdir(parents=True)
    foreign, _ = TokenStore(elsewhere).create("one", owner="a", verbs=["read"], life=9, name="n", made_by="b")
    (state / "sandboxes/two/tokens").mkdir()
    shutil.copy(state / f"sandboxes/one/tokens/{record.id}.json", state / "sandboxes/two/tokens")
    flipped = [text[:place] + ("A" if text[place] != "A" else "B") + text[place + 1 :] for place in range(len(text))]
    bad = [
        *flipped, "", "agentbox_", "agentbox_.", f"agentbox_{payload}.", f"agentbox_.{signature}", foreign, text + "A",
        f"agentbox_{wider}.{signature}", text[:-1], text.upper(), f" {text}", f"{text}\n", f"{text}=", "\ud800",
        "agentbox_\u00fc.x",
        f"agentbox_{payload}.{signature}.{signature}", "agentbox_" + "A" * MAX_LENGTH + "." + signature,
    ]  # fmt: skip
    for number, candidate in enumerate(bad):
        with pytest.raises(NotAuthenticated):
            store.authenticate(candidate)
            pytest.fail(f"number {number} was taken")
    assert store.authenticate(text).id == record.id


def test_a_token_ends_by_time_by_word_with_its_sandbox_and_with_the_key(
    state: Path, store: TokenStore, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, record = make()
    assert store.is_valid(record)
    monkeypatch.setattr("jupyter_agentbox.sandbox.tokens.time", SimpleNamespace(time=lambda: time.time() + 61))
    with pytest.raises(NotAuthenticated, match="expired"):
        store.authenticate(text)
    assert not store.is_valid(record)
    assert store.list() == []
    assert list((state / "sandboxes/one/tokens").iterdir()) == []
    monkeypatch.undo()

    text, record = make()
    TokenStore(state).revoke("one", record.id)
    with pytest.raises(NotAuthenticated, match="revoked"):
        store.authenticate(text)
    assert not store.is_valid(record)
    for sandbox, name in (("one", record.id), ("none", "x"), ("..", "../token"), ("one", "../session")):
        with pytest.raises(NotFound):
            store.revoke(sandbox, name)

    text, record = make("two")
    shutil.rmtree(state / "sandboxes/two")
    with pytest.raises(NotAuthenticated, match="ended"):
        store.authenticate(text)
    with pytest.raises(NotFound):
        make("two")

    text, record = make()
    (state / "token.key").unlink()
    with pytest.raises(NotAuthenticated):
        store.authenticate(text)
    make()
    with pytest.raises(NotAuthenticated):
        store.authenticate(text)


def test_a_record_that_was_changed_or_moved_is_none(state: Path, store: TokenStore, make: Make) -> None:
    text, record = make()
    other, second = make()
    path = state / "sandboxes/one/tokens" / f"{record.id}.json"
    path.write_bytes((path.parent / f"{second.id}.json").read_bytes())
    with pytest.raises(NotAuthenticated):
        store.authenticate(text)
    path.write_text("{")
    with pytest.raises(NotAuthenticated):
        store.authenticate(text)
    assert store.authenticate(other).id == second.id


def test_a_token_goes_on_with_its_sandbox_and_one_that_was_revoked_stays_so(
    state: Path, store: TokenStore, make: Make
) -> None:
    (text, record), (other, second) = make(), make()
    (state / "parked" / ("a" * 20)).mkdir(parents=True)
    scope = store.authenticate(text)
    for place in ("a" * 20, "two", "a" * 20, "one"):
        store.carry(scope.sandbox, place)
        before, scope = scope, store.authenticate(text)
        assert scope == msgspec.structs.replace(record, sandbox=place)
        assert store.is_valid(before), "a call that goes on meanwhile has its right"
        assert [item.sandbox for item in store.list(place)] == [item.sandbox for item in store.list()] == [place] * 2
    store.revoke("one", second.id)
    store.carry("one", "two")
    with pytest.raises(NotAuthenticated):
        store.authenticate(other)
    with pytest.raises(NotFound):
        store.revoke("one", record.id)
    assert store.authenticate(text).sandbox == "two"
    store.carry("one", "two")
    assert store.authenticate(text).sandbox == "two", "one had none to carry"
    third, _ = make()
    store.carry("one", "two")
    assert {store.authenticate(each).sandbox for each in (text, third)} == {"two"}
    shutil.rmtree(state / "sandboxes/two")
    assert not store.is_valid(scope)
    with pytest.raises(NotAuthenticated):
        store.authenticate(text)


def test_processes_that_make_the_key_at_once_agree(state: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from jupyter_agentbox.sandbox.tokens import TokenStore\n"
        "sys.stdin.readline()\n"
        "store = TokenStore(pathlib.Path(sys.argv[1]))\n"
        "print(store.create('one', owner='a', verbs=['read'], life=60, name='n', made_by='b')[0])"
    )
    command = [sys.executable, "-c", program, str(state)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    texts = [process.communicate(timeout=150)[0].strip() for process in processes]
    assert len({TokenStore(state).authenticate(text).id for text in texts}) == 6
    assert [path.name for path in state.iterdir() if path.is_file()] == ["token.key"]


def test_a_key_that_others_can_read_or_that_is_none_is_refused(state: Path, store: TokenStore, make: Make) -> None:
    text, _ = make()
    key = state / "token.key"
    key.chmod(0o644)
    with pytest.raises(InvalidConfig, match=r"token\.key"):
        store.authenticate(text)
    key.chmod(0o600)
    store.authenticate(text)
    key.write_bytes(b"short")
    with pytest.raises(InvalidConfig):
        make()
    key.unlink()
    key.symlink_to("/dev/zero")
    with pytest.raises(InvalidConfig):
        make()


def test_tokens_of_a_sandbox_are_bounded_and_so_is_their_life(make: Make) -> None:
    for _ in range(MAX_TOKENS):
        make()
    with pytest.raises(LimitReached):
        make()
    make("two")
    assert [choose_life(None, 10), choose_life(None, 86400), choose_life(5, 10)] == [10, 3600, 5]
    with pytest.raises(PolicyRefused) as caught:
        choose_life(11, 10)
    assert (caught.value.field, caught.value.setting) == ("life", "Policy.max_token_life")


def test_a_scoped_caller_says_what_it_does_or_does_nothing(make: Make) -> None:
    _, record = make(verbs=("read",))
    caller = Caller("ann", scope=record)
    for refused in (caller, caller.acting("write"), caller.acting("execute")):
        with pytest.raises(NotAuthorized):
            refused.check_verb()
    caller.acting("read").check_verb()
    with pytest.raises(NotAuthorized, match="create sandboxes"):
        caller.acting("read").check_unscoped("create sandboxes")
    assert caller.to_detail() == {"by": "ann", "token": record.id, "token_name": "agent"}
    Caller("ann").check_verb()
    Caller("ann").check_unscoped("create sandboxes")
