"""The connection to an OpenAI-compatible server: requests that are tried again, errors that tell no secrets."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any, TypeVar

from rgate_integrations.errors import ConfigurationError, EvidenceError, ServerError, missing_dependency
from rgate_integrations.models.completion import Completion, read_completion
from rgate_integrations.models.credentials import Credentials
from rgate_integrations.runtime.threads import ForkSafeLock

__all__ = ["ServerConnection", "no_logprobs"]

Item = TypeVar("Item")
Result = TypeVar("Result")
_BUSY = {408, 429, 500, 502, 503, 504}
LONGEST_BODY = 16 << 20
"""Bytes of an answer; 4,000 tokens with 20 likeliest each take 8 MB."""
_QUOTED = 300  # characters of a server's own words in an error


class ServerConnection:
    """Sends requests to one server, several at a time.

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

    _pid: int
    _client: Any
    _close_client: Callable[[], object] | None
    _pool: ThreadPoolExecutor | None

    def __init__(
        self, url: str, credentials: Credentials, *, timeout: float, retries: int, max_concurrency: int
    ) -> None:
        if timeout <= 0 or retries < 0 or max_concurrency < 1:
            raise ConfigurationError("timeout and max_concurrency must be above 0, retries at least 0.")
        self.url = url
        self.credentials = credentials
        self.timeout = timeout
        self.retries = retries
        self.max_concurrency = max_concurrency
        self._forget_connections()

    def __repr__(self) -> str:
        return f"ServerConnection({self.url!r}, {self.credentials!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_connections()

    def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        with self._lock:
            if self._close_client is not None and self._pid == os.getpid():
                self._close_client()
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)
            self._client = self._pool = self._close_client = None

    def each(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Do something with each item, at the same time; the server makes batches of it.

        Raises:
            ServerError: All failed, the first of them with this: there is no use in trying one of them again.
            EvidenceError: Some failed, so they are best asked one by one.
        """
        if len(items) <= 1:
            return [work(item) for item in items]
        self._http()
        pool = self._pool
        if pool is None:  # closed by another thread just now
            return [work(item) for item in items]
        jobs = [pool.submit(work, item) for item in items]
        errors = [job.exception() for job in jobs]
        failed = [error for error in errors if error is not None]
        if not failed:
            return [job.result() for job in jobs]
        if len(failed) == len(jobs):
            raise failed[0]
        raise EvidenceError(f"{len(failed)} of {len(jobs)} requests failed; the first: {failed[0]}")

    def post(self, path: str, body: dict[str, Any]) -> Completion:
        """Send a request; try again after what may pass.

        Returns:
            What the server wrote.

        Raises:
            ServerError: The server could not be reached, stayed busy or broken, or gave something else as an answer.
            EvidenceError: It refused this very request.
            ConfigurationError: The environment names a proxy server that cannot be used.
        """
        trouble = ""
        for attempt in range(self.retries + 1):
            if attempt:
                pause = min(0.25 * 2**attempt, 8.0)
                # Of random length, so that callers that failed together do not come back together.
                time.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311  not for cryptography
            response = self._sent(path, body)
            if isinstance(response, str):
                trouble = response
                continue
            status, content = response
            if status in _BUSY:
                trouble = f"it answered {status}"
                continue
            if status >= 400:
                raise self._refusal(status, content.decode(errors="replace"))
            answer = read_completion(content)
            if answer is None:
                raise ServerError(f"{self.url} does not answer as OpenAI's API does.")
            return answer
        # Here and above nothing is raised inside an `except`: a chained error of httpx may quote what was sent.
        raise ServerError(
            f"The server at {self.url} could not be used: {trouble}.",
            hint="Is it running, and is the URL its /v1?",
        )

    def _sent(self, path: str, body: dict[str, Any]) -> tuple[int, bytes] | str:
        """Send a request once; returns the status and body of what it answered, or what went wrong."""
        client = self._http()
        import httpx

        async def answer() -> tuple[int, bytes]:
            # httpx bounds the wait for each next piece: who sends a byte a second would never be late.
            async with (
                asyncio.timeout(self.timeout),
                client.stream("POST", self.url + path, json=body) as response,
            ):
                return response.status_code, await self._read(response)

        future = asyncio.run_coroutine_threadsafe(answer(), _event_loop())
        try:
            return future.result()
        except TimeoutError:
            return f"there was no whole answer within {self.timeout:g} s"
        except CancelledError:
            return "the connection was closed"
        except httpx.RequestError as error:
            return self.credentials.redact(f"{type(error).__name__}: {error}")
        except BaseException:  # Ctrl-C: nobody waits for the answer any more
            future.cancel()
            raise

    async def _read(self, response: Any) -> bytes:
        """Read a body as it came. It is not unpacked: a megabyte of gzip can be gigabytes, and none was asked for."""
        packed = response.headers.get("content-encoding", "")
        if packed.strip().lower() not in ("", "identity"):
            said = self.credentials.redact(packed)[:_QUOTED]
            raise ServerError(f"The server at {self.url} packed its answer ({said}), unasked.")
        body = bytearray()
        async for part in response.aiter_raw():
            body += part
            if len(body) > LONGEST_BODY:
                raise ServerError(
                    f"The server at {self.url} answered more than {LONGEST_BODY >> 20} MiB, and was not read on."
                )
        return bytes(body)

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

    def _http(self) -> Any:
        """Return the client of this process, and make it and the threads if there is none."""
        try:
            import httpx
        except ImportError as error:
            raise missing_dependency("httpx", "served") from error
        with self._lock:
            # A child of a fork has its parent's connections, which must not be shared, but not its threads.
            if self._client is None or self._pid != os.getpid():
                most = self.max_concurrency
                options = {
                    "timeout": self.timeout,
                    # A login goes here too, and not into the URL, which httpx writes to its log.
                    "headers": {"Accept-Encoding": "identity"} | self.credentials.headers(),
                    "limits": httpx.Limits(max_connections=most, max_keepalive_connections=most),
                }
                self._client = _new_client(options)
                self._close_client = weakref.finalize(self, _close, self._client, os.getpid())
                self._pool = ThreadPoolExecutor(most, thread_name_prefix="rgate-served")
                self._pid = os.getpid()
            return self._client

    def _forget_connections(self) -> None:
        self._lock = ForkSafeLock()  # guards the four below
        self._pid = -1
        self._client = None
        self._close_client = None
        self._pool = None


def no_logprobs(url: str, said: str = "") -> EvidenceError:
    """Build the error for a server without log-probabilities; ``said`` are its own words, redacted."""
    quoted = f" It says: {said}" if said else ""
    return EvidenceError(
        f"The server at {url} gives no log-probabilities.{quoted}",
        hint="vLLM, SGLang and llama.cpp give them; `transformers serve` does not.",
    )


_loops: dict[int, asyncio.AbstractEventLoop] = {}
_loops_lock = ForkSafeLock()


def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process that all requests run on; a thread of its own keeps it running."""
    with _loops_lock:
        pid = os.getpid()  # the thread of a parent's loop is not in a child of a fork
        if pid not in _loops:
            _loops[pid] = asyncio.new_event_loop()
            threading.Thread(target=_loops[pid].run_forever, name="rgate-served-loop", daemon=True).start()
        return _loops[pid]


def _new_client(options: dict[str, Any]) -> Any:
    """Make a client of httpx.

    Raises:
        ConfigurationError: The environment names a proxy server that cannot be used. It is not quoted.
    """
    import httpx

    try:
        return httpx.AsyncClient(**options)
    except (httpx.InvalidURL, ValueError):  # their messages quote parts of a login
        pass
    raise ConfigurationError(
        "A proxy server that the environment names (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY) cannot be used.",
        hint="Percent-encode user and password in it: / is %2F, @ is %40, : is %3A.",
    )


def _close(client: Any, pid: int) -> None:
    """Close a client, on the loop that it is used on, if that is in this process; nobody waits for it."""
    if pid == os.getpid():
        asyncio.run_coroutine_threadsafe(client.aclose(), _event_loop())
