"""Runs the application on uvicorn: who may ask, how large and how slow a request may be, and how the server ends."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import traceback
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.remote import TOKEN
from rgate_integrations.serving.origins import is_preflight
from rgate_integrations.serving.wire import problem

_log = logging.getLogger("rgate_integrations.serving")

_OPEN = ("/health", "/ready")  # asked by what starts and stops servers, which has no token
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_LARGEST_HEADERS = 32 << 10
_LARGEST_BODY = 16 << 20
_PATIENCE = 10.0
_FRAMES = 5  # of a traceback that are logged
_LAST_SECONDS = 30  # for what is being answered when the server is told to end


def make_server(
    app: ASGIApp, host: str, port: int, *, token: str = "", patience: float = _PATIENCE
) -> uvicorn.Server:
    """Return a server for an application; its ``run`` listens until the process is told to end.

    Args:
        app: The application.
        host: Address to listen on.
        port: Port; 0 for any that is free.
        token: The bearer token that requests must have, without the white space around it, as clients send it.
            Without one only this machine can be served.
        patience: Seconds that the headers of a request, and then its body, may take to come.

    Raises:
        ConfigurationError: Other machines could ask, and there is no token; or it cannot be sent.
    """
    token = token.strip()
    if not (token.isascii() and token.isprintable()):
        raise ConfigurationError("The token is not text of printable ASCII characters.", hint=f"Set {TOKEN}.")
    if not token:
        if host not in _LOOPBACK:
            raise ConfigurationError(
                f"Other machines can reach {host}, and there is no token.",
                hint=f"Set {TOKEN} to a secret, or listen on 127.0.0.1.",
            )
        # Web pages that a user of this machine visits know no secret either, but they have another host's name.
        app = TrustedHostMiddleware(app, allowed_hosts=["localhost", "127.0.0.1", "[::1]"])
    config = uvicorn.Config(
        Guard(app, token=token, patience=patience),
        host,
        port,
        http=_TimedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=_LARGEST_HEADERS,
        timeout_keep_alive=patience,  # type: ignore[arg-type]  # it may be a part of a second
        timeout_graceful_shutdown=_LAST_SECONDS,
    )
    return uvicorn.Server(config)


class _TimedProtocol(H11Protocol):
    """HTTP/1.1 whose request headers must be whole in time: uvicorn bounds only the wait for their first byte."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._late = self.loop.call_later(self.timeout_keep_alive, self._hang_up)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._late.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # and the next request has not come already
            self._late = self.loop.call_later(self.timeout_keep_alive, self._hang_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.cancel()
        super().connection_lost(exc)

    def _hang_up(self) -> None:
        self.transport.write(_LATE)
        self.transport.close()


class Guard:
    """ASGI middleware: refuses what is not allowed, too large or too slow, and cancels what nobody waits for.

    Args:
        app: The application.
        token: The bearer token that requests must have; empty for none.
        patience: Seconds that the body of a request may take to come.
    """

    def __init__(self, app: ASGIApp, *, token: str = "", patience: float = _PATIENCE) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode() if token else b""
        self._patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("authorization", "").encode("latin-1")
        body: bytes | Response | None
        if self._expected and not _is_open(scope) and not hmac.compare_digest(given, self._expected):
            message = "The bearer token is missing or wrong."
            body = problem(401, "Unauthorized", message, headers={"www-authenticate": "Bearer"})
        else:
            body = await self._body(Request(scope, receive))
        if isinstance(body, Response):
            await body(scope, receive, send)
        elif body is not None:
            await self._answer(scope, body, receive, send)

    async def _body(self, request: Request) -> bytes | Response | None:
        """Return the body, or the response to one that is too large or too slow; None if its client has left."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._patience):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > _LARGEST_BODY:
                        too_large = f"A request may have {_LARGEST_BODY:,} bytes."
                        return problem(413, "TooLarge", too_large, headers={"connection": "close"})
        except TimeoutError:
            return problem(408, "TooSlow", "The body did not come in time.", headers={"connection": "close"})
        except ClientDisconnect:
            return None
        return bytes(body)

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Let the application answer, and stop it when its client leaves."""
        # Who leaves is noticed here: after the body, the application waits for another message in vain.
        messages: asyncio.Queue[Message] = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": body, "more_body": False})
        is_answered = asyncio.Event()

        async def send_on(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                is_answered.set()

        answering = asyncio.ensure_future(self._app(scope, messages.get, send_on))
        leaving = asyncio.ensure_future(_leaving(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            # A client may leave once it has its answer: MCP's sessions begin after that.
            if not is_answered.is_set():
                answering.cancel()  # nothing happens to one that is done
        try:
            await answering
        except asyncio.CancelledError:
            pass
        except Exception as error:
            # Not raised: uvicorn would log its message, which may quote a question.
            frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
            places = [f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in frames]
            _log.error("A request failed: %s at %s", type(error).__name__, " > ".join(places))


def _is_open(scope: Scope) -> bool:
    """Whether a request needs no token: browsers ask without it whether a page may ask, and `OriginCheck` answers."""
    is_health = scope["method"] == "GET" and scope["path"] in _OPEN
    return is_health or is_preflight(scope["method"], Headers(scope=scope))


async def _leaving(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
