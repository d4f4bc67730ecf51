"""Decide which hosts a sandbox may reach, by patterns, names and addresses. No input or output.

A pattern is an exact name (``example.org``), every subdomain of a name (``*.example.org``, which excludes
``example.org`` itself), or ``*``. Each may end in one port (``example.org:8443``). A pattern without a port covers
ports 80 and 443. Names are compared label by label in lower-case ASCII form.

:mod:`~jupyter_agentbox.egress.gate` calls this module before it lets a connection out, and ``policy.policy`` uses it
to validate settings.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import string
from dataclasses import dataclass

from jupyter_agentbox.errors import InvalidRequest
from jupyter_agentbox.spec import OWN_HOSTS, Grant

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

#: Ports of a pattern that names no port.
DEFAULT_PORTS = (80, 443)
#: Port of a pattern that covers every port: ``*``. Only lists of the hosts that a person may allow contain it.
ANY_PORT = 0
#: Longest name in the DNS, in characters.
MAX_NAME = 253

#: Start of the sentence for every refused host.
BLOCKED = "Blocked by sandbox"

_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_PRINTABLE = frozenset(string.ascii_letters + string.digits + string.punctuation)
#: IDNA 2003 and IDNA 2008 map these characters to different names, so the intended name is ambiguous.
_AMBIGUOUS = "ß\u03c2\u200c\u200d"


@dataclass(frozen=True)
class Pattern:
    """Parsed entry of an allowlist.

    Parameters
    ----------
    text : str
        Original text; the audit log calls it the rule.
    name : str
        Normalised name without the wildcard; empty for ``*``.
    is_below : bool
        Whether the pattern matches the subdomains of ``name``, without ``name`` itself.
    port : int or None
        The only allowed port; None means :data:`DEFAULT_PORTS`. :data:`ANY_PORT` means every port.
    """

    text: str
    name: str
    is_below: bool
    port: int | None

    @property
    def ports(self) -> tuple[int, ...]:
        """Allowed ports."""
        return DEFAULT_PORTS if self.port is None else (self.port,)

    def has_port(self, port: int) -> bool:
        """Return whether the pattern allows a port."""
        return self.port == ANY_PORT or port in self.ports

    @property
    def is_exact(self) -> bool:
        """Whether the pattern matches exactly one name."""
        return not self.is_below

    def matches_name(self, name: str) -> bool:
        """Return whether the pattern matches a normalised name, regardless of the port."""
        if not self.is_below:
            return name == self.name
        # The dot keeps evilexample.org from matching *.example.org.
        return not self.name or name.endswith("." + self.name)


@dataclass(frozen=True)
class Decision:
    """Decision on one host and port.

    Parameters
    ----------
    is_allowed : bool
        Whether the grant covers the host and port.
    host : str
        Normalised name, or the requested name in printable form if it cannot be normalised.
    rule : str or None
        Pattern that allowed the connection.
    reason : str
        For a refusal: one sentence in printable ASCII that names host and port, and the setting that would allow them.
    is_malformed : bool
        Whether the host is refused because it is not a valid host name. No setting can allow it.
    is_users : bool
        Whether a person allowed the host, and policy alone would not have.
    """

    is_allowed: bool
    host: str
    rule: str | None = None
    reason: str = ""
    is_malformed: bool = False
    is_users: bool = False


class AddressGivenError(ValueError):
    """An IP address was given where a host name is required."""


def printable(text: str, limit: int = MAX_NAME) -> str:
    """Return a hostile string in a form that is safe for a log, a status line or a notebook.

    Parameters
    ----------
    text : str
        Any text.
    limit : int
        Maximum number of characters to keep.

    Returns
    -------
    str
        Printable ASCII without spaces. Every other character is replaced by ``?``.
    """
    shown = "".join(c if c in _PRINTABLE else "?" for c in text[:limit])
    return shown + "..." if len(text) > limit else shown


def is_ip_literal(text: str) -> bool:
    """Return whether clients would interpret a host as an address instead of a name.

    They interpret a numeric last label as IPv4 (``127.0.0.1``, ``2130706433``, ``0x7f.1``, ``0177.1``),
    and colons or brackets as IPv6.
    """
    if ":" in text or text.startswith("["):
        return True
    last = text.rstrip(".").rpartition(".")[2].lower()
    return re.fullmatch(r"[0-9]+|0x[0-9a-f]*", last, re.ASCII) is not None


def normal_name(text: str) -> str:
    """Return a host name in the normal form in which names are compared.

    Parameters
    ----------
    text : str
        Name in any case, with or without a trailing dot, in Unicode or ``xn--`` form.

    Returns
    -------
    str
        Lower-case ASCII name without a trailing dot.

    Raises
    ------
    AddressGivenError
        The text is an IP address.
    ValueError
        The text is not a valid host name.
    """
    if len(text) > 4 * MAX_NAME:
        raise ValueError("is too long for a host name")
    if not text.isascii():
        if any(c in text for c in _AMBIGUOUS):
            raise ValueError("contains a character that programs encode differently: use its xn-- form")
        try:
            text = text.encode("idna").decode("ascii")
        except UnicodeError:
            raise ValueError("is not a valid international host name") from None
    name = text.lower().removesuffix(".")
    # Check after the IDNA mapping, which turns full-width digits into plain ones.
    if is_ip_literal(name):
        raise AddressGivenError("is an IP address: only names are allowed")
    if not name or len(name) > MAX_NAME or not all(_LABEL.fullmatch(part) for part in name.split(".")):
        raise ValueError("is not a host name")
    return name


def is_malformed(text: str) -> bool:
    """Return whether a host is neither a name nor an address."""
    try:
        normal_name(text)
    except AddressGivenError:
        return False
    except ValueError:
        return True
    return False


def parse_pattern(
    text: str, *, setting: str = "Policy.allowed_hosts", field: str = "hosts", has_any_port: bool = False
) -> Pattern:
    """Parse one entry of an allowlist.

    Parameters
    ----------
    text : str
        ``name``, ``*.name`` or ``*``, with or without ``:port``.
    setting, field : str
        Setting and field that the error names.
    has_any_port : bool
        Whether the port may be ``*``, for every port.

    Raises
    ------
    InvalidRequest
        The pattern is malformed, an address, or a URL.
    """

    def bad(why: str) -> InvalidRequest:
        return InvalidRequest(
            f"host pattern '{printable(text)}' {why} (setting: {setting}); "
            "write example.org, *.example.org, example.org:8443 or *",
            field=field,
            setting=setting,
        )

    host, colon, digits = text.partition(":")
    port = None
    if colon:
        if ":" in digits or host.startswith("["):
            raise bad("is a URL or an IP address: only names are allowed")
        if has_any_port and digits == "*":
            port = ANY_PORT
        elif re.fullmatch(r"[0-9]{1,5}", digits, re.ASCII) and 1 <= int(digits) <= 65535:
            port = int(digits)
        else:
            raise bad("has an invalid port")
    if host == "*":
        return Pattern(text, "", True, port)
    is_below = host.startswith("*.")
    try:
        name = normal_name(host[2:] if is_below else host)
    except ValueError as error:
        raise bad(str(error)) from None
    return Pattern(text, name, is_below, port)


@functools.lru_cache(maxsize=256)
def parse_patterns(
    texts: tuple[str, ...], setting: str, field: str = "hosts", *, has_any_port: bool = False
) -> tuple[Pattern, ...]:
    """Parse a list of patterns; see :func:`parse_pattern`. Cached, because every decision needs the list."""
    return tuple(parse_pattern(text, setting=setting, field=field, has_any_port=has_any_port) for text in texts)


def check_grant(grant: Grant) -> None:
    """Raise :class:`~jupyter_agentbox.errors.InvalidRequest` if a grant contains a malformed pattern."""
    parse_patterns(grant.hosts, grant.setting)
    parse_patterns(grant.private_hosts, "Policy.private_hosts", "private_hosts")
    _users_patterns(grant)
    _allowable_patterns(grant)


def _users_patterns(grant: Grant) -> tuple[Pattern, ...]:
    return parse_patterns(grant.user_hosts, "jupyter agentbox egress list")


def _allowable_patterns(grant: Grant) -> tuple[Pattern, ...]:
    return parse_patterns(grant.may_allow, "Policy.user_may_allow", "user_may_allow", has_any_port=True)


def ports_of(name: str, grant: Grant) -> tuple[int, ...]:
    """Return the ports on which a grant allows a normalised name; empty if it does not allow the name."""
    found = {
        port
        for pattern in (*parse_patterns(grant.hosts, grant.setting), *_users_patterns(grant))
        if pattern.matches_name(name)
        for port in pattern.ports
    }
    return tuple(sorted(found))


def decide(host: str, port: int, grant: Grant) -> Decision:
    """Decide by name and port alone, before any lookup.

    Parameters
    ----------
    host : str
        Name as code inside wrote it: hostile.
    port : int
        Port number.
    grant : Grant
        What the sandbox may reach.
    """
    try:
        name = normal_name(host)
    except AddressGivenError:
        shown = printable(host)
        reason = f"{BLOCKED}: {shown}:{port}. Only host names can be allowed, not IP addresses."
        return Decision(False, shown, None, reason)
    except ValueError as error:
        shown = printable(host)
        return Decision(False, shown, None, f"{shown}:{port} {error}", is_malformed=True)
    for pattern in parse_patterns(grant.hosts, grant.setting):
        if port in pattern.ports and pattern.matches_name(name):
            return Decision(True, name, pattern.text)
    for pattern in _users_patterns(grant):
        if port in pattern.ports and pattern.matches_name(name):
            return Decision(True, name, pattern.text, is_users=True)
    return Decision(False, name, None, explain_refusal(name, port, grant))


def explain_refusal(name: str, port: int, grant: Grant) -> str:
    """Return the sentence for a refused host: where a person can allow it, and the setting.

    Parameters
    ----------
    name : str
        Normalised name.
    port : int
        Port number; 0 for a name lookup.
    grant : Grant
        What the sandbox may reach.
    """
    target = f"{name}:{port}" if port else name
    patterns = _allowable_patterns(grant)
    if any(pattern.matches_name(name) and (not port or pattern.has_port(port)) for pattern in patterns):
        return f"{BLOCKED}: {target}. Allow it {grant.consent}, or add it to {grant.setting}."
    # The caller who made the request can change it.
    remedy = "Add it" if grant.setting == OWN_HOSTS else "Ask your administrator to add it"
    return f"{BLOCKED}: {target}. {remedy} to {grant.setting}."


@dataclass(frozen=True)
class Kind:
    """Category of an address that is not public.

    Parameters
    ----------
    what : str
        Description, such as ``loopback``.
    is_ordinary : bool
        Whether the address is in a range from which networks number their machines: RFC 1918 or unique local IPv6.
        A wildcard in ``private_hosts`` opens only these.
    """

    what: str
    is_ordinary: bool = False


def _table(rows: dict[str, str]) -> list[tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, str]]:
    return [(ipaddress.ip_network(network), what) for network, what in rows.items()]


#: Special-purpose ranges: IANA's registries for IPv4 and IPv6, cloud metadata services in other ranges, and IPv6 forms
#: that carry an IPv4 address. Addresses that Python does not consider global are refused even if they are not listed.
_SPECIAL = _table(
    {
        "0.0.0.0/8": "unspecified",
        "100.100.100.200/32": "metadata service",  # Alibaba Cloud
        "100.64.0.0/10": "carrier-grade NAT",
        "127.0.0.0/8": "loopback",
        "168.63.129.16/32": "metadata service",  # Azure; the number alone looks like a public address
        "169.254.0.0/16": "link-local or metadata service",
        "192.0.0.0/24": "reserved or metadata service",
        "192.88.99.0/24": "6to4 relay",
        "198.18.0.0/15": "benchmarking",
        "224.0.0.0/4": "multicast",
        "240.0.0.0/4": "reserved",
        "::/128": "unspecified",
        "::1/128": "loopback",
        "::ffff:0:0/96": "IPv4-mapped",
        "::ffff:0:0:0/96": "IPv4-translated",
        "::/96": "IPv4-compatible",
        "64:ff9b::/96": "NAT64",
        "64:ff9b:1::/48": "NAT64",
        "100::/64": "discard-only",
        "2001::/32": "Teredo",
        "2001::/23": "reserved",
        "2002::/16": "6to4",
        "3fff::/20": "documentation",
        "5f00::/16": "segment routing",
        "fd00:42::/32": "metadata service",  # Scaleway
        "fd00:c1::/32": "metadata service",  # Oracle Cloud
        "fd00:ec2::/32": "metadata service",  # AWS
        "fd20:ce::/32": "metadata service",  # Google Cloud
        "fe80::/10": "link-local",
        "fec0::/10": "site-local",
        "ff00::/8": "multicast",
    }
)
#: Ranges that a wildcard in ``private_hosts`` may open.
_ORDINARY = _table(dict.fromkeys(("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"), "private"))
#: Treated as public although IANA reserves them: closed networks number their package mirrors from the documentation
#: networks. No internal service may use these addresses, so they lead to nothing that needs protection.
_DOCUMENTATION = _table(
    dict.fromkeys(("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32"), "documentation")
)
_GLOBAL_V6 = ipaddress.ip_network("2000::/3")
#: ISATAP interface identifiers, which precede the IPv4 address.
_ISATAP = (0x00005EFE, 0x02005EFE)


def _find(ip: IPAddress, table: list[tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, str]]) -> str | None:
    return next((what for network, what in table if ip.version == network.version and ip in network), None)


def carried_address(address: str | IPAddress) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address embedded in an IPv6 address in one of the standard forms, or None.

    For the prefix ``64:ff9b:1::/48`` the longest of its forms is assumed.
    """
    ip = ipaddress.ip_address(address)
    if ip.version == 4:
        return None
    number = int(ip)
    form = _find(ip, _SPECIAL)
    if form == "6to4":
        return ipaddress.IPv4Address(number >> 80 & 0xFFFFFFFF)
    if form == "Teredo":
        return ipaddress.IPv4Address(~number & 0xFFFFFFFF)
    if form in ("IPv4-mapped", "IPv4-translated", "IPv4-compatible", "NAT64") or number >> 32 & 0xFFFFFFFF in _ISATAP:
        return ipaddress.IPv4Address(number & 0xFFFFFFFF)
    return None


