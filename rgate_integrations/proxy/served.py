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

__all__ = ["ServedProxy"]

Item = TypeVar("Item")
Result = TypeVar("Result")
_BUSY = {408, 429, 500, 502, 503, 504}
_TOP_LOGPROBS = 20  # what OpenAI's API and vLLM allow
_CHARACTERS_PER_TOKEN = 4  # for cutting texts: the server's tokenizer is not asked
# Servers read the spellings of control tokens as control tokens; a question must not end its own turn.
_CONTROL = re.compile(r"<\|[\w-]+\|>|</?s>|<(?:start|end)_of_turn>|\[/?INST\]")


class ServedProxy(Proxy):
    """A model on a server, asked over HTTP. For gates that judge by text and probabilities; probes cannot use it.

    ``generate`` and ``sample`` are chat completions, or completions for raw prompts, with log-probabilities; an
    adapter is the server's name of it (vLLM: ``--lora-modules``). ``score`` asks for one token with the 20 likeliest:
    targets are compared by their first token after their common prefix, which the assistant's turn begins with. A
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
        self._lock = threading.Lock()  # guards the three below
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
        work = partial(self._draft, prompt, adapter=adapter, max_tokens=tokens, temperature=0.0)
        return self._each(work, values)

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
        jobs = [(each, seed + sample) for each in values for sample in range(n)]
        work = partial(self._sample, prompt, max_tokens=tokens, temperature=temperature)
        drafts = self._each(work, jobs)
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
            EvidenceError: One target is a prefix of another, or the server gives no log-probabilities.
        """
        # Character by character is what is meant here.
        prefix = os.path.commonprefix(list(targets)) if len(targets) > 1 else ""  # noqa: RUF071
        rests = [target[len(prefix) :] for target in targets]
        if not all(rests):
            raise EvidenceError(f"{prefix!r} is the beginning of another target: they cannot be told apart.")
        work = partial(self._score, prompt, rests=rests, prefix=prefix, adapter=adapter)
        return self._each(work, values)

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
        characters = tokens * _CHARACTERS_PER_TOKEN
        return text[:characters] if len(text) > characters else None

    # --- one request ---------------------------------------------------------------------------------------

    def _draft(
        self, prompt: PromptTemplate, values: Values, *, adapter: str | None = None, **options: Any
    ) -> Draft:
        """Write one draft; ``options`` are those of the API."""
        answer = self._ask(prompt, values, adapter, options)
        choice = answer["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        tokens = _tokens(answer)
        if tokens and not tokens[-1]["token"]:  # the end of the turn
            tokens = tokens[:-1]
        return Draft(
            text=(text or "").strip(),
            tokens=tuple(str(token["token"]) for token in tokens),
            logprobs=tuple(min(float(token["logprob"]), 0.0) for token in tokens) if tokens else None,
            finished=choice.get("finish_reason") == "stop",
            source="proxy",
            model=self.name,
            prompt_tokens=_prompt_tokens(answer),
        )

    def _sample(self, prompt: PromptTemplate, job: tuple[Values, int], **options: Any) -> Draft:
        """Write one sample; a job is values and seed."""
        values, seed = job
        return self._draft(prompt, values, seed=seed, **options)

    def _score(
        self,
        prompt: PromptTemplate,
        values: Values,
        *,
        rests: Sequence[str],
        prefix: str,
        adapter: str | None,
    ) -> TargetScores:
        """Score the targets of one prompt, by what follows their common prefix."""
        options = {"max_tokens": 1, "temperature": 0.0, "top_logprobs": _TOP_LOGPROBS}
        answer = self._ask(prompt, values, adapter, options, prefix)
        tokens = _tokens(answer)
        likeliest = (tokens[0]["top_logprobs"] or []) if tokens else []
        logprobs = {str(token["token"]): float(token["logprob"]) for token in likeliest}
        if not logprobs:
            raise _no_logprobs(self.url)
        return TargetScores(tuple(_score_of(rest, logprobs) for rest in rests), _prompt_tokens(answer))

    def _ask(
        self,
        prompt: PromptTemplate,
        values: Values,
        adapter: str | None,
        options: dict[str, Any],
        prefix: str = "",
    ) -> dict[str, Any]:
        """Ask for a completion of one prompt, whose answer begins with ``prefix``."""
        clean = {name: _CONTROL.sub(" ", text) for name, text in values.items()}
        body: dict[str, Any] = {"model": adapter or self.name, **options}
        if prompt.stop_at_newline:
            body["stop"] = ["\n"]
        if prompt.raw:
            # Completions have the number of likeliest tokens in `logprobs` itself.
            body |= {"prompt": prompt.text(**clean) + prefix, "logprobs": body.pop("top_logprobs", 1)}
            return self._post("/completions", body)
        messages = prompt.messages(**clean)
        if prefix and messages[-1]["role"] == "assistant":
            messages[-1]["content"] += prefix
        elif prefix:
            messages.append({"role": "assistant", "content": prefix})
        if messages[-1]["role"] == "assistant":
            # vLLM's and SGLang's words for: go on with this turn.
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
                pause = min(0.25 * 2**attempt, 8.0)
                # Of random length, so that callers that failed together do not come back together.
                time.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311  not for cryptography
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

    def _each(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Do something with each item, at the same time; the server makes batches of it."""
        if len(items) <= 1:
            return [work(item) for item in items]
        self._http()
        pool = self._pool
        if pool is None:  # closed by another thread just now
            return [work(item) for item in items]
        return list(pool.map(work, items))

    def _http(self) -> Any:
        """Return the client of this process, and make it and the threads if there is none."""
        try:
            import httpx
        except ImportError as error:
            raise missing_dependency("httpx", "served") from error
        with self._lock:
            # A child of a fork has its parent's connections, which must not be shared, but not its threads.
            if self._client is None or self._pid != os.getpid():
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
    if logprobs.get("content"):  # chat completions
        return [{"top_logprobs": [], **token} for token in logprobs["content"]]
    tokens = logprobs.get("tokens") or []  # completions: parallel lists, and the likeliest as a mapping
    values = logprobs.get("token_logprobs") or []
    likeliest = logprobs.get("top_logprobs") or [{}] * len(tokens)
    found = []
    for token, value, likely in zip(tokens, values, likeliest, strict=False):
        top = [{"token": name, "logprob": logprob} for name, logprob in (likely or {}).items()]
        found.append({"token": token, "logprob": 0.0 if value is None else value, "top_logprobs": top})
    return found


def _prompt_tokens(answer: dict[str, Any]) -> int:
    usage = answer.get("usage") or {}
    return int(usage.get("prompt_tokens") or 0)


def _score_of(target: str, logprobs: dict[str, float]) -> float:
    """Log-probability of the likeliest token that a target may begin with, or the most that it can have."""
    wanted = target.strip()
    starts = []
    for token, logprob in logprobs.items():
        text = token.strip()
        if text and wanted.startswith(text):
            starts.append(logprob)
    if starts:
        return min(max(starts), 0.0)
    # It is not among those that are listed: no likelier than the least of them, and not more than they leave over.
    left_over = 1.0 - sum(math.exp(logprob) for logprob in logprobs.values())
    return min(min(logprobs.values()), math.log(max(left_over, 1e-9)), 0.0)


def _no_logprobs(url: str, text: str = "") -> EvidenceError:
    said = f" It says: {text}" if text else ""
    return EvidenceError(
        f"The server at {url} gives no log-probabilities.{said}",
        hint="vLLM, SGLang and llama.cpp give them; `transformers serve` does not.",
    )
