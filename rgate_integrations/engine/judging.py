"""Lets gates score a batch of questions on shared evidence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from rgate_integrations.decision import Cost
from rgate_integrations.evidence.base import EvidenceSpec, Inputs
from rgate_integrations.evidence.collector import Collected, Collector, Postponed, Sources, expanded_specs
from rgate_integrations.gates.base import Gate, Score
from rgate_integrations.gates.scoring import ScoreSpec
from rgate_integrations.models.segments import segments

MAX_REQUEST_TOKENS = 2_048
"""A request is read whole up to this length; of longer ones the beginning, the end, and what asks between them."""
CLEARLY_NEEDLESS = 0.9
"""A request that was not read whole retrieves below this P(known)."""
_MOST_CHARACTERS = 200_000  # of the middle of a request that are looked through for what asks
_SHARES = {"begin": 0.45, "middle": 0.1, "end": 0.45}  # of the tokens that are read of a longer request
_ASKS = re.compile(
    r"(?:who|whom|whose|what|when|where|which|why|how|is|are|was|were|do|does|did|can|could|has|have|had|will|would"
    r"|tell|name|give|list|find|explain|describe|define|write|draft|make|create|turn|summari[sz]e|translate|rewrite"
    r"|show|check|compare|book|send|please|i want|i need)\b",
    re.IGNORECASE,
)
"""How sentences begin that ask. It only picks what is read; what is read decides."""


@dataclass(frozen=True)
class Judged:
    """What was found out about a question; what to do about it is the caller's matter.

    Attributes:
        score: The gate's score, or why there is none.
        cost: What the evidence cost.
        warnings: What was noticed on the way.
    """

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
    inputs, warnings = fitting(batch, specs, sources)
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
    inputs, warnings = fitting(batch, [spec], sources)
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
    inputs = collector.inputs[place]
    noticed = score.warnings if isinstance(score, Score) else ()
    if inputs.partly and isinstance(score, Score) and score.p_known < CLEARLY_NEEDLESS:
        reason = f"It is too long to be read whole, and not clearly needless. {score.reason}"
        score = replace(score, p_known=0.0, reason=reason)
    return Judged(score, collector.cost(spec, place), (*warnings, *noticed))


def fitting(
    batch: Sequence[Inputs], specs: Sequence[EvidenceSpec[Any]], sources: Sources
) -> tuple[list[Inputs], list[tuple[str, ...]]]:
    """Shorten requests that no model should read whole; returns them all, and a warning for each that was."""
    if not any(spec.reads_model for spec in expanded_specs(specs)):
        return list(batch), [()] * len(batch)
    inputs: list[Inputs] = []
    warnings: list[tuple[str, ...]] = []
    for each in batch:
        short = _shortened(each.question, sources)
        if short is None:
            inputs.append(each)
            warnings.append(())
        else:
            inputs.append(replace(each, question=short, partly=True))
            warnings.append((f"Of {len(each.question):,} characters {len(short):,} were read.",))
    return inputs, warnings


def _shortened(question: str, sources: Sources) -> str | None:
    """Return the beginning, the end and what asks between them of a request, or None when it can be read whole."""
    if len(question.encode()) <= MAX_REQUEST_TOKENS:  # a token has at least one byte
        return None
    longest = 8 * MAX_REQUEST_TOKENS  # characters that so many tokens rarely exceed
    readable = question[:longest]
    # Without a model nothing counts its tokens; the evidence that needs one will fail for that reason.
    with suppress(Exception):
        readable = sources.proxy().truncate(readable, MAX_REQUEST_TOKENS) or readable
    if len(readable) == len(question):
        return None
    begin = int(_SHARES["begin"] * len(readable))
    end = len(question) - int(_SHARES["end"] * len(readable))
    middle = _asking(question[begin:end], int(_SHARES["middle"] * len(readable)))
    return "\n".join([question[:begin], *middle, question[end:]])


def _asking(text: str, characters: int) -> list[str]:
    """Return sentences that ask, of at most so many characters together."""
    found = []
    for sentence in segments(text[:_MOST_CHARACTERS]):
        asks = sentence.endswith("?") or _ASKS.match(sentence)
        if asks and len(sentence) <= characters:
            found.append(sentence)
            characters -= len(sentence)
    return found
