"""Runs an application on uvicorn: who may ask, how large and how slow a request may be, and how the server ends.

A request passes, in this order: the names of this machine (without a token), `OriginCheck`, CORS for the origins that
are allowed, and `Guard` with the token, the limits and the client that leaves.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import re
import traceback
from collections.abc import Collection
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.remote import TOKEN
from rgate_integrations.serving.wire import METHODS, problem

_log = logging.getLogger("rgate_integrations.serving")

_OPEN = ("/health", "/ready")  # asked by what starts and stops servers, which has no token
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s*A-Z]+")
_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_LARGEST_HEADERS = 32 << 10
_LARGEST_BODY = 16 << 20
_PATIENCE = 10.0
_FRAMES = 5  # of a traceback that are logged
_LAST_SECONDS = 30  # for what is being answered when the server is asked to end


def make_server(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    token: str = "",
    allow_origins: Collection[str] = (),
    patience: float = _PATIENCE,
) -> uvicorn.Server:
    """Return a server for an application; its ``run`` listens until the process is asked to end.

    Args:
        app: The application.
        host: Address to listen on.
        port: Port; 0 for any that is free.
        token: The bearer token that requests must have. Without one only this machine can be served.
        allow_origins: Origins whose web pages may ask, such as ``http://localhost:3000``.
        patience: Seconds that the headers of a request, and then its body, may take to come.

    Raises:
        ConfigurationError: Other machines could ask without a token, the token cannot be sent, or an origin is none.
    """
    app = protect(app, token=token, allow_origins=allow_origins, patience=patience)
    if not token.strip():
        if host not in _LOOPBACK:
            raise ConfigurationError(
                f"Other machines can reach {host}, and there is no token.",
                hint=f"Set {TOKEN} to a secret, or listen on 127.0.0.1.",
            )
        # Against DNS rebinding: a page of another name that leads to this machine has its own origin.
        app = TrustedHostMiddleware(app, allowed_hosts=["localhost", "127.0.0.1", "[::1]"])
    config = uvicorn.Config(
        app,
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


def protect(
    app: ASGIApp, *, token: str = "", allow_origins: Collection[str] = (), patience: float = _PATIENCE
) -> ASGIApp:
    """Return an application that is asked only what `make_server` lets through, on whatever server it runs.

    Args:
        app: The application.
        token: The bearer token that requests must have, without the white space around it, as clients send it; empty
            for none.
        allow_origins: Origins whose web pages may ask.
        patience: Seconds that the body of a request may take to come.

    Raises:
        ConfigurationError: The token cannot be sent, or an origin is not one.
    """
    token = token.strip()
    if not (token.isascii() and token.isprintable()):
        raise ConfigurationError("The token is not text of printable ASCII characters.", hint=f"Set {TOKEN}.")
    for origin in allow_origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigurationError(
                f"{origin!r} is not an origin.", hint="Scheme, host and port, such as http://localhost:3000"
            )
    app = Guard(app, token=token, patience=patience)
    if allow_origins:
        # Before the guard: browsers ask without the token whether a page may ask.
        app = CORSMiddleware(
            app, allow_origins=allow_origins, allow_methods=METHODS, allow_headers=["*"], expose_headers=["*"]
        )
    return OriginCheck(app, allow_origins)


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


class OriginCheck:
    """ASGI middleware: refuses what a page of another origin asks, whatever the route.

    Browsers send ``Sec-Fetch-Site`` with every request to this machine or over TLS, and ``Origin`` with all but plain
    GET and HEAD. Other clients send neither.

    Args:
        app: The application.
        allowed: Origins whose pages may ask.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str] = ()) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http" and not self._may_ask(scope["method"], Headers(scope=scope)):
            message = "Web pages of other origins may not ask this server."
            response = problem(
                403, "ForbiddenOrigin", message, "rgate serve --allow-origin names one that may."
            )
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _may_ask(self, method: str, headers: Headers) -> bool:
        origins = headers.getlist("origin")
        if origins and all(origin in self._allowed for origin in origins):
            return True
        if origins and method == "OPTIONS" and "access-control-request-method" in headers:
            return False  # a page has no need to ask whether it may ask its own origin
        host = headers.get("host", "").lower()
        own = (f"http://{host}", f"https://{host}")
        sites = headers.getlist("sec-fetch-site")
        return all(origin.lower() in own for origin in origins) and all(
            site.strip().lower() in ("same-origin", "none") for site in sites
        )


class Guard:
    """ASGI middleware: refuses what is not allowed, too large or too slow, and cancels what no client waits for.

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
        authorization = Headers(scope=scope).get("authorization", "").encode("latin-1")
        is_open = scope["method"] == "GET" and scope["path"] in _OPEN
        body: bytes | Response | None
        if self._expected and not is_open and not hmac.compare_digest(authorization, self._expected):
            message = "The bearer token is missing or wrong."
            body = problem(401, "Unauthorized", message, headers={"www-authenticate": "Bearer"})
        else:
            body = await self._read_body(Request(scope, receive))
        if isinstance(body, Response):
            await body(scope, receive, send)
        elif body is not None:
            await self._answer(scope, body, receive, send)

    async def _read_body(self, request: Request) -> bytes | Response | None:
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
        leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            pass  # the server ends and waits no longer; raised, uvicorn would log a traceback
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


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
