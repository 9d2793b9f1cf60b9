"""Models on an OpenAI-compatible server with log-probabilities, such as vLLM, SGLang or llama.cpp."""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from pydantic import SecretStr

from rgate_integrations.decision import Draft, to_float, valid_count
from rgate_integrations.errors import ConfigurationError, EvidenceError, ServerError
from rgate_integrations.models.base import LanguageModel, TargetScores, Values
from rgate_integrations.models.bounded_http import (
    MAX_QUOTED,
    Answer,
    make_client,
    read_credentials,
    request,
    run_requests,
)
from rgate_integrations.models.request_options import RequestOptions, ServerHabits
from rgate_integrations.prompts import PromptTemplate, strip_control_tokens
from rgate_integrations.runtime.files import parse_json
from rgate_integrations.runtime.flow import Call, arun
from rgate_integrations.runtime.records import read_choice_logprobs, read_logprobs

if TYPE_CHECKING:
    import httpx

_Request: TypeAlias = tuple[str, dict[str, Any]]  # path and body
# Statuses after which the same request may succeed if it is repeated.
_BUSY = {408, 429, 500, 502, 503, 504}
_MAX_PAUSE = 60.0  # seconds, even if a server asks for a longer pause
_TOP_LOGPROBS = 20  # the maximum of OpenAI's API and vLLM
_CHARACTERS_PER_TOKEN = 4  # an estimate: the server's tokenizer is unknown


