"""Patterns, names and addresses: the decisions of the egress gate."""

from __future__ import annotations

import ipaddress
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support import ROOT

from jupyter_agentbox.egress import dial, rules
from jupyter_agentbox.errors import InvalidRequest
from jupyter_agentbox.spec import Grant

GRANT = Grant(hosts=("example.com", "*.example.org", "db.example.net:5432", "bücher.example"))
DOCS = ROOT / "docs" / "egress.md"


def is_allowed(host: str, port: int = 443, grant: Grant = GRANT) -> bool:
    return rules.decide(host, port, grant).is_allowed


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("example.com", True),
        ("EXAMPLE.com", True),
        ("example.com.", True),
        ("example.com..", False),
        ("evilexample.com", False),
        ("example.com.evil.com", False),
        ("www.example.com", False),
        ("example.org", False),
        ("a.example.org", True),
        ("a.b.example.org", True),
        ("A.B.Example.ORG.", True),
        ("evilexample.org", False),
        (".example.org", False),
        ("a..example.org", False),
        ("*.example.org", False),
        ("xn--bcher-kva.example", True),
        ("XN--BCHER-KVA.example", True),
        ("bücher.example", True),
        ("xn--bcher-kvb.example", False),
        ("example.com\x00.example.org", False),
        ("example.com/.example.org", False),
        ("user@a.example.org", False),
        ("a example.org", False),
        ("", False),
        (".", False),
        ("a" * 5000, False),
    ],
)
def test_names_match_label_by_label(host: str, expected: bool) -> None:
    assert is_allowed(host) is expected


def test_only_ports_80_and_443_unless_a_pattern_names_the_port() -> None:
    assert [p for p in (22, 25, 80, 443, 5432, 8080, 8443) if is_allowed("example.com", p)] == [80, 443]
    assert [p for p in (80, 443, 5432, 5433) if is_allowed("db.example.net", p)] == [5432]
    refused = rules.decide("example.com", 22, GRANT)
    assert "example.com:22" in refused.reason
    assert "Policy.allowed_hosts" in refused.reason


@pytest.mark.parametrize(
    ("may_allow", "target", "is_possible"),
    [
        (("*:*",), "example.com:8443", True),
        (("*:*",), "example.com:0", True),
        (("*",), "example.com:8443", False),
        (("*",), "example.com:443", True),
        (("*.example.com:*",), "a.example.com:22", True),
        (("*.example.com:*",), "example.com:443", False),
        (("other.test:22",), "other.test:0", True),
        ((), "example.com:443", False),
    ],
)
def test_a_refusal_says_where_the_host_can_be_allowed(
    may_allow: tuple[str, ...], target: str, is_possible: bool
) -> None:
    name, _, port = target.partition(":")
    shown = name if port == "0" else target
    sentence = rules.explain_refusal(name, int(port), Grant(may_allow=may_allow))
    assert sentence == (
        f"Blocked by sandbox: {shown}. Allow it in the Sandboxes panel, or add it to Policy.allowed_hosts."
        if is_possible
        else f"Blocked by sandbox: {shown}. Ask your administrator to add it to Policy.allowed_hosts."
    )


def test_hosts_that_a_person_allowed_are_marked_and_come_last() -> None:
    grant = Grant(hosts=("*.policy.test",), user_hosts=("a.policy.test", "user.test:5432"))
    assert not rules.decide("a.policy.test", 443, grant).is_users
    assert rules.decide("user.test", 5432, grant).is_users
    assert rules.ports_of("user.test", grant) == (5432,)
    assert not rules.decide("user.test", 443, grant).is_allowed


def test_only_lists_of_what_may_be_allowed_have_patterns_for_every_port() -> None:
    assert rules.parse_pattern("*:*", has_any_port=True).has_port(5432)
    with pytest.raises(InvalidRequest, match="invalid port"):
        rules.parse_pattern("example.com:*")


def test_star_is_every_name_and_no_address() -> None:
    everything = Grant(hosts=("*",))
    assert is_allowed("anything.example", 443, everything)
    assert not is_allowed("anything.example", 8443, everything)
    assert not is_allowed("127.0.0.1", 80, everything)


