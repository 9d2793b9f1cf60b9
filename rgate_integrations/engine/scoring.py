"""Scores a batch of requests with the user's rules, then with a gate. Long requests are truncated."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rgate_integrations.decision import Cost, Request
from rgate_integrations.gates.base import Gate, Score, ScoreSpec
from rgate_integrations.gates.evidence.base import Context, Evidence, Piece, Sources, expand_specs
from rgate_integrations.gates.rules import Rules
from rgate_integrations.gates.turns import resolve_turns
from rgate_integrations.runtime.segments import BLANK_LINE, drop_repeated, is_question, segments
from rgate_integrations.runtime.text import detect_encoding, plain_text

MAX_READ_WHOLE = 2_500
"""Maximum length, in characters, of a request that is read completely. The gate learned from texts up to this long:
in longer ones, it takes pasted text for questions."""
# Of a longer request, the gate reads so many characters at each end, since people put their question before or after
# a pasted text, and so many of the sentences in between that ask for something.
_END_CHARACTERS = _MIDDLE_CHARACTERS = 600
# Maximum characters of the middle to search for such sentences, because splitting a book takes seconds.
_MAX_MIDDLE_CHARACTERS = 200_000
# Beginnings of sentences that ask for something, also in a list, brackets or quotes. A match only means that the gate
# reads it.
_ASKS = re.compile(
    r"(?:[-*•>]+\s*|\(?\w{1,2}[.)]\s*)?[\"'(\[*_“‘«„]*"
    r"(?:who|whom|whose|what|when|where|which|why|how|is|are|was|were|do|does|did|can|could|has|have|had|will|would"
    r"|tell|name|give|list|find|explain|describe|define|write|draft|make|create|turn|summari[sz]e|translate|rewrite"
    r"|show|check|compare|book|send|please|i want|i need)\b",
    re.IGNORECASE,
)


def score_requests(
    gate: Gate, requests: Sequence[Request], sources: Sources, rules: Rules
) -> list[Score | Exception]:
    """Return a score or an error for each request of a batch, in order. A rule that matches replaces the gate.

    Args:
        gate: The gate.
        requests: The requests.
        sources: Where the gate's evidence comes from, such as models.
        rules: The user's rules.
    """
    start = time.perf_counter()
    verdict = ScoreSpec(gate)
    likeness = rules.likeness_for(gate)
    reads_model = any(spec.reads_model for spec in expand_specs((*likeness, verdict)))
    resolved = resolve_turns(gate, requests, sources) if gate.reads_history else requests
    evidence = []
    # The cheapest rules decide first: patterns and functions, then examples, then the gate.
    first_patterns, last_patterns = rules.pattern_order
    for request, resolved_request in zip(requests, resolved, strict=True):
        ruling = rules.match(request, first_patterns)
        if ruling is None and isinstance(resolved_request, Request) and resolved_request is not request:
            # Not `never`: an offer in the resolved request may be about something else than the reply.
            ruling = rules.match(resolved_request, ("always",))
        item = Evidence(request)
        if ruling is not None:
            item.pieces[verdict] = Piece(ruling)
        elif isinstance(resolved_request, Exception):
            item.pieces[verdict] = resolved_request
        elif reads_model:
            item = read_request(resolved_request)
        evidence.append(item)
    # A request that already has a verdict costs nothing more, because `find` only computes missing pieces.
    context = Context(evidence, sources)
    for spec in likeness:
        undecided = context.without(verdict)
        for item, match in zip(undecided.evidence, undecided.find(spec), strict=True):
            if isinstance(match, Exception) or match.value is not None:
                item.pieces[verdict] = match
    for request, item in zip(requests, evidence, strict=True):
        ruling = None if verdict in item.pieces else rules.match(request, last_patterns)
        if ruling is not None:
            item.pieces[verdict] = Piece(ruling)
    context.find(verdict)
    if len(gate.corpora) > 1:
        _add_corpora(verdict, context)
    time_each = Cost(milliseconds=(time.perf_counter() - start) * 1e3 / len(requests))
    scores: list[Score | Exception] = []
    for resolved_request, item in zip(resolved, evidence, strict=True):
        piece = item.pieces[verdict]
        if isinstance(piece, Piece):
            score = replace(piece.value, cost=item.cost + time_each)
            if reads_model and isinstance(resolved_request, Request):
                score = _retrieve_if_unread(score, resolved_request, item)
            scores.append(score)
        else:
            scores.append(piece)
    return scores


def _retrieve_if_unread(score: Score, request: Request, item: Evidence) -> Score:
    """Return the score, overridden to retrieve if an unread part of the request may need passages.

    A part is unread if it was cut off, which also adds a warning, or is encoded, for example in Base64.
    """
    if item.truncated:
        warning = f"Only {len(item.question):,} of {len(request.question):,} characters were read."
        score = replace(score, warnings=(warning, *score.warnings))
        if item.leaves_out:
            score = score.overridden(
                "The request is too long to be read completely, and the rest asks for more."
            )
    encoding = detect_encoding(item.question)
    if encoding:
        score = score.overridden(f"Contains text in {encoding}, which the gate does not read.")
    return score


def _add_corpora(verdict: ScoreSpec, context: Context) -> None:
    """Ask the gate where to search if a rule retrieves, because the rule only says whether to search."""
    for item in context.evidence:
        score = getattr(item.pieces[verdict], "value", None)
        if score is None or score.corpora or score.override is None or not score.override.retrieve:
            continue
        unruled = Evidence(item.request)
        (piece,) = replace(context, evidence=[unruled]).find(verdict)
        if isinstance(piece, Piece):
            score = replace(score, p_covered=piece.value.p_covered, corpora=piece.value.corpora)
            item.pieces[verdict] = Piece(score, unruled.cost)


def read_request(request: Request) -> Evidence:
    """Return the `Evidence` for a request, with its text as models read it.

    Letters are made plain, see `plain_text`, and a repeated request is read once. If the text has more than
    `MAX_READ_WHOLE` characters, it is cut to its beginning, its end and, as far as they fit, the sentences in
    between that ask for something.
    """
    question, original = plain_text(request.question), ""
    if len(question) <= MAX_READ_WHOLE:
        question = drop_repeated(question)
    if question != request.question:
        request, original = replace(request, question=question), request.question
    if len(question) <= MAX_READ_WHOLE:
        return Evidence(request, original=original)
    begin, end = question[:_END_CHARACTERS], question[-_END_CHARACTERS:]
    # Whole lines or sentences, unless they are long.
    half = _END_CHARACTERS // 2
    begin = begin[: max(begin.rfind("\n"), begin.rfind(". ") + 1, half)]
    end = end[min((at for at in (end.find("\n"), end.find(". ") + 1) if 0 < at < half), default=0) :]
    middle = question[len(begin) : -len(end)]
    asking = list(_asking_sentences(middle[:_MAX_MIDDLE_CHARACTERS]))
    parts, room = [begin], _MIDDLE_CHARACTERS
    for sentence in asking:
        if len(sentence) <= room:
            parts.append(sentence)
            room -= len(sentence)
    leaves_out = len(middle) > _MAX_MIDDLE_CHARACTERS or len(parts) <= len(asking)
    request = replace(request, question="\n".join([*parts, end]))
    return Evidence(request, truncated=True, leaves_out=leaves_out, original=original)


def _asking_sentences(text: str) -> Iterator[str]:
    """Yield the sentences that begin like a request, end with a question mark, or are a whole paragraph."""
    for paragraph in BLANK_LINE.split(text):
        sentences = segments(paragraph)
        for sentence in sentences:
            if len(sentences) == 1 or is_question(sentence) or _ASKS.match(sentence):
                yield sentence
