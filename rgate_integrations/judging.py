"""Lets gates score a batch of questions on shared evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rgate_integrations.decision import Cost
from rgate_integrations.evidence.base import EvidenceSpec, Inputs
from rgate_integrations.evidence.collector import Collected, Collector, Postponed, Sources, expanded_specs
from rgate_integrations.gates.base import Gate, Score
from rgate_integrations.gates.scoring import ScoreSpec

MAX_QUESTION_TOKENS = 1_024
_MAX_QUESTION_CHARACTERS = 8_192


@dataclass(frozen=True)
class Judged:
    """What was found out about a question; what to do about it is the caller's matter.

    Attributes:
        question: The question, as it was read.
        score: The gate's score, or why there is none.
        cost: What the evidence cost.
        warnings: What was noticed on the way.
    """

    question: str
    score: Score | Exception
    cost: Cost
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Begun:
    """A question that the quick looks did not settle.

    Attributes:
        inputs: The question as it is read, and what came with it.
        warnings: What was noticed on the way.
        collected: The evidence that is there.
    """

    inputs: Inputs
    warnings: tuple[str, ...]
    collected: Collected


def judge_together(gates: Sequence[Gate], batch: Sequence[Inputs], sources: Sources) -> list[list[Judged]]:
    """Let several gates score one batch; returns a list of results for each."""
    specs = [ScoreSpec(gate) for gate in gates]
    inputs, warnings = _fitting(batch, specs, sources)
    collector = Collector(inputs, sources, specs)
    found = []
    for spec in specs:
        scores = collector.context().find(spec)
        judged = []
        for place, score in enumerate(scores):
            judged.append(_judged(collector, spec, place, score, warnings[place]))
        found.append(judged)
    return found


def look_first(gate: Gate, batch: Sequence[Inputs], sources: Sources) -> list[Judged | Begun]:
    """Let a gate score what it can without slow evidence, such as a draft that is still to be written."""
    spec = ScoreSpec(gate)
    inputs, warnings = _fitting(batch, [spec], sources)
    collector = Collector(inputs, sources, [spec], quick=True)
    found: list[Judged | Begun] = []
    scores = collector.context().find(spec)
    for place, score in enumerate(scores):
        if isinstance(score, Postponed):
            found.append(Begun(inputs[place], warnings[place], collector.collected(place)))
        else:
            found.append(_judged(collector, spec, place, score, warnings[place]))
    return found


def look_on(gate: Gate, batch: Sequence[Begun], sources: Sources) -> list[Judged]:
    """Let a gate score what `look_first` left open, with all the evidence that it asks for."""
    spec = ScoreSpec(gate)
    inputs = [each.inputs for each in batch]
    collector = Collector(inputs, sources, [spec], earlier=[each.collected for each in batch])
    found = []
    scores = collector.context().find(spec)
    for place, score in enumerate(scores):
        found.append(_judged(collector, spec, place, score, batch[place].warnings))
    return found


def _judged(
    collector: Collector, spec: ScoreSpec, place: int, score: Score | Exception, warnings: tuple[str, ...]
) -> Judged:
    noticed = score.warnings if isinstance(score, Score) else ()
    question = collector.inputs[place].question
    return Judged(question, score, collector.cost(spec, place), (*warnings, *noticed))


def _fitting(
    batch: Sequence[Inputs], specs: Sequence[EvidenceSpec[Any]], sources: Sources
) -> tuple[list[Inputs], list[tuple[str, ...]]]:
    """Cut questions that no model should read whole; returns them all, and a warning for each that was cut."""
    reads = any(spec.reads_model for spec in expanded_specs(specs))
    inputs: list[Inputs] = []
    warnings: list[tuple[str, ...]] = []
    for each in batch:
        short = _cut(each.question, sources) if reads else each.question[:_MAX_QUESTION_CHARACTERS]
        said = f"The question was cut from {len(each.question):,} to {len(short):,} characters."
        warnings.append(() if short == each.question else (said,))
        inputs.append(each if short == each.question else replace(each, question=short))
    return inputs, warnings


def _cut(question: str, sources: Sources) -> str:
    if len(question.encode()) <= MAX_QUESTION_TOKENS:  # a token has at least one byte
        return question
    short = question[:_MAX_QUESTION_CHARACTERS]
    try:
        return sources.proxy().cut(short, MAX_QUESTION_TOKENS) or short
    except Exception:
        # There is no model to count its tokens. The evidence that needs it will fail for that reason.
        return short
