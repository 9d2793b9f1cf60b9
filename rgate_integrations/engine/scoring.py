"""How a batch of questions is scored: by the user's rules, and by a gate; of requests that are too long, a part."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from rgate_integrations.decision import Cost, Request
from rgate_integrations.gates.base import Gate, Score, ScoreSpec
from rgate_integrations.gates.evidence.base import Context, Evidence, Piece, Sources, expand_specs
from rgate_integrations.gates.rules import Rules
from rgate_integrations.runtime.segments import QUESTION_MARKS, segments

MAX_REQUEST_TOKENS = 2_048
"""A request is read whole up to this length; of longer ones the beginning, the end, and what asks between them."""
MIN_P_KNOWN_IF_TRUNCATED = 0.9
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


def score_requests(
    gate: Gate, requests: Sequence[Request], sources: Sources, rules: Rules
) -> list[Score | Exception]:
    """Score a batch; returns a score for each request, in order, or why there is none.

    Rules that read nothing go first, patterns and functions; then examples. The gate is asked about the rest.
    """
    began = time.perf_counter()
    verdict = ScoreSpec(gate)
    likeness = rules.likeness_for(gate)
    planned = expand_specs((*likeness, verdict))
    reads_model = any(spec.reads_model for spec in planned)
    evidence = []
    for request in requests:
        ruled = rules.match(request)
        each = read_request(request, sources) if reads_model and ruled is None else Evidence(request)
        if ruled is not None:
            each.pieces[verdict] = Piece(ruled)
        evidence.append(each)
    context = Context(evidence, sources, planned)
    for spec in likeness:
        undecided = context.without(verdict)
        for each, alike in zip(undecided.evidence, undecided.find(spec), strict=True):
            if isinstance(alike, Exception):
                each.pieces[verdict] = alike
            elif alike.value is not None:
                each.pieces[verdict] = Piece(alike.value)
    context.find(verdict)
    if len(gate.corpora) > 1:
        _add_corpora(verdict, context)
    pieces = context.find(verdict)
    milliseconds = (time.perf_counter() - began) * 1e3 / len(requests)
    scores: list[Score | Exception] = []
    for request, each, piece in zip(requests, evidence, pieces, strict=True):
        if isinstance(piece, Exception):
            scores.append(piece)
            continue
        score = replace(piece.value, cost=each.cost + Cost(milliseconds=milliseconds))
        if each.truncated:
            warning = f"Of {len(request.question):,} characters {len(each.question):,} were read."
            score = replace(score, warnings=(warning, *score.warnings))
            if score.p_known < MIN_P_KNOWN_IF_TRUNCATED:
                score = score.overridden("Too long to be read whole, and not clearly needless.")
        scores.append(score)
    return scores


def _add_corpora(verdict: ScoreSpec, context: Context) -> None:
    """Let the gate say where to search for what a rule retrieves: the rule says only whether."""
    ruled = []
    for each in context.evidence:
        score = getattr(each.pieces[verdict], "value", None)
        if score is not None and not score.corpora and score.override is not None and score.override.retrieve:
            ruled.append(each)
    asked = [Evidence(each.request) for each in ruled]
    for each, evidence, piece in zip(ruled, asked, context.part(asked).find(verdict), strict=True):
        if isinstance(piece, Piece):
            score = replace(each[verdict], p_covered=piece.value.p_covered, corpora=piece.value.corpora)
            each.pieces[verdict] = Piece(score, evidence.cost)


def read_request(request: Request, sources: Sources) -> Evidence:
    """Return a request as a model reads it: of a very long one the beginning, the end and what asks between them."""
    question = request.question
    if len(question.encode()) <= MAX_REQUEST_TOKENS:  # a token has at least one byte
        return Evidence(request)
    readable = question[: 8 * MAX_REQUEST_TOKENS]  # so many tokens rarely have more characters
    # Without a model nothing counts its tokens; the evidence that needs one will fail for that reason.
    with suppress(Exception):
        readable = sources.proxy("").truncate(readable, MAX_REQUEST_TOKENS) or readable
    if len(readable) == len(question):
        return Evidence(request)
    at_end, left = int(_AT_EACH_END * len(readable)), int(_BETWEEN * len(readable))
    parts = [question[:at_end]]
    for sentence in segments(question[at_end:-at_end][:_MOST_CHARACTERS]):
        asks = sentence.endswith(QUESTION_MARKS) or _ASKS.match(sentence)
        if asks and len(sentence) <= left:
            parts.append(sentence)
            left -= len(sentence)
    parts.append(question[-at_end:])
    return Evidence(replace(request, question="\n".join(parts)), truncated=True)
