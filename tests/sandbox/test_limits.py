"""The rule by which a sandbox is told to fill a disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from jupyter_agentbox.errors import DiskFull
from jupyter_agentbox.runtimes import Usage
from jupyter_agentbox.sandbox import limits
from jupyter_agentbox.sandbox.limits import FreeSpace
from jupyter_agentbox.spec import MIB, Cause

FLOOR = 160 * MIB
GROWTH_DIVISOR = FLOOR // limits.GROWTH_DIVISOR


class Disk:
    """What is left on the disk, and what the work folder holds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.left, self.size, self.is_exact, self.cpu, self.now = 10 * FLOOR, 0, True, 0.0, 1000.0
        self.measured = 0
        (tmp_path / "work").mkdir()
        (tmp_path / "own").mkdir()
        self.space = FreeSpace(tmp_path / "work", tmp_path / "own", FLOOR)
        monkeypatch.setattr(self.space, "_left", lambda path: (self.left, FLOOR))
        monkeypatch.setattr(limits, "measure_tree", self.measure)
        monkeypatch.setattr(limits.time, "monotonic", lambda: self.now)

    def measure(self, *_: object) -> tuple[int, bool]:
        self.measured += 1
        return self.size, self.is_exact

    def look(self, left: int, size: int = 0, cpu: float = 0.0, after: float = 1.0) -> bool:
        """Whether it is stopped."""
        self.left, self.size, self.now = left, size, self.now + after
        end = self.space.find_breach(Usage(0, cpu, 0))
        if end is not None:
            assert (end.cause, end.setting) == (Cause.DISK_FULL, "Policy.min_free_disk")
        return end is not None


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Disk:
    return Disk(monkeypatch, tmp_path)


def test_nothing_is_measured_while_there_is_space(disk: Disk) -> None:
    assert not any(disk.look(limits.TRACKING_MULTIPLE * FLOOR, size) for size in (0, 10 * FLOOR))
    assert disk.measured == 0


def test_what_has_grown_is_stopped_below_the_floor_and_not_before(disk: Disk) -> None:
    assert not disk.look(FLOOR, 0)
    assert not disk.look(0, 100 * GROWTH_DIVISOR), "as much as the floor is left"
    assert disk.look(-1, 100 * GROWTH_DIVISOR)


def test_what_has_not_grown_is_never_stopped(disk: Disk) -> None:
    assert not disk.look(FLOOR, 5 * GROWTH_DIVISOR)
    for _ in range(100):
        assert not disk.look(-FLOOR, 5 * GROWTH_DIVISOR + GROWTH_DIVISOR)
    assert disk.look(-FLOOR, 6 * GROWTH_DIVISOR + 1)


def test_one_that_starts_below_the_floor_is_stopped_once_it_grows(disk: Disk) -> None:
    assert not disk.look(-1, 50 * GROWTH_DIVISOR)
    assert not disk.look(-1, 50 * GROWTH_DIVISOR, after=1000)
    assert disk.look(-1, 52 * GROWTH_DIVISOR)


def test_what_grew_long_before_the_disk_was_full_does_not_count(disk: Disk) -> None:
    assert not disk.look(FLOOR, 0)
    assert not disk.look(FLOOR, 50 * GROWTH_DIVISOR, after=limits.MARK_INTERVAL + 1)
    assert not disk.look(-1, 50 * GROWTH_DIVISOR)


def test_a_folder_that_cannot_be_measured_is_judged_by_processor_time(disk: Disk) -> None:
    disk.is_exact = False
    assert not disk.look(FLOOR, 0)
    assert not disk.look(-1, 100 * GROWTH_DIVISOR, cpu=limits.MIN_CPU / 2)
    assert disk.look(-1, 0, cpu=2 * limits.MIN_CPU)


@pytest.mark.parametrize(("floor", "least", "most"), [(0, None, None), (None, 1, None), (2**60, 0, 0)])
def test_what_may_be_written_from_outside(
    tmp_path: Path, floor: int | None, least: int | None, most: int | None
) -> None:
    room = FreeSpace(tmp_path, tmp_path, floor).room()
    assert (room is None) is (least is None)
    if room is not None:
        assert room.left is not None
        assert room.left >= (least or 0)
        if most is not None:
            assert room.left <= most
            with pytest.raises(DiskFull, match=r"stay free\. Delete files there, or lower Policy\.min_free_disk"):
                room.take(1, "x")
