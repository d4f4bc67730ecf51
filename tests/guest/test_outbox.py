"""No message is lost or doubled by a change of owner, but what the limit cuts, and that is counted."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_agentbox.guest.framing import INITIAL_CREDIT
from jupyter_agentbox.guest.outbox import Outbox


class Owner:
    """Stands for the host's end of a stream: takes bytes, and gives credit for what it has taken."""

    def __init__(self, window: int = 0) -> None:
        self.header = {"window": window}
        self.credit_given = INITIAL_CREDIT + window
        self.got = b""
        self.taken = 0
        self.has_eof = False
        self.on_credit = lambda: None

    @property
    def credit(self) -> int:
        return self.credit_given

    def write(self, data: bytes) -> None:
        assert len(data) <= self.credit_given
        self.credit_given -= len(data)
        self.got += data

    def write_eof(self) -> None:
        self.has_eof = True

    def take(self, count: int) -> None:
        count = min(count, len(self.got) - self.taken)
        self.taken += count
        self.credit_given += count
        self.on_credit()


MESSAGES = st.lists(st.binary(min_size=1, max_size=40_000), min_size=1, max_size=12)


@given(MESSAGES, st.lists(st.integers(0, 90_000), max_size=20))
@settings(max_examples=80, deadline=None)
def test_each_owner_begins_with_the_first_message_that_was_not_taken_whole(
    messages: list[bytes], takes: list[int]
) -> None:
    outbox = Outbox(1 << 30, lambda: None)
    owner = Owner()
    outbox.attach(owner)  # type: ignore[arg-type]
    for message in messages:
        outbox.put(message)
    for take in takes:
        owner.take(take)
    ends = [sum(map(len, messages[: n + 1])) for n in range(len(messages))]
    whole = sum(1 for end in ends if end <= owner.taken)
    outbox.detach()
    second = Owner(window=10_000_000)
    outbox.attach(second)  # type: ignore[arg-type]
    assert second.got == b"".join(messages[whole:])


def test_what_is_said_without_an_owner_waits_for_the_next() -> None:
    outbox = Outbox(1000, lambda: None)
    outbox.put(b"a" * 400)
    outbox.put(b"b" * 400)
    assert outbox.has_room
    outbox.put(b"c" * 400)
    assert outbox.dropped == 1
    owner = Owner()
    outbox.attach(owner)  # type: ignore[arg-type]
    assert owner.got == b"b" * 400 + b"c" * 400
    outbox.close()
    assert owner.has_eof


def test_a_full_outbox_holds_its_program_up_until_the_owner_takes_some() -> None:
    woken = []
    outbox = Outbox(INITIAL_CREDIT, lambda: woken.append(1))
    owner = Owner()
    outbox.attach(owner)  # type: ignore[arg-type]
    outbox.put(b"x" * (2 * INITIAL_CREDIT))
    assert not outbox.has_room
    owner.take(INITIAL_CREDIT)
    assert not outbox.has_room
    owner.take(INITIAL_CREDIT)
    assert outbox.has_room
    assert woken
    assert owner.got == b"x" * (2 * INITIAL_CREDIT)
