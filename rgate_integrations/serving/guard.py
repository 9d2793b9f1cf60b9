"""What every request passes first: the token, the limits of size and time, and that its client is still there."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rgate_integrations.serving.wire import Problem, ProblemResponse

_OPEN = ("/health", "/ready")
"""Asked by what starts and stops servers, which has no token."""


@dataclass(frozen=True)
class Limits:
    """What one request may take.

    Attributes:
        body: Bytes of its body.
        seconds: How long its body may take to come.
    """

    body: int = 16 << 20
    seconds: float = 10.0


class Guard:
    """ASGI middleware: refuses what is not allowed, too large or too slow, and cancels what nobody waits for.

    Args:
        app: The application.
        token: The bearer token that requests must have; empty for none.
        limits: What a request may take.
    """

    def __init__(self, app: ASGIApp, *, token: str = "", limits: Limits | None = None) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode() if token else b""
        self._limits = limits or Limits()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if scope["path"] not in _OPEN and not self._is_allowed(headers):
            refusal = problem(401, "Unauthorized", "The bearer token is missing or wrong.")
            refusal.headers["www-authenticate"] = "Bearer"
            await refusal(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._limits.seconds):
                body = await self._body(headers, receive)
        except TimeoutError:
            body = problem(408, "TooSlow", "The body did not come in time.")
        if body is None:  # its client has left
            return
        if isinstance(body, Response):
            body.headers["connection"] = "close"
            await body(scope, receive, send)
            return
        await self._answer(scope, body, receive, send)

    def _is_allowed(self, headers: Headers) -> bool:
        given = headers.get("authorization", "").encode("latin-1")
        return not self._expected or hmac.compare_digest(given, self._expected)

    async def _body(self, headers: Headers, receive: Receive) -> bytes | Response | None:
        most = self._limits.body
        too_large = problem(413, "TooLarge", f"A request may have {most:,} bytes.")
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > most:
            return too_large
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > most:
                return too_large
            if not message.get("more_body", False):
                return bytes(body)

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Let the application answer, and stop it when its client leaves."""
        began = time.perf_counter()
        timings = scope.setdefault("state", {}).setdefault("timings", {})
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            if not pending:
                await asyncio.Event().wait()  # until it is cancelled: who leaves is noticed here, below
            return pending.pop()

        async def timed(message: Message) -> None:
            if message["type"] == "http.response.start":
                parts = [f"{name};dur={milliseconds:.1f}" for name, milliseconds in timings.items()]
                parts.append(f"total;dur={(time.perf_counter() - began) * 1e3:.1f}")
                MutableHeaders(scope=message).append("server-timing", ", ".join(parts))
            await send(message)

        answering = asyncio.ensure_future(self._app(scope, replay, timed))
        leaving = asyncio.ensure_future(_leaving(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                answering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answering
        finally:
            answering.cancel()
            leaving.cancel()


def problem(status: int, kind: str, message: str, hint: str = "") -> Response:
    """Return the response that says what went wrong."""
    body = ProblemResponse(error=Problem(message=message, type=kind, hint=hint))
    return Response(body.model_dump_json(), status, media_type="application/json")


async def _leaving(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
