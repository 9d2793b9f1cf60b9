"""How a batch of questions is scored: by the user's rules, and by a gate; of requests that are too long, a part."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from rgate_integrations.decision import Cost
from rgate_integrations.gates.base import Gate, Score, ScoreSpec, Specs
from rgate_integrations.gates.evidence.base import Context, Inputs, Sources, expand_specs
from rgate_integrations.gates.rules import Rules
from rgate_integrations.runtime.segments import segments

MAX_REQUEST_TOKENS = 2_048
"""A request is read whole up to this length; of longer ones the beginning, the end, and what asks between them."""
CLEARLY_NEEDLESS = 0.9
"""A request that was not read whole retrieves below this P(known)."""
_MOST_CHARACTERS = 200_000  # of the middle of a request that are looked through for what asks
_AT_EACH_END, _BETWEEN = 0.45, 0.1  # shares of the tokens that are read of a longer request
_ASKS = re.compile(
    r"(?:who|whom|whose|what|when|where|which|why|how|is|are|was|were|do|does|did|can|could|has|have|had|will|would"
    r"|tell|name|give|list|find|explain|describe|define|write|draft|make|create|turn|summari[sz]e|translate|rewrite"
    r"|show|check|compare|book|send|please|i want|i need)\b",
    re.IGNORECASE,
)
"""How sentences begin that ask. It only picks what is read; what is read decides."""


def evaluate(gate: Gate, batch: Sequence[Inputs], sources: Sources, rules: Rules) -> list[Score | Exception]:
    """Score a batch; returns a score for each question, in order, or why there is none.

    Rules that read nothing go first, patterns and functions; then examples. The gate is asked about the rest.
    """
    began = time.perf_counter()
    specs: Specs = (*rules.likeness_for(gate), ScoreSpec(gate))
    reads_model = any(spec.reads_model for spec in expand_specs(specs))
    scores: list[Score | Exception | None] = []
    read = []
    for inputs in batch:
        matched = rules.match(inputs)
        scores.append(matched)
        read.append(shorten(inputs, sources) if reads_model and matched is None else inputs)
    context = Context(read, sources, specs)
    for spec in specs:
        undecided = [place for place, score in enumerate(scores) if score is None]
        for place, piece in zip(undecided, context.part(undecided).find(spec), strict=True):
            scores[place] = piece if isinstance(piece, Exception) else piece.value
    milliseconds = (time.perf_counter() - began) * 1e3 / len(batch)
    found: list[Score | Exception] = []
    for given, evidence, score in zip(batch, context.evidence, scores, strict=True):
        assert score is not None  # noqa: S101  whom no rule decided, the gate has judged
        if isinstance(score, Score):
            score = replace(score, cost=evidence.cost + Cost(milliseconds=milliseconds))
            if evidence.inputs.partly:
                score = _of_a_part(score, given, evidence.inputs)
        found.append(score)
    return found


def _of_a_part(score: Score, given: Inputs, read: Inputs) -> Score:
    """Say that a request was not read whole; it retrieves unless it is clearly needless."""
    warning = f"Of {len(given.question):,} characters {len(read.question):,} were read."
    score = replace(score, warnings=(warning, *score.warnings))
    if score.p_known >= CLEARLY_NEEDLESS:
        return score
    reason = f"It is too long to be read whole, and not clearly needless. {score.reason}"
    return replace(score, p_known=0.0, reason=reason)


def shorten(inputs: Inputs, sources: Sources) -> Inputs:
    """Leave the beginning, the end and what asks between them of a request that no model should read whole."""
    question = inputs.question
    if len(question.encode()) <= MAX_REQUEST_TOKENS:  # a token has at least one byte
        return inputs
    readable = question[: 8 * MAX_REQUEST_TOKENS]  # so many tokens rarely have more characters
    # Without a model nothing counts its tokens; the evidence that needs one will fail for that reason.
    with suppress(Exception):
        readable = sources.proxy().truncate(readable, MAX_REQUEST_TOKENS) or readable
    if len(readable) == len(question):
        return inputs
    at_end, left = int(_AT_EACH_END * len(readable)), int(_BETWEEN * len(readable))
    parts = [question[:at_end]]
    for sentence in segments(question[at_end:-at_end][:_MOST_CHARACTERS]):
        asks = sentence.endswith("?") or _ASKS.match(sentence)
        if asks and len(sentence) <= left:
            parts.append(sentence)
            left -= len(sentence)
    parts.append(question[-at_end:])
    return replace(inputs, question="\n".join(parts), partly=True)
