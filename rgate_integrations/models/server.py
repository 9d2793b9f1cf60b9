"""The connection to an OpenAI-compatible server: requests that are tried again, errors that tell no secrets.

What a server answers comes in either of OpenAI's two shapes. Whatever it is, it is data or refused.
"""

from __future__ import annotations

import asyncio
import random
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from rgate_integrations.errors import ConfigurationError, EvidenceError, ServerError, missing_dependency
from rgate_integrations.models.credentials import Credentials
from rgate_integrations.runtime.files import parse_json
from rgate_integrations.runtime.logprobs import as_logprob
from rgate_integrations.runtime.threads import reset_after_fork


@dataclass(frozen=True)
class ServedToken:
    """A token that a server wrote.

    Attributes:
        text: The token.
        logprob: Its log-probability, at most 0.
        likeliest: The tokens that were likeliest in its place, with their log-probabilities; may be empty.
    """

    text: str
    logprob: float
    likeliest: Mapping[str, float]


@dataclass(frozen=True)
class Completion:
    """What a server wrote.

    Attributes:
        text: The text.
        tokens: Its tokens; empty if the server gives no log-probabilities.
        finished: Whether it came to its end by itself.
        prompt_tokens: Length of the prompt in tokens, at least 0; 0 if the server does not say so.
    """

    text: str
    tokens: tuple[ServedToken, ...]
    finished: bool
    prompt_tokens: int


def read_completion(body: bytes) -> Completion | None:
    """Read the body of a response.

    Returns:
        What the server wrote, or None if it is not what OpenAI's API answers. There is no error to chain: it would
        quote the body, and a body may quote the key.
    """
    try:
        answer = parse_json(body)
        choice = answer["choices"][0]
        message = choice.get("message")
        written = choice["text"] if message is None else message.get("content") or ""
        usage = answer.get("usage") or {}
        return Completion(
            text=_text(written),
            tokens=tuple(_tokens(choice.get("logprobs") or {})),
            finished=choice.get("finish_reason") == "stop",
            prompt_tokens=max(int(usage.get("prompt_tokens") or 0), 0),
        )
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError):
        return None


def _tokens(given: Mapping[str, Any]) -> Iterator[ServedToken]:
    for token in given.get("content") or ():  # chat completions
        listed = token.get("top_logprobs") or ()
        yield _token(token["token"], token["logprob"], [(each["token"], each["logprob"]) for each in listed])
    # Completions: parallel lists, and the likeliest as a mapping. The first token has no probability if it is the
    # first of all.
    texts, logprobs = given.get("tokens") or (), given.get("token_logprobs") or ()
    tops = given.get("top_logprobs") or [None] * len(texts)
    for text, logprob, top in zip(texts, logprobs, tops, strict=False):
        yield _token(text, logprob or 0.0, (top or {}).items())


def _token(text: Any, logprob: Any, tops: Iterable[tuple[Any, Any]]) -> ServedToken:
    likeliest = {}
    for other, value in tops:
        likeliest[_text(other)] = as_logprob(float(value))
    return ServedToken(_text(text), as_logprob(float(logprob)), likeliest)


def _text(value: Any) -> str:
    """Return text without half surrogate pairs, which JSON can hold and nothing else."""
    if not isinstance(value, str):
        raise TypeError("it is no text")
    return value.encode(errors="replace").decode()


Item = TypeVar("Item")
Result = TypeVar("Result")
_BUSY = {408, 429, 500, 502, 503, 504}
LONGEST_BODY = 16 << 20
"""Bytes of an answer; 4,000 tokens with 20 likeliest each take 8 MB."""
_LONGEST_PAUSE = 60.0  # seconds that a server may ask us to wait
_QUOTED = 300  # characters of a server's own words in an error


