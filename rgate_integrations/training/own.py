"""Labels of a model's own answers: what it knows by itself, for a gate that judges the LLM that it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rgate_integrations.errors import DataFormatError
from rgate_integrations.models.base import Proxy
from rgate_integrations.prompts import ANSWER, PromptTemplate
from rgate_integrations.runtime.records import read_records
from rgate_integrations.runtime.text import is_correct
from rgate_integrations.training.drafts import Progress, cached_drafts, silent
from rgate_integrations.training.examples import DataFile, read_examples

ANSWER_TOKENS = 64
"""Maximum length of an answer that is labelled."""

OWN_LABEL = "own_answer_correct"


def read_own(
    paths: Sequence[Path], proxy: Proxy, *, prompt: PromptTemplate = ANSWER, progress: Progress = silent
) -> list[DataFile]:
    """Read questions, let the model answer them greedily, and label each by whether its answer holds a gold one.

    The answers are kept in a file of the cache: a restart continues where it was.

    Args:
        paths: JSONL files, also gzipped, with ``question`` and ``gold_answers`` a line.
        proxy: The model that answers.
        prompt: What it is asked.
        progress: Told what is being done, how far it is, and how far it goes.

    Raises:
        DataFormatError: A line lacks a key; the message names file and line.
    """
    gold: dict[str, tuple[str, ...]] = {}
    for path in paths:
        for record in read_records(path):
            answers = record.texts("gold_answers")
            if not answers:
                raise DataFormatError(
                    f"{record.where}: no gold_answers.",
                    hint="The model's own answers are compared with them.",
                )
            gold[record.text("question")] = tuple(answers)
    drafts = cached_drafts(proxy, list(gold), ANSWER_TOKENS, progress, prompt)
    targets = {}
    for (question, answers), draft in zip(gold.items(), drafts, strict=True):
        targets[question] = float(is_correct(draft.text, answers))
    return read_examples(paths, OWN_LABEL, targets)