class RemoteModel(LanguageModel):
    """A model on a server, for gates that use text and probabilities but read no hidden states.

    ``generate`` and ``sample`` use chat completions, or completions for raw prompts, with log-probabilities. Fields
    that a server refuses are not sent again: ``max_tokens`` becomes ``max_completion_tokens``; log-probabilities,
    temperature and similar fields are left out. The answer is the text after the model's thoughts, and is empty if
    these were cut off. Refer to an adapter by its name on the server (vLLM: ``--lora-modules``).

    ``score`` starts the assistant's turn with the targets' common prefix, and requests one token with the 20 most
    probable alternatives. The targets are compared by their first token after the prefix. A target outside the top 20
    gets an upper bound: the lowest probability of the 20, or 1 minus the sum of all 20, whichever is smaller. If
    none of several targets is among the 20, for example because the model thinks first, scoring fails.

    Args:
        url: Base URL, such as ``http://localhost:8000/v1``. A login in it (``http://user:password@host``,
            percent-encoded) is sent as basic authentication.
        model: Name of the model on the server.
        api_key: Sent as a bearer token, without surrounding white space; ``OPENAI_API_KEY`` is never read.
        timeout: Maximum seconds for one request and its whole answer, above 0 and finite.
        retries: Maximum number of retries, at least 0, with back-off, after 408, 429, 500, 502 to 504,
            a timeout, or a failed connection.
        max_concurrency: Maximum number of concurrent requests per call, at least 1; the server batches them.
        options: Additional fields of the application's requests, and how long the model may think.

    Raises:
        ConfigurationError: The URL or the key is invalid, both a key and a login were given, or a number is out of
            range.
        MissingDependencyError: The extra ``openai`` is not installed.

    Key and login never appear in an error, log or ``repr``, even if a server's answer quotes them. A pickle of the
    proxy does contain them, because worker processes need them: protect it like the key.

    Examples:
        >>> from rgate_integrations import load_gate
        >>> proxy = RemoteModel("http://localhost:8000/v1", "Qwen/Qwen3-4B")
        >>> gate = load_gate("ik", proxy=proxy)
    """

    is_remote: ClassVar[bool] = True

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str | SecretStr | None = None,
        timeout: float = 60.0,
        retries: int = 3,
        max_concurrency: int = 16,
        options: RequestOptions = RequestOptions(),  # noqa: B008  it is frozen
    ) -> None:
        seconds = to_float(timeout)
        if seconds is None or not 0 < seconds < math.inf:  # written this way to reject NaN, too
            raise ConfigurationError(f"timeout must be a finite number of seconds above 0, not {timeout!r}.")
        valid_count(retries, "retries", least=0)
        valid_count(max_concurrency, "max_concurrency")
        self.url, self._credentials = read_credentials(url, api_key)
        self.name = model
        self.timeout = timeout
        self.retries = retries
        self.max_concurrency = max_concurrency
        self.options = options
        self.habits = ServerHabits(options)

    def __repr__(self) -> str:
        return f"RemoteModel({self.url!r}, {self.name!r})"

    def generate(
        self, prompt: PromptTemplate, values: Sequence[Values], *, tokens: int, adapter: str | None = None
    ) -> list[Draft]:
        """Continue prompts greedily; see `LanguageModel.generate`.

        Raises:
            ServerError: The server cannot be used.
            EvidenceError: The server refused the requests, or only some of them succeeded.
            ConfigurationError: The environment's proxy settings cannot be used.
        """
        requests = [
            self._request(prompt, fields, {"max_tokens": tokens, "temperature": 0.0}, adapter=adapter)
            for fields in values
        ]
        return self._write(requests, tokens)

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
        """Sample continuations; see `LanguageModel.sample`. The server may ignore the seed.

        Raises the errors of `generate`.
        """
        requests = [
            self._request(
                prompt, fields, {"max_tokens": tokens, "temperature": temperature, "seed": seed + number}
            )
            for fields in values
            for number in range(n)
        ]
        drafts = self._write(requests, tokens)
        return [tuple(drafts[i : i + n]) for i in range(0, len(drafts), n)]

    def score(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        targets: Sequence[str],
        *,
        adapter: str | None = None,
    ) -> list[TargetScores]:
        """Return scores of the first token in which the targets differ, not of whole targets; see the class.

        Raises:
            ServerError: The server cannot be used.
            EvidenceError: One target is a prefix of another, the server sends no log-probabilities, refused a
                request or answered only some, or none of several targets is among the top tokens.
            ConfigurationError: The environment's proxy settings cannot be used.
        """
        prefix = ""
        if len(targets) > 1:
            prefix = os.path.commonprefix(list(targets))  # noqa: RUF071  character by character
        rests = [target[len(prefix) :] for target in targets]
        if "" in rests:
            raise EvidenceError(
                f"The target text {prefix!r} is the beginning of another target, so the two cannot be compared.",
                hint="Choose targets such that none is the beginning of another.",
            )
        options = {"max_tokens": 1, "temperature": 0.0, "top_logprobs": _TOP_LOGPROBS}
        requests = [
            self._request(prompt, fields, options, adapter=adapter, prefix=prefix) for fields in values
        ]
        completions = self._ask(requests, needs_logprobs=True)
        return [self._score(rests, likeliest, draft.prompt_tokens) for draft, likeliest in completions]

    def truncate(self, text: str, tokens: int) -> str | None:
        """Return a text cut to about ``tokens`` tokens; None if it is no longer than that."""
        characters = tokens * _CHARACTERS_PER_TOKEN
        return text[:characters] if len(text) > characters else None

    # --- prompts and answers ---------------------------------------------------------------------------------

    def _write(self, requests: Sequence[_Request], tokens: int) -> list[Draft]:
        """Request drafts of at most ``tokens`` tokens, even if the server counts differently."""
        return [draft.head(tokens) for draft, _ in self._ask(requests, needs_logprobs=False)]

    def _score(self, rests: Sequence[str], logprobs: Mapping[str, float], prompt_tokens: int) -> TargetScores:
        """Return the scores of one prompt's targets.

        Args:
            rests: The targets' texts after their common prefix.
            logprobs: The most probable next tokens, each with its log-probability.
            prompt_tokens: Length of the prompt in tokens.

        Raises:
            EvidenceError: ``logprobs`` is empty, or there are several targets and it contains none of them.
        """
        if not logprobs:
            raise EvidenceError(
                f"The server at {self.url} sends no log-probabilities.",
                hint="Use vLLM, SGLang or llama.cpp; `transformers serve` does not send any.",
            )
        # An unlisted token has at most the lowest listed probability, and at most what the list leaves over.
        left_over = 1.0 - sum(map(math.exp, logprobs.values()))
        bound = min(*logprobs.values(), math.log(max(left_over, 1e-9)), 0.0)
        listed: dict[str, float] = {}
        for rest in rests:
            for token, logprob in logprobs.items():
                if token.strip() and rest.strip().startswith(token.strip()):
                    listed[rest] = max(listed.get(rest, logprob), logprob)
        # Bounds alone cannot tell which target is likelier.
        if len(rests) > 1 and not listed:
            likeliest = max(logprobs, key=logprobs.__getitem__)
            raise EvidenceError(
                f"{self.name} would start its answer with {likeliest[:40]!r}: its {len(logprobs)} likeliest first "
                f"tokens include none of {', '.join(map(repr, rests))}.",
                hint="Turn off the model's thinking, or use an instruct model, which answers at once.",
            )
        return TargetScores(tuple(listed.get(rest, bound) for rest in rests), prompt_tokens)

    def _request(
        self,
        prompt: PromptTemplate,
        values: Values,
        options: dict[str, Any],
        *,
        adapter: str | None = None,
        prefix: str = "",
    ) -> _Request:
        """Return path and body of the request for one prompt. The LLM's answer continues ``prefix``."""
        # A server interprets the text of control tokens, so a question must not contain any.
        clean = {name: strip_control_tokens(text) for name, text in values.items()}
        body: dict[str, Any] = {"model": adapter or self.name, **options}
        if prompt.stop_at_newline:
            body["stop"] = ["\n"]
        if prompt.raw:
            # For completions, `logprobs` is the number of top tokens.
            body |= {"prompt": prompt.text(**clean) + prefix, "logprobs": body.pop("top_logprobs", 1)}
            return "/completions", body
        literally = prefix.replace("{", "{{").replace("}", "}}")
        messages = replace(prompt, assistant=prompt.assistant + literally).messages(**clean)
        if messages[-1]["role"] == "assistant":
            # With these fields, vLLM and SGLang continue the turn.
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        return "/chat/completions", {**body, "messages": messages, "logprobs": True}

    # --- the server ------------------------------------------------------------------------------------------

    def _ask(self, requests: Sequence[_Request], *, needs_logprobs: bool) -> list[Completion]:
        """Send requests concurrently, and return their completions in order.

        Raises:
            ServerError: All requests failed, and the first one failed because the server cannot be used.
                Repeating them is useless.
            EvidenceError: Only some requests failed; or all failed, and the server refused the first one. In
                both cases the gate computes the evidence again, for each question alone.
            ConfigurationError: The environment's proxy settings cannot be used.
        """
        outcomes = run_requests(self._ask_all(requests, needs_logprobs))
        completions = [outcome for outcome in outcomes if isinstance(outcome, tuple)]
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        # One bad question must not cost the others their decisions, but a dead server must not be tried for each.
        if completions and errors:
            raise EvidenceError(
                f"{len(errors)} of {len(requests)} requests to {self.name} failed; the first error was: "
                f"{getattr(errors[0], 'message', errors[0])}",
                hint=getattr(errors[0], "hint", ""),
            )
        if errors:
            raise errors[0]
        return completions

    async def _ask_all(
        self, requests: Sequence[_Request], needs_logprobs: bool
    ) -> list[Completion | BaseException]:
        # All requests at once could exceed the server's queue, and those that wait in it would time out.
        slots = asyncio.Semaphore(self.max_concurrency)
        async with make_client(self.url, self._credentials.headers) as client:
            calls = [self._complete(client, slots, *request, needs_logprobs) for request in requests]
            return await asyncio.gather(*calls, return_exceptions=True)

    async def _complete(
        self,
        client: httpx.AsyncClient,
        slots: asyncio.Semaphore,
        path: str,
        body: dict[str, Any],
        needs_logprobs: bool,
    ) -> Completion:
        """Send a request, and return its completion.

        A request for text may be repeated with more tokens; see `ServerHabits.complete`. One for scores is not.
        """
        async with slots:
            # A score only needs the first token, so it never waits for thoughts.
            if needs_logprobs:
                return await self._adapt(client, path, body, True, self.retries, longer=False)

            async def ask(longer: bool, is_required: bool) -> Draft:
                retries = self.retries if is_required else 0
                return (await self._adapt(client, path, body, False, retries, longer=longer))[0]

            # `Call` needs two forms, but this one is only ever awaited.
            return await arun(self.habits.complete(lambda *flags: Call(ask, ask, *flags))), {}

    async def _adapt(
        self,
        client: httpx.AsyncClient,
        path: str,
        body: dict[str, Any],
        needs_logprobs: bool,
        retries: int,
        *,
        longer: bool,
    ) -> Completion:
        """Send a request without the fields that the server refuses, and record those that it names.

        Raises:
            EvidenceError: The server refuses something else, or log-probabilities although they are needed.
            ServerError: See `_post`.
        """
        refused = list(self.habits.refused)
        without = [name for name in refused if name != "logprobs" or not needs_logprobs]
        named: list[str] = []
        while True:
            sent = self.habits.body(body, without, longer=longer)
            try:
                completion = await self._post(client, path, sent, retries)
            except EvidenceError as error:
                name = self.habits.find_refused(error.message, sent)
                if name:
                    named.append(name)
                elif "logprobs" in sent:
                    # It may be the cause, but it is not recorded, because the refusal does not mention it.
                    name = "logprobs"
                if not name or (name == "logprobs" and needs_logprobs):
                    raise
                without.append(name)
            else:
                # Only a success proves that these fields were the cause.
                self.habits.refused = max(self.habits.refused, refused + named, key=len)
                return completion

    async def _post(
        self, client: httpx.AsyncClient, path: str, body: dict[str, Any], retries: int
    ) -> Completion:
        """Send a request, with retries after transient failures.

        Raises:
            ServerError: The server could not be reached, stayed busy or broken, refused the key, path or
                model, or its answer is too long or not in OpenAI's format.
            EvidenceError: The server refused this request for another reason.
        """
        import httpx

        trouble, hint, pause = "", "", 0.0
        for attempt in range(retries + 1):
            await asyncio.sleep(pause)
            # Random, so that callers that failed together do not retry together.
            pause = min(0.5 * 2**attempt, 8.0) * random.uniform(0.5, 1.0)  # noqa: S311  not for cryptography
            try:
                answer = await request(client, "POST", self.url + path, seconds=self.timeout, body=body)
            except TimeoutError:
                trouble, hint = (
                    f"no complete answer within {self.timeout:g} s",
                    "Check the server's load, or allow more time: increase timeout= or, on the command line, "
                    "--thinking-tokens (10 tokens add a second).",
                )
            except httpx.RequestError as error:
                trouble, hint = (
                    self._credentials.redact(f"{type(error).__name__}: {error}"),
                    "Check that it is running, and the URL's scheme, host and port.",
                )
            else:
                if answer.status not in _BUSY:
                    return self._read(answer)
                trouble, hint = (
                    f"it answered {answer.status}",
                    "Send fewer requests at once, or try again later."
                    if answer.status == 429
                    else "Check the server's log, or try again later.",
                )
                retry_after = answer.headers.get("retry-after", "")
                if retry_after.isdecimal():
                    pause = min(float(retry_after), _MAX_PAUSE)
        # Raised outside the `except`, because a chained error of httpx may quote the key.
        raise ServerError(
            f"The server at {self.url} could not be used: {trouble}.",
            hint=hint,
        )

    def _read(self, answer: Answer) -> Completion:
        if answer.status < 400:
            completion = read_completion(answer.content, self.name)
            if completion is None:
                raise ServerError(
                    f"The answer from {self.url} is not in the format of OpenAI's API.",
                    hint="Check that the server is OpenAI-compatible, and that the URL ends in /v1.",
                )
            return completion
        message = f"({answer.status}): {self._credentials.redact(answer.text)[:MAX_QUOTED]}"
        if answer.status in (401, 403, 404):
            problem = "refused the key"
            hint = "Check the key (api_key=, RGATE_API_KEY, for a judge RGATE_JUDGE_API_KEY) and what it may use."
            if answer.status == 404:
                problem = "does not know the path or the model"
                hint = "Check the URL (…/v1) and the name of the model (model=, --model)."
            raise ServerError(f"The server at {self.url} {problem} {message}", hint=hint)
        raise EvidenceError(
            f"The server at {self.url} refused the request {message}",
            hint="Fix what the message names, or check the server's log.",
        )


