"""Control which hosts a sandbox may reach, and carry its outgoing connections.

A sandbox has no network. The guest accepts connections on loopback addresses and hands each one, unparsed,
to the host as a stream of the link. The host parses the stream, decides, connects and writes to the audit log.

- :mod:`.rules` decides: patterns, names, addresses. No input or output.
- :mod:`.wire` and :mod:`.http1` parse bytes: TLS hello, SOCKS5, DNS; HTTP/1.1. No input or output.
- :mod:`.dial` looks a name up once and connects to the answer.
- :mod:`.forward` carries allowed bytes both ways, :mod:`.http_forward` request by request.
- :mod:`.gate` combines these for one sandbox.
- :mod:`.presets` reads the hosts of package managers from their own configuration.

Terms: a *pattern* is one entry of an allowlist. A *rule* is the pattern that allowed a connection. A *grant* is
everything that one sandbox may reach. A *refusal* is a decision against a connection; the guest receives it as one
sentence that names the setting.
"""

from __future__ import annotations

from jupyter_agentbox.spec import HOSTNAME

#: Addresses inside the sandbox on which the guest's proxies listen.
HTTP_PROXY_ADDRESS = ("127.0.0.1", 3128)
SOCKS_ADDRESS = ("127.0.0.1", 1080)

_PROXY = "http://{}:{}".format(*HTTP_PROXY_ADDRESS)
#: The sandbox's own names and addresses. Programs know different forms of them; the guest's proxy serves the rest.
_NO_PROXY = f"localhost,127.0.0.1,127.0.0.0/8,::1,0.0.0.0,{HOSTNAME}"

#: Environment variables for code inside, so that programs use the proxy and show its refusals in their own errors.
#: Servers inside the sandbox are reached directly. ``all_proxy`` and ``ws_proxy`` stay unset: several clients fail on
#: a SOCKS address when an optional package is missing, and programs without proxy support connect by name anyway.
PROXY_ENV = {
    "http_proxy": _PROXY,
    "https_proxy": _PROXY,
    "HTTP_PROXY": _PROXY,
    "HTTPS_PROXY": _PROXY,
    "no_proxy": _NO_PROXY,
    "NO_PROXY": _NO_PROXY,
}
