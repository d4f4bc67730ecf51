"""Serve the page for reading and trying the API. It consists of two local files, so it works offline."""

from __future__ import annotations

from importlib.resources import files

from jupyter_server.auth.decorator import authorized
from tornado import web

from .identity import RESOURCE, TokenMixin


class _PageHandler(TokenMixin):
    auth_resource = RESOURCE

    @property
    def content_security_policy(self) -> str:
        """Allow only our own script, and connections to this server only."""
        return (
            f"{super().content_security_policy}; default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; "
            "connect-src 'self'"
        )

    def send(self, name: str, content_type: str) -> None:
        """Send a file of the package."""
        self.set_header("Content-Type", f"{content_type}; charset=UTF-8")
        self.set_header("Cache-Control", "no-cache")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.finish((files("jupyter_agentbox.api") / "static" / name).read_bytes())


class PageHandler(_PageHandler):
    """The documentation page."""

    @web.authenticated
    @authorized("read", RESOURCE)  # type: ignore[untyped-decorator]
    def get(self) -> None:
        """Send the page."""
        _ = self.xsrf_token  # sets the cookie that the page's calls need
        self.send("docs.html", "text/html")


class ScriptHandler(_PageHandler):
    """The page's script."""

    @web.authenticated
    @authorized("read", RESOURCE)  # type: ignore[untyped-decorator]
    def get(self) -> None:
        """Send the script."""
        self.send("docs.js", "text/javascript")
