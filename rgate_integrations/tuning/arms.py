"""Arms that answer questions: a model, with or without passages, or an object from your application."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from rgate_integrations.answering.drafting import read_message, write_answers
from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, EvidenceError
from rgate_integrations.index.retriever import Retriever, describe_index
from rgate_integrations.models.base import LanguageModel
from rgate_integrations.prompts import ANSWER, ANSWER_WITH_PASSAGES, PromptTemplate
from rgate_integrations.runtime.replies import THINKING_OFF, get_field
from rgate_integrations.tuning.questions import Question

TEMPERATURE = 1.0
"""Sampling temperature, as in the KBM paper (section 2.2)."""

SAMPLE = "sample"
"""First word of the name of an arm that samples."""

_METHODS = ("invoke", "query", "complete")  # LangChain's runnables, LlamaIndex's query engines and LLMs
_TEXT_FIELDS = ("answer", "result", "output", "text", "response", "content")


@dataclass(frozen=True)
class ModelArm:
    """A model, local or on a server, that answers without passages or with those of an index.

    ``batch`` is the number of questions per call. ``facts`` are the JSON values on which its answers depend: a run
    with other facts cannot continue an earlier one. A server's address is not among them, because the server may
    move.

    Attributes:
        llm: The answering LLM.
        index: The index to search for passages; without one, or without hits, the LLM answers from memory.
        k: Passages per question.
        tokens: Maximum length of an answer, in tokens.
        seed: Seed of answers sampled at `TEMPERATURE`, without passages; None for the most likely answer.
        prompt: Prompt without passages; it has the field ``question``.
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
        """Questions per call; 1 for a server, because it forms its own batches."""
        return 1 if self.llm.is_remote else 16

    @property
    def facts(self) -> dict[str, Any]:
        """The settings on which the answers depend, as JSON values."""
        facts: dict[str, Any] = {
            "llm": self.llm.name,
            "weights": self.llm.fingerprint,
            "prompt": self.prompt.hash,
            "tokens": self.tokens,
            **self.llm.options.facts,
        }
        if self.index is not None:
            facts |= {"k": self.k, "prompt": ANSWER_WITH_PASSAGES.hash, "index": describe_index(self.index)}
        if self.seed is not None:
            facts |= {"temperature": TEMPERATURE, "seed": self.seed}
        return facts

    def answer(self, questions: Sequence[Question]) -> list[Draft]:
        """Return one answer per question.

        With a seed, the answers are sampled without passages. Otherwise, they use the passages that the index finds,
        if there is an index.
        """
        texts = [question.text for question in questions]
        if self.seed is not None:
            samples = self.llm.sample(
                self.prompt,
                [{"question": text} for text in texts],
                n=1,
                tokens=self.tokens,
                temperature=TEMPERATURE,
                seed=self.seed,
            )
            return [drafts[0] for drafts in samples]
        rankings = [[] for _ in texts] if self.index is None else self.index.search(texts, self.k)
        passages = [[hit.passage for hit in hits] for hits in rankings]
        return write_answers(self.llm, texts, passages, tokens=self.tokens, prompt=self.prompt)


@dataclass(frozen=True)
class ObjectArm:
    """An arm that answers with a callable from your application; `read_answer` interprets the callable's results.

    Attributes:
        call: Answers one question.
        name: Name of the object, for records and errors.
        batch: Questions per call: 1.
    """

    call: Callable[[str], Any]
    name: str
    batch: int = field(default=1, init=False)

    @property
    def facts(self) -> dict[str, Any]:
        """The object's name, which is all that we know about it."""
        return {"object": self.name}

    def answer(self, questions: Sequence[Question]) -> list[Draft]:
        """Return one answer per question; the object is called once for each."""
        return [read_answer(self.call(question.text)) for question in questions]


Arm: TypeAlias = ModelArm | ObjectArm
"""A way to answer. ``batch``, ``facts`` and ``answer`` are described at `ModelArm`."""


def as_arm(source: Any, argument: str) -> Arm:
    """Return an arm, a way to answer questions, that uses a model or an object from your application.

    Args:
        source: An `Arm`; a `LanguageModel`; a LangChain runnable that takes the question; a
            LlamaIndex query engine or LLM; or a callable from question to answer.
        argument: Name of the argument, for the error.

    Raises:
        ConfigurationError: ``source`` is none of these.
    """
    if isinstance(source, LanguageModel):
        return ModelArm(source)
    if isinstance(source, ModelArm | ObjectArm):
        return source
    methods = [getattr(source, name, None) for name in _METHODS]
    # A runnable or an engine may also be callable, so its method takes precedence.
    call = next(filter(callable, [*methods, source]), None)
    if call is None:
        raise ConfigurationError(
            f"{argument}= cannot answer questions: {type(source).__name__} is not a supported type.",
            hint="Pass a LangChain runnable, a LlamaIndex query engine, a model, or a function of the question.",
        )
    # The name is stored with the answers, so that a run with another object does not resume from them.
    name = str(getattr(source, "model_name", "") or getattr(source, "__name__", "") or type(source).__name__)
    return ObjectArm(call, name)


def sampling_arms(direct: Arm, n: int, seed: int = 0) -> dict[str, Arm]:
    """Return arms that each sample one answer per question without retrieval, by name.

    Args:
        direct: The arm that answers without retrieval.
        n: Number of arms.
        seed: Seed; a different one draws different answers.

    Raises:
        ConfigurationError: ``n`` is not 0, and ``direct`` is an object from your application, which cannot sample.
    """
    if n == 0:
        return {}
    if not isinstance(direct, ModelArm):
        raise ConfigurationError(
            f"num_samples= needs answers at temperature 1, but direct= ({direct.name!r}) is an object of your "
            "application, whose temperature cannot be set.",
            hint="Pass a model of this package as direct=, such as RemoteModel(URL, MODEL), or omit num_samples=.",
        )
    return {f"{SAMPLE} {i + 1}": replace(direct, index=None, seed=seed * n + i) for i in range(n)}


def read_answer(answer: Any) -> Draft:
    """Convert the answer of an application's object to a draft, with its log-probabilities if it has any.

    Args:
        answer: A string, a `Draft`, a LangChain message, or an object or mapping that has one of these as
            ``answer``, ``result``, ``output``, ``text``, ``response`` or ``content``.

    Raises:
        EvidenceError: ``answer`` is none of these.
    """
    if isinstance(answer, Draft):
        return answer
    if isinstance(answer, str):
        return Draft(text=answer.strip(), source="llm")
    if isinstance(get_field(answer, "response_metadata"), Mapping):  # a LangChain message
        return read_message(answer)
    for name in _TEXT_FIELDS if answer is not None else ():
        # A field of that name may hold something else, such as a number or a method.
        with suppress(EvidenceError):
            return read_answer(get_field(answer, name))
    raise EvidenceError(
        f"An answer of direct= or retrieve= has no text: it is of type {type(answer).__name__}.",
        hint="Let it return a string, a message, or an object or dict with a field such as answer or text.",
    )


def describe_thinking(arm: Arm, drafts: Sequence[Draft]) -> str:
    """Return what to add to an LLM's name: how long it thought, or that thinking was off; empty if neither."""
    tokens = [draft.thinking_tokens for draft in drafts]
    # Report what the LLM did, because it may think even if it was told not to.
    if any(tokens):
        return f", thinking first ({np.median(tokens):.0f} tokens)"
    return f", {THINKING_OFF}" if isinstance(arm, ModelArm) and arm.llm.options.think == "off" else ""
