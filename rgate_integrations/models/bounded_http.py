"""Requests to servers of models and decisions: bounded in time and size, without cookies, and nothing is unpacked."""

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
"""Maximum bytes of an answer; 4,000 tokens with the 20 likeliest of each take 8 MB."""


@dataclass(frozen=True)
class Answer:
    """What a server answered.

    Attributes:
        status: The status code.
        headers: The headers.
        content: The body, as it was sent.
    """

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def text(self) -> str:
        """The body as text, for errors; the server's charset is not trusted."""
        return self.content.decode(errors="replace")


def make_client(
    url: str, headers: Mapping[str, str], *, timeout: httpx.Timeout | None = None, keepalive: float = 5.0
) -> httpx.AsyncClient:
    """Return a client for a server, which keeps no cookies.

    Args:
        url: The server's base. For this machine no proxy server of the environment is used: it would get the key.
        headers: Sent with every request. The login goes here, and not into the URL, which httpx writes to its log.
        timeout: Of connecting, and between two pieces of an answer; None for `request`, which has one deadline for
            everything.
        keepalive: Seconds that an unused connection is kept.

    Raises:
        ConfigurationError: A proxy server of the environment cannot be used.
    """
    import httpx

    try:
        return httpx.AsyncClient(
            headers={"Accept-Encoding": "identity", **headers},
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            timeout=timeout,
            # The callers bound how many requests there are.
            limits=httpx.Limits(max_connections=None, keepalive_expiry=keepalive),
            verify=_ssl_context(),
            trust_env=not _is_loopback(httpx.URL(url).host),
        )
    except (ImportError, httpx.InvalidURL, ValueError):  # messages quote parts of a proxy server's login
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
    """Send a request, and read the whole answer.

    Args:
        client: Of `make_client`.
        method: The HTTP method.
        url: The URL.
        seconds: Deadline for all of it: connecting, sending, and the answer, however slowly it comes.
        body: JSON values to send; None for no body.
        headers: More headers.

    Raises:
        TimeoutError: The answer is not complete.
        httpx.RequestError: The server cannot be reached, or breaks off.
        ServerError: The answer is longer than `LONGEST_BODY`.
    """
    more = dict(headers or {})
    content = None
    if body is not None:
        more["Content-Type"] = "application/json"
        content = json_line(body).encode()  # half a surrogate pair, which has no bytes, is escaped
    # httpx bounds the wait for each next piece: a server that sends a byte a second would never be late.
    async with (
        asyncio.timeout(seconds),
        client.stream(method, url, content=content, headers=more) as response,
    ):
        answered = bytearray()
        # Raw, not unpacked: a megabyte of gzip can be gigabytes, and none was asked for.
        async for part in response.aiter_raw():
            answered += part
            if len(answered) > LONGEST_BODY:
                raise ServerError(
                    f"{url} answered more than {LONGEST_BODY >> 20} MiB; the rest was not read."
                )
        return Answer(response.status_code, response.headers, bytes(answered))


def run_requests(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of a coroutine, which runs in a thread of its own: the caller's may run an event loop."""
    result: _T = Start(Call(_run_on_own_loop, None, coroutine)).run().run()
    return result


def _run_on_own_loop(coroutine: Coroutine[Any, Any, _T]) -> _T:
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        # `asyncio.run` would also wait for host names that are still looked up, which nothing can interrupt.
        loop.close()


def _is_loopback(host: str) -> bool:
    """Return whether a host is this machine, in whatever form it is written."""
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
    """Return what checks servers' certificates: reading those of all authorities takes 20 ms."""
    import httpx

    return httpx.create_ssl_context()
