"""A second implementation of the proxy interface: a pure function of the prompt, without a model."""

import hashlib
import math

import numpy as np

from rgate_integrations.decision import Draft
from rgate_integrations.models.base import HasStates, HiddenStates, LanguageModel, TargetScores


class ScriptedProxy(LanguageModel, HasStates):
    """Answers by hashing the prompt.

    Attributes:
        calls: Name of each method call, in order.
        fixed: Text that every completion has, instead of a hashed one.
        fingerprint: Identifies its weights; unknown by default.
        fails_for: A question for which it raises, if any.
        nan_for: A question whose log-probabilities are NaN, if any.
    """

    name = "scripted"
    fingerprint = ""
    num_layers = 4

    def __init__(
        self,
        fixed: str | None = None,
        fingerprint: str = "",
        *,
        fails_for: str | None = None,
        nan_for: str | None = None,
    ) -> None:
        self.calls: list[str] = []
        self.fails_for = fails_for
        self.nan_for = nan_for
        self.fixed = fixed
        self.fingerprint = fingerprint

    def generate(self, prompt, values, *, tokens, adapter=None):
        self._called("generate", values)
        return [self._draft(prompt.text(**v), tokens) for v in values]

    def sample(self, prompt, values, *, n, tokens, temperature, seed):
        self._called("sample", values)
        return [
            tuple(self._draft(f"{prompt.text(**v)}|{seed}|{i % 3}", tokens) for i in range(n)) for v in values
        ]

    def score(self, prompt, values, targets, *, adapter=None):
        self._called("score", values)
        return [
            TargetScores(tuple(self._logprob(f"{prompt.text(**v)}|{t}|{adapter}", v) for t in targets), 7)
            for v in values
        ]

    def hidden(self, prompt, values, drafts, layers):
        self._called("hidden", values)
        return [
            HiddenStates(
                np.array([[self._unit(f"{v['question']}{b}{i}") for i in range(4)] for b in layers]), 9
            )
            for v in values
        ]

    def truncate(self, text, tokens):
        words = text.split()
        return " ".join(words[:tokens]) if len(words) > tokens else None

    def _called(self, name, values):
        self.calls.append(name)
        if self.fails_for in [v["question"] for v in values]:
            raise RuntimeError("scripted failure")

    def _unit(self, key):
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big") / 2**48

    def _logprob(self, key, values):
        return math.nan if values["question"] == self.nan_for else -4 * self._unit(key)

    def _draft(self, key, tokens):
        hashed = f"Answer {hashlib.sha256(key.encode()).hexdigest()[:6]} is it."
        text = hashed if self.fixed is None else self.fixed
        words = [f" {w}" if i else w for i, w in enumerate(text.split())][:tokens]
        logprobs = tuple(-2 * self._unit(f"{key}{w}") for w in words)
        return Draft(
            text="".join(words),
            token_ids=tuple(range(len(words))),
            tokens=tuple(words),
            logprobs=logprobs,
            finished=len(words) < tokens,
            source="proxy",
            model=self.name,
            prompt_tokens=len(key.split()),
        )
