"""HTTP requests with bounds on time and size, without cookies or compression."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any, TypeVar

from rgate_integrations.errors import ConfigurationError, ServerError
from rgate_integrations.runtime.files import json_line
from rgate_integrations.runtime.flow import Call, Start

if TYPE_CHECKING:
    import ssl

    import httpx

_T = TypeVar("_T")

LONGEST_BODY = 16 << 20
"""Maximum bytes of an answer; 4,000 tokens with 20 log-probabilities each take 8 MB."""


@dataclass(frozen=True)
class Answer:
    """A server's answer.

    Attributes:
        status: The status code.
        headers: The headers.
        content: The body.
    """

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def text(self) -> str:
        """The body as text, for errors; the server's charset is ignored."""
        return self.content.decode(errors="replace")


def make_client(
    url: str, headers: Mapping[str, str], *, timeout: httpx.Timeout | None = None, keepalive: float = 5.0
) -> httpx.AsyncClient:
    """Return a client for a server, which keeps no cookies.

    Args:
        url: The server's base URL. On this machine the environment's proxy server is not used: it would get the key.
        headers: Sent with every request. The login goes here, not into the URL, which httpx logs.
        timeout: Of connecting, and between two parts of an answer; None for `request`, which has one deadline for
            everything.
        keepalive: Seconds that an unused connection is kept.

    Raises:
        ConfigurationError: The environment's proxy server cannot be used.
    """
    import httpx

    try:
        return httpx.AsyncClient(
            headers={"Accept-Encoding": "identity", **headers},
            # A jar that accepts no domain: a cookie would link one user's request to another's.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            timeout=timeout,
            # The callers limit the number of requests.
            limits=httpx.Limits(max_connections=None, keepalive_expiry=keepalive),
            verify=_ssl_context(),
            trust_env=not _is_loopback(httpx.URL(url).host),
        )
    except (
        ImportError,
        httpx.InvalidURL,
        ValueError,
    ):  # not chained: they quote parts of the proxy server's login
        raise ConfigurationError(
            "A proxy server that the environment names (such as HTTPS_PROXY or ALL_PROXY) cannot be used.",
            hint="Percent-encode user and password in it: / is %2F, @ is %40, : is %3A. "
            'One of SOCKS needs: pip install "httpx[socks]".',
        ) from None


async def request(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    seconds: float,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Send a request, and return the whole answer.

    Args:
        client: Of `make_client`.
        method: The HTTP method.
        url: The URL.
        seconds: Deadline for everything: connecting, sending, and the last byte of the answer.
        body: A JSON value; None for no body.
        headers: Further headers.

    Raises:
        TimeoutError: The answer is not complete in time.
        httpx.RequestError: The server cannot be reached, or breaks off.
        ServerError: The answer is longer than `LONGEST_BODY`.
    """
    headers = dict(headers or {})
    content = None
    if body is not None:
        headers["Content-Type"] = "application/json"
        content = json_line(body).encode()  # not httpx's `json=`: this escapes halves of surrogate pairs
    # httpx limits only the wait for each part: a server that sends a byte a second would never be late.
    async with (
        asyncio.timeout(seconds),
        client.stream(method, url, content=content, headers=headers) as response,
    ):
        received = bytearray()
        # Raw: a megabyte of gzip, which was not requested, can be gigabytes.
        async for part in response.aiter_raw():
            received += part
            if len(received) > LONGEST_BODY:
                raise ServerError(
                    f"{url} answered more than {LONGEST_BODY >> 20} MiB; the rest was not read."
                )
        return Answer(response.status_code, response.headers, bytes(received))


def run_requests(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine in another thread, since the caller's may run an event loop, and return its result."""
    result: _T = Start(Call(_run_on_own_loop, None, coroutine)).run().run()
    return result


def _run_on_own_loop(coroutine: Coroutine[Any, Any, _T]) -> _T:
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        # `asyncio.run` would also wait for host name look-ups, which cannot be interrupted.
        loop.close()


def _is_loopback(host: str) -> bool:
    """Return whether a host is this machine, in any notation."""
    host = host.rstrip(".")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            address = ipaddress.ip_address(socket.inet_aton(host))  # such as 127.1
        except OSError:
            return host == "localhost" or host.endswith(".localhost")
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


@cache
def _ssl_context() -> ssl.SSLContext:
    """Return the context that checks certificates; cached, since reading those of all authorities takes 20 ms."""
    import httpx

    return httpx.create_ssl_context()
