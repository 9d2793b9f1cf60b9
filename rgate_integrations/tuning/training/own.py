"""What every training has in common: its options; and what a model says itself: drafts, and labels of its answers."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, DataFormatError, EvidenceError
from rgate_integrations.gates.papers.boundary import Normalisation, certainty
from rgate_integrations.models.base import Proxy
from rgate_integrations.prompts import ANSWER, SHORT_ANSWER, PromptTemplate, answering
from rgate_integrations.runtime.records import read_records
from rgate_integrations.runtime.text import comparable, is_correct
from rgate_integrations.tuning.arms import Arm, ModelArm
from rgate_integrations.tuning.collection import Progress, cached_answers, silent
from rgate_integrations.tuning.questions import Question
from rgate_integrations.tuning.training.examples import LABEL, DataFile, Example, read_examples

SampledLabel = Literal["accuracy", "certainty"]
"""``accuracy``: the share of right answers, which needs gold answers; ``certainty``: their agreement."""

OWN_LABEL = "own_answer_correct"
"""Whether the likeliest answer holds a gold one."""

ANSWER_TOKENS = 64
"""Maximum length of the likeliest answer."""

SAMPLES = 30
"""Sampled answers to each question, at temperature 1: KBM's numbers (section 2.2)."""

_SAMPLE_TOKENS = 16


def to_be_sampled(paths: Sequence[Path], label: str) -> bool:
    """Whether a label is one of sampled answers, and the files do not hold it."""
    if label not in get_args(SampledLabel):
        return False
    records = (record for path in paths for record in read_records(path))
    return not any(label in record.fields for record in records)


def read_own(
    paths: Sequence[Path],
    proxy: Proxy,
    label: str = OWN_LABEL,
    *,
    prompt: PromptTemplate = ANSWER,
    seed: int = 0,
    progress: Progress = silent,
) -> list[DataFile]:
    """Read questions, let the model answer them, and label each by its answers.

    The answers are kept in a file of the cache: a restart continues where it was. Samples are drawn with the prompt,
    the temperature and the length with which the ``boundary`` gate samples.

    Args:
        paths: JSONL files, also gzipped, with ``question`` and, unless the label is the certainty, ``gold_answers``.
        proxy: The model whose knowledge is labelled.
        label: `OWN_LABEL`, or a `SampledLabel`.
        prompt: What it is asked for its likeliest answer.
        seed: Seed of the samples.
        progress: Told what is being done, how far it is, and how far it goes.

    Raises:
        DataFormatError: A line lacks a key; the message names file and line.
    """
    questions = []
    for path in paths:
        for record in read_records(path):
            question = Question.of(record)
            if not question.gold and label != "certainty":
                hint = "The model's own answers are compared with them; --label certainty needs none."
                raise DataFormatError(f"{record.where}: no gold_answers.", hint=hint)
            questions.append(question)
    arms: dict[str, Arm] = {"direct": ModelArm(proxy, tokens=ANSWER_TOKENS, prompt=prompt)}
    what = "answers"
    if label != OWN_LABEL:
        what = "samples"
        arms = {}
        for number in range(SAMPLES):
            arm = ModelArm(proxy, tokens=_SAMPLE_TOKENS, prompt=SHORT_ANSWER, seed=seed * SAMPLES + number)
            arms[f"sample {number + 1}"] = arm
    answers = cached_answers(what, arms, questions, progress)
    targets = {}
    for question in questions:
        drafts = [answers.answer_of(question, arm) for arm in arms]
        texts = [draft.text for draft in drafts if draft is not None]
        if label != "certainty":
            targets[question.text] = sampled_accuracy(texts, question.gold)
            continue
        try:
            targets[question.text] = sampled_certainty(texts)
        except EvidenceError:  # all samples are empty: nothing is known
            targets[question.text] = 0.0
    return read_examples(paths, label, targets)


def sampled_accuracy(samples: Sequence[str], gold: Sequence[str]) -> float:
    """Return the share of sampled answers that are right (KBM, section 2.2): the accuracy label, in [0, 1]."""
    if not samples:
        return 0.0
    return sum(is_correct(sample, gold) for sample in samples) / len(samples)


def sampled_certainty(samples: Sequence[str], normalisation: Normalisation = "distinct") -> float:
    """Return C = 1 - H / H_max of sampled answers (KBM, equations 1 and 2): the certainty label, in [0, 1].

    Raises:
        EvidenceError: All samples are empty.
    """
    return certainty(list(Counter(comparable(samples)).values()), normalisation)


