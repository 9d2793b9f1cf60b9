"""Proxy models behind an OpenAI-compatible server that gives log-probabilities: vLLM, SGLang, llama.cpp."""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from pydantic import SecretStr

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, EvidenceError, ServerError
from rgate_integrations.models.base import LanguageModel, TargetScores, Values
from rgate_integrations.models.bounded_http import Answer, make_client, request, run_requests
from rgate_integrations.models.completion import Completion, read_completion
from rgate_integrations.models.credentials import read_credentials
from rgate_integrations.models.request_options import RequestOptions, ServerHabits
from rgate_integrations.prompts import PromptTemplate, strip_control_tokens
from rgate_integrations.runtime.flow import Call, arun

if TYPE_CHECKING:
    import httpx

_Request: TypeAlias = tuple[str, dict[str, Any]]  # path and body
_BUSY = {408, 429, 500, 502, 503, 504}
_LONGEST_PAUSE = 60.0  # seconds that a server may ask us to wait
_TOP_LOGPROBS = 20  # what OpenAI's API and vLLM allow
_QUOTED = 300  # characters of a server's own words in an error
_CHARACTERS_PER_TOKEN = 4  # for cutting texts: the server's tokenizer is not asked


class ServedProxy(LanguageModel):
    """A model on a server, asked over HTTP. For gates that judge by text and probabilities; probes cannot use it.

    ``generate`` and ``sample`` are chat completions, or completions for raw prompts, with log-probabilities. What a
    server refuses is not sent again: ``max_tokens`` becomes ``max_completion_tokens``, and log-probabilities,
    temperature and the like are left out. An answer is what follows the model's thoughts; one that is cut off before
    is empty. An adapter is the server's name of it (vLLM:
    ``--lora-modules``). ``score`` asks for one token with the 20 likeliest: targets are compared by their first token
    after their common prefix, which the assistant's turn begins with. A target that is not among the 20 gets an upper
    bound of its probability: the smaller of the least likely of the 20 and what all 20 together leave over. Where
    none is among them, as with a model that thinks first, there is no score.

    Args:
        url: The server's base, such as ``http://localhost:8000/v1``. A login in it (``http://user:password@host``,
            percent-encoded) is sent as basic authentication.
        model: Name of the model on the server.
        api_key: Sent as a bearer token, without the white space around it; the environment's ``OPENAI_API_KEY`` is
            never read.
        timeout: Of one request and its whole answer, in seconds, however slowly it comes.
        retries: How often a request is tried again after 408, 429, 5xx or a lost connection, with back-off.
        max_concurrency: Requests at a time; a server batches what comes together.
        options: What requests have beside, as the application sends them, and how long the model may think.

    Raises:
        ConfigurationError: The URL cannot be used, the key cannot be sent, both a key and a login were given, or a
            number is out of its range.

    Key and login appear in no error, log or ``repr``, also not where a server's answer quotes them. A pickle of the
    proxy has them in full, since workers need them: keep it as you keep the key.

    Example:
        >>> from rgate_integrations import load_gate
        >>> proxy = ServedProxy("http://localhost:8000/v1", "Qwen/Qwen3-4B")
        >>> gate = load_gate("ik", proxy=proxy)
    """

    is_remote: ClassVar[bool] = True
    habits: ServerHabits

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
        # Infinity is no deadline, and NaN is above nothing.
        if not 0 < timeout < math.inf or retries < 0 or max_concurrency < 1:
            raise ConfigurationError(
                f"timeout={timeout!r} and max_concurrency={max_concurrency!r} must be above 0, and timeout finite; "
                f"retries={retries!r} must be at least 0."
            )
        self.url, self._credentials = read_credentials(url, api_key)
        self.name = model
        self.timeout = timeout
        self.retries = retries
        self.max_concurrency = max_concurrency
        self.options = options
        self.habits = ServerHabits(options)

    def __repr__(self) -> str:
        return f"ServedProxy({self.url!r}, {self.name!r})"

    def generate(
        self, prompt: PromptTemplate, values: Sequence[Values], *, tokens: int, adapter: str | None = None
    ) -> list[Draft]:
        """Continue prompts greedily; see `Generates.generate`."""
        options = {"max_tokens": tokens, "temperature": 0.0}
        requests = [self._request(prompt, each, options, adapter=adapter) for each in values]
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
        """Sample continuations; see `Generates.sample`. Whether a seed is honoured is the server's matter."""
        requests = []
        for each in values:
            for number in range(n):
                options = {"max_tokens": tokens, "temperature": temperature, "seed": seed + number}
                requests.append(self._request(prompt, each, options))
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
        """Score the first token that tells the targets apart; see the class.

        Raises:
            EvidenceError: One target is a prefix of another, the server gives no log-probabilities, or no target
                is among the likeliest tokens.
        """
        prefix = ""
        if len(targets) > 1:
            prefix = os.path.commonprefix(list(targets))  # noqa: RUF071  character by character
        rests = [target[len(prefix) :] for target in targets]
        if "" in rests:
            raise EvidenceError(f"{prefix!r} is the beginning of another target: they cannot be told apart.")
        options = {"max_tokens": 1, "temperature": 0.0, "top_logprobs": _TOP_LOGPROBS}
        requests = [self._request(prompt, each, options, adapter=adapter, prefix=prefix) for each in values]
        completions = self._ask(requests, needs_logprobs=True)
        return [self._score(rests, likeliest, draft.prompt_tokens) for draft, likeliest in completions]

    def truncate(self, text: str, tokens: int) -> str | None:
        """Return ``text`` cut to about a number of tokens, or None when it is not longer."""
        characters = tokens * _CHARACTERS_PER_TOKEN
        if len(text) <= characters:
            return None
        return text[:characters]

    # --- prompts and answers ---------------------------------------------------------------------------------

    def _write(self, requests: Sequence[_Request], tokens: int) -> list[Draft]:
        """Return drafts of at most so many tokens, whatever the server takes for a token."""
        return [draft.head(tokens) for draft, _ in self._ask(requests, needs_logprobs=False)]

    def _score(self, rests: Sequence[str], logprobs: Mapping[str, float], prompt_tokens: int) -> TargetScores:
        """Score the targets of one prompt, by what follows their common prefix."""
        if not logprobs:
            raise EvidenceError(
                f"The server at {self.url} gives no log-probabilities.",
                hint="vLLM, SGLang and llama.cpp give them; `transformers serve` does not.",
            )
        # No likelier than the least of those that are listed, and not more than they leave over.
        left_over = 1.0 - sum(map(math.exp, logprobs.values()))
        most = min(*logprobs.values(), math.log(max(left_over, 1e-9)), 0.0)
        listed: dict[str, float] = {}
        for rest in rests:
            for token, logprob in logprobs.items():
                if token.strip() and rest.strip().startswith(token.strip()):
                    listed[rest] = max(listed.get(rest, logprob), logprob)
        # The bounds of targets that are not listed say nothing about which of them is likelier.
        if len(rests) > 1 and not listed:
            likeliest = max(logprobs, key=logprobs.__getitem__)
            raise EvidenceError(
                f"{self.name} would begin with {likeliest[:40]!r}: none of {', '.join(map(repr, rests))} "
                f"is among its {len(logprobs)} likeliest tokens.",
                hint="Ask a model that answers at once: switch its thinking off, or take an instruct model.",
            )
        return TargetScores(tuple(listed.get(rest, most) for rest in rests), prompt_tokens)

    def _request(
        self,
        prompt: PromptTemplate,
        values: Values,
        options: dict[str, Any],
        *,
        adapter: str | None = None,
        prefix: str = "",
    ) -> _Request:
        """Return path and body of the request for one prompt, whose answer begins with ``prefix``."""
        # A server reads the spellings of control tokens as control tokens: none may come out of a question.
        clean = {name: strip_control_tokens(text) for name, text in values.items()}
        body: dict[str, Any] = {"model": adapter or self.name, **options}
        if prompt.stop_at_newline:
            body["stop"] = ["\n"]
        if prompt.raw:
            # Completions have the number of likeliest tokens in `logprobs`.
            body |= {"prompt": prompt.text(**clean) + prefix, "logprobs": body.pop("top_logprobs", 1)}
            return "/completions", body
        literally = prefix.replace("{", "{{").replace("}", "}}")
        messages = replace(prompt, assistant=prompt.assistant + literally).messages(**clean)
        if messages[-1]["role"] == "assistant":
            # vLLM's and SGLang's words for: go on with this turn.
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        return "/chat/completions", {**body, "messages": messages, "logprobs": True}

    # --- the server ------------------------------------------------------------------------------------------

    def _ask(self, requests: Sequence[_Request], *, needs_logprobs: bool) -> list[Completion]:
        """Send requests, several at a time; the server makes batches of them.

        Raises:
            ServerError: All failed, the first of them with this: there is no use in trying one of them again.
            EvidenceError: Some failed, so they are best asked one by one.
        """
        outcomes = run_requests(self._ask_all(requests, needs_logprobs))
        completions = [each for each in outcomes if isinstance(each, tuple)]
        errors = [each for each in outcomes if isinstance(each, BaseException)]
        if completions and errors:
            raise EvidenceError(f"{len(errors)} of {len(requests)} requests failed; the first: {errors[0]}")
        if errors:
            raise errors[0]
        return completions

    async def _ask_all(
        self, requests: Sequence[_Request], needs_logprobs: bool
    ) -> list[Completion | BaseException]:
        slots = asyncio.Semaphore(self.max_concurrency)
        async with make_client(self.url, self._credentials.headers) as client:
            asked = [self._complete(client, slots, *each, needs_logprobs) for each in requests]
            return await asyncio.gather(*asked, return_exceptions=True)

    async def _complete(
        self,
        client: httpx.AsyncClient,
        slots: asyncio.Semaphore,
        path: str,
        body: dict[str, Any],
        needs_logprobs: bool,
    ) -> Completion:
        """Send a request, as often as `ServerHabits.complete` asks for it."""
        async with slots:
            if needs_logprobs:
                return await self._adapt(client, path, body, True, self.retries, longer=False)

            async def ask(longer: bool, is_required: bool) -> Draft:
                retries = self.retries if is_required else 0
                return (await self._adapt(client, path, body, False, retries, longer=longer))[0]

            # Both forms are the same: it is only awaited.
            draft = await arun(self.habits.complete(lambda *flags: Call(ask, ask, *flags)))
            return draft, {}

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
        """Send a request; without what the server refuses, which is then remembered.

        Raises:
            EvidenceError: It refuses something else, or the log-probabilities that are needed.
        """
        refused = list(self.habits.refused)
        without = [name for name in refused if name != "logprobs" or not needs_logprobs]
        named: list[str] = []
        while True:
            sent = self.habits.body(body, without, longer=longer)
            try:
                completion = await self._post(client, path, sent, retries)
                break
            except EvidenceError as error:
                name = self.habits.find_refused(error.message, sent)
                if name:
                    named.append(name)
                elif "logprobs" in sent:  # for another reason, which may be gone with the next request
                    name = "logprobs"
                if not name or (name == "logprobs" and needs_logprobs):
                    raise
                without.append(name)
        # Only now: what was refused for another reason is no habit.
        self.habits.refused = max(self.habits.refused, refused + named, key=len)
        return completion

    async def _post(
        self, client: httpx.AsyncClient, path: str, body: dict[str, Any], retries: int
    ) -> Completion:
        """Send a request; try again after what may pass.

        Raises:
            ServerError: The server could not be reached, stayed busy or broken, or gave something else as an answer.
            EvidenceError: It refused this very request.
        """
        import httpx

        trouble, pause = "", 0.0
        for attempt in range(retries + 1):
            await asyncio.sleep(pause)
            # Of random length, so that callers that failed together do not come back together.
            pause = min(0.5 * 2**attempt, 8.0) * random.uniform(0.5, 1.0)  # noqa: S311  not for cryptography
            try:
                url = self.url + path
                answer = await request(client, "POST", url, seconds=self.timeout, body=body)
            except TimeoutError:
                trouble = f"there was no whole answer within {self.timeout:g} s"
                continue
            except httpx.RequestError as error:
                trouble = self._credentials.redact(f"{type(error).__name__}: {error}")
                continue
            if answer.status not in _BUSY:
                return self._read(answer)
            trouble = f"it answered {answer.status}"
            wished = answer.headers.get("retry-after", "")
            if wished.isdecimal():
                pause = min(float(wished), _LONGEST_PAUSE)
        # Nothing is raised inside an `except`: a chained error of httpx may quote what was sent.
        raise ServerError(
            f"The server at {self.url} could not be used: {trouble}.",
            hint="Is it running, and is the URL its /v1?",
        )

    def _read(self, answer: Answer) -> Completion:
        status = answer.status
        if status < 400:
            completion = read_completion(answer.content, self.name)
            if completion is None:
                raise ServerError(f"{self.url} does not answer as OpenAI's API does.")
            return completion
        said = self._credentials.redact(answer.text)[:_QUOTED]
        if status in (401, 403, 404):
            raise ServerError(
                f"The server at {self.url} refused the key, or has no such path or model ({status}): {said}",
                hint="Check api_key=, url=…/v1 and model=.",
            )
        raise EvidenceError(f"The server at {self.url} refused the request ({status}): {said}")
