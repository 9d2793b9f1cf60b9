"""Reports of a tuned gate or an evaluation: in sentences, as a card, and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict

from rgate_integrations.decision import Draft
from rgate_integrations.errors import DataFormatError
from rgate_integrations.gates.folder import plain
from rgate_integrations.gates.probability import sigmoids
from rgate_integrations.gates.registry import loadable
from rgate_integrations.runtime.arrays import BoolArray, Float64Array
from rgate_integrations.runtime.files import json_line, parse_json, read_file
from rgate_integrations.tuning.calibration import LEAST
from rgate_integrations.tuning.collection import Answered
from rgate_integrations.tuning.fitting import FittedGate, Readings
from rgate_integrations.tuning.labelling import Labels

_LARGEST_RESULT = 1 << 28  # bytes


class _Shown(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class JudgedQuestion(_Shown):
    """A question of an evaluation: P(known), P(covered), what overrides them, and which answers to it are right."""

    question: str
    dataset: str = ""
    draft: str | None = None
    p_known: float
    override: bool | None = None
    p_covered: float | None = None
    corpus: str | None = None
    closed_book_correct: bool
    rag_correct: bool


class Result(_Shown):
    """What the page shows of one gate."""

    gate: str
    draft: str = ""
    threshold: float | None = None
    break_even: dict[str, float] | None = None
    notes: tuple[str, ...] = ()
    questions: tuple[JudgedQuestion, ...]


def read_results(paths: Sequence[str | Path]) -> list[Result]:
    """Read what ``rgate evaluate --out`` wrote.

    Raises:
        DataFormatError: A file cannot be read, or is something else; the message names it.
    """
    results = []
    for path in map(Path, paths):
        try:
            results.append(Result.model_validate(parse_json(read_file(path, _LARGEST_RESULT))))
        except (OSError, ValueError) as error:
            raise DataFormatError(
                f"{str(path)!r} is not a result of an evaluation: {error}.",
                hint="rgate evaluate … --out FILE",
            ) from error
    return results


def report_page(results: Sequence[Result]) -> str:
    """Return the page: one HTML document without any reference to the network.

    Args:
        results: Results of evaluations; the page shows one at a time.
    """
    # "<" would end the script element, whatever a model wrote
    data = (
        json_line([result.model_dump() for result in results])
        .replace("<", "\\u003c")
        .replace("\u2028", "\\u2028")
    )
    template = files("rgate_integrations.tuning").joinpath("report.html").read_text(encoding="utf-8")
    return template.replace("/*DATA*/[]", data)


Notes: TypeAlias = dict[str, list[str]]
"""What is said of each gate, ``"question alone"`` and ``"answer first"``, in sentences."""


def write_notes(labels: Labels, question: FittedGate, begun: FittedGate | None) -> Notes:
    """Say what each gate guarantees, how good it is, and what it saves; why one is not there, if it is not."""
    notes = {"question alone": _notes_of(labels, question)}
    if begun is not None:
        return notes | {"answer first": _notes_of(labels, begun)}
    n = sum(each.direct.logprobs is not None for each in labels.answered)
    why = (
        f"There is no gate for partial answers: {n} of {len(labels.answered)} answers came with log-probabilities, "
        f"which not every server gives. {LEAST} are needed, and not all of them right, or all wrong."
    )
    return notes | {"answer first": [why]}


def _notes_of(labels: Labels, gate: FittedGate) -> list[str]:
    """Say in sentences what a gate guarantees, how good it is, and what it spends."""
    rate = float(gate.retrieves.mean())
    answered = [labels.answered[index] for index in gate.indices]
    direct, rag = np.median([(each.seconds["direct"], each.seconds["retrieve"]) for each in answered], axis=0)
    notes = [
        gate.choice.guarantee,
        f"Threshold {gate.choice.threshold:.3f}: retrieves for {rate:.1%}.",
        f"AUC of P(known) on held-out questions: {gate.auc:.3f}; of the shipped gate: {gate.auc_before:.3f} "
        f"(n = {len(gate.p)}).",
        f"Takes {rate * rag + (1 - rate) * direct:.3g} s a question (median, as measured) instead of {rag:.3g} with "
        "retrieval always, without the gate's own work.",
    ]
    spent = mean_tokens(answered, gate.retrieves, gate.artifact.tokens)
    always = mean_tokens(answered, np.ones(len(answered), dtype=bool))
    if spent is not None and always is not None:  # where the server says how long prompts are
        notes.append(
            f"Tokens of the LLM a question: {spent[0]:.0f} read and {spent[1]:.0f} written, instead of "
            f"{always[0]:.0f} and {always[1]:.0f} with retrieval always."
        )
    return notes


def mean_tokens(answered: Sequence[Answered], retrieved: BoolArray, begun: int = 0) -> Float64Array | None:
    """Return the tokens of prompts and of answers that a question takes on average, shape (2,).

    Args:
        answered: The questions, with the answers of both arms.
        retrieved: Which of them are answered with retrieval, shape (n,).
        begun: For these the answer without retrieval is begun, and dropped after so many tokens; 0 if it is not.

    Returns:
        The tokens; None if the length of a prompt is not known.
    """
    total = np.zeros(2)
    for each, with_retrieval in zip(answered, retrieved, strict=True):
        if 0 in (each.direct.prompt_tokens, each.retrieve.prompt_tokens):
            return None
        if with_retrieval:
            total += (each.retrieve.prompt_tokens, _length(each.retrieve))
            if begun:
                total += (each.direct.prompt_tokens, min(_length(each.direct), begun))
        else:
            total += (each.direct.prompt_tokens, _length(each.direct))
    return total / len(answered)


def _length(answer: Draft) -> float:
    """Return how many tokens an answer has, with its thoughts; about that, where the server lists none."""
    return answer.thinking_tokens + (len(answer.tokens) or len(answer.text) / 4)  # characters a token


def write_page(
    labels: Labels, question: FittedGate, begun: FittedGate | None, readings: Readings, notes: Notes
) -> str:
    """Return the report: one HTML document without any reference to the network.

    All scores in it are of fits that have not seen the question; those of the shipped gate are its own.

    Args:
        labels: The labelled answers.
        question: The gate for the question alone.
        begun: The gate for partial answers, if there is one.
        readings: What the gate that was corrected says of the questions.
        notes: What is said of the gates.
    """
    about, about_begun = notes.values()
    if begun is None:
        results = [_result("tuned, question alone", labels, readings, question, about + about_begun)]
    else:
        results = [
            _result("tuned, question alone", labels, readings, question, about),
            _result("tuned, answer first", labels, readings, begun, about_begun),
        ]
    shipped = replace(question, choice=replace(question.choice, threshold=0.5), p=sigmoids(readings.prior))
    results.append(_result("shipped", labels, readings, shipped, []))
    return report_page(results)


def _result(name: str, labels: Labels, readings: Readings, gate: FittedGate, notes: Sequence[str]) -> Result:
    rows = []
    for index, p in zip(gate.indices, gate.p, strict=True):
        answered, decision = labels.answered[index], readings.decisions[index]
        rows.append(
            JudgedQuestion(
                question=answered.question.text,
                dataset=answered.question.dataset or "all questions",
                draft=answered.direct.text,
                p_known=round(float(p), 5),
                p_covered=decision.p_covered,
                corpus=decision.corpora[0] if decision.corpora else None,
                closed_book_correct=bool(labels.known[index]),
                rag_correct=bool(labels.rag[index]),
            )
        )
    return Result(
        gate=name,
        threshold=gate.choice.threshold,
        notes=(labels.description, *notes),
        questions=tuple(rows),
    )


def write_card(name: str, labels: Labels, llm: str, notes: Notes, failed: int) -> str:
    """Return the card of the folder, in Markdown."""
    lines = [
        f"# {plain(name)}",
        "",
        f"A retrieval gate of `rgate-integrations`, tuned on {plain(llm)}.",
        "",
        f"- **Labels** ({labels.kind}): {labels.description}",
        f"- **Questions**: {len(labels.known)} with a label, {labels.unlabelled} without; {failed} calls failed.",
        f"- **Right without retrieval**: {np.mean(labels.known):.1%}; with retrieval: {np.mean(labels.rag):.1%}.",
        "",
    ]
    for name_of_gate, sentences in notes.items():
        lines += [f"## {name_of_gate.capitalize()}", "", *(f"- {note}" for note in sentences), ""]
    lines.append(
        f'Use it as `load_gate("{loadable(name)}")`; where there is an answer-first gate, '
        f'`load_gate("{name}/answer-first")` judges a partial answer.'
    )
    return "\n".join(lines) + "\n"
