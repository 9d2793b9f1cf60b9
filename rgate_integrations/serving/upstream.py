"""The server behind the gateway: requests go to it, and its bytes come back, as they are."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from rgate_integrations.answering.partial_answer import BufferedAnswer, PartialAnswer, TokenStream
from rgate_integrations.errors import EvidenceError
from rgate_integrations.models.credentials import read_credentials
from rgate_integrations.runtime.files import parse_json
from rgate_integrations.runtime.records import read_logprobs
from rgate_integrations.serving.wire import problem

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
# Seconds: servers such as llama.cpp close a connection after 5, perhaps just when it is used again.
_KEPT = 2.0
_LONGEST_LINE = 1 << 20


class Relay(StreamingResponse):
    """A response of the upstream, whose connection is closed when the client leaves."""

    def __init__(
        self, response: httpx.Response, chunks: AsyncGenerator[bytes], told: Mapping[str, str]
    ) -> None:
        super().__init__(chunks, response.status_code)
        headers = httpx.Headers(response.headers)
        for name in _OF_CONNECTION:
            headers.pop(name, None)
        headers.update(told)
        self.raw_headers = [(name.lower(), value) for name, value in headers.raw]
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
        self._dropped = {*_OF_CONNECTION, "host", "content-length", OWN_HEADER}
        if self._own_headers or not keeps_key:
            self._dropped.add("authorization")
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
        headers = httpx.Headers(request.headers.raw)
        for name in self._dropped:
            headers.pop(name, None)
        headers.update(self._own_headers)
        # httpx would ask for more than the client can read.
        if plain or "accept-encoding" not in headers:
            headers["accept-encoding"] = "identity"
        path = request.scope.get("raw_path", b"/").decode("latin-1")
        query = request.scope["query_string"].decode("latin-1")
        url = self.url + path + (f"?{query}" if query else "")
        built = self._client.build_request(request.method, url, headers=headers, content=body)
        return await self._client.send(built, stream=True)

    async def forward(self, request: Request, body: bytes, told: Mapping[str, str] | None = None) -> Response:
        """Send a client's request on, and return the response with some headers more."""
        try:
            response = await self.send(request, body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            # Without what the error says: that may have the key.
            message = f"The upstream server cannot be asked ({type(error).__name__})."
            return problem(502, "UpstreamError", message)
        return Relay(response, _read_chunks(response), told or {})


class UpstreamAnswer(BufferedAnswer):
    """An answer as the upstream streams it: server-sent events, whose bytes are kept as they come.

    Args:
        upstream: The server.
        request: What the client asks.
        body: The body of that.

    Attributes:
        response: The upstream's response; None before it came.
    """

    def __init__(self, upstream: Upstream, request: Request, body: bytes) -> None:
        super().__init__(PartialAnswer(), TokenStream(_never_blocking, self._open))
        self.response: httpx.Response | None = None
        self._send = partial(upstream.send, request, body, plain=True)
        self._line = b""

    async def _open(self) -> AsyncIterator[bytes]:
        self.response = await self._send()
        if self.response.status_code != 200:
            await self.response.aclose()
            raise EvidenceError(f"The upstream server answered {self.response.status_code}.")
        self.partial.has_end = False
        return _read_chunks(self.response)

    def read(self, chunk: bytes) -> bool:
        """Note the text in the events that end in a chunk; returns False for a call of a tool."""
        *lines, self._line = (self._line + chunk).split(b"\n")
        self._line = self._line[:_LONGEST_LINE]
        is_text = True
        for line in lines:
            if line.startswith(b"data:"):
                is_text = self._read_event(line[5:].strip()) and is_text
        return is_text

    def _read_event(self, data: bytes) -> bool:
        if data == b"[DONE]":
            self.partial.has_end = True
            return True
        try:
            event = parse_json(data)
            choice = event["choices"][0]
            if choice.get("finish_reason"):
                self.partial.has_end = True
            delta = choice["delta"]
            if delta.get("tool_calls") or delta.get("function_call"):
                return False
            text = delta.get("content")
            if isinstance(text, str) and text:
                self.partial.pieces.append(text)
            self.partial.model = str(event.get("model") or "")
            # Only where the client asked for them: then each token has one.
            tokens, logprobs = read_logprobs((choice.get("logprobs") or {}).get("content"))
            self.partial.tokens += tokens
            self.partial.logprobs += logprobs
        except (AttributeError, LookupError, TypeError, ValueError):
            pass  # an event of another kind
        return True


async def _read_chunks(response: httpx.Response) -> AsyncGenerator[bytes]:
    """Yield the body of a response as it comes, and close the connection whenever that ends."""
    try:
        async for chunk in response.aiter_raw():
            yield chunk
    finally:
        await response.aclose()


def _never_blocking() -> Iterator[Any]:
    raise NotImplementedError("The gateway only awaits.")
