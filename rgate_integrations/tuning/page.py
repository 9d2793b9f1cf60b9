"""What is told about a tuned gate: the report as a page, and its card."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from rgate_integrations.arrays import Float64Array
from rgate_integrations.evaluation.break_even import StageTimes
from rgate_integrations.evaluation.report import report_page
from rgate_integrations.index.embedder import Embedder
from rgate_integrations.tuning.asking import Answered
from rgate_integrations.tuning.gates import LEAST, FittedGate
from rgate_integrations.tuning.labelling import Labels
from rgate_integrations.tuning.questions import clusters

_TOPICS, _A_TOPIC = 8, 25  # at most so many, of about so many questions at least
_WORD = re.compile(r"[^\W\d_]{4,}")
_NO_TOPIC = "all questions"


def page(
    labels: Labels,
    question: FittedGate,
    answer_first: FittedGate | None,
    prior: Float64Array,
    times: StageTimes | None = None,
    embedder: Embedder | None = None,
) -> str:
    """Return the report: one HTML document without any reference to the network.

    All scores in it are of fits that have not seen the question; those of the shipped gate are its own.

    Args:
        labels: The labelled answers.
        question: The gate for the question alone.
        answer_first: The gate for begun answers, if there is one.
        prior: Logits of the gate that was corrected.
        times: What an answer costs without and with retrieval; measured seconds when None.
        embedder: Groups the questions by topic; there is one group when None.
    """
    topics = topics_of([each.question.text for each in labels.answered], embedder)
    about = [labels.description]
    shown = [
        _result(
            "tuned, question alone",
            "none",
            labels,
            question,
            topics,
            [*about, *_notes(labels, question, times)],
        )
    ]
    if answer_first is None:
        shown[0]["notes"].append(no_answer_first(labels))
    else:
        notes = [*about, *_notes(labels, answer_first, times)]
        shown.append(_result("tuned, answer first", "begun", labels, answer_first, topics, notes))
    p = 1 / (1 + np.exp(-prior))
    rows = _rows(labels, np.arange(len(p)), p, topics)
    shown.append({"gate": "shipped", "draft": "none", "threshold": 0.5, "questions": rows, "notes": about})
    return report_page(shown)


def summary(
    name: str,
    labels: Labels,
    question: FittedGate,
    answer_first: FittedGate | None,
    failed: int,
    times: StageTimes | None = None,
) -> str:
    """Return the card of the folder, in Markdown."""
    lines = [
        f"# {name}",
        "",
        f"A retrieval gate of `rgate-integrations`, tuned on {question.artifact.llm}.",
        "",
        f"- **Labels** ({labels.kind}): {labels.description}",
        f"- **Questions**: {len(labels.known)} with a label, {labels.unknown} without; {failed} calls failed.",
        f"- **Right without retrieval**: {np.mean(labels.known):.1%}; with retrieval: {np.mean(labels.rag):.1%}.",
        "",
    ]
    for title, gate in (("Question alone", question), ("Answer first", answer_first)):
        if gate is not None:
            lines += [f"## {title}", "", *(f"- {note}" for note in _notes(labels, gate, times)), ""]
    if answer_first is None:
        lines.append(f'{no_answer_first(labels)} Use the gate as `load_gate("{name}")`.')
    else:
        lines.append(
            f'Use it as `load_gate("{name}")`; `load_gate("{name}/answer-first")` judges a begun answer.'
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


def _notes(labels: Labels, gate: FittedGate, times: StageTimes | None) -> list[str]:
    """Say in sentences what the gate promises, how good it is, and what it saves."""
    rate = float((gate.p < gate.chosen.threshold).mean())
    notes = [
        gate.chosen.promise,
        f"AUC of P(known) on held-out questions: {gate.auc:.3f}; of the shipped gate: {gate.auc_before:.3f} "
        f"(n = {len(gate.p)}).",
    ]
    chosen = [labels.answered[place] for place in gate.places]
    direct, rag, unit = _prices(chosen, times)
    if rag > 0:
        spent = rate * rag + (1 - rate) * direct
        notes.append(
            f"Retrieves for {rate:.1%}: {spent:.3g} {unit} a question instead of {rag:.3g} with retrieval always, "
            "without the gate's own work."
        )
    return notes


def _prices(answered: Sequence[Answered], times: StageTimes | None) -> tuple[float, float, str]:
    """Return what an answer costs without and with retrieval, and in which unit."""
    if times is not None:
        return times.direct, times.search + times.rag, "(your figures)"
    direct = float(np.median([each.seconds["direct"] for each in answered]))
    rag = float(np.median([each.seconds["retrieve"] for each in answered]))
    return direct, rag, "s (median, as measured)"