def classify_address(address: str | IPAddress) -> Kind | None:
    """Return the category of an address that must not be connected to.

    Parameters
    ----------
    address : str or IPv4Address or IPv6Address
        One answer of a lookup.

    Returns
    -------
    Kind or None
        None for a public address.

    Raises
    ------
    ValueError
        The text is not an address.
    """
    ip = ipaddress.ip_address(address)
    form = _find(ip, _SPECIAL)
    carried = carried_address(ip)
    if carried is not None:
        inner = classify_address(carried)
        return Kind(f"{form or 'ISATAP'} with an embedded {'public' if inner is None else 'non-public'} address")
    if form is not None:
        return Kind(form)
    ordinary = _find(ip, _ORDINARY)
    if ordinary is not None:
        return Kind(ordinary, is_ordinary=True)
    if _find(ip, _DOCUMENTATION) is not None:
        return None
    # Refuse everything that IANA has not assigned as global unicast, listed in the table or not.
    if not ip.is_global or (ip.version == 6 and ip not in _GLOBAL_V6):
        return Kind("reserved")
    return None


def private_rule(name: str, port: int, grant: Grant, *, is_ordinary: bool) -> str | None:
    """Return the entry of ``private_hosts`` that lets a name resolve to a refused address, or None.

    Parameters
    ----------
    name : str
        Normalised name.
    port : int
        Port number.
    grant : Grant
        What the sandbox may reach.
    is_ordinary : bool
        Whether the address is in an ordinary private range and does not belong to this machine. Any other address needs
        an exact name with a port, because the Jupyter server, proxies and metadata services have such addresses.
    """
    for pattern in parse_patterns(grant.private_hosts, "Policy.private_hosts", "private_hosts"):
        if not is_ordinary and not (pattern.is_exact and pattern.port):
            continue
        if port in pattern.ports and pattern.matches_name(name):
            return pattern.text
    return None


