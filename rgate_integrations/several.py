"""Requests that ask several things, or steer: judged by the hardest part, so that no other part can hide it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rgate_integrations.decision import Cost
from rgate_integrations.evidence.base import Inputs
from rgate_integrations.evidence.collector import expanded_specs
from rgate_integrations.gates.base import Gate, Score
from rgate_integrations.judging import Judged

MOST_QUESTIONS = 8
"""A request that asks more than this retrieves."""

_CLOSERS = "\"')]"
_LABELLED = re.compile(r"[A-Z][a-z]+:$")  # such as "Hint:"
_LABEL = re.compile(r"^[A-Z][a-z]+:\s+")
_HINT = re.compile(r"^(?:hint|note|ps|p\.s\.|fyi):?\s", re.IGNORECASE)
_ASKS = re.compile(
    r"(?:who|whom|whose|what|when|where|which|why|how|is|are|was|were|do|does|did|can|could|has|have|had|will|would"
    r"|tell|name|give|list|find|explain|describe|define)\b",
    re.IGNORECASE,
)
_INSTRUCTS = re.compile(
    r"(?:please |now )?(?:write|draft|compose|make|create|turn|summari[sz]e|shorten|translate|rewrite|proofread|fix"
    r"|correct|show|check|compare|set|play|remind|book|send|add|call|cancel|change|open|close|transfer|pay|look|get"
    r"|help|i want|i need|i(?:['’]d| would) like)\b",
    re.IGNORECASE,
)
_STEERS = re.compile(
    r"\b(?:do not|don['’]t|no need to|not? need|never|without|skip|ignore)\b.{0,40}"
    r"\b(?:retriev|search|look|documents?|passages?|sources?|files)"
    r"|\b(?:i|we|you|everyone|everybody)(?: surely| already| all)* knows? (?:this|that|it|the answer)\b"
    r"|\banswer\b.{0,20}\b(?:from memory|by heart|from your head)"
    r"|^(?:this|that|it)(?:['’]s| is) (?:easy|common knowledge|well known|trivial)\b",
    re.IGNORECASE,
)
_MOST_STEERING = 12
"""Words of a sentence that does nothing but steer; a longer one asks for something, too."""
_LONG_REST = 12
"""Words beside the one sentence that asks, from which on it is judged by itself, too: that much text, such as a log
or a mail, outvotes it. With less, the sentences rather belong together."""
_SHOWN = 80  # characters of a part in a warning


@dataclass(frozen=True)
class Parts:
    """What is judged for one request.

    Attributes:
        inputs: The request as a whole, the same without asides if it has some, and each of its questions if there
            are several.
        too_many: Whether it asks so much that it retrieves in any case.
    """

    inputs: tuple[Inputs, ...]
    too_many: bool = False


def questions_in(text: str) -> list[str]:
    """Return what is judged by itself, too: each question of several, or the only one among much text.

    A sentence asks if it ends in a question mark or begins as a question or a wish does. Several sentences
    without a question mark are one request, a task, unless much text that does not ask stands beside them.

    >>> questions_in("Who wrote Hamlet? And where was its first printer born?")
    ['Who wrote Hamlet?', 'And where was its first printer born?']
    >>> questions_in("I was born in 1980. How old am I?")
    []
    """
    sentences = [_LABEL.sub("", sentence) for sentence in _sentences(text)]
    found = [each for each in sentences if _asks(each)]
    if len(found) > 1 and "?" in text:
        return found
    rest = sum(len(each.split()) for each in sentences) - sum(len(each.split()) for each in found)
    return found if found and rest >= _LONG_REST else []


def _asks(sentence: str) -> bool:
    return sentence.endswith("?") or bool(_ASKS.match(sentence) or _INSTRUCTS.match(sentence))


def _sentences(text: str) -> list[str]:
    """Split a text at line breaks, sentence ends, and before labels; one walk over its words."""
    found = []
    for line in text.splitlines():
        words = line.split()
        begin = 0
        for i, word in enumerate(words[:-1], start=1):
            following = words[i]
            starts = following.lstrip("\"'([")[:1]
            ended = word.rstrip(_CLOSERS).endswith((".", "!", "?"))
            ends = word.endswith("?") or (ended and (starts.isupper() or starts.isdigit()))
            if ends or _LABELLED.match(following):
                found.append(" ".join(words[begin:i]))
                begin = i
        if words:
            found.append(" ".join(words[begin:]))
    return found


def without_asides(text: str) -> str:
    """Return a request without sentences that steer or are marked as asides; empty if there are none, or no others.

    >>> without_asides("When is my bill due? Do not retrieve.")
    'When is my bill due?'
    >>> without_asides("Summarise the notes. Hint: What is 2 + 2?")
    'Summarise the notes.'
    >>> without_asides("When is my bill due?")
    ''
    """
    sentences = _sentences(text)
    kept = [sentence for sentence in sentences if not _is_aside(sentence)]
    return " ".join(kept) if len(kept) < len(sentences) else ""


def _is_aside(sentence: str) -> bool:
    if _HINT.match(sentence):
        return True
    return len(sentence.split()) <= _MOST_STEERING and _STEERS.search(sentence) is not None


def parts_of(inputs: Inputs, gates: Sequence[Gate]) -> Parts:
    """Return what is to be judged for a request by gates.

    A given draft answers the whole request, so with one only the whole is judged. Gates for which no model reads the
    question, such as a constant one, are left alone.
    """
    questions = questions_in(inputs.question)
    core = without_asides(inputs.question)
    judged = list(dict.fromkeys([core, *questions] if core else questions))
    if not judged or not any(_reads(gate) for gate in gates):
        return Parts((inputs,))
    if len(questions) > MOST_QUESTIONS:
        return Parts((inputs,), too_many=True)
    if inputs.draft is not None:
        return Parts((inputs,))
    return Parts((inputs, *(replace(inputs, question=question) for question in judged)))


def hardest(parts: Parts, found: Iterator[Judged | Exception]) -> Judged | Exception:
    """Take the results of a request's parts, and return one for the request.

    P(known) is the lowest of all parts, the draft that of the whole. A part that failed fails the request.
    """
    results = [next(found) for _ in parts.inputs]
    scored: list[tuple[Judged, Score]] = []
    for result in results:
        if isinstance(result, Exception):
            return result
        if not isinstance(result.score, Score):
            return replace(result, question=parts.inputs[0].question)
        scored.append((result, result.score))
    whole, score = scored[0]
    if parts.too_many:
        warning = f"It asks more than {MOST_QUESTIONS} questions, so it retrieves."
        unknown = replace(score, p_known=0.0, reason=warning)
        return replace(whole, score=unknown, warnings=(*whole.warnings, warning))
    if len(scored) == 1:
        return whole
    lowest = min(scored, key=lambda each: each[1].p_known)  # of equal ones the first, the whole
    cost = sum((each.cost for each, _ in scored), Cost())
    if lowest[0] is whole:
        return replace(whole, cost=cost)
    warning = f"Judged by its hardest part: {lowest[0].question[:_SHOWN]!r}."
    hard = replace(lowest[1], draft=score.draft)
    return replace(whole, score=hard, cost=cost, warnings=(*whole.warnings, warning))


def _reads(gate: Gate) -> bool:
    return any(spec.reads_model for spec in expanded_specs(gate.specs))
