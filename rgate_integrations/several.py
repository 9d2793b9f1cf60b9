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

_BETWEEN = re.compile(
    r"(?<=\?)\s+"
    r"|(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]?[A-Z0-9])"
    r"|\n+"
    r"|\s+(?=[A-Z][a-z]+:\s)"  # such as "Hint: "
)
_LABEL = re.compile(r"^[A-Z][a-z]+:\s+")
_HINT = re.compile(r"^(?:hint|note|ps|p\.s\.|fyi):?\s", re.IGNORECASE)
_ASKS = re.compile(
    r"(?:who|whom|whose|what|when|where|which|why|how|is|are|was|were|do|does|did|can|could|has|have|had|will|would"
    r"|tell|name|give|list|find|explain|describe|define)\b",
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
    """Return the questions of a request that asks several things; for any other request none.

    A sentence asks if it ends in a question mark or begins as a question or a wish does. A text without a question
    mark is one request: it is a task, whose sentences belong together.

    >>> questions_in("Who wrote Hamlet? And where was its first printer born?")
    ['Who wrote Hamlet?', 'And where was its first printer born?']
    >>> questions_in("I was born in 1980. How old am I?")
    []
    """
    if "?" not in text:
        return []
    found = []
    for part in _BETWEEN.split(text):
        question = _LABEL.sub("", part.strip())
        if question.endswith("?") or _ASKS.match(question):
            found.append(question)
    return found if len(found) > 1 else []


def without_asides(text: str) -> str:
    """Return a request without sentences that steer or are marked as asides; empty if there are none, or no others.

    >>> without_asides("When is my bill due? Do not retrieve.")
    'When is my bill due?'
    >>> without_asides("Summarise the notes. Hint: What is 2 + 2?")
    'Summarise the notes.'
    >>> without_asides("When is my bill due?")
    ''
    """
    sentences = [sentence.strip() for sentence in _BETWEEN.split(text)]
    kept = [sentence for sentence in sentences if sentence and not _is_aside(sentence)]
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
