"""What answers questions: a model without or with passages, or an object of the application."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from rgate_integrations.answering.answers import write_answers
from rgate_integrations.answering.drafting import read_message
from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, EvidenceError
from rgate_integrations.index.retriever import Retriever, describe_index
from rgate_integrations.models.base import LanguageModel
from rgate_integrations.prompts import ANSWER, ANSWER_WITH_PASSAGES, PromptTemplate
from rgate_integrations.runtime.replies import THINKING_OFF, get_field
from rgate_integrations.tuning.questions import Question

TEMPERATURE = 1.0
"""Of sampled answers, as in KBM (section 2.2)."""

SAMPLE = "sample"
"""The first word of the names of arms that sample."""

_METHODS = ("invoke", "query", "complete")  # LangChain's runnables, LlamaIndex's query engines and LLMs
_TEXTS = ("answer", "result", "output", "text", "response", "content")


@dataclass(frozen=True)
class ModelArm:
    """A model, local or on a server, with passages from an index if there is one.

    ``batch`` is how many questions it takes at once. ``facts`` are JSON values that decide its answers: a run with
    others does not continue an earlier one. Where a server listens is not among them: the same model may move.

    Attributes:
        llm: Answers.
        index: Finds passages; None answers without. Where it finds none the answer is without, too.
        k: Passages a question.
        tokens: Maximum length of an answer.
        seed: Answers are sampled with it, at `TEMPERATURE`; None for the likeliest answer.
        prompt: What the model is asked without passages; it has the field ``question``.
    """

    llm: LanguageModel
    index: Retriever | None = None
    k: int = 3
    tokens: int = 64
    seed: int | None = None
    prompt: PromptTemplate = ANSWER

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.llm.name

    @property
    def batch(self) -> int:
        """A server makes its own batches."""
        return 1 if self.llm.is_remote else 16

    @property
    def facts(self) -> dict[str, Any]:
        """Model, prompt and lengths."""
        facts: dict[str, Any] = {
            "llm": self.llm.name,
            "weights": self.llm.fingerprint,
            "prompt": self.prompt.hash,
            "tokens": self.tokens,
        }
        facts |= self.llm.options.facts
        if self.index is not None:
            facts |= {"k": self.k, "prompt": ANSWER_WITH_PASSAGES.hash, "index": describe_index(self.index)}
        if self.seed is not None:
            facts |= {"temperature": TEMPERATURE, "seed": self.seed}
        return facts

    def answer(self, questions: Sequence[Question]) -> list[Draft]:
        """Search, if there is an index, and answer."""
        values = [{"question": question.text} for question in questions]
        if self.seed is not None:
            drawn = self.llm.sample(
                self.prompt, values, n=1, tokens=self.tokens, temperature=TEMPERATURE, seed=self.seed
            )
            return [drafts[0] for drafts in drawn]
        if self.index is None:
            return self.llm.generate(self.prompt, values, tokens=self.tokens)
        texts = [question.text for question in questions]
        passages = []
        for hits in self.index.search(texts, self.k):
            passages.append([hit.passage for hit in hits])
        return write_answers(self.llm, texts, passages, tokens=self.tokens, prompt=self.prompt)


@dataclass(frozen=True)
class ObjectArm:
    """An object of an application: it is given the question, and what it returns is read. See `ModelArm`.

    Attributes:
        call: Answers one question.
        name: What is called.
    """

    call: Callable[[str], Any]
    name: str
    batch: int = field(default=1, init=False)

    @property
    def facts(self) -> dict[str, Any]:
        """Its name, which is all that is known of it."""
        return {"object": self.name}

    def answer(self, questions: Sequence[Question]) -> list[Draft]:
        """Ask one question after the other."""
        return [read_answer(self.call(question.text)) for question in questions]


Arm: TypeAlias = ModelArm | ObjectArm
"""Answers questions."""


def as_arm(source: Any, what: str) -> Arm:
    """Return what answers as an arm.

    Args:
        source: An `Arm`; a `LanguageModel`; a LangChain runnable that takes the question; a
            LlamaIndex query engine or LLM; or a callable from question to answer.
        what: Name of the argument, for the error.

    Raises:
        ConfigurationError: It is something else.
    """
    if isinstance(source, LanguageModel):
        return ModelArm(source)
    if isinstance(source, ModelArm | ObjectArm):
        return source
    methods = [getattr(source, name, None) for name in _METHODS]
    call = next(filter(callable, [*methods, source]), None)
    if call is None:
        raise ConfigurationError(
            f"{what}= cannot answer questions: it is a {type(source).__name__}.",
            hint="Give a LangChain runnable, a LlamaIndex query engine, a proxy, or a function of the question.",
        )
    name = str(getattr(source, "model_name", "") or getattr(source, "__name__", "") or type(source).__name__)
    return ObjectArm(call, name)


def sampling_arms(direct: Arm, n: int, seed: int = 0) -> dict[str, Arm]:
    """Return arms that sample answers without retrieval, one answer a question each, by their names.

    Args:
        direct: The arm that answers without retrieval.
        n: How many.
        seed: Another one draws other answers.

    Raises:
        ConfigurationError: ``direct`` is an object of the application, which only the application can make sample.
    """
    arms: dict[str, Arm] = {}
    for number in range(n):
        if not isinstance(direct, ModelArm):
            raise ConfigurationError(
                "num_samples= needs an LLM that answers at random, and direct= is an object of yours.",
                hint="Give a model, such as ServedProxy(URL, MODEL).",
            )
        arms[f"{SAMPLE} {number + 1}"] = replace(direct, index=None, seed=seed * n + number)
    return arms


def read_answer(answer: Any) -> Draft:
    """Return what an application's object gave as an answer, with OpenAI's log-probabilities if they are with it.

    Raises:
        EvidenceError: There is no text in it.
    """
    if isinstance(answer, Draft):
        return answer
    reply = _find_reply(answer)
    if reply is None:
        raise EvidenceError(f"An answer of type {type(answer).__name__} has no text.")
    return Draft(text=reply.strip(), source="llm") if isinstance(reply, str) else read_message(reply)


def _find_reply(answer: Any) -> Any:
    """Return the text of an answer, or the message of a chat model, wherever frameworks put it; None without any."""
    if (
        answer is None
        or isinstance(answer, str)
        or isinstance(get_field(answer, "response_metadata"), Mapping)
    ):
        return answer
    for name in _TEXTS:
        reply = _find_reply(get_field(answer, name))
        if reply is not None:
            return reply
    return None


def describe_thinking(arm: Arm, drafts: Sequence[Draft]) -> str:
    """Return how much an LLM thought before its answers, to stand behind its name; empty where it is as ever."""
    tokens = [draft.thinking_tokens for draft in drafts]
    if any(tokens):
        return f", thinking first ({np.median(tokens):.0f} tokens)"
    return f", {THINKING_OFF}" if isinstance(arm, ModelArm) and arm.llm.options.think == "off" else ""
