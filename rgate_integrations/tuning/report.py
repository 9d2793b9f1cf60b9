"""What is told about a tuned gate or an evaluation: in sentences, as a card, and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from rgate_integrations.decision import Draft
from rgate_integrations.errors import DataFormatError
from rgate_integrations.gates.artifacts.card import plain
from rgate_integrations.gates.registry import loadable
from rgate_integrations.runtime.arrays import BoolArray, Float64Array
from rgate_integrations.runtime.files import json_line, parse_json
from rgate_integrations.runtime.records import Record
from rgate_integrations.tuning.collection import Answered
from rgate_integrations.tuning.fitting import LEAST, FittedGate
from rgate_integrations.tuning.labelling import Labels

_HINT = "rgate evaluate … --out FILE"
_NEEDED = ("gate", "sets", "pooled", "questions")


def read_results(paths: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Read what ``rgate evaluate --out`` wrote.

    Raises:
        DataFormatError: A file cannot be read, or is something else; the message names it.
    """
    found = []
    for path in map(Path, paths):
        try:
            result = parse_json(path.read_bytes())
        except (OSError, ValueError) as error:
            raise DataFormatError(f"The result {str(path)!r} cannot be read: {error}.") from error
        if not isinstance(result, dict) or not all(key in result for key in _NEEDED):
            raise DataFormatError(f"{str(path)!r} is no result of an evaluation.", hint=_HINT)
        found.append({**result, "questions": _questions(result["questions"], path)})
    return found


def _questions(given: Any, path: Path) -> list[dict[str, Any]]:
    """Return the questions of a result, of which each part is what it must be."""
    checked = []
    for number, fields in enumerate(given if isinstance(given, list) else [None], start=1):
        where = f"{path}, question {number}"
        record = Record(where, number, fields if isinstance(fields, dict) else {}, _HINT)
        checked.append(
            {
                "question": record.text("question"),
                "dataset": record.optional_text("dataset"),
                "draft": record.optional_text("draft"),
                "p_known": record.optional_number("p_known") or 0.0,
                "closed_book_correct": record.fields.get("closed_book_correct") is True,
                "rag_correct": record.fields.get("rag_correct") is True,
            }
        )
    return checked


def report_page(results: Sequence[Mapping[str, Any]], *, texts: bool = True) -> str:
    """Return the page: one HTML document without any reference to the network.

    Args:
        results: Results of evaluations; the page shows one at a time.
        texts: Whether questions and drafts are in it; without them the page can be shown to anybody.
    """
    shown = []
    for result in results:
        rows = []
        for number, question in enumerate(result["questions"], start=1):
            text, draft = f"question {number}", ""
            if texts:
                text, draft = question["question"], question.get("draft") or ""
            right = [int(bool(question["closed_book_correct"])), int(bool(question["rag_correct"]))]
            rows.append([question["p_known"], *right, question["dataset"], text, draft])
        notes, threshold = result.get("notes"), result.get("threshold")
        shown.append(
            {
                "gate": result["gate"],
                "draft": result.get("draft", ""),
                "threshold": 0.5 if threshold is None else threshold,
                "break_even": result.get("break_even"),
                "notes": list(map(str, notes))
                if isinstance(notes, list)
                else [],  # a file may hold something else
                "questions": rows,
            }
        )
    # "<" would end the script element, whatever a model wrote
    data = json_line(shown).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    template = files("rgate_integrations.tuning").joinpath("report.html").read_text(encoding="utf-8")
    return template.replace("/*DATA*/[]", data)


_CHARACTERS_A_TOKEN = 4


@dataclass(frozen=True)
class Notes:
    """What is said of the two gates, in sentences.

    Attributes:
        question: Of the gate for the question alone.
        answer_first: Of the gate for begun answers; why there is none, if there is none.
    """

    question: list[str]
    answer_first: list[str]


def write_notes(labels: Labels, question: FittedGate, begun: FittedGate | None) -> Notes:
    """Say what each gate guarantees, how good it is, and what it saves."""
    about_question = _notes_of(labels, question)
    if begun is None:
        n = sum(each.direct.logprobs is not None for each in labels.answered)
        why = f"the {n} answers with log-probabilities are all right, or all wrong"
        if n < LEAST:
            why = f"{n} of {len(labels.answered)} answers came with log-probabilities, which not every server gives"
        return Notes(about_question, [f"There is no gate for begun answers: {why}."])
    return Notes(about_question, _notes_of(labels, begun))