#: Names shared by many owners: the path of the request selects the content, and TLS hides the path.
_SHARED_NAMES = re.compile(
    r"""(?: s3(?:[.-][a-z0-9-]+)*\.amazonaws\.com | storage\.(?:cloud\.google|googleapis)\.com
      | (?:[a-z0-9.-]+\.)?r2\.cloudflarestorage\.com | [a-z0-9-]+\.(?:digitaloceanspaces|backblazeb2|wasabisys)\.com
      | (?:(?:api|gist|codeload)\.)?github\.com | (?:raw|objects|gist|media|release-assets)\.githubusercontent\.com
      | gitlab\.com | bitbucket\.org | codeberg\.org | huggingface\.co
      | (?:www\.)?(?:dropbox|dropboxusercontent|pastebin)\.com | (?:drive|docs|www)\.googleapis\.com
      | drive\.google\.com | cdn\.jsdelivr\.net | unpkg\.com | transfer\.sh | web\.archive\.org
      | api\.telegram\.org )""",
    re.VERBOSE | re.ASCII,
)
#: Zones in which anyone may register a name.
_SHARED_BELOW = """
    s3.amazonaws.com amazonaws.com cloudfront.net googleapis.com appspot.com run.app web.app firebaseio.com
    windows.net azureedge.net azurewebsites.net githubusercontent.com github.io gitlab.io workers.dev pages.dev r2.dev
    cloudflarestorage.com digitaloceanspaces.com backblazeb2.com wasabisys.com vercel.app netlify.app herokuapp.com
    onrender.com fly.dev ngrok.io ngrok.app ngrok-free.app trycloudflare.com hf.space fastly.net akamaized.net
""".split()  # noqa: SIM905 - a table for people


def shared_host_note(pattern: str) -> str | None:
    """Return a warning if the hosts of a pattern serve content of arbitrary owners, or None.

    Parameters
    ----------
    pattern : str
        Well-formed pattern.

    Returns
    -------
    str or None
        Sentence for the administrator, or None.
    """
    parsed = parse_pattern(pattern)
    if parsed.is_below and not parsed.name:
        return "* allows every public host: code inside can send data to anyone"
    if parsed.is_below:
        reach = [zone for zone in _SHARED_BELOW if zone == parsed.name or zone.endswith("." + parsed.name)]
        is_shared = bool(reach)
    else:
        is_shared = _SHARED_NAMES.fullmatch(parsed.name) is not None
    if not is_shared:
        return None
    return (
        f"{pattern} is shared by many owners, and a host name cannot restrict access to one of them: "
        "code inside can fetch anyone's files there, and send data to an account of its own"
    )