LITERALS = [
    "127.0.0.1", "2130706433", "0x7f.1", "0x7f000001", "0177.0.0.1", "127.1", "127.0.0.1.", "0x", "[::1]", "::1",
    "::ffff:7f00:1", "[::ffff:127.0.0.1]", "fe80::1%eth0", "１２７.0.0.1", "127。0。0。1", "1.2.3.4.5", "93.184.216.34",
]  # fmt: skip


@pytest.mark.parametrize("literal", LITERALS)
def test_addresses_are_no_names_in_any_spelling(literal: str) -> None:
    decision = rules.decide(literal, 443, Grant(hosts=("*",)))
    assert not decision.is_allowed
    assert "IP address" in decision.reason
    with pytest.raises(InvalidRequest):
        rules.parse_pattern(literal)


@pytest.mark.parametrize(
    "pattern",
    [
        "", " ", "https://example.com", "example.com/path", "example.com:", "example.com:0", "example.com:65536",
        "example.com:443:1", "example.com:-1", "example.com:+80", "example.com:８０", "*.", "**.example.com",
        "a.*.com", "*example.com", "exa mple.com", "-a.com", "a-.com", "faß.example", "a..b", "x" * 64 + ".com",
    ],
)  # fmt: skip
def test_malformed_patterns_name_field_and_setting(pattern: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        rules.parse_pattern(pattern, setting="Policy.some", field="egress")
    assert (caught.value.field, caught.value.setting) == ("egress", "Policy.some")
    assert "Policy.some" in str(caught.value)
    with pytest.raises(InvalidRequest):
        rules.check_grant(Grant(hosts=(pattern,)))
    with pytest.raises(InvalidRequest):
        rules.check_grant(Grant(private_hosts=(pattern,)))


def test_the_decision_names_its_rule() -> None:
    assert rules.decide("X.example.org", 443, GRANT).rule == "*.example.org"
    assert rules.decide("x.example.org", 443, GRANT).host == "x.example.org"


@given(st.text())
@example("example.com\r\nX: y")
@example("\x1b[2J")
def test_a_refusal_is_one_short_printable_line_whatever_the_name(host: str) -> None:
    decision = rules.decide(host, 443, GRANT)
    if not decision.is_allowed:
        assert re.fullmatch(r"[ -~]{1,500}", decision.reason)
        assert re.fullmatch(r"[!-~]{0,300}", decision.host)


label = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True).filter(lambda x: not x.startswith("xn--"))
name = st.lists(label, min_size=1, max_size=4).map(".".join).filter(lambda n: not rules.is_ip_literal(n))


@given(name, name)
def test_below_means_a_label_boundary(outer: str, inner: str) -> None:
    grant = Grant(hosts=(f"*.{outer}",))
    assert is_allowed(f"{inner}.{outer}", 443, grant)
    assert not is_allowed(outer, 443, grant)
    assert not is_allowed(f"x{outer}", 443, grant)
    assert is_allowed(inner, 443, grant) is inner.endswith("." + outer)


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "127.0.0.1", "127.255.255.254", "0.0.0.0", "0.1.2.3",
        "169.254.169.254", "168.63.129.16", "100.64.0.1", "100.127.255.255", "100.100.100.200", "192.0.0.192",
        "192.0.0.9", "198.18.0.1", "192.88.99.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255",
        "::", "::1", "::ffff:7f00:1", "::ffff:8.8.8.8", "::127.0.0.1", "::8.8.8.8", "64:ff9b::7f00:1", "64:ff9b::8:8",
        "64:ff9b:1::1", "2002:7f00:1::", "2001::1", "2001:0:4136:e378::", "fe80::1", "fe80::1%eth0", "fec0::1",
        "fc00::1", "fd00:ec2::254", "fd20:ce::254", "ff02::1", "100::1", "4000::1", "5f00::1", "2001:10::1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    assert rules.classify_address(address)


