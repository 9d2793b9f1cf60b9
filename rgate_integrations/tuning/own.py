"""What every training has in common: its options; and what a model says itself: drafts, and labels of its answers."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self, get_args

from rgate_integrations.decision import Draft
from rgate_integrations.gates.papers.boundary import certainty
from rgate_integrations.models.base import LanguageModel, Proxy
from rgate_integrations.models.proxies import language_model
from rgate_integrations.prompts import ANSWER, SHORT_ANSWER, PromptTemplate, answering
from rgate_integrations.runtime.records import read_records
from rgate_integrations.runtime.text import comparable, is_correct, normalise
from rgate_integrations.tuning.arms import ModelArm, sampling_arms
from rgate_integrations.tuning.collection import Progress, cached_answers, silent
from rgate_integrations.tuning.questions import (
    LABEL,
    DataFile,
    DraftKind,
    Question,
    read_examples,
    recorded_drafts,
)

SampledLabel = Literal["accuracy", "certainty"]
"""``accuracy``: the share of right answers, which needs gold answers; ``certainty``: their agreement."""

OWN_LABEL = "own_answer_correct"
"""Whether the likeliest answer holds a gold one."""

SAMPLES = 30
"""Sampled answers to each question, at temperature 1: KBM's numbers (section 2.2)."""


@dataclass(frozen=True)
class Recipe:
    """How to fine-tune.

    Attributes:
        epochs: Passes over the pairs.
        learning_rate: Peak learning rate.
        batch_size: Pairs an optimizer step.
        rank: LoRA rank.
        alpha: LoRA scaling.
        dropout: LoRA dropout.
        schedule: Learning rate schedule of transformers.
        warmup: Share of the steps that warm up.
        per_device: Pairs a forward pass; several passes make a step.
    """

    epochs: float
    learning_rate: float
    batch_size: int = 16
    rank: int = 8
    alpha: int = 16
    dropout: float = 0.05
    schedule: str = "linear"
    warmup: float = 0.0
    per_device: int = 8

    def with_options(self, **options: Any) -> Self:
        """Return a copy with the options that are not None."""
        return replace(self, **{name: value for name, value in options.items() if value is not None})


@dataclass(frozen=True)
class TrainingOptions:
    """What a gate is trained to read, how it is trained and tested, and how it is described.

    Attributes:
        draft: ``"proxy"`` reads the proxy's own drafts, ``"recorded"`` what the LLM wrote, ``"none"`` the question
            alone.
        tokens: Draft tokens to read.
        folds: Folds of the cross-validation. 0 is 5 for a probe, which is calibrated on them, and no cross-validation
            for a gate that is fine-tuned.
        seed: Seed of everything.
        label: Name of the label.
        labelled_by: What made the labels, for the model card; empty if the data came with them.
        llm: Name of the LLM whose answers were labelled.
        system: System turn of the prompt that the answers are written under (probes only); None is that of `ANSWER`.
        recipe: How to fine-tune; the paper's settings when None.
        resume: Continue a fine-tuning that was killed.
    """

    draft: DraftKind = "proxy"
    tokens: int = 32
    folds: int = 0
    seed: int = 0
    label: str = LABEL
    labelled_by: str = ""
    llm: str = "the LLM of the training data"
    system: str | None = None
    recipe: Recipe | None = None
    resume: bool = False

    @property
    def prompt(self) -> PromptTemplate:
        """The prompt that the question stands in, and that drafts are written for."""
        return answering(self.system)

    @property
    def reads(self) -> dict[str, Any]:
        """Which drafts the trained gate reads, as parameters of a gate."""
        if self.draft == "none":
            return {"tokens": 0, "source": "proxy"}
        return {"tokens": self.tokens, "source": self.draft}

    def provenance(self, files: Sequence[DataFile], recipe: str, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return where a trained gate comes from, as JSON values.

        Args:
            files: What it was trained on.
            recipe: How it was trained, in words or JSON.
            metrics: What the cross-validation found.
        """
        versions = {"python": platform.python_version()}
        for name in ("torch", "transformers", "peft", "scikit-learn", "numpy"):
            versions[name] = version(name)
        return {
            "label": f"{self.label} of {self.labelled_by}" if self.labelled_by else self.label,
            "seed": self.seed,
            "folds": self.folds,
            "recipe": recipe,
            "data": list(map(DataFile.as_provenance, files)),
            "metrics": metrics,
            "versions": versions,
            "licence": "that of the training data",
        }


def to_be_sampled(paths: Sequence[Path], label: str) -> bool:
    """Whether a label is one of sampled answers, and the files do not hold it."""
    if label not in get_args(SampledLabel):
        return False
    records = chain.from_iterable(map(read_records, paths))
    return not any(label in record.fields for record in records)


def read_own(
    paths: Sequence[Path],
    proxy: LanguageModel,
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
    for record in chain.from_iterable(map(read_records, paths)):
        question = Question.of(record)
        if not question.gold and label != "certainty":
            raise record.wrong("no gold_answers, which the model's own answers are compared with")
        questions.append(question)
    if label == OWN_LABEL:
        answers = cached_answers("answers", {"direct": ModelArm(proxy, prompt=prompt)}, questions, progress)
    else:
        arm = ModelArm(proxy, tokens=16, prompt=SHORT_ANSWER)
        answers = cached_answers("samples", sampling_arms(arm, SAMPLES, seed), questions, progress)
    targets = {}
    for question, drafts in zip(questions, answers, strict=True):
        texts = [draft.text for draft in drafts.values()]
        if label == "certainty":
            targets[question.text] = sampled_certainty(texts)
        else:
            targets[question.text] = sampled_accuracy(texts, question.gold)
    return read_examples(paths, label, targets)


def sampled_accuracy(samples: Sequence[str], gold: Sequence[str]) -> float:
    """Return the share of sampled answers that are right (KBM, section 2.2): the accuracy label, in [0, 1]."""
    return sum(is_correct(sample, gold) for sample in samples) / max(len(samples), 1)


def sampled_certainty(samples: Sequence[str]) -> float:
    """Return C = 1 - H / H_max of sampled answers (KBM, equations 1 and 2): the certainty label, in [0, 1].

    Where all samples are empty, nothing is known: 0.
    """
    if not any(map(normalise, samples)):
        return 0.0
    return certainty(list(Counter(comparable(samples)).values()))


def drafts_for(
    proxy: Proxy, questions: Sequence[Question], options: TrainingOptions, progress: Progress = silent
) -> list[Draft] | None:
    """Return a draft a question as the options ask for, or None for the question alone.

    The proxy's drafts are kept in a file of the cache: a restart continues where it was.

    Raises:
        DataFormatError: Recorded drafts are asked for, and some questions have none.
    """
    recorded = recorded_drafts(questions, options.draft)
    if options.draft == "none":
        return None
    if options.draft == "proxy":
        arm = ModelArm(language_model(proxy), tokens=options.tokens, prompt=options.prompt)
        answers = cached_answers("drafts", {"direct": arm}, questions, progress)
        return [drafts["direct"] for drafts in answers]
    drafts = []
    for draft in filter(None, recorded):
        head = proxy.truncate(draft.text, options.tokens)
        drafts.append(Draft(text=(head or draft.text).strip(), source="recorded", finished=head is None))
    return drafts
