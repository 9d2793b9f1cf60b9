"""Proxy models behind an OpenAI-compatible server that gives log-probabilities: vLLM, SGLang, llama.cpp."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import SecretStr

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, EvidenceError
from rgate_integrations.models.base import HiddenStates, PooledLayer, Proxy, TargetScores, Values
from rgate_integrations.models.completion import Completion
from rgate_integrations.models.control_tokens import without_control_tokens
from rgate_integrations.models.credentials import Credentials, checked_key, split_login
from rgate_integrations.models.server import ServerConnection, no_logprobs
from rgate_integrations.prompts import PromptTemplate

__all__ = ["ServedProxy"]

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
        self.url, login = split_login(url)
        self.name = model
        self._refuses_logprobs = False
        self._connection = ServerConnection(
            self.url,
            Credentials(key=checked_key(api_key), login=login),
            timeout=timeout,
            retries=retries,
            max_concurrency=max_concurrency,
        )

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
            return [Draft(text="", source="proxy", model=self.name, finished=False) for _ in values]
        work = partial(self._draft, prompt, adapter=adapter, max_tokens=tokens, temperature=0.0)
        return self._connection.each(work, values)

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
        drafts = self._connection.each(work, jobs)
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
            EvidenceError: One target is a prefix of another, the server gives no log-probabilities, or no target
                is among the likeliest tokens.
        """
        # Character by character is what is meant here.
        prefix = os.path.commonprefix(list(targets)) if len(targets) > 1 else ""  # noqa: RUF071
        rests = [target[len(prefix) :] for target in targets]
        if not all(rests):
            raise EvidenceError(f"{prefix!r} is the beginning of another target: they cannot be told apart.")
        work = partial(self._score, prompt, rests=rests, prefix=prefix, adapter=adapter)
        return self._connection.each(work, values)

    def score_text(
        self, prompt: PromptTemplate, values: Sequence[Values], drafts: Sequence[Draft]
    ) -> list[Draft]:
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

    def truncate(self, text: str, tokens: int) -> str | None:
        """Return ``text`` cut to about a number of tokens, at four characters each, or None when it is not longer."""
        characters = tokens * _CHARACTERS_PER_TOKEN
        return text[:characters] if len(text) > characters else None

    # --- one request ---------------------------------------------------------------------------------------

    def _draft(
        self, prompt: PromptTemplate, values: Values, *, adapter: str | None = None, **options: Any
    ) -> Draft:
        """Write one draft; ``options`` are those of the API."""
        answer = self._written(prompt, values, adapter, options)
        tokens = answer.tokens
        if tokens and not tokens[-1].text:  # the end of the turn
            tokens = tokens[:-1]
        draft = Draft(
            text=answer.text.strip(),
            tokens=tuple(token.text for token in tokens),
            logprobs=tuple(token.logprob for token in tokens) if tokens else None,
            finished=answer.finished,
            source="proxy",
            model=self.name,
            prompt_tokens=answer.prompt_tokens,
        )
        return draft.head(options["max_tokens"])  # whatever the server takes for a token

    def _written(
        self, prompt: PromptTemplate, values: Values, adapter: str | None, options: dict[str, Any]
    ) -> Completion:
        """Ask for a text with log-probabilities, or without, if the server refuses requests for them."""
        said = ""
        if not self._refuses_logprobs:
            try:
                return self._ask(prompt, values, adapter, options)
            except EvidenceError as error:  # it refused the request
                said = error.message
        answer = self._ask(prompt, values, adapter, options, logprobs=False)
        # Remembered only where the server named them: another reason may be gone with the next request.
        self._refuses_logprobs |= "log-prob" in said
        return answer

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
        logprobs = answer.tokens[0].likeliest if answer.tokens else {}
        if not logprobs:
            raise no_logprobs(self.url)
        # The bounds of targets that are not listed say nothing about which of them is likelier.
        if len(rests) > 1 and not any(_listed(rest, logprobs) for rest in rests):
            likeliest = max(logprobs, key=lambda token: logprobs[token])
            raise EvidenceError(
                f"{self.name} would begin with {likeliest[:_QUOTED]!r}: none of {', '.join(map(repr, rests))} "
                f"is among its {len(logprobs)} likeliest tokens.",
                hint="Ask a model that answers at once: switch its thinking off, or take an instruct model.",
            )
        return TargetScores(tuple(_score_of(rest, logprobs) for rest in rests), answer.prompt_tokens)

    def _ask(
        self,
        prompt: PromptTemplate,
        values: Values,
        adapter: str | None,
        options: dict[str, Any],
        prefix: str = "",
        *,
        logprobs: bool = True,
    ) -> Completion:
        """Ask for a completion of one prompt, whose answer begins with ``prefix``."""
        clean = {name: without_control_tokens(text) for name, text in values.items()}
        body: dict[str, Any] = {"model": adapter or self.name, **options}
        if prompt.stop_at_newline:
            body["stop"] = ["\n"]
        if prompt.raw:
            body["prompt"] = prompt.text(**clean) + prefix
            if logprobs:  # completions have the number of likeliest tokens in it
                body["logprobs"] = body.pop("top_logprobs", 1)
            return self._connection.post("/completions", body)
        messages = prompt.messages(**clean)
        if prefix and messages[-1]["role"] == "assistant":
            messages[-1]["content"] += prefix
        elif prefix:
            messages.append({"role": "assistant", "content": prefix})
        if messages[-1]["role"] == "assistant":
            # vLLM's and SGLang's words for: go on with this turn.
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        body["messages"] = messages
        if logprobs:
            body["logprobs"] = True
        return self._connection.post("/chat/completions", body)


def _listed(target: str, logprobs: Mapping[str, float]) -> list[float]:
    """Return the log-probabilities of the tokens that a target may begin with, as far as they are listed."""
    wanted = target.strip()
    found = []
    for token, logprob in logprobs.items():
        text = token.strip()
        if text and wanted.startswith(text):
            found.append(logprob)
    return found


def _score_of(target: str, logprobs: Mapping[str, float]) -> float:
    """Log-probability of the likeliest token that a target may begin with, or the most that it can have."""
    listed = _listed(target, logprobs)
    if listed:
        return max(listed)
    # It is not among those that are listed: no likelier than the least of them, and not more than they leave over.
    left_over = 1.0 - sum(math.exp(logprob) for logprob in logprobs.values())
    return min(min(logprobs.values()), math.log(max(left_over, 1e-9)), 0.0)
