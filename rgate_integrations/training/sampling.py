"""Soft labels from sampled answers (KBM, section 2.2): how many are right, or how far they agree."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from rgate_integrations.errors import DataFormatError, EvidenceError
from rgate_integrations.models.base import Proxy
from rgate_integrations.models.download import cache_dir
from rgate_integrations.prompts import SHORT_ANSWER
from rgate_integrations.runtime.files import JsonlLog
from rgate_integrations.runtime.locks import locked
from rgate_integrations.runtime.records import read_records
from rgate_integrations.training.drafts import Progress, not_ours, silent
from rgate_integrations.training.examples import DataFile, read_examples
from rgate_integrations.training.labels import sampled_accuracy, sampled_certainty

SampledLabel = Literal["accuracy", "certainty"]
"""``accuracy``: the share of right answers, which needs gold answers; ``certainty``: their agreement."""

SAMPLES = 30
"""Answers to each question, at temperature 1: the paper's numbers."""

_TEMPERATURE, _TOKENS, _CHUNK = 1.0, 16, 32


def to_be_sampled(paths: Sequence[Path], label: str) -> bool:
    """Whether a label is one of sampled answers, and the files do not hold it."""
    if label not in get_args(SampledLabel):
        return False
    records = (record for path in paths for record in read_records(path))
    return not any(label in record.fields for record in records)


def read_sampled(
    paths: Sequence[Path], label: SampledLabel, proxy: Proxy, *, seed: int = 0, progress: Progress = silent
) -> list[DataFile]:
    """Read questions, and label each by the model's own sampled answers.

    Args:
        paths: JSONL files, also gzipped, with ``question`` and, for the accuracy, ``gold_answers`` a line.
        label: Which label.
        proxy: The model whose knowledge is labelled.
        seed: Seed of the samples.
        progress: Told what is being done, how far it is, and how far it goes.

    Raises:
        DataFormatError: A line lacks a key; the message names file and line.
    """
    gold: dict[str, list[str]] = {}
    for path in paths:
        for record in read_records(path):
            question = record.text("question")
            answers = list(record.texts("gold_answers"))
            if label == "accuracy" and not answers:
                raise DataFormatError(
                    f"{record.where}: no gold_answers.", hint="--label certainty needs none."
                )
            gold[question] = answers
    samples = sampled_answers(proxy, list(gold), seed=seed, progress=progress)
    targets = {}
    for question, texts in samples.items():
        if label == "accuracy":
            targets[question] = sampled_accuracy(texts, gold[question])
        else:
            targets[question] = _certainty(texts)
    return read_examples(paths, label, targets)


def sampled_answers(
    proxy: Proxy, questions: Sequence[str], *, n: int = SAMPLES, seed: int = 0, progress: Progress = silent
) -> dict[str, list[str]]:
    """Return ``n`` sampled answers to each question, kept in a file of the cache: a restart continues where it was.

    The prompt, the temperature and the length are those with which the ``boundary`` gate samples.
    """
    settings = f"{proxy.name}|{proxy.fingerprint}|{SHORT_ANSWER.hash}|{_TEMPERATURE}|{_TOKENS}|{n}|{seed}"
    name = hashlib.sha256(settings.encode()).hexdigest()[:16]
    path = cache_dir() / "samples" / f"{name}.jsonl"
    wait = partial(progress, "waiting for another training that samples the same answers", 0, len(questions))
    with locked(path, waiting=wait):
        return _sampled_or_kept(JsonlLog(path), proxy, questions, n, seed, progress)


def _sampled_or_kept(
    log: JsonlLog, proxy: Proxy, questions: Sequence[str], n: int, seed: int, progress: Progress
) -> dict[str, list[str]]:
    answers: dict[str, list[str]] = {}
    for record in log.values():
        try:
            answers[record["question"]] = [str(answer) for answer in record["answers"]]
        except (TypeError, LookupError) as error:
            raise not_ours(log) from error
    missing = [question for question in questions if question not in answers]
    for start in range(0, len(missing), _CHUNK):
        chunk = missing[start : start + _CHUNK]
        values = [{"question": question} for question in chunk]
        sampled = proxy.sample(SHORT_ANSWER, values, n=n, tokens=_TOKENS, temperature=_TEMPERATURE, seed=seed)
        texts = [[draft.text for draft in drafts] for drafts in sampled]
        new = dict(zip(chunk, texts, strict=True))
        log.append({"question": question, "answers": found} for question, found in new.items())
        answers |= new
        progress("sampling answers", len(questions) - len(missing) + start + len(chunk), len(questions))
    return {question: answers[question] for question in questions}


def _certainty(samples: Sequence[str]) -> float:
    try:
        return sampled_certainty(samples)
    except EvidenceError:  # all are empty: nothing is known
        return 0.0
