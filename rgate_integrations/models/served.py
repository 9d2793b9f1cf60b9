"""Proxy models behind an OpenAI-compatible server that gives log-probabilities: vLLM, SGLang, llama.cpp."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from pydantic import SecretStr

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, EvidenceError
from rgate_integrations.models.base import HiddenStates, PooledLayer, Proxy, TargetScores, Values
from rgate_integrations.models.credentials import read_credentials
from rgate_integrations.models.server import ServerConnection, no_logprobs
from rgate_integrations.prompts import PromptTemplate, without_control_tokens

_Request: TypeAlias = tuple[str, dict[str, Any]]  # path and body
_TOP_LOGPROBS = 20  # what OpenAI's API and vLLM allow
_QUOTED = 40  # characters of a server's token in an error
_CHARACTERS_PER_TOKEN = 4  # for cutting texts: the server's tokenizer is not asked


class ServedProxy(Proxy):
    """A model on a server, asked over HTTP. For gates that judge by text and probabilities; probes cannot use it.

    ``generate`` and ``sample`` are chat completions, or completions for raw prompts, with log-probabilities; a server
    that refuses requests for these is asked without. An adapter is the server's name of it (vLLM:
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

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str | SecretStr | None = None,
        timeout: float = 60.0,
        retries: int = 3,
        max_concurrency: int = 16,
    ) -> None:
        self.url, credentials = read_credentials(url, api_key)
        self.name = model
        self._refuses_logprobs = False
        self._connection = ServerConnection(self.url, credentials, timeout, retries, max_concurrency)

    def __repr__(self) -> str:
        return f"ServedProxy({self.url!r}, {self.name!r})"

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        self._connection.close()

    def generate(
        self, prompt: PromptTemplate, values: Sequence[Values], *, tokens: int, adapter: str | None = None
    ) -> list[Draft]:
        """Continue prompts greedily; see `Proxy.generate`."""
        if tokens == 0:
            return [Draft(text="", source="proxy", model=self.name, finished=False)] * len(values)
        options = {"max_tokens": tokens, "temperature": 0.0}
        requests = [self._request(prompt, each, options, adapter=adapter) for each in values]
        return self._connection.each(self._draft, requests)

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
        requests = []
        for each in values:
            for number in range(n):
                options = {"max_tokens": tokens, "temperature": temperature, "seed": seed + number}
                requests.append(self._request(prompt, each, options))
        drafts = self._connection.each(self._draft, requests)
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
        return self._connection.each(partial(self._score, rests), requests)

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

    def truncate(self, text: str, tokens: int) -> str | None:
        """Return ``text`` cut to about a number of tokens, at four characters each, or None when it is not longer."""
        characters = tokens * _CHARACTERS_PER_TOKEN
        if len(text) <= characters:
            return None
        return text[:characters]

    async def _draft(self, request: _Request) -> Draft:
        """Write one draft: with log-probabilities, or without, if the server refuses requests for them."""
        path, body = request
        answer, refusal = None, ""
        if not self._refuses_logprobs:
            try:
                answer = await self._connection.post(path, body)
            except EvidenceError as error:
                refusal = error.message
        if answer is None:
            without = dict(body)
            del without["logprobs"]
            answer = await self._connection.post(path, without)
            # Remembered only where the server named them: another reason may be gone with the next request.
            self._refuses_logprobs |= "log-prob" in refusal
        tokens = answer.tokens
        if tokens and not tokens[-1].text:  # the end of the turn
            tokens = tokens[:-1]
        draft = Draft(
            text=answer.text.strip(),
            tokens=tuple(token.text for token in tokens),
            logprobs=tuple(token.logprob for token in tokens) or None,
            finished=answer.finished,
            source="proxy",
            model=self.name,
            prompt_tokens=answer.prompt_tokens,
        )
        return draft.head(body["max_tokens"])  # whatever the server takes for a token

    async def _score(self, rests: Sequence[str], request: _Request) -> TargetScores:
        """Score the targets of one prompt, by what follows their common prefix."""
        answer = await self._connection.post(*request)
        if not answer.tokens or not answer.tokens[0].likeliest:
            raise no_logprobs(self.url)
        logprobs = answer.tokens[0].likeliest
        # No likelier than the least of those that are listed, and not more than they leave over.
        left_over = 1.0 - sum(map(math.exp, logprobs.values()))
        most = min(*logprobs.values(), math.log(max(left_over, 1e-9)), 0.0)
        scores, is_any_listed = [], False
        for rest in rests:
            listed = _listed(rest, logprobs)
            is_any_listed |= bool(listed)
            scores.append(max(listed, default=most))
        # The bounds of targets that are not listed say nothing about which of them is likelier.
        if len(rests) > 1 and not is_any_listed:
            likeliest = max(logprobs, key=logprobs.__getitem__)
            raise EvidenceError(
                f"{self.name} would begin with {likeliest[:_QUOTED]!r}: none of {', '.join(map(repr, rests))} "
                f"is among its {len(logprobs)} likeliest tokens.",
                hint="Ask a model that answers at once: switch its thinking off, or take an instruct model.",
            )
        return TargetScores(tuple(scores), answer.prompt_tokens)

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
        clean = {}
        for name, text in values.items():
            clean[name] = without_control_tokens(text)
        body: dict[str, Any] = {"model": adapter or self.name, **options}
        if prompt.stop_at_newline:
            body["stop"] = ["\n"]
        if prompt.raw:
            # Completions have the number of likeliest tokens in `logprobs`.
            body |= {"prompt": prompt.text(**clean) + prefix, "logprobs": body.pop("top_logprobs", 1)}
            return "/completions", body
        messages = prompt.messages(**clean)
        if prefix and messages[-1]["role"] == "assistant":
            messages[-1]["content"] += prefix
        elif prefix:
            messages.append({"role": "assistant", "content": prefix})
        if messages[-1]["role"] == "assistant":
            # vLLM's and SGLang's words for: go on with this turn.
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        return "/chat/completions", {**body, "messages": messages, "logprobs": True}


def _listed(target: str, logprobs: Mapping[str, float]) -> list[float]:
    """Return the log-probabilities of the tokens that a target may begin with, as far as they are listed."""
    wanted = target.strip()
    found = []
    for token, logprob in logprobs.items():
        text = token.strip()
        if text and wanted.startswith(text):
            found.append(logprob)
    return found
