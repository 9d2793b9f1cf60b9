"""Runs an application on uvicorn: checks clients, limits large and slow requests, shuts down gracefully.

`Guard` checks every request, and cancels it if its client disconnects. If web pages of other origins are allowed,
CORS answers their preflight requests before the guard, because browsers send these without the token.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import traceback
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.remote import TOKEN
from rgate_integrations.serving import logger
from rgate_integrations.serving.wire import METHODS, problem

_OPEN = ("/health", "/ready")  # the probes of an orchestrator have no token
# Only processes on this machine can reach these addresses, so they need no token.
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_OWN_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s*A-Z]+")
# As bytes: without complete headers there is no request that the application could answer.
_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_MAX_HEADERS = 32 << 10
# Requests with images are a few MiB.
_MAX_BODY = 16 << 20
_RECEIVE_TIMEOUT = 10.0  # seconds
_FRAMES = 5  # number of frames of a traceback to log
_SHUTDOWN_SECONDS = 30  # how long shutdown waits for open requests


def make_server(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    token: str = "",
    allow_origins: Collection[str] = (),
    receive_timeout: float = _RECEIVE_TIMEOUT,
) -> uvicorn.Server:
    """Return a server for an application; its ``run`` listens until a signal stops the process.

    Args:
        app: The application.
        host: Address to listen on.
        port: Port; 0 for any free port.
        token: The bearer token that clients must send, except to ``/health`` and ``/ready``. Without one,
            only loopback addresses are allowed.
        allow_origins: Origins whose web pages may send requests, such as ``http://localhost:3000``.
        receive_timeout: Seconds for the headers of a request to arrive, and then for its body.

    Raises:
        ConfigurationError: Other machines could connect without a token, or the token or an origin is invalid.
    """
    token = token.strip()
    _check_access(host, token, allow_origins)
    app = Guard(app, token=token, allow_origins=allow_origins, receive_timeout=receive_timeout)
    if allow_origins:
        app = CORSMiddleware(
            app, allow_origins=allow_origins, allow_methods=METHODS, allow_headers=["*"], expose_headers=["*"]
        )
    config = uvicorn.Config(
        app,
        host,
        port,
        http=_TimedProtocol,
        # No route is a WebSocket, and the guard only checks HTTP.
        ws="none",
        lifespan="on",
        log_config=None,
        # URLs may contain questions, which do not belong in a log.
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=_MAX_HEADERS,
        # `_TimedProtocol` reads it as the limit for complete headers.
        timeout_keep_alive=receive_timeout,  # type: ignore[arg-type]  # uvicorn also accepts a float
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
    return uvicorn.Server(config)


def _check_access(host: str, token: str, allow_origins: Collection[str]) -> None:
    """Check the options of `make_server` that decide who may connect.

    Raises:
        ConfigurationError: Other machines could connect without a token, or the token or an origin is invalid.
    """
    if not token and host not in _LOOPBACK:
        raise ConfigurationError(
            f"Other machines can reach a server on {host!r}, but no token is set.",
            hint=f"Set the environment variable {TOKEN} to a secret, or listen on 127.0.0.1 (--host).",
        )
    if not (token.isascii() and token.isprintable()):
        raise ConfigurationError(
            "The token has characters that are not printable ASCII.",
            hint=f"Use only printable ASCII in {TOKEN}.",
        )
    for origin in allow_origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigurationError(
                f"Invalid origin {origin!r} in allow_origins (--allow-origin).",
                hint="Write scheme, host and port in lower case, without a path, such as "
                "http://localhost:3000.",
            )


class _TimedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, with a limit on the time until the headers of a request are complete."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._late = self.loop.call_later(self.timeout_keep_alive, self._hang_up)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._late.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # and the next request has not arrived yet
            self._late = self.loop.call_later(self.timeout_keep_alive, self._hang_up)

    def connection_lost(self, exc: Exception | None) -> None:
        # Otherwise the timer would keep the closed connection in memory until it fires.
        self._late.cancel()
        super().connection_lost(exc)

    def _hang_up(self) -> None:
        # Straight to the transport, because h11 may be in the middle of the headers.
        self.transport.write(_LATE)
        self.transport.close()


class Guard:
    """ASGI middleware that checks clients, limits bodies, and cancels requests whose client disconnects.

    In this order, it rejects requests

    - to a host name that is not one of this machine, if no token is set: in DNS rebinding, a web page makes its own
      host name resolve to this machine, so that its requests come from the same origin;
    - from web pages of other origins, unless allowed. Browsers reveal them: with ``Sec-Fetch-Site`` in every
      request to this machine or over TLS, and with ``Origin`` in all but plain GET and HEAD requests. A request
      with neither header passes, because other clients send neither;
    - without the token, except GET and HEAD requests to ``/health`` and ``/ready``;
    - whose body has more than 16 MiB, or arrives too slowly.

    Args:
        app: The application.
        token: The bearer token that clients must send; empty for none.
        allow_origins: Origins whose web pages may send requests.
        receive_timeout: Seconds for the body of a request to arrive.
    """

    def __init__(
        self, app: ASGIApp, *, token: str, allow_origins: Collection[str], receive_timeout: float
    ) -> None:
        self._app = app
        self._expected = f"bearer {token}".encode() if token else b""
        self._allow_origins = allow_origins
        self._receive_timeout = receive_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        body = self._refuse(request) or await self._read_body(request)
        if isinstance(body, Response):
            await body(scope, receive, send)
        elif body is not None:
            await self._answer(scope, body, receive, send)

    def _refuse(self, request: Request) -> Response | None:
        """Return the error response to a client that may not send this request; None if it may."""
        host = request.headers.get("host", "")
        if not self._expected and not _OWN_HOST.fullmatch(host):
            return problem(
                400,
                "InvalidHost",
                f"The header Host is {host[:100]!r}, not a name of this machine, and no token is set.",
                f"Send the request to 127.0.0.1; or start the server with a secret in {TOKEN}, and send it as the "
                "bearer token.",
            )
        if not self._allows_origin(request):
            return problem(
                403,
                "ForbiddenOrigin",
                "Web pages of other origins may not send requests to this server.",
                "Allow the origin: allow_origins= (rgate serve --allow-origin).",
            )
        # The root path is the prefix of a mounted application.
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        is_open = request.method in ("GET", "HEAD") and path in _OPEN
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        authorization = f"{scheme.lower()} {credentials}".encode("latin-1")
        # In constant time, which does not reveal how much of a guessed token is right.
        if self._expected and not is_open and not hmac.compare_digest(authorization, self._expected):
            return problem(
                401,
                "Unauthorized",
                "The bearer token is missing or wrong.",
                f"Send the header Authorization: Bearer TOKEN, with the server's {TOKEN}.",
                headers={"www-authenticate": "Bearer"},
            )
        return None

    def _allows_origin(self, request: Request) -> bool:
        """Return whether a request comes from an allowed web page, a page of this server, or no page."""
        # A request may repeat the header: all of its values are checked.
        headers = request.headers
        origins = headers.getlist("origin")
        if origins and all(origin in self._allow_origins for origin in origins):
            return True
        if origins and request.method == "OPTIONS" and "access-control-request-method" in headers:
            return False  # a preflight: a page sends none to its own origin
        host = headers.get("host", "").lower()
        same_origin = (f"http://{host}", f"https://{host}")
        sites = headers.getlist("sec-fetch-site")
        return all(origin.lower() in same_origin for origin in origins) and all(
            site.strip().lower() in ("same-origin", "none") for site in sites
        )

    async def _read_body(self, request: Request) -> bytes | Response | None:
        """Return the body, an error response if it is too large or slow, or None if the client disconnected."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._receive_timeout):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > _MAX_BODY:
                        return problem(
                            413,
                            "TooLarge",
                            f"The body is larger than {_MAX_BODY:,} bytes.",
                            "Send a smaller body.",
                            headers={"connection": "close"},
                        )
        except TimeoutError:
            return problem(
                408,
                "TooSlow",
                f"The body did not arrive within {self._receive_timeout:g} s.",
                "Try again, or send a smaller body.",
                headers={"connection": "close"},
            )
        except ClientDisconnect:
            return None
        return bytes(body)

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run the application, and cancel it if its client disconnects before the answer is complete."""
        # We watch for the disconnect here, so the application receives the body and no further message.
        messages: asyncio.Queue[Message] = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": body, "more_body": False})
        is_answered = asyncio.Event()

        async def send_on(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                is_answered.set()

        answering = asyncio.ensure_future(self._app(scope, messages.get, send_on))
        leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
        # Cancelled when the server shuts down and waits no longer; if we raised, uvicorn would log a traceback.
        with suppress(asyncio.CancelledError):
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        # A client may disconnect after its answer, and MCP sessions go on after that.
        if not is_answered.is_set():
            answering.cancel()  # without effect if it is done
        try:
            await answering
        except asyncio.CancelledError:
            pass
        except Exception as error:
            # Not raised, because uvicorn would log the message, which may quote a question.
            frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
            locations = [f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in frames]
            logger.error("A request failed: %s at %s", type(error).__name__, " > ".join(locations))


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
