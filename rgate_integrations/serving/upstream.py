"""The gateway's upstream: forwards requests to the LLM's server, and relays its responses."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Any
from urllib.parse import unquote

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from rgate_integrations.answering.partial_answer import BufferedAnswer, ChunkStream
from rgate_integrations.errors import EvidenceError, ServerError
from rgate_integrations.models.bounded_http import make_client, read_credentials
from rgate_integrations.models.remote import read_completion
from rgate_integrations.runtime.files import parse_json
from rgate_integrations.runtime.records import read_choice_logprobs
from rgate_integrations.runtime.replies import read_reply
from rgate_integrations.serving.wire import problem

OWN_HEADER = "x-rgate"
"""Header for commands of a client to the gateway, and prefix of the gateway's own headers."""

# Headers that concern one connection and are not forwarded (RFC 9110, 7.6.1).
_HOP_BY_HOP = frozenset(
    (
        "connection",
        "expect",
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
# Reasoning models may think for minutes before they send the first byte.
_WAIT = httpx.Timeout(600.0, connect=10.0)
# Servers such as llama.cpp close idle connections after 5 s, perhaps just as we use one again.
_KEEPALIVE_SECONDS = 2.0
# An upstream that never finishes must not fill the memory.
_MAX_HELD_BYTES = 4 << 20
# The segment "." or "..", also before a parameter as in "..;x", or beside characters that servers strip.
_DOT_SEGMENT = re.compile(r"(?:^|[/\\])[\s\0]*\.{1,2}[\s\0]*(?:;[^/\\]*)?(?:[/\\]|\Z)")


class Relay(StreamingResponse):
    """The upstream's response with the gateway's headers; closes the upstream's connection if the client leaves."""

    def __init__(
        self, response: httpx.Response, chunks: AsyncGenerator[bytes], own_headers: Mapping[str, str]
    ) -> None:
        super().__init__(chunks, response.status_code)
        headers = httpx.Headers(response.headers)
        if "transfer-encoding" in headers:  # it overrides the length (RFC 9112, 6.3)
            headers.pop("content-length", None)
        _drop_headers(headers, {*_HOP_BY_HOP, "date"})  # the gateway writes its own date
        headers.update(own_headers)
        self.raw_headers = [(name.lower(), value) for name, value in headers.raw]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        async with aclosing(self._chunks):
            await super().__call__(scope, receive, send)


class Upstream:
    """The LLM's server, which is OpenAI-compatible.

    Args:
        url: Base URL, with or without ``/v1``.
        key: API key; not needed if the URL contains a login. With either of them, the client's key is not forwarded.
        keeps_key: Whether the client's key is forwarded if there is neither key nor login. False if clients send
            the gateway's own token as their key.

    Raises:
        ConfigurationError: The URL, the key, or a proxy server from the environment is invalid, or both a key
            and a login were given.
    """

    def __init__(self, url: str, *, key: str | None = None, keeps_key: bool = True) -> None:
        base, credentials = read_credentials(url, key)
        # The client's path already begins with /v1.
        self._base = httpx.URL(base.removesuffix("/v1"))
        self._own_headers = credentials.headers
        # httpx itself sets host and content-length.
        self._dropped = {*_HOP_BY_HOP, "host", "content-length"}
        if self._own_headers or not keeps_key:
            self._dropped.add("authorization")
        self._client = make_client(base, {}, timeout=_WAIT, keepalive=_KEEPALIVE_SECONDS)
        self._ending: set[asyncio.Future[None]] = set()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def send(self, request: Request, body: bytes, *, plain: bool = False) -> httpx.Response:
        """Forward a client's request, and return the response, whose body is not read yet.

        Args:
            request: The request.
            body: Its body, or a replacement.
            plain: Whether the response must not be compressed.

        Raises:
            httpx.HTTPError: The server cannot be reached, or its response has an invalid status.
            httpx.InvalidURL: The request's target is outside the server's base URL.
        """
        headers = httpx.Headers(request.headers.raw)
        _drop_headers(headers, self._dropped)
        headers.update(self._own_headers)
        # Otherwise httpx would ask for encodings that the client may not be able to read.
        if plain or "accept-encoding" not in headers:
            headers["accept-encoding"] = "identity"
        built = self._client.build_request(
            request.method, self._url_for(request), headers=headers, content=body
        )
        response = await self._send(built)
        # A response with such a status could not be forwarded.
        if not 200 <= response.status_code < 600:
            await response.aclose()
            raise httpx.RemoteProtocolError(f"Invalid status {response.status_code}.")
        return response

    async def _send(self, request: httpx.Request) -> httpx.Response:
        """Send a request; if it is cancelled, end it once the connection stands.

        httpcore loses connections whose request is cancelled between connecting and sending: they stay open.
        """
        connected = asyncio.Event()

        async def notice(event: str, _: Any) -> None:
            if event.endswith("send_request_headers.started"):
                connected.set()

        request.extensions["trace"] = notice
        sending = asyncio.ensure_future(self._client.send(request, stream=True))
        sending.add_done_callback(lambda _: connected.set())
        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:
            ending = asyncio.ensure_future(_end(sending, connected))
            self._ending.add(ending)  # asyncio itself keeps no reference
            ending.add_done_callback(self._ending.discard)
            raise

    async def complete(self, request: Request, body: bytes) -> str:
        """Send the gateway's own chat request, with path and headers of ``request``, and return the answer.

        Raises:
            EvidenceError: The answer has no text.
            httpx.HTTPError: The server cannot be reached, or its response has an invalid status.
            httpx.InvalidURL: The request's target is outside the server's base URL.
        """
        response = await self.send(request, body, plain=True)
        content = b""
        async with aclosing(_read_chunks(response)) as chunks:
            async for chunk in chunks:
                content += chunk
                if len(content) > _MAX_HELD_BYTES:
                    break
        completion = read_completion(content)
        if completion is None or not completion[0].text:
            raise EvidenceError(
                f"The upstream should have rewritten a follow-up, but its answer has no text (status "
                f"{response.status_code}).",
                hint="Check its API key, and that it answers chat requests; or omit condense= (--condense).",
            )
        return completion[0].text

    async def forward(
        self, request: Request, body: bytes, own_headers: Mapping[str, str] | None = None
    ) -> Response:
        """Forward a request to the upstream, and return the upstream's response with the gateway's headers added.

        A request whose target is not a path below the upstream's URL is not forwarded; its response is an
        error with the status 400.

        Raises:
            httpx.HTTPError: The server cannot be reached, or its response has an invalid status.
        """
        try:
            response = await self.send(request, body)
        except httpx.InvalidURL:
            return problem(
                400,
                "InvalidTarget",
                "The request's target is not a path below the upstream's URL.",
                "Send a path that begins with / and has no segments . or ..",
            )
        return Relay(response, _read_chunks(response), own_headers or {})

    def _url_for(self, request: Request) -> httpx.URL:
        """Return the URL for a request: its target below the base URL, on the same host.

        Raises:
            httpx.InvalidURL: The target is not a path, or has dot segments.
        """
        # Without the prefix of a mounted application, which the upstream does not know.
        path: bytes = request.scope["raw_path"].removeprefix(request.scope.get("root_path", "").encode())
        decoded = unquote(path.decode("latin-1"))
        if not path.startswith(b"/") or _DOT_SEGMENT.search(decoded):
            raise httpx.InvalidURL("The target is outside the base URL.")
        query: bytes = request.scope["query_string"]
        # The raw path, because decoding could change which resource it names.
        below = self._base.raw_path.rstrip(b"/")
        return self._base.copy_with(raw_path=below + path + (b"?" + query if query else b""))


class UpstreamAnswer(BufferedAnswer):
    """A streamed answer of the upstream: server-sent events, whose bytes are kept unchanged.

    Args:
        upstream: The server.
        request: The client's request.
        body: The body to send.

    Attributes:
        response: The upstream's response; None until it arrives.
    """

    def __init__(self, upstream: Upstream, request: Request, body: bytes) -> None:
        super().__init__(ChunkStream(never_blocking, self._open))
        self.response: httpx.Response | None = None
        self._send = partial(upstream.send, request, body, plain=True)
        self._line = b""
        self._held = 0
        self._events = 0

    @property
    def silent_chunks(self) -> int:
        """Number of events without text. A server may split an event, or send comments between them."""
        return self._events - len(self.partial.pieces)

    async def _open(self) -> AsyncIterator[bytes]:
        self.response = await self._send()
        if self.response.status_code != 200:
            await self.response.aclose()
            raise EvidenceError(
                f"The upstream server answered with status {self.response.status_code}.",
                hint="Check its API key, its limits and its log.",
            )
        # A complete stream announces its end; one that stops without that was cut off.
        self.partial.has_end = False
        return _read_chunks(self.response)

    def read(self, chunk: bytes) -> bool:
        """Read the events that a chunk completes; return False if the answer is too long, or calls a tool."""
        self._held += len(chunk)
        is_text = self._held <= _MAX_HELD_BYTES
        *lines, self._line = (self._line + chunk).split(b"\n")
        for line in lines:
            # Servers of LLMs send each event's data in one line.
            if line.startswith(b"data:"):
                is_text = self._read_event(line[5:].strip()) and is_text
        return is_text

    def _read_event(self, data: bytes) -> bool:
        if data == b"[DONE]":
            self.partial.has_end = True
            return True
        with suppress(AttributeError, LookupError, TypeError, ValueError):  # another kind of event
            event = parse_json(data)
            self._events += 1
            if event.get("error"):
                self.error = ServerError(
                    "The upstream server reported an error in its stream.",
                    hint="Check its log and its limits.",
                )
            choice = event["choices"][0]
            if choice.get("finish_reason"):
                self.partial.has_end = True
            delta = choice["delta"]
            if delta.get("tool_calls") or delta.get("function_call"):
                return False
            self.partial.has_thoughts |= read_reply(delta).thoughts is not None
            text = delta.get("content")
            if isinstance(text, str) and text:
                self.partial.pieces.append(text)
            self.partial.model = str(event.get("model") or "")
            # Log-probabilities are present only if the client requested them; then every token has one.
            self.partial.add_logprobs(read_choice_logprobs(choice))
        return True


async def _end(sending: asyncio.Future[httpx.Response], connected: asyncio.Event) -> None:
    """Cancel a request that nobody waits for, once it may be, and close its response if there is one already."""
    await connected.wait()
    sending.cancel()
    with suppress(asyncio.CancelledError, httpx.HTTPError):
        response = await sending
        await response.aclose()


def _drop_headers(headers: httpx.Headers, names: Collection[str]) -> None:
    """Remove the headers in ``names``, those that ``Connection`` lists, and those that only the gateway may set.

    The latter are its own (``x-rgate…``), and those of CORS: the gateway decides which web pages may read an answer.
    """
    named = {name.strip().lower() for name in headers.get("connection", "").split(",")}
    for name in list(headers):
        if name in names or name in named or name.startswith((OWN_HEADER, "access-control-")):
            del headers[name]


async def _read_chunks(response: httpx.Response) -> AsyncGenerator[bytes]:
    """Yield the raw body of a response in chunks; then close the response, even if the reader stops early."""
    try:
        async for chunk in response.aiter_raw():
            yield chunk
    finally:
        await response.aclose()


def never_blocking(*_: object) -> Any:
    """Fail, in place of a function that would block: all steps of the gateway are asynchronous.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError("The gateway only has asynchronous steps; await this one.")
