"""Sizes and host patterns as people write them in settings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traitlets import HasTraits, TraitError

from jupyter_agentbox.policy.traits import ByteSize, HostPatterns, parse_size
from jupyter_agentbox.spec import GIB, MIB, format_size


class Holder(HasTraits):
    size = ByteSize(1)
    hosts = HostPatterns(("pypi",))
    plain = HostPatterns(has_presets=False)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512 MiB", 512 * MIB),
        ("512MB", 512 * MIB),
        ("4g", 4 * GIB),
        ("1.5 GiB", 3 * GIB // 2),
        (" 100 ", 100),
        ("7b", 7),
        (4096, 4096),
        (1e6, 1_000_000),
    ],
)
def test_sizes_are_read_as_docker_reads_them(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "value",
    ["", "much", "-1", "1 PB", "4 g b", "0", 0, -5, True, None, float("inf"), float("nan"), [], "9" * 400, "٤g"],
)
def test_what_is_no_size_is_refused_in_words(value: object) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(value)


@settings(deadline=None)
@given(st.integers(1, 2**60))
def test_a_size_written_for_a_person_reads_back_nearly_the_same(size: int) -> None:
    shown = format_size(size)
    assert parse_size(shown.replace(" bytes", "")) == pytest.approx(size, rel=0.001)


def test_the_trait_names_itself_in_its_error() -> None:
    assert Holder(size="2 KiB").size == 2048
    with pytest.raises(TraitError, match=r"Holder\.size: 'lots' is not a size"):
        Holder(size="lots")


@pytest.mark.parametrize(
    ("text", "patterns"),
    [("*:*", ["*:*"]), ("a.example, b.example:80", ["a.example", "b.example:80"]), ("['a.example']", ["a.example"])],
)
def test_host_patterns_are_read_from_a_command_line(text: str, patterns: list[str]) -> None:
    assert HostPatterns().from_string(text) == patterns


def test_host_patterns_are_checked_when_they_are_set() -> None:
    assert Holder(hosts=("pypi", "*.example.org:8443")).hosts == ["pypi", "*.example.org:8443"]
    for bad in ("https://example.org", "127.0.0.1", "a b", "example.org:99999", "*.*.org", "", 5):
        with pytest.raises(TraitError, match=r"hosts"):
            Holder(hosts=[bad])


def test_defaults_are_not_shared_between_objects() -> None:
    Holder().hosts.append("example.org")
    assert Holder().hosts == ["pypi"]
