"""HTTP requests with limits on time and size, without cookies or compression."""

from __future__ import annotations

import asyncio
import ipaddress
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
"""Maximum size of an answer in bytes; 4,000 tokens with 20 log-probabilities each take 8 MB."""


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
        """The body as text, for error messages; always read as UTF-8, whatever charset the server names."""
        return self.content.decode(errors="replace")


def make_client(
    url: str, headers: Mapping[str, str], *, timeout: httpx.Timeout | None = None, keepalive: float = 5.0
) -> httpx.AsyncClient:
    """Return a client that sends requests to one server, and keeps no cookies.

    Args:
        url: The server's base URL. If its host is ``localhost`` or a loopback address, the environment's
            proxy server, which would see the key, is not used.
        headers: Headers of every request. The login goes here and not into the URL, because httpx logs URLs.
        timeout: Timeout for connecting and between two parts of an answer; None if the client is used with `request`,
            which has a single deadline for everything.
        keepalive: Seconds to keep an unused connection.

    Raises:
        ConfigurationError: The environment's proxy server cannot be used.
    """
    import httpx

    try:
        return httpx.AsyncClient(
            # Without compression, so that an answer takes no more memory than its limited size.
            headers={"Accept-Encoding": "identity", **headers},
            # Accepts no cookies, which would link one user's request to another's.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            timeout=timeout,
            # No limit, because the callers limit the number of requests.
            limits=httpx.Limits(max_connections=None, keepalive_expiry=keepalive),
            verify=_ssl_context(),
            trust_env=not _is_loopback(httpx.URL(url).host),
        )
    except (ImportError, httpx.InvalidURL, ValueError):
        # Not chained, because these errors quote parts of the proxy server's login.
        raise ConfigurationError(
            "The proxy settings in the environment (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY) cannot be used.",
            hint="In a proxy's URL, percent-encode the user name and the password: / is %2F, @ is %40, : is %3A. "
            'SOCKS needs pip install "httpx[socks]". In NO_PROXY, write IPv6 addresses like fe80::1, with neither '
            "brackets nor a prefix length.",
        ) from None


async def request(
    client: httpx.AsyncClient, method: str, url: str, *, seconds: float, body: Any = None
) -> Answer:
    """Send a request, and return the complete answer, whatever its status.

    Args:
        client: A client from `make_client`.
        method: The HTTP method.
        url: The URL.
        seconds: Deadline for everything: connecting, sending, and the last byte of the answer.
        body: A JSON value; None for no body.

    Raises:
        TimeoutError: The answer was not complete in time.
        httpx.RequestError: The server cannot be reached, or the connection broke.
        ServerError: The answer is longer than `LONGEST_BODY`.
    """
    headers = {} if body is None else {"Content-Type": "application/json"}
    # Unlike httpx's `json=`, this escapes lone surrogates.
    content = None if body is None else json_line(body).encode()
    # httpx only limits the wait for each part, so a server that sends a byte a second would never time out.
    async with (
        asyncio.timeout(seconds),
        client.stream(method, url, content=content, headers=headers) as response,
    ):
        received = bytearray()
        # Raw bytes, because a megabyte of unrequested gzip can unpack to gigabytes.
        async for part in response.aiter_raw():
            received += part
            if len(received) > LONGEST_BODY:
                raise ServerError(
                    f"The answer from {url} is larger than {LONGEST_BODY >> 20} MiB; the rest was not read.",
                    hint="Check that the URL points to an LLM server or a decision server.",
                )
        return Answer(response.status_code, response.headers, bytes(received))


def run_requests(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine in another thread, since the caller's thread may run an event loop, and return its result."""
    return Start(Call(_run_on_own_loop, None, coroutine)).run().run()


def _run_on_own_loop(coroutine: Coroutine[Any, Any, _T]) -> _T:
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        # Not `asyncio.run`, which would also wait for host name look-ups, which cannot be interrupted.
        loop.close()


def _is_loopback(host: str) -> bool:
    """Return whether a host is this machine.

    True for ``localhost``, names that end in ``.localhost``, loopback addresses, and unspecified addresses such as
    ``0.0.0.0``.
    """
    host = host.rstrip(".")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


@cache
def _ssl_context() -> ssl.SSLContext:
    """Return the context that checks certificates, cached because loading the root certificates takes 20 ms."""
    import httpx

    return httpx.create_ssl_context()