@pytest.mark.parametrize(
    "address",
    [
        "8.8.8.8", "93.184.216.34", "172.32.0.1", "172.15.0.1", "100.63.255.255", "100.128.0.1", "169.253.0.1",
        "198.17.0.1", "198.20.0.1", "223.255.255.255", "2606:4700::1", "2a00:1450::1",
        "192.0.2.1", "198.51.100.7", "203.0.113.80", "2001:db8::1",
    ],
)  # fmt: skip
def test_public_addresses_and_documentation_networks_pass(address: str) -> None:
    assert rules.classify_address(address) is None


DOCUMENTATION = [
    ipaddress.ip_network(n) for n in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32")
]


@given(st.ip_addresses())
def test_nothing_passes_that_this_python_calls_not_global(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    if not ip.is_global and not any(ip.version == n.version and ip in n for n in DOCUMENTATION):
        assert rules.classify_address(ip)


def is_opened(address: str | rules.IPAddress, pattern: str, *, is_own: bool = False) -> bool:
    """Whether a name that leads there may be dialled."""
    grant = Grant(hosts=("*", "*:8080"), private_hosts=(pattern,))
    return dial.refused_answer("a.corp", 8080, [str(address)], grant, lambda _: is_own) is None


WILDCARDS = ("*:8080", "*.corp:8080")

ORDINARY = [
    "10.0.0.0", "10.255.255.255", "172.16.0.0", "172.31.255.255", "192.168.0.0", "192.168.255.255", "fc00::",
    "fd12:3456:789a::1", "fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "fd00:ec1:ffff::", "fd00:ec3::",
]  # fmt: skip


@pytest.mark.parametrize("address", ORDINARY)
def test_a_wildcard_opens_ordinary_private_ranges(address: str) -> None:
    assert all(is_opened(address, pattern) for pattern in (*WILDCARDS, "a.corp:8080"))
    assert not is_opened(address, "b.corp:8080")
    assert not is_opened(address, "*")
    assert not any(is_opened(address, pattern, is_own=True) for pattern in WILDCARDS)
    assert is_opened(address, "a.corp:8080", is_own=True)


METADATA = ipaddress.IPv4Address("169.254.169.254")
SPECIAL = [
    # Metadata services
    "169.254.169.254", "169.254.170.2", "169.254.42.42", "100.100.100.200", "192.0.0.192", "168.63.129.16",
    "fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "fd00:c1::a9fe:a9fe", "fd00:42::42", "fe80::a9fe:a9fe",
    "fe80::1%eth0",
    # The other special-purpose ranges, their first and last addresses
    "0.0.0.0", "0.255.255.255", "100.64.0.0", "100.127.255.255", "127.0.0.0", "127.255.255.255", "169.254.0.0",
    "192.0.0.0", "192.0.0.255", "192.88.99.0", "198.18.0.0", "198.19.255.255", "224.0.0.0", "239.255.255.255",
    "240.0.0.0", "255.255.255.255", "::", "::1", "100::1", "2001:2::1", "2001:10::1", "2001:20::1", "3fff::1",
    "5f00::1", "4000::1", "fec0::1", "ff02::1",
    # Forms of 169.254.169.254, of an ordinary private address, and of a public one
    "::ffff:169.254.169.254", "::ffff:0:169.254.169.254", "::169.254.169.254", "64:ff9b::169.254.169.254",
    "64:ff9b:1::169.254.169.254", "64:ff9b:1:a9fe:00a9:fe00::", "2002:a9fe:a9fe::1", "2001:0:a9fe:a9fe::1",
    "2001:0:4136:e378:8000:63bf:5601:5601", "2a00::5efe:169.254.169.254", "fd12::200:5efe:169.254.169.254",
    "::ffff:10.0.0.1", "64:ff9b::10.0.0.1", "2002:a00:1::1", "fd12::5efe:10.0.0.1", "::ffff:8.8.8.8",
    "64:ff9b::8.8.8.8",
]  # fmt: skip


@pytest.mark.parametrize("address", SPECIAL)
def test_a_special_address_is_opened_by_an_exact_name_with_its_port_only(address: str) -> None:
    for is_own in (False, True):
        assert not any(is_opened(address, pattern, is_own=is_own) for pattern in (*WILDCARDS, "*", "a.corp", "*.corp"))
        assert is_opened(address, "a.corp:8080", is_own=is_own)


@pytest.mark.parametrize(
    "address",
    ["::ffff:a9fe:a9fe", "::ffff:0:a9fe:a9fe", "::a9fe:a9fe", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a9fe:a9fe",
     "2002:a9fe:a9fe::", "2001:0:808:808::5601:5601", "2a00::200:5efe:a9fe:a9fe"],
)  # fmt: skip
def test_a_carried_address_is_found(address: str) -> None:
    assert rules.carried_address(address) == METADATA
    kind = rules.classify_address(address)
    assert kind
    assert kind.what.endswith("with an embedded non-public address")


@pytest.mark.parametrize("address", ["8.8.8.8", "10.0.0.1", "2606:4700::1", "fd00:ec2::254", "::1:0:0:0"])
def test_no_address_is_found_where_none_is_carried(address: str) -> None:
    assert rules.carried_address(address) is None


private = st.one_of(
    *(st.ip_addresses(network=n) for n in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"))
)


@given(st.one_of(st.ip_addresses(), private))
def test_a_wildcard_opens_private_addresses_and_no_others(ip: rules.IPAddress) -> None:
    kind = rules.classify_address(ip)
    if kind is not None and is_opened(ip, "*:8080"):
        assert kind.is_ordinary
        assert ip.is_private
        assert not any(
            ip in ipaddress.ip_network(n) for n in ("127.0.0.0/8", "169.254.0.0/16", "100.64.0.0/10", "192.0.0.0/24")
        )


@given(st.ip_addresses(v=4), st.integers(0, (1 << 32) - 1))
def test_no_wildcard_opens_a_form_of_any_address(ip: ipaddress.IPv4Address, noise: int) -> None:
    number = int(ip)
    for form in (
        0xFFFF << 32 | number,  # mapped
        0xFFFF << 48 | number,  # translated
        0x64FF9B << 96 | number,  # NAT64
        0x64FF9B0001 << 80 | noise << 32 | number,
        0x2002 << 112 | number << 80 | noise,  # 6to4
        0x20010000 << 96 | number << 64 | noise,  # Teredo, its server
        0x20010000 << 96 | noise << 64 | ~number & 0xFFFFFFFF,  # Teredo, its client
        0xFD12 << 112 | 0x5EFE << 32 | number,  # ISATAP
        0x2A00 << 112 | noise << 64 | 0x02005EFE << 32 | number,
    ):
        address = ipaddress.IPv6Address(form)
        assert rules.classify_address(address), address
        assert not any(is_opened(address, pattern) for pattern in WILDCARDS), address


@pytest.mark.parametrize("answer", ["junk", "", "10.0.0.1.1", "1", "::g"])
def test_what_is_no_address_is_never_dialled(answer: str) -> None:
    with pytest.raises(ValueError, match="address"):
        rules.classify_address(answer)
    assert not any(is_opened(answer, pattern) for pattern in (*WILDCARDS, "a.corp:8080"))


@pytest.mark.parametrize(
    "pattern", ["s3.amazonaws.com", "s3.eu-west-1.amazonaws.com", "storage.googleapis.com", "*.amazonaws.com", "*",
                "*.github.io", "*.com", "raw.githubusercontent.com", "*.windows.net", "GITHUB.com:443"],
)  # fmt: skip
def test_shared_hosts_are_warned_of(pattern: str) -> None:
    note = rules.shared_host_note(pattern)
    assert note
    assert pattern in note


@pytest.mark.parametrize("pattern", ["example.org", "*.example.org", "bucket.s3.example.org", "me.github.io"])
def test_hosts_of_one_owner_are_not_warned_of(pattern: str) -> None:
    assert rules.shared_host_note(pattern) is None


def test_the_table_in_the_documentation_is_what_happens() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]*)` \| (yes|no) \|", DOCS.read_text(), re.MULTILINE)
    assert len(rows) >= 15
    for pattern, target, answer in rows:
        host, _, port = target.rpartition(":")
        decision = rules.decide(host, int(port), Grant(hosts=(pattern,)))
        assert decision.is_allowed is (answer == "yes"), (pattern, target)
