"""The server behind the gateway: requests go to it, and its bytes come back, as they are."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from rgate_integrations.models.credentials import read_credentials
from rgate_integrations.serving.guard import problem

OWN_HEADER = "x-rgate"
"""What a client says to the gateway, and the beginning of what the gateway says to clients."""

# They concern one connection, and not what goes over it (RFC 9110, 7.6.1).
_OF_CONNECTION = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
_WAIT = httpx.Timeout(600.0, connect=10.0)
_KEPT = (
    2.0  # seconds: servers such as llama.cpp close a connection after 5, perhaps just when it is used again
)


class Relay(StreamingResponse):
    """A response of the upstream, whose connection is closed when the client leaves."""

    def __init__(
        self, response: httpx.Response, chunks: AsyncGenerator[bytes], told: Mapping[str, str]
    ) -> None:
        super().__init__(chunks, response.status_code)
        headers = []
        for name, value in response.headers.raw:
            if name.lower().decode() not in _OF_CONNECTION:
                headers.append((name.lower(), value))
        headers += [(name.encode(), value.encode("latin-1")) for name, value in told.items()]
        self.raw_headers = headers
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        async with aclosing(self._chunks):
            await super().__call__(scope, receive, send)


class Upstream:
    """An OpenAI-compatible server.

    Args:
        url: Its base, with or without ``/v1``.
        key: Its key. Without one, requests keep the key that their client sent.
        keeps_key: Whether the client's key may be sent on; not where it is the gateway's own token.

    Raises:
        ConfigurationError: The URL cannot be used, or the key cannot be sent.
    """

    def __init__(self, url: str, *, key: str | None = None, keeps_key: bool = True) -> None:
        base, credentials = read_credentials(url, key)
        self.url = base.removesuffix("/v1")
        self._own_headers = credentials.headers
        self._keeps_key = keeps_key
        # As many connections as there are clients: what waits, waits at the server.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=_KEPT)
        self._client = httpx.AsyncClient(timeout=_WAIT, limits=limits)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def send(self, request: Request, body: bytes, *, plain: bool = False) -> httpx.Response:
        """Send a client's request on; the body of the response is yet to be read.

        Args:
            request: The request.
            body: Its body, or another in its place.
            plain: Whether the answer must not be compressed.

        Raises:
            httpx.HTTPError: The server cannot be asked.
        """
        path = request.scope.get("raw_path", b"/").decode("latin-1")
        query = request.scope["query_string"].decode("latin-1")
        url = self.url + path + (f"?{query}" if query else "")
        built = self._client.build_request(
            request.method, url, headers=self._headers(request, plain), content=body
        )
        return await self._client.send(built, stream=True)

    async def forward(self, request: Request, body: bytes, told: Mapping[str, str]) -> Response:
        """Send a client's request on, and return the response with some headers more."""
        try:
            response = await self.send(request, body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return unreachable(error)
        return Relay(response, read_chunks(response), told)

    def _headers(self, request: Request, plain: bool) -> httpx.Headers:
        dropped = {*_OF_CONNECTION, "host", "content-length", OWN_HEADER}
        if self._own_headers or not self._keeps_key:
            dropped.add("authorization")
        kept = []
        for name, value in request.headers.raw:
            if name.decode("latin-1") not in dropped:
                kept.append((name, value))
        headers = httpx.Headers(kept)
        headers.update(self._own_headers)
        # httpx would ask for more than the client can read.
        if plain or "accept-encoding" not in headers:
            headers["accept-encoding"] = "identity"
        return headers


async def read_chunks(response: httpx.Response) -> AsyncGenerator[bytes]:
    """Yield the body of a response as it comes, and close the connection whenever that ends."""
    try:
        async for chunk in response.aiter_raw():
            yield chunk
    finally:
        await response.aclose()


def unreachable(error: Exception) -> Response:
    """Return the response for an upstream that cannot be asked; what it says of the error may have its key."""
    kind = type(error).__name__
    return problem(502, "UpstreamError", f"The upstream server cannot be asked ({kind}).")