class ServerConnection:
    """Sends requests to one server, several at a time, from an event loop in a thread of its own.

    It travels in pickles, with its credentials but without its open connections.

    Args:
        url: The server's base, without a login.
        credentials: What requests are sent with.
        timeout: Of one request and its whole answer, in seconds, above 0.
        retries: How often a request is tried again, at least 0.
        max_concurrency: Requests at a time, at least 1.

    Raises:
        ConfigurationError: A number is out of its range.
    """

    def __init__(
        self, url: str, credentials: Credentials, timeout: float, retries: int, max_concurrency: int
    ) -> None:
        if timeout <= 0 or retries < 0 or max_concurrency < 1:
            raise ConfigurationError("timeout and max_concurrency must be above 0, retries at least 0.")
        self.url = url
        self.credentials = credentials
        self.timeout = timeout
        self.retries = retries
        self.max_concurrency = max_concurrency
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self.after_fork()
        reset_after_fork(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return ServerConnection, (
            self.url,
            self.credentials,
            self.timeout,
            self.retries,
            self.max_concurrency,
        )

    def after_fork(self) -> None:
        """Forget the thread and the connections, which are the parent's."""
        # Guards the loop: callers come from several threads, and only one of them may start it.
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        if self._finalizer is not None:
            self._finalizer.detach()

    def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        with self._lock:
            self._loop = None
            if self._finalizer is not None:
                self._finalizer()

    def each(self, work: Callable[[Item], Awaitable[Result]], items: Sequence[Item]) -> list[Result]:
        """Do something with each item, at the same time; the server makes batches of it.

        Raises:
            ServerError: All failed, the first of them with this: there is no use in trying one of them again.
            EvidenceError: Some failed, so they are best asked one by one.
        """

        async def all_at_once() -> list[Result | BaseException]:
            return await asyncio.gather(*map(work, items), return_exceptions=True)

        with self._lock:  # not between the loop's last look for requests and its end: nobody would answer
            loop = self._running_loop()
            future = asyncio.run_coroutine_threadsafe(all_at_once(), loop)
        try:
            outcomes = future.result()
        except CancelledError:
            outcomes = [ServerError(f"The connection to {self.url} was closed.")]
        except BaseException:  # Ctrl-C: nobody waits for the answers any more
            future.cancel()
            raise
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if 0 < len(errors) < len(outcomes):
            raise EvidenceError(f"{len(errors)} of {len(items)} requests failed; the first: {errors[0]}")
        if errors:
            raise errors[0]
        return cast(list[Result], outcomes)

    async def post(self, path: str, body: dict[str, Any]) -> Completion:
        """Send a request; try again after what may pass.

        Returns:
            What the server wrote.

        Raises:
            ServerError: The server could not be reached, stayed busy or broken, or gave something else as an answer.
            EvidenceError: It refused this very request.
        """
        import httpx

        trouble, pause, status, content = "", 0.0, 0, b""
        for attempt in range(self.retries + 1):
            await asyncio.sleep(pause)
            # Of random length, so that callers that failed together do not come back together.
            pause = min(0.5 * 2**attempt, 8.0) * random.uniform(0.5, 1.0)  # noqa: S311  not for cryptography
            try:
                status, content, wished = await self._send(path, body)
            except TimeoutError:
                trouble = f"there was no whole answer within {self.timeout:g} s"
                continue
            except httpx.RequestError as error:
                trouble = self.credentials.redact(f"{type(error).__name__}: {error}")
                continue
            if status not in _BUSY:
                break
            trouble = f"it answered {status}"
            if wished.isdecimal():
                pause = min(float(wished), _LONGEST_PAUSE)
        else:
            # Nothing is raised inside an `except`: a chained error of httpx may quote what was sent.
            raise ServerError(
                f"The server at {self.url} could not be used: {trouble}.",
                hint="Is it running, and is the URL its /v1?",
            )
        if status >= 400:
            raise self._refusal(status, content.decode(errors="replace"))
        answer = read_completion(content)
        if answer is None:
            raise ServerError(f"{self.url} does not answer as OpenAI's API does.")
        return answer

    async def _send(self, path: str, body: dict[str, Any]) -> tuple[int, bytes, str]:
        """Send a request once; returns the status, the body, and after how long the server wishes to be asked again.

        httpx bounds the wait for each next piece: who sends a byte a second would never be late.
        """
        async with (
            self._slots,
            asyncio.timeout(self.timeout),
            self._client.stream("POST", self.url + path, json=body) as response,
        ):
            # Not unpacked: a megabyte of gzip can be gigabytes, and none was asked for.
            packed = response.headers.get("content-encoding", "").strip().lower()
            if packed not in ("", "identity"):
                said = self.credentials.redact(packed)[:_QUOTED]
                raise ServerError(f"The server at {self.url} packed its answer ({said}), unasked.")
            content = bytearray()
            async for part in response.aiter_raw():
                content += part
                if len(content) > LONGEST_BODY:
                    raise ServerError(
                        f"The server at {self.url} answered more than {LONGEST_BODY >> 20} MiB, and was not read on."
                    )
            return response.status_code, bytes(content), response.headers.get("retry-after", "")

    def _refusal(self, status: int, text: str) -> Exception:
        """Build the error for a request that was refused; ``text`` is the body as it came."""
        said = self.credentials.redact(text)[:_QUOTED]
        if status in (401, 403):
            return ServerError(f"The server at {self.url} refused the key ({status}).", hint="Pass api_key=")
        if status == 404:
            return ServerError(
                f"{self.url} has no such path or model ({status}): {said}", hint="url=…/v1, model="
            )
        if "logprob" in text[:_QUOTED]:
            return no_logprobs(self.url, said)
        return EvidenceError(f"The server at {self.url} refused the request ({status}): {said}")

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop that requests run on, and make it and the client if there is none; with the lock held.

        Raises:
            ConfigurationError: The environment names a proxy server that cannot be used.
        """
        if self._loop is None:
            # As many connections as there are requests at a time: the semaphore bounds them.
            self._client = _new_client(self.credentials, self.timeout)
            # One loop for all callers: so this bounds what they ask for together.
            self._slots = asyncio.Semaphore(self.max_concurrency)
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), name="rgate-served", daemon=True).start()
            self._finalizer = weakref.finalize(self, _end, self._loop, self._client)
            self._finalizer.atexit = False
        return self._loop


def no_logprobs(url: str, said: str = "") -> EvidenceError:
    """Build the error for a server without log-probabilities; ``said`` are its own words, redacted."""
    quoted = f" It says: {said}" if said else ""
    return EvidenceError(
        f"The server at {url} gives no log-probabilities.{quoted}",
        hint="vLLM, SGLang and llama.cpp give them; `transformers serve` does not.",
    )


def _new_client(credentials: Credentials, timeout: float) -> Any:
    try:
        import httpx
    except ImportError as error:
        raise missing_dependency("httpx", "served") from error
    # The login goes here too, and not into the URL, which httpx writes to its log.
    headers = {"Accept-Encoding": "identity", **credentials.headers()}
    try:
        # As many connections as there are requests at a time: the semaphore bounds them.
        return httpx.AsyncClient(timeout=timeout, headers=headers, limits=httpx.Limits(max_connections=None))
    except (httpx.InvalidURL, ValueError):  # their messages quote parts of a proxy server's login
        pass
    raise ConfigurationError(
        "A proxy server that the environment names (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY) cannot be used.",
        hint="Percent-encode user and password in it: / is %2F, @ is %40, : is %3A.",
    )


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _end(loop: asyncio.AbstractEventLoop, client: Any) -> None:
    """End the requests on a loop, close its client and stop it; nobody waits for it."""

    async def end() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # who waits for them hears of it
        await client.aclose()
        loop.stop()

    asyncio.run_coroutine_threadsafe(end(), loop)