# --- bodies of answers ---------------------------------------------------------------------------------------------

Completion: TypeAlias = tuple[Draft, Mapping[str, float]]
"""A draft, and the top tokens of its first position with their log-probabilities (empty if the server sent none)."""


def read_completion(body: bytes, model: str = "") -> Completion | None:
    """Parse the body of a server's answer.

    Args:
        body: The body.
        model: Name of the model that wrote it.

    Returns:
        The completion, or None if the body is not in the format of OpenAI's API. No error is raised,
        because it would quote the body, which may quote the key.
    """
    try:
        answer = parse_json(body)
        choice = answer["choices"][0]
        message = choice.get("message")
        content = choice["text"] if message is None else message.get("content") or ""
        if not isinstance(content, str | list):
            return None
        if isinstance(content, list) and not all(
            isinstance(part, Mapping) and "type" in part for part in content
        ):
            return None
        tokens, logprobs = read_choice_logprobs(choice)
        usage = answer.get("usage") or {}
        draft = Draft.from_message(
            choice if message is None else message,
            usage=usage,
            reason=choice.get("finish_reason"),
            tokens=tokens,
            logprobs=logprobs or None,
            source="proxy",
            model=model,
            # Servers may send null or a negative number.
            prompt_tokens=max(int(usage.get("prompt_tokens") or 0), 0),
        )
        return draft, _read_top_tokens(choice.get("logprobs") or {})
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError):
        return None


def _read_top_tokens(logprobs: Mapping[str, Any]) -> dict[str, float]:
    """Return the top tokens of the first position, with their log-probabilities."""
    if logprobs.get("content"):  # chat completions
        entries = logprobs["content"][0].get("top_logprobs") or []
    else:  # completions have a mapping per position
        tops = (logprobs.get("top_logprobs") or [None])[0] or {}
        entries = [{"token": token, "logprob": logprob} for token, logprob in tops.items()]
    return dict(zip(*read_logprobs(entries), strict=True))