DraftKind = Literal["proxy", "recorded", "none"]
"""Whose drafts are read: the proxy's own, what the LLM is recorded to have written, or none: the question alone."""


def valid_draft_kind(kind: str) -> None:
    """Check a kind of draft that a user gave.

    Raises:
        ConfigurationError: It is none.
    """
    if kind not in get_args(DraftKind):
        raise ConfigurationError(f"draft must be proxy, recorded or none, not {kind!r}.")


def drafts_for(
    proxy: Proxy,
    examples: Sequence[Example],
    kind: DraftKind,
    tokens: int,
    progress: Progress = silent,
    prompt: PromptTemplate = ANSWER,
) -> list[Draft] | None:
    """Return a draft an example, or None for the question alone.

    Raises:
        DataFormatError: Recorded drafts are asked for, and some examples have none.
    """
    valid_draft_kind(kind)
    if kind == "none":
        return None
    if kind == "proxy":
        return cached_drafts(proxy, [e.question for e in examples], tokens, progress, prompt)
    if not all(e.text for e in examples):
        raise DataFormatError("Some questions have no closed_book_text.", hint='Use draft="proxy" or "none".')
    return [recorded_draft(proxy, e.text, tokens) for e in examples]


def cached_drafts(
    proxy: Proxy,
    questions: Sequence[str],
    tokens: int,
    progress: Progress = silent,
    prompt: PromptTemplate = ANSWER,
) -> list[Draft]:
    """Return the proxy's drafts, which are kept in a file of the cache: a restart continues where it was."""
    arm = ModelArm(proxy, tokens=tokens, prompt=prompt)
    asked = [Question(text) for text in questions]
    answers = cached_answers("drafts", {"direct": arm}, asked, progress)
    drafts = [answers.answer_of(question, "direct") for question in asked]
    return [draft for draft in drafts if draft is not None]  # none is missing: that is an error above


def recorded_draft(proxy: Proxy, text: str, tokens: int) -> Draft:
    """Return the first tokens of a recorded text, counted by the proxy's tokenizer."""
    head = proxy.truncate(text, tokens)
    return Draft(text=(head or text).strip(), source="recorded", finished=head is None)


@dataclass(frozen=True)
class TrainingOptions:
    """What a gate is trained to read, how it is tested, and how it is described.

    Attributes:
        draft: ``"proxy"`` reads the proxy's own drafts, ``"recorded"`` what the LLM wrote, ``"none"`` the question
            alone.
        tokens: Draft tokens to read.
        folds: Folds of the cross-validation. None is 5 for a probe, which is calibrated on them, and 0 (no
            cross-validation) for a gate that is fine-tuned.
        seed: Seed of everything.
        label: Name of the label.
        labelled_by: What made the labels, for the model card; empty if the data came with them.
        llm: Name of the LLM whose answers were labelled.
        system: System turn of the prompt that the answers are written under (probes only); None is that of `ANSWER`.
    """

    draft: DraftKind = "proxy"
    tokens: int = 32
    folds: int | None = None
    seed: int = 0
    label: str = LABEL
    labelled_by: str = ""
    llm: str = "the LLM of the training data"
    system: str | None = None

    @property
    def prompt(self) -> PromptTemplate:
        """The prompt that the question stands in, and that drafts are written for."""
        return answering(self.system)

    def provenance(
        self,
        files: Sequence[DataFile],
        *,
        folds: int,
        recipe: str,
        metrics: dict[str, Any],
        packages: Sequence[str],
    ) -> dict[str, Any]:
        """Return where a trained gate comes from, as JSON values.

        Args:
            files: What it was trained on.
            folds: Folds of the cross-validation.
            recipe: How it was trained, in words or JSON.
            metrics: What the cross-validation found.
            packages: The packages whose versions matter.
        """
        versions = {name: version(name) for name in packages}
        return {
            "label": f"{self.label} of {self.labelled_by}" if self.labelled_by else self.label,
            "seed": self.seed,
            "folds": folds,
            "recipe": recipe,
            "data": [file.as_provenance() for file in files],
            "metrics": metrics,
            "versions": versions | {"python": platform.python_version()},
            "licence": "that of the training data",
        }
