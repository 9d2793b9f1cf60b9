"""Runs the application on uvicorn: who may listen where, how slow a client may be, and how the server ends."""

from __future__ import annotations

import asyncio
import ipaddress
from typing import Any

import uvicorn
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.models.decision_server import TOKEN
from rgate_integrations.serving.guard import Guard, Limits

_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_LARGEST_HEADERS = 32 << 10
_LAST_SECONDS = 30  # for what is being answered when the server is told to end


class _TimedProtocol(H11Protocol):
    """HTTP/1.1 whose request headers must be whole in time: uvicorn bounds only the wait for their first byte."""

    patience = 10.0
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._late = self.loop.call_later(self.patience, self._close_late)

    def data_received(self, data: bytes) -> None:
        if self._late is None and (self.cycle is None or self.cycle.response_complete):
            self._late = self.loop.call_later(self.patience, self._close_late)
        super().data_received(data)
        if self._late is not None and self.cycle is not None and not self.cycle.response_complete:
            self._late.cancel()
            self._late = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def _close_late(self) -> None:
        self._late = None
        self.transport.write(_LATE)
        self.transport.close()


def make_server(
    app: ASGIApp, host: str, port: int, *, token: str = "", limits: Limits | None = None
) -> uvicorn.Server:
    """Return a server for an application; its ``run`` listens until the process is told to end.

    Args:
        app: The application.
        host: Address to listen on.
        port: Port; 0 for any that is free.
        token: The bearer token that requests must have. Without one only this machine can be served.
        limits: What a request may take.

    Raises:
        ConfigurationError: Other machines could ask, and there is no token.
    """
    limits = limits or Limits()
    if not token:
        if not _is_loopback(host):
            raise ConfigurationError(
                f"Other machines can reach {host}, and there is no token.",
                hint=f"Set {TOKEN} to a secret, or listen on 127.0.0.1.",
            )
        # Web pages that a user of this machine visits know no secret either, but they have another host's name.
        app = TrustedHostMiddleware(app, allowed_hosts=["localhost", "127.0.0.1", "[::1]", host])
    protocol = type("Protocol", (_TimedProtocol,), {"patience": limits.seconds})
    config = uvicorn.Config(
        Guard(app, token=token, limits=limits),
        host,
        port,
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=_LARGEST_HEADERS,
        timeout_graceful_shutdown=_LAST_SECONDS,
    )
    return uvicorn.Server(config)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
