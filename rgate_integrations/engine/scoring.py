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
from rgate_integrations.gates.turns import resolve_turns
from rgate_integrations.runtime.letters import detect_encoding, plain_text
from rgate_integrations.runtime.segments import BLANK_LINE, QUESTION_MARKS, segments

MAX_REQUEST_TOKENS = 2_048
"""A request is read whole up to this length; of longer ones the beginning, the end, and what asks between them."""
MIN_P_KNOWN_IF_TRUNCATED = 0.9
"""A request that was not read whole retrieves below this P(known), and always if what may ask was left out."""
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
    resolved = resolve_turns(gate, requests, sources) if gate.reads_history else requests
    for request, whole in zip(requests, resolved, strict=True):
        ruled = rules.match(request)
        each = Evidence(request)
        if ruled is not None:
            each.pieces[verdict] = Piece(ruled)
        elif isinstance(whole, Exception):
            each.pieces[verdict] = whole
        elif reads_model:
            each = read_request(whole, sources)
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
            if each.leaves_out or score.p_known < MIN_P_KNOWN_IF_TRUNCATED:
                score = score.overridden("Too long to be read whole, and not clearly needless.")
        encoding = detect_encoding(each.question) if reads_model else ""
        if encoding:
            score = score.overridden(f"Written in {encoding}, which the gate does not read.")
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
    """Return a request as a model reads it: in plain letters, and of a very long one only a part.

    That is the beginning, the end and what asks between them.
    """
    question, original = plain_text(request.question), ""
    if question != request.question:
        request, original = replace(request, question=question), request.question
    if len(question.encode()) <= MAX_REQUEST_TOKENS:  # a token has at least one byte
        return Evidence(request, original=original)
    readable = question[: 8 * MAX_REQUEST_TOKENS]  # so many tokens rarely have more characters
    # Without a model nothing counts its tokens; the evidence that needs one will fail for that reason.
    with suppress(Exception):
        readable = sources.proxy("").truncate(readable, MAX_REQUEST_TOKENS) or readable
    if len(readable) == len(question):
        return Evidence(request, original=original)
    at_end, left = int(_AT_EACH_END * len(readable)), int(_BETWEEN * len(readable))
    between = question[at_end:-at_end]
    asking = _asking(between[:_MOST_CHARACTERS])
    parts = [question[:at_end]]
    for sentence in asking:
        if len(sentence) <= left:
            parts.append(sentence)
            left -= len(sentence)
    leaves_out = len(between) > _MOST_CHARACTERS or len(parts) <= len(asking)
    parts.append(question[-at_end:])
    shortened = replace(request, question="\n".join(parts))
    return Evidence(shortened, truncated=True, leaves_out=leaves_out, original=original)


def _asking(text: str) -> list[str]:
    """Return the sentences of a text that may ask for something: by their words, or as each stands by itself."""
    found = []
    for paragraph in BLANK_LINE.split(text):
        sentences = segments(paragraph)
        for sentence in sentences:
            if len(sentences) == 1 or sentence.endswith(QUESTION_MARKS) or _ASKS.match(sentence):
                found.append(sentence)
    return found
