"""What is told about a tuned gate: the report as a page, and its card."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rgate_integrations.artifacts.card import plain
from rgate_integrations.gates.registry import loadable
from rgate_integrations.index.embedder import Embedder
from rgate_integrations.runtime.arrays import Float64Array
from rgate_integrations.tuning.costs import Costs, cost_notes, first_look_note
from rgate_integrations.tuning.first_look import FirstLook
from rgate_integrations.tuning.gates import LEAST, FittedGate
from rgate_integrations.tuning.labelling import Labels
from rgate_integrations.tuning.questions import clusters
from rgate_integrations.tuning.report import report_page

_TOPICS, _A_TOPIC = 8, 25  # at most so many, of about so many questions at least
_WORD = re.compile(r"[^\W\d_]{4,}")
_NO_TOPIC = "all questions"


@dataclass(frozen=True)
class Notes:
    """What is said of the two gates, in sentences.

    Attributes:
        question: Of the gate for the question alone.
        answer_first: Of the gate for begun answers; why there is none, if there is none.
    """

    question: list[str]
    answer_first: list[str]

    @classmethod
    def of(
        cls,
        labels: Labels,
        question: FittedGate,
        answer_first: FittedGate | None,
        look: FirstLook | None,
        costs: Costs,
    ) -> Notes:
        """Say what each gate promises, how good it is, and what it saves."""
        about_question = [*_quality(question), *cost_notes(labels, question, costs)]
        if answer_first is None:
            return cls(about_question, [no_answer_first(labels)])
        about_begun = [*_quality(answer_first), *cost_notes(labels, answer_first, costs)]
        if look is not None:
            about_begun.append(first_look_note(labels, question, answer_first, look, costs))
        return cls(about_question, about_begun)


def page(
    labels: Labels,
    question: FittedGate,
    answer_first: FittedGate | None,
    prior: Float64Array,
    notes: Notes,
    embedder: Embedder | None = None,
) -> str:
    """Return the report: one HTML document without any reference to the network.

    All scores in it are of fits that have not seen the question; those of the shipped gate are its own.

    Args:
        labels: The labelled answers.
        question: The gate for the question alone.
        answer_first: The gate for begun answers, if there is one.
        prior: Logits of the gate that was corrected.
        notes: What is said of the gates.
        embedder: Groups the questions by topic; there is one group when None.
    """
    topics = topics_of([each.question.text for each in labels.answered], embedder)
    about, about_question = [labels.description], [labels.description, *notes.question]
    if answer_first is None:
        about_question += notes.answer_first
    shown = [_result("tuned, question alone", "none", labels, question, topics, about_question)]
    if answer_first is not None:
        about_begun = [*about, *notes.answer_first]
        shown.append(_result("tuned, answer first", "begun", labels, answer_first, topics, about_begun))
    p = 1 / (1 + np.exp(-prior))
    rows = _rows(labels, np.arange(len(p)), p, topics)
    shown.append({"gate": "shipped", "draft": "none", "threshold": 0.5, "questions": rows, "notes": about})
    return report_page(shown)


def summary(name: str, labels: Labels, llm: str, notes: Notes, failed: int) -> str:
    """Return the card of the folder, in Markdown."""
    lines = [
        f"# {plain(name)}",
        "",
        f"A retrieval gate of `rgate-integrations`, tuned on {plain(llm)}.",
        "",
        f"- **Labels** ({labels.kind}): {labels.description}",
        f"- **Questions**: {len(labels.known)} with a label, {labels.unknown} without; {failed} calls failed.",
        f"- **Right without retrieval**: {np.mean(labels.known):.1%}; with retrieval: {np.mean(labels.rag):.1%}.",
        "",
    ]
    for title, sentences in (("Question alone", notes.question), ("Answer first", notes.answer_first)):
        lines += [f"## {title}", "", *(f"- {note}" for note in sentences), ""]
    lines.append(
        f'Use it as `load_gate("{loadable(name)}")`; where there is an answer-first gate, '
        f'`load_gate("{name}/answer-first")` judges a begun answer.'
    )
    return "\n".join(lines) + "\n"


def no_answer_first(labels: Labels) -> str:
    """Say why there is no gate for begun answers."""
    n = sum(each.direct.logprobs is not None for each in labels.answered)
    if n < LEAST:
        why = (
            f"{n} of {len(labels.answered)} answers came with log-probabilities, which not every server gives"
        )
    else:
        why = f"the {n} answers with log-probabilities are all right, or all wrong"
    return f"There is no gate for begun answers: {why}."


def topics_of(questions: Sequence[str], embedder: Embedder | None) -> list[str]:
    """Return the topic of each question, named by words that are frequent in it and rare elsewhere."""
    n = min(_TOPICS, len(questions) // _A_TOPIC)
    if embedder is None or n < 2:
        return [_NO_TOPIC for _ in questions]
    labels = clusters(embedder.embed(questions), n, seed=0)
    words = [set(_WORD.findall(question.casefold())) for question in questions]
    overall = Counter(word for each in words for word in each)
    names = {}
    for topic in np.unique(labels):
        inside = Counter(word for each, of in zip(words, labels, strict=True) if of == topic for word in each)
        best = sorted(inside, key=lambda word: (-(inside[word] ** 2) / overall[word], word))[:3]
        names[topic] = ", ".join(best) or f"topic {topic + 1}"
    return [names[topic] for topic in labels]


def _result(
    name: str, draft: str, labels: Labels, gate: FittedGate, topics: Sequence[str], notes: Sequence[str]
) -> dict[str, Any]:
    return {
        "gate": name,
        "draft": draft,
        "threshold": gate.chosen.threshold,
        "questions": _rows(labels, gate.places, gate.p, topics),
        "notes": list(notes),
    }


def _rows(labels: Labels, places: Any, p: Float64Array, topics: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for place, score in zip(places, p, strict=True):
        each = labels.answered[place]
        rows.append(
            {
                "question": each.question.text,
                "dataset": topics[place],
                "draft": each.direct.text,
                "p_known": round(float(score), 5),
                "closed_book_correct": labels.known[place],
                "rag_correct": labels.rag[place],
            }
        )
    return rows


def _quality(gate: FittedGate) -> list[str]:
    """Say in sentences what the gate promises, and how good it is."""
    rate = float((gate.p < gate.chosen.threshold).mean())
    return [
        gate.chosen.promise,
        f"Threshold {gate.chosen.threshold:.3f}: retrieves for {rate:.1%}.",
        f"AUC of P(known) on held-out questions: {gate.auc:.3f}; of the shipped gate: {gate.auc_before:.3f} "
        f"(n = {len(gate.p)}).",
    ]
