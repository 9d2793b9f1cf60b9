"""Which web pages may ask a server of ours: only its own, and those of origins that its operator names."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rgate_integrations.serving.wire import problem


class OriginCheck:
    """ASGI middleware: refuses what a page of another origin asks, whatever the route.

    Browsers send ``Sec-Fetch-Site`` with every request to this machine or over TLS, and ``Origin`` with all but plain
    GET and HEAD. Other clients send neither.

    Args:
        app: The application.
        allowed: Origins whose pages may ask, such as ``http://localhost:3000``.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str] = ()) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http" and not self._may_ask(scope["method"], Headers(scope=scope)):
            message = "Web pages of other origins may not ask this server."
            response = problem(403, "ForbiddenOrigin", message, "--allow-origin names one that may.")
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _may_ask(self, method: str, headers: Headers) -> bool:
        origins = headers.getlist("origin")
        if origins and all(origin in self._allowed for origin in origins):
            return True
        if is_preflight(method, headers):  # a page has no need to ask for its own origin
            return False
        host = headers.get("host", "").lower()
        own = (f"http://{host}", f"https://{host}")
        sites = headers.getlist("sec-fetch-site")
        return all(origin.lower() in own for origin in origins) and all(
            site.strip().lower() in ("same-origin", "none") for site in sites
        )


def is_preflight(method: str, headers: Headers) -> bool:
    """Return whether a browser asks if a page may ask; that request has no token."""
    return method == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers
