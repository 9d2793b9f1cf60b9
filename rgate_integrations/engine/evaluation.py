"""How a batch of questions is scored: by the user's rules, and by a gate; of requests that are too long, a part."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from rgate_integrations.decision import Cost
from rgate_integrations.gates.base import Gate, Score, ScoreSpec, Specs
from rgate_integrations.gates.evidence.base import Context, Inputs, Sources, expand_specs
from rgate_integrations.gates.rules import Rules
from rgate_integrations.models.segments import segments

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


@dataclass(frozen=True)
class Evaluation:
    """What was found out about a question; what to do about it is the caller's matter.

    Attributes:
        score: The score of a rule or of the gate, or why there is none.
        cost: What the evidence cost.
        warnings: What was noticed on the way.
    """

    score: Score | Exception
    cost: Cost = field(default_factory=Cost)
    warnings: tuple[str, ...] = ()


def evaluate(gate: Gate, batch: Sequence[Inputs], sources: Sources, rules: Rules) -> list[Evaluation]:
    """Score a batch; returns its evaluations, in the order of the questions.

    Rules that read nothing go first: patterns and functions. The gate is asked about the rest.
    """
    evaluations: dict[int, Evaluation] = {}
    rest: dict[int, Inputs] = {}
    for place, inputs in enumerate(batch):
        score = rules.match(inputs)
        if score is None:
            rest[place] = inputs
        else:
            evaluations[place] = Evaluation(score, warnings=score.warnings)
    if rest:
        judged = _judge(gate, list(rest.values()), sources, rules)
        evaluations.update(zip(rest, judged, strict=True))
    return [evaluations[place] for place in range(len(batch))]


def _judge(gate: Gate, batch: Sequence[Inputs], sources: Sources, rules: Rules) -> list[Evaluation]:
    """Let examples and the gate score a batch; where an example decides, the gate does not."""
    began = time.perf_counter()
    likeness, judgment = rules.likeness_for(gate), ScoreSpec(gate)
    specs: Specs = (judgment,) if likeness is None else (likeness, judgment)
    inputs = list(batch)
    if any(spec.reads_model for spec in expand_specs(specs)):
        inputs = [shorten(each, sources) for each in batch]
    context = Context(inputs, sources, specs)
    scores: list[Score | Exception | None] = [None] * len(batch)
    if likeness is not None:
        for place, like in enumerate(context.find(likeness)):
            scores[place] = like if isinstance(like, Exception) else rules.compare(like.value)
    asked = [place for place, score in enumerate(scores) if score is None]
    for place, piece in zip(asked, context.part(asked).find(judgment), strict=True):
        scores[place] = piece if isinstance(piece, Exception) else piece.value
    milliseconds = (time.perf_counter() - began) * 1e3 / len(batch)
    evaluations = []
    for given, read, score, cost in zip(batch, inputs, scores, context.costs(), strict=True):
        warnings: tuple[str, ...] = ()
        if read.partly:
            warnings = (f"Of {len(given.question):,} characters {len(read.question):,} were read.",)
        if isinstance(score, Score):
            warnings += score.warnings
            if read.partly and score.p_known < CLEARLY_NEEDLESS:
                reason = f"It is too long to be read whole, and not clearly needless. {score.reason}"
                score = replace(score, p_known=0.0, reason=reason)
        assert score is not None  # noqa: S101  whom no example decided, the gate has judged
        timed = cost.model_copy(update={"milliseconds": milliseconds})
        evaluations.append(Evaluation(score, timed, warnings))
    return evaluations


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
    at_end, left = int(_AT_EACH_END * len(readable)), int(_BETWEEN * len(readable))
    parts = [question[:at_end]]
    for sentence in segments(question[at_end:-at_end][:_MOST_CHARACTERS]):
        asks = sentence.endswith("?") or _ASKS.match(sentence)
        if asks and len(sentence) <= left:
            parts.append(sentence)
            left -= len(sentence)
    parts.append(question[-at_end:])
    return replace(inputs, question="\n".join(parts), partly=True)
