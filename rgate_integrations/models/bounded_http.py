"""HTTP requests with limits on time and size, without cookies or compression, and credentials, never shown."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import SecretStr

from rgate_integrations.errors import ConfigurationError, ServerError, needs_extra
from rgate_integrations.runtime.files import json_line
from rgate_integrations.runtime.flow import Call, Start

if TYPE_CHECKING:
    import ssl

    import httpx

_T = TypeVar("_T")

MAX_QUOTED = 300
"""Maximum characters of a server's message that an error quotes."""
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


# --- credentials ---------------------------------------------------------------------------------------------------

_MAX_PORT = 65535


@dataclass(frozen=True)
class Credentials:
    """An API key, a login, or neither. ``repr`` hides them; a pickle contains them, for worker processes.

    Attributes:
        headers: The headers to send.
        secrets: The texts to redact.
    """

    headers: dict[str, str] = field(default_factory=dict, repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def redact(self, text: str) -> str:
        """Replace the credentials in a text, because servers may echo them.

        Redact before truncating, because half a key would not be found.
        """
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def read_credentials(url: str, api_key: str | SecretStr | None) -> tuple[str, Credentials]:
    """Return a server's base URL without its login, and the credentials: that login, or the API key.

    Args:
        url: An http or https URL, without query and fragment.
        api_key: The key, which is stripped; None or an empty one means no key.

    Raises:
        ConfigurationError: The URL or the key is invalid, or both a key and a login were given. The message does not
            quote them.
        MissingDependencyError: The extra ``openai`` is not installed.
    """
    with needs_extra("openai"):
        import httpx
    try:
        parts = httpx.URL(url.strip())
    except httpx.InvalidURL:  # its message may quote a part of the password
        parts = httpx.URL("")
    is_server = parts.scheme in ("http", "https") and parts.host and (parts.port or 0) <= _MAX_PORT
    # An @ in the path means an unencoded password: `http://user:1/2@host` parses as host, port and path, so the
    # password would be shown.
    if not is_server or parts.query or parts.fragment or "@" in parts.path:
        raise ConfigurationError(
            "The server's URL is invalid.",
            hint="Use one such as http://localhost:8000, or http://localhost:8000/v1 for an LLM's server. It may not "
            f"contain ? or #, and its port may be at most {_MAX_PORT}. In its user and password, write / as %2F "
            "and @ as %40.",
        )
    # The login is sent as a header, because URLs are logged.
    bare = str(parts.copy_with(username="", password="")).rstrip("/")
    key = api_key.get_secret_value() if isinstance(api_key, SecretStr) else api_key or ""
    if not (isinstance(key, str) and key.strip().isascii() and key.strip().isprintable()):
        raise ConfigurationError(
            "The token or API key must be printable ASCII text.",
            hint="Copy it again into the argument or environment variable (such as RGATE_API_KEY or RGATE_TOKEN), "
            "without extra characters such as a second line or a byte order mark.",
        )
    key = key.strip()
    secret = parts.password or parts.username  # a user name without a password is a token
    if key and secret:
        raise ConfigurationError(
            "Both an API key and a login in the URL were given, but a request can send only one.",
            hint="Remove the login from the URL, or the key: the argument, or the environment variable "
            "(RGATE_API_KEY, RGATE_JUDGE_API_KEY or RGATE_TOKEN).",
        )
    if key:
        return bare, Credentials({"Authorization": f"Bearer {key}"}, (key,))
    if secret:
        # The encoded form is a secret, too: anyone can decode it.
        basic = base64.b64encode(f"{parts.username}:{parts.password}".encode()).decode()
        return bare, Credentials({"Authorization": f"Basic {basic}"}, (basic, secret))
    return bare, Credentials()
