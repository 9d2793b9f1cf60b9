"""Proxy models behind an OpenAI-compatible server that gives log-probabilities: vLLM, SGLang, llama.cpp."""

from __future__ import annotations

import math
import os
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, EvidenceError, ServerError, missing_dependency
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.proxy.base import HiddenStates, PooledLayer, Proxy, TargetScores, Values

_T = TypeVar("_T")
_BUSY = {408, 429, 500, 502, 503, 504}
_TOP = 20  # what OpenAI's API and vLLM allow
_CHARACTERS = 4  # a token, for cutting texts: the server's tokenizer is not asked
# Servers read the spellings of control tokens as control tokens; a question must not end its own turn.
_CONTROL = re.compile(r"<\|[\w-]+\|>|</?s>|<(?:start|end)_of_turn>|\[/?INST\]")


class ServedProxy(Proxy):
    """A model on a server, asked over HTTP. For gates that judge by text and probabilities; probes cannot use it.

    ``generate`` and ``sample`` are chat completions, or completions for raw prompts, with log-probabilities; an
    adapter is the server's name of it (vLLM: ``--lora-modules``). ``score`` asks for one token with the 20 likeliest:
    targets are compared by their first token after their common beginning, which the assistant's turn begins with. A
    target that is not among the 20 gets the most that it can have: the least of the 20, or what the 20 leave over,
    whichever is less.

    Args:
        url: The server's base, such as ``http://localhost:8000/v1``.
        model: Name of the model on the server.
        api_key: Sent as a bearer token; the environment's ``OPENAI_API_KEY`` is never read.
        timeout: Of one request, in seconds.
        retries: How often a request is tried again after 408, 429, 5xx or a lost connection, with back-off.
        max_concurrency: Requests at a time; a server batches what comes together.

    Example:
        >>> from rgate_integrations import load_gate
        >>> proxy = ServedProxy("http://localhost:8000/v1", "Qwen/Qwen3-4B")
        >>> gate = load_gate("ik", proxy=proxy)
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        retries: int = 3,
        max_concurrency: int = 16,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigurationError(f"{url!r} is no URL.", hint="Such as http://localhost:8000/v1")
        if timeout <= 0 or retries < 0 or max_concurrency < 1:
            raise ConfigurationError("timeout and max_concurrency must be above 0, retries at least 0.")
        self.url = url.rstrip("/")
        self.name = model
        self._settings: dict[str, Any] = {
            "api_key": api_key,
            "timeout": timeout,
            "retries": retries,
            "max_concurrency": max_concurrency,
        }
        self._lock = threading.Lock()
        self._pid = -1
        self._client: Any = None
        self._pool: ThreadPoolExecutor | None = None

    def __repr__(self) -> str:
        return f"ServedProxy({self.url!r}, {self.name!r})"

    def __reduce__(self) -> tuple[Callable[[], ServedProxy], tuple[()]]:
        return partial(type(self), self.url, self.name, **self._settings), ()

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        with self._lock:
            if self._client is not None:
                self._client.close()
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)
            self._client = self._pool = None

    def generate(
        self, prompt: PromptTemplate, values: Sequence[Values], *, tokens: int, adapter: str | None = None
    ) -> list[Draft]:
        """Continue prompts greedily; see `Proxy.generate`."""
        if tokens == 0:
            return [Draft(text="", source="proxy", model=self.name, finished=False) for _ in values]
        options = {"max_tokens": tokens, "temperature": 0.0}
        return self._each(lambda v: self._draft(prompt, v, adapter, options), values)

    def sample(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        *,
        n: int,
        tokens: int,
        temperature: float,
        seed: int,
    ) -> list[tuple[Draft, ...]]:
        """Sample continuations; see `Proxy.sample`. Whether a seed is honoured is the server's matter."""
        if temperature <= 0:
            raise ConfigurationError(
                f"temperature must be above 0, not {temperature}.", hint="Use generate()."
            )
        jobs = [(v, seed + i) for v in values for i in range(n)]

        def one(job: tuple[Values, int]) -> Draft:
            options = {"max_tokens": tokens, "temperature": temperature, "seed": job[1]}
            return self._draft(prompt, job[0], None, options)

        drafts = self._each(one, jobs)
        return [tuple(drafts[i * n : (i + 1) * n]) for i in range(len(values))]

    def score(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        targets: Sequence[str],
        *,
        adapter: str | None = None,
    ) -> list[TargetScores]:
        """Score the first token that tells the targets apart; see the class.

        Raises:
            EvidenceError: One target is the beginning of another, or the server gives no log-probabilities.
        """
        begun = _common_beginning(targets) if len(targets) > 1 else ""
        rests = [target[len(begun) :] for target in targets]
        if not all(rests):
            raise EvidenceError(f"{begun!r} is the beginning of another target: they cannot be told apart.")

        def one(v: Values) -> TargetScores:
            options = {"max_tokens": 1, "temperature": 0.0, "top_logprobs": _TOP}
            answer = self._ask(prompt, v, adapter, options, begun)
            first = next(iter(_tokens(answer)), {})
            likely = {str(t["token"]): float(t["logprob"]) for t in first.get("top_logprobs", [])}
            if not likely:
                raise _no_logprobs(self.url)
            scores = tuple(_score_of(rest, likely) for rest in rests)
            return TargetScores(scores, int((answer.get("usage") or {}).get("prompt_tokens") or 0))

        return self._each(one, values)

    def read(self, prompt: PromptTemplate, values: Sequence[Values], drafts: Sequence[Draft]) -> list[Draft]:
        """Refused: servers do not give the log-probabilities of a given text.

        Raises:
            EvidenceError: Always.
        """
        raise EvidenceError(
            "A served model cannot read a given text token by token.",
            hint="Give drafts with log-probabilities, or let the server write them.",
        )

    def hidden(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        drafts: Sequence[Draft] | None,
        layers: Sequence[PooledLayer],
    ) -> list[HiddenStates]:
        """Refused: servers do not give hidden states.

        Raises:
            EvidenceError: Always.
        """
        raise EvidenceError(
            "A served model gives no hidden states, which probes read.",
            hint="Use a gate that judges text, such as ik or slimplm with an adapter, or a local proxy.",
        )

    def cut(self, text: str, tokens: int) -> str | None:
        """Return ``text`` cut to about a number of tokens, at four characters each, or None when it is not longer."""
        return text[: tokens * _CHARACTERS] if len(text) > tokens * _CHARACTERS else None

    # --- one request ---------------------------------------------------------------------------------------

    def _draft(
        self, prompt: PromptTemplate, values: Values, adapter: str | None, options: dict[str, Any]
    ) -> Draft:
        answer = self._ask(prompt, values, adapter, options)
        found, choice = _tokens(answer), answer["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        usage = answer.get("usage") or {}
        if found and not found[-1]["token"]:  # the end of the turn
            found = found[:-1]
        return Draft(
            text=(text or "").strip(),
            tokens=tuple(str(t["token"]) for t in found),
            logprobs=tuple(min(float(t["logprob"]), 0.0) for t in found) if found else None,
            finished=choice.get("finish_reason") == "stop",
            source="proxy",
            model=self.name,
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
        )

    def _ask(
        self,
        prompt: PromptTemplate,
        values: Values,
        adapter: str | None,
        options: dict[str, Any],
        begun: str = "",
    ) -> dict[str, Any]:
        clean = {name: _CONTROL.sub(" ", text) for name, text in values.items()}
        body: dict[str, Any] = {"model": adapter or self.name, **options}
        if prompt.stop_at_newline:
            body["stop"] = ["\n"]
        if prompt.raw:
            body |= {"prompt": prompt.text(**clean) + begun, "logprobs": body.pop("top_logprobs", 1)}
            return self._post("/completions", body)
        messages = prompt.messages(**clean)
        if begun and messages[-1]["role"] == "assistant":
            messages[-1]["content"] += begun
        elif begun:
            messages.append({"role": "assistant", "content": begun})
        if messages[-1]["role"] == "assistant":
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        return self._post("/chat/completions", {**body, "messages": messages, "logprobs": True})

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request; try again after what may pass.

        Raises:
            ServerError: The server could not be reached, or stayed busy or broken.
            EvidenceError: It refused this very request.
        """
        import httpx

        trouble = ""
        for attempt in range(self._settings["retries"] + 1):
            if attempt:
                time.sleep(min(0.25 * 2**attempt, 8.0) * random.uniform(0.5, 1.0))  # noqa: S311
            try:
                response = self._http().post(self.url + path, json=body)
            except httpx.TransportError as error:
                trouble = f"{type(error).__name__}: {error}"
                continue
            if response.status_code in _BUSY:
                trouble = f"it answered {response.status_code}"
                continue
            if response.status_code >= 400:
                raise self._refusal(response.status_code, response.text[:300])
            try:
                answer = response.json()
                answer["choices"][0]
            except (ValueError, LookupError, TypeError) as error:
                raise ServerError(f"{self.url} does not answer as OpenAI's API does.") from error
            return dict(answer)
        raise ServerError(
            f"The server at {self.url} could not be used: {trouble}.",
            hint="Is it running, and is the URL its /v1?",
        )

    def _refusal(self, status: int, text: str) -> Exception:
        if status in (401, 403):
            return ServerError(f"The server at {self.url} refused the key ({status}).", hint="Pass api_key=")
        if status == 404:
            return ServerError(
                f"{self.url} has no such path or model ({status}): {text}", hint="url=…/v1, model="
            )
        if "logprob" in text:
            return _no_logprobs(self.url, text)
        return EvidenceError(f"The server at {self.url} refused the request ({status}): {text}")

    def _each(self, work: Callable[[Any], _T], items: Sequence[Any]) -> list[_T]:
        if len(items) <= 1:
            return [work(item) for item in items]
        self._http()
        pool = self._pool
        if pool is None:  # closed by another thread just now
            return [work(item) for item in items]
        return list(pool.map(work, items))

    def _http(self) -> Any:
        try:
            import httpx
        except ImportError as error:
            raise missing_dependency("httpx", "served") from error
        with self._lock:
            if self._client is None or self._pid != os.getpid():  # connections must not be shared over a fork
                key, most = self._settings["api_key"], self._settings["max_concurrency"]
                self._client = httpx.Client(
                    timeout=self._settings["timeout"],
                    headers={"Authorization": f"Bearer {key}"} if key else {},
                    limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
                )
                self._pool = ThreadPoolExecutor(most, thread_name_prefix="rgate-served")
                self._pid = os.getpid()
            return self._client


def _tokens(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The generated tokens with their log-probabilities, in either of OpenAI's two shapes; [] without them."""
    logprobs = answer["choices"][0].get("logprobs") or {}
    if logprobs.get("content"):
        return list(logprobs["content"])
    tops = logprobs.get("top_logprobs") or [{}] * len(logprobs.get("tokens") or [])
    return [
        {
            "token": token,
            "logprob": value if value is not None else 0.0,
            "top_logprobs": [{"token": t, "logprob": v} for t, v in (top or {}).items()],
        }
        for token, value, top in zip(
            logprobs.get("tokens") or [], logprobs.get("token_logprobs") or [], tops, strict=False
        )
    ]


def _common_beginning(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:same]


def _score_of(target: str, likely: dict[str, float]) -> float:
    """Log-probability of the likeliest token that begins a target, or the most that it can have."""
    wanted = target.strip()
    begins = [v for t, v in likely.items() if t.strip() and wanted.startswith(t.strip())]
    if begins:
        return min(max(begins), 0.0)
    rest = 1.0 - sum(math.exp(v) for v in likely.values())
    return min(min(likely.values()), math.log(max(rest, 1e-9)), 0.0)


def _no_logprobs(url: str, text: str = "") -> EvidenceError:
    said = f" It says: {text}" if text else ""
    return EvidenceError(
        f"The server at {url} gives no log-probabilities.{said}",
        hint="vLLM, SGLang and llama.cpp give them; `transformers serve` does not.",
    )
