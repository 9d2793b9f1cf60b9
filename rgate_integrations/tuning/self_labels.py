"""Labels questions by a model's own answers.

The label is whether the most likely answer is right, which share of samples is right, or how much samples agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Literal, get_args

from rgate_integrations.errors import NoAnswerError
from rgate_integrations.gates.papers.boundary import certainty
from rgate_integrations.models.base import LanguageModel
from rgate_integrations.prompts import ANSWER, SHORT_ANSWER, PromptTemplate
from rgate_integrations.runtime.records import read_records
from rgate_integrations.runtime.text import is_correct, normalise_answers
from rgate_integrations.tuning.arms import ModelArm, sampling_arms
from rgate_integrations.tuning.collection import Progress, cached_answers, no_progress
from rgate_integrations.tuning.questions import DataFile, Question, read_examples

SampledLabel = Literal["accuracy", "certainty"]
"""``accuracy``: the share of samples that are right, which needs gold answers. ``certainty``: how much they agree."""

SELF_LABEL = "own_answer_correct"
"""Name of the label that is true if the most likely answer contains a gold answer."""

SAMPLES = 30
"""Number of sampled answers per question, at temperature 1, as in the KBM paper (section 2.2)."""


def needs_sampling(paths: Sequence[Path], label: str) -> bool:
    """Return whether answers must be sampled: ``label`` is a `SampledLabel`, and no line of the files has it yet."""
    records = chain.from_iterable(map(read_records, paths))
    return label in get_args(SampledLabel) and not any(label in record.fields for record in records)


def label_own_answers(
    paths: Sequence[Path],
    proxy: LanguageModel,
    label: str = SELF_LABEL,
    *,
    prompt: PromptTemplate = ANSWER,
    seed: int = 0,
    progress: Progress = no_progress,
) -> list[DataFile]:
    """Read questions, let a model answer them, label each by its answers, and return one `DataFile` per path.

    The answers are cached, so a restarted run resumes. Prompt, temperature and length of samples are those of the
    ``boundary`` gate.

    Args:
        paths: JSONL files, plain or gzipped, with ``question`` and, except for certainty, ``gold_answers``.
        proxy: The model whose knowledge is labelled.
        label: `SELF_LABEL`, or a `SampledLabel`.
        prompt: Prompt for the model's most likely answer, with `SELF_LABEL`.
        seed: Seed of the samples.
        progress: Progress callback: ``(label, done, total)``.

    Raises:
        DataFormatError: A file cannot be read or has no new question, a line lacks a key, or a repeated
            question gets a different label; the message names the file.
        ServerError: The model could not answer a question.
        NoAnswerError: The model was cut off while it was still thinking.
    """
    questions = []
    for record in chain.from_iterable(map(read_records, paths)):
        question = Question.from_record(record)
        if not question.gold and label != "certainty":
            raise record.error(
                'gold_answers is missing: add it, or use label="certainty" (--label certainty, without --self-label)'
            )
        questions.append(question)
    if label == SELF_LABEL:
        answers = cached_answers("answers", {"direct": ModelArm(proxy, prompt=prompt)}, questions, progress)
    else:
        # The same settings as the boundary gate, which learns to predict these labels.
        arm = ModelArm(proxy, tokens=16, prompt=SHORT_ANSWER)
        answers = cached_answers("samples", sampling_arms(arm, SAMPLES, seed), questions, progress)
    targets = {}
    for question, drafts in zip(questions, answers, strict=True):
        texts = [draft.text for draft in drafts.values()]
        if label == "certainty":
            targets[question.text] = sampled_certainty(texts)
        else:
            # The accuracy label of the KBM paper, section 2.2: the share of samples that are right.
            targets[question.text] = sum(is_correct(text, question.gold) for text in texts) / len(texts)
    return read_examples(paths, label, targets)


def sampled_certainty(samples: Sequence[str]) -> float:
    """Return the certainty label: how much sampled answers agree, in [0, 1].

    It is `boundary.certainty` of the answers' counts (KBM paper, equations 1 and 2). It is 0 if each sample is empty,
    a refusal or a tool call.
    """
    try:
        texts = normalise_answers(samples)
    except NoAnswerError:
        return 0.0
    return certainty(list(Counter(texts).values()))
