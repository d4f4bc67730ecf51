"""Egress by name: what may leave a sandbox, and the one gate that it leaves through.

A sandbox has no network. The guest accepts connections on loopback addresses and hands each one, unread,
to the host as a stream of the link; here the stream is parsed, decided, dialled and logged.

- :mod:`.rules` decides: patterns, names, addresses. No input or output.
- :mod:`.wire` and :mod:`.http1` read bytes: TLS hello, SOCKS5, DNS; HTTP/1.1. No input or output.
- :mod:`.dial` looks a name up once and dials the answer.
- :mod:`.forward` carries allowed bytes both ways, :mod:`.http_forward` request by request.
- :mod:`.gate` ties these together for one sandbox.
- :mod:`.presets` reads the hosts of package managers from their own configuration.

Words: a *pattern* is one entry of an allowlist, a *rule* the pattern that allowed something, a *grant* all that one
sandbox may reach, a *refusal* a decision against the guest, told to it in one sentence that names the setting.
"""

from __future__ import annotations

#: Where the guest listens inside.
HTTP_PROXY_ADDRESS = ("127.0.0.1", 3128)
SOCKS_ADDRESS = ("127.0.0.1", 1080)

_PROXY = "http://{}:{}".format(*HTTP_PROXY_ADDRESS)
_NO_PROXY = "localhost,127.0.0.1,::1"

#: Variables for code inside, so that programs use the proxy and show its refusals in their own errors.
#: Servers inside the sandbox are reached directly. ``all_proxy`` and ``ws_proxy`` stay unset: several clients fail at
#: a SOCKS address for want of an optional package, and whatever knows no proxy gets out transparently by name anyway.
PROXY_ENV = {
    "http_proxy": _PROXY,
    "https_proxy": _PROXY,
    "HTTP_PROXY": _PROXY,
    "HTTPS_PROXY": _PROXY,
    "no_proxy": _NO_PROXY,
    "NO_PROXY": _NO_PROXY,
}
