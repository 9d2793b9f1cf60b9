"""How gates score a batch of questions on shared evidence; of requests that are too long, a part."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from rgate_integrations.decision import Cost
from rgate_integrations.evidence.base import Context, Inputs, Sources, expand_specs
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
class Evaluation:
    """What was found out about a question; what to do about it is the caller's matter.

    Attributes:
        score: The gate's score, or why there is none.
        cost: What the evidence cost.
        warnings: What was noticed on the way.
    """

    score: Score | Exception
    cost: Cost = field(default_factory=Cost)
    warnings: tuple[str, ...] = ()


def evaluate(gates: Sequence[Gate], batch: Sequence[Inputs], sources: Sources) -> list[list[Evaluation]]:
    """Let gates score a batch; returns for each gate its evaluations, in the order of the questions."""
    specs = [ScoreSpec(gate) for gate in gates]
    inputs = list(batch)
    if any(spec.reads_model for spec in expand_specs(specs)):
        inputs = [shorten(each, sources) for each in batch]
    context = Context(inputs, sources, specs)
    found = []
    for spec in specs:
        scores = context.find(spec)
        costs = context.costs(spec)
        evaluations = []
        for given, read, score, cost in zip(batch, inputs, scores, costs, strict=True):
            warnings: tuple[str, ...] = ()
            if read.partly:
                warnings = (f"Of {len(given.question):,} characters {len(read.question):,} were read.",)
            if isinstance(score, Score):
                warnings += score.warnings
                if read.partly and score.p_known < CLEARLY_NEEDLESS:
                    reason = f"It is too long to be read whole, and not clearly needless. {score.reason}"
                    score = replace(score, p_known=0.0, reason=reason)
            evaluations.append(Evaluation(score, cost, warnings))
        found.append(evaluations)
    return found


def shorten(inputs: Inputs, sources: Sources) -> Inputs:
    """Leave the beginning, the end and what asks between them of a request that no model should read whole."""
    question = inputs.question
    if len(question.encode()) <= MAX_REQUEST_TOKENS:  # a token has at least one byte
        return inputs
    longest = 8 * MAX_REQUEST_TOKENS  # characters that so many tokens rarely exceed
    readable = question[:longest]
    # Without a model nothing counts its tokens; the evidence that needs one will fail for that reason.
    with suppress(Exception):
        readable = sources.proxy().truncate(readable, MAX_REQUEST_TOKENS) or readable
    if len(readable) == len(question):
        return inputs
    begin = int(_SHARES["begin"] * len(readable))
    end = len(question) - int(_SHARES["end"] * len(readable))
    left = int(_SHARES["middle"] * len(readable))
    parts = [question[:begin]]
    for sentence in segments(question[begin:end][:_MOST_CHARACTERS]):
        asks = sentence.endswith("?") or _ASKS.match(sentence)
        if asks and len(sentence) <= left:
            parts.append(sentence)
            left -= len(sentence)
    parts.append(question[end:])
    return replace(inputs, question="\n".join(parts), partly=True)