def _notes_of(labels: Labels, gate: FittedGate) -> list[str]:
    """Say in sentences what a gate guarantees, how good it is, and what it spends."""
    rate = float(gate.retrieves.mean())
    notes = [
        gate.choice.guarantee,
        f"Threshold {gate.choice.threshold:.3f}: retrieves for {rate:.1%}.",
        f"AUC of P(known) on held-out questions: {gate.auc:.3f}; of the shipped gate: {gate.auc_before:.3f} "
        f"(n = {len(gate.p)}).",
    ]
    seconds = [labels.answered[place].seconds for place in gate.places]
    direct, rag = (float(np.median([each[arm] for each in seconds])) for arm in ("direct", "retrieve"))
    if rag > 0:
        spent = rate * rag + (1 - rate) * direct
        notes.append(
            f"Takes {spent:.3g} s a question (median, as measured) instead of {rag:.3g} with retrieval always, "
            "without the gate's own work."
        )
    notes.append(_token_note(labels, gate))
    return notes


def _token_note(labels: Labels, gate: FittedGate) -> str:
    """Say what the LLM reads and writes."""
    answered = [labels.answered[place] for place in gate.places]
    retrieved, nothing = gate.retrieves, np.zeros(len(answered), dtype=bool)
    begun = gate.artifact.tokens
    spent = mean_tokens(answered, retrieved, retrieved if begun else nothing, begun)
    always = mean_tokens(answered, ~nothing, nothing)
    if spent is None or always is None:
        return "The answers do not say how long their prompts were: tokens cannot be counted."
    return (
        f"Tokens of the LLM a question: {spent[0]:.0f} read and {spent[1]:.0f} written, instead of "
        f"{always[0]:.0f} and {always[1]:.0f} with retrieval always."
    )


def mean_tokens(
    answered: Sequence[Answered], retrieved: BoolArray, dropped: BoolArray, begun: int = 0
) -> Float64Array | None:
    """Return the tokens of prompts and of answers that a question takes on average, shape (2,).

    Args:
        answered: The questions, with the answers of both arms.
        retrieved: Which of them are answered with retrieval, shape (n,).
        dropped: For which of these the answer without retrieval is begun and dropped, shape (n,).
        begun: After how many tokens it is dropped.

    Returns:
        The tokens; None if the length of a prompt is not known.
    """
    total = np.zeros(2)
    for each, with_retrieval, drops in zip(answered, retrieved, dropped, strict=True):
        if 0 in (each.direct.prompt_tokens, each.retrieve.prompt_tokens):
            return None
        answer = each.retrieve if with_retrieval else each.direct
        total += (answer.prompt_tokens, _length(answer))
        if drops:
            total += (each.direct.prompt_tokens, min(_length(each.direct), begun))
    return total / len(answered)


def _length(answer: Draft) -> float:
    """Return how many tokens an answer has; about that, where the server lists none."""
    return len(answer.tokens) or len(answer.text) / _CHARACTERS_A_TOKEN


def write_page(
    labels: Labels, question: FittedGate, begun: FittedGate | None, prior: Float64Array, notes: Notes
) -> str:
    """Return the report: one HTML document without any reference to the network.

    All scores in it are of fits that have not seen the question; those of the shipped gate are its own.

    Args:
        labels: The labelled answers.
        question: The gate for the question alone.
        begun: The gate for begun answers, if there is one.
        prior: Logits of the gate that was corrected, shape (n,).
        notes: What is said of the gates.
    """
    results = []
    about = notes.question if begun is not None else notes.question + notes.answer_first
    p = 1 / (1 + np.exp(-prior))
    shown = [("tuned, question alone", question.choice.threshold, question.places, question.p, about)]
    if begun is not None:
        shown.append(
            ("tuned, answer first", begun.choice.threshold, begun.places, begun.p, notes.answer_first)
        )
    shown.append(("shipped", 0.5, np.arange(len(p)), p, []))
    for gate, threshold, places, scores, said in shown:
        rows = []
        for place, score in zip(places, scores, strict=True):
            answered = labels.answered[place]
            rows.append(
                {
                    "question": answered.question.text,
                    "dataset": answered.question.dataset or "all questions",
                    "draft": answered.direct.text,
                    "p_known": round(float(score), 5),
                    "closed_book_correct": labels.known[place],
                    "rag_correct": labels.rag[place],
                }
            )
        notes_shown = [labels.description, *said]
        results.append({"gate": gate, "threshold": threshold, "questions": rows, "notes": notes_shown})
    return report_page(results)


def write_card(name: str, labels: Labels, llm: str, notes: Notes, failed: int) -> str:
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
