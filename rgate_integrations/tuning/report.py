"""Reports on a tuned gate or an evaluation, as sentences, a Markdown card, and an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TypeAlias

import numpy as np
from pydantic import BaseModel, Field

from rgate_integrations.errors import DataFormatError
from rgate_integrations.gates.folder import plain
from rgate_integrations.gates.probability import sigmoids
from rgate_integrations.gates.registry import gate_argument
from rgate_integrations.runtime.files import json_line, parse_json, read_file
from rgate_integrations.runtime.records import first_problem
from rgate_integrations.tuning.calibration import LEAST
from rgate_integrations.tuning.fitting import FittedGate, Readings
from rgate_integrations.tuning.labelling import Labels
from rgate_integrations.tuning.questions import as_paths

# A result holds every question; a larger file is not a result, or is too large for a page.
_MAX_RESULT_BYTES = 1 << 28
_MAX_USEFUL_RATE = 0.95


class ReportedQuestion(BaseModel, frozen=True, allow_inf_nan=False):
    """A question of an evaluation, with its decision and the labels of both answers.

    ``override`` is True if an override decided to retrieve, False if one decided to skip, and None without one.
    """

    question: str
    dataset: str = ""
    draft: str | None = None
    p_known: float = Field(ge=0, le=1)
    override: bool | None = None
    p_covered: float | None = Field(default=None, ge=0, le=1)
    corpus: str | None = None
    closed_book_correct: bool
    rag_correct: bool


class Result(BaseModel, frozen=True, allow_inf_nan=False):
    """The part of an evaluation that the page of `report_page` shows."""

    gate: str
    draft: str = ""
    threshold: float | None = None
    break_even: dict[str, float] | None = None
    notes: tuple[str, ...] = ()
    questions: tuple[ReportedQuestion, ...] = Field(min_length=1)


def read_results(paths: str | Path | Sequence[str | Path]) -> list[Result]:
    """Read results of ``rgate evaluate --out``.

    Raises:
        DataFormatError: A file cannot be read, or is not a result of an evaluation; the message names the file.
    """
    results = []
    for path in as_paths(paths):
        try:
            results.append(Result.model_validate(parse_json(read_file(path, _MAX_RESULT_BYTES))))
        except (OSError, ValueError) as error:
            raise DataFormatError(
                f"{str(path)!r} cannot be read as a result of an evaluation: {first_problem(error)}.",
                hint="Make one with rgate evaluate … --out FILE.",
            ) from error
    return results


def report_page(results: Sequence[Result]) -> str:
    """Return an HTML page about evaluations. It is self-contained: it loads nothing from the network.

    Args:
        results: Results of evaluations; the page shows one at a time.
    """
    data = json_line([result.model_dump() for result in results])
    template = files("rgate_integrations.tuning").joinpath("report.html").read_text(encoding="utf-8")
    # A model's text must not end the script element ("<") or the line of JavaScript.
    return template.replace("/*DATA*/[]", data.replace("<", "\\u003c").replace("\u2028", "\\u2028"))


Notes: TypeAlias = dict[str, list[str]]
"""Sentences by gate, ``"question alone"`` or ``"answer first"``; the first one is the guarantee, or says why
there is no such gate."""


def write_notes(labels: Labels, question: FittedGate, answer_first: FittedGate | None) -> Notes:
    """Return sentences on each gate's guarantee, quality and savings, and whether these make it worth using.

    If ``answer_first`` is None, a sentence says why there is no such gate.
    """
    n = sum(answered.direct.logprobs is not None for answered in labels.answered)
    partial_notes = [
        f"No gate for partial answers was fitted: {n} of {len(labels.answered)} answers came with log-probabilities, "
        f"which not every server sends. At least {LEAST} are needed, both right and wrong ones."
    ]
    if answer_first is not None:
        partial_notes = _write_gate_notes(labels, answer_first)
    return {"question alone": _write_gate_notes(labels, question), "answer first": partial_notes}


def _write_gate_notes(labels: Labels, gate: FittedGate) -> list[str]:
    rate = float(gate.retrieves.mean())
    answered = [labels.answered[index] for index in gate.indices]
    seconds = [(answer.seconds["direct"], answer.seconds["retrieve"]) for answer in answered]
    direct, rag = np.median(seconds, axis=0)
    conclusions = []
    if gate.auc <= gate.auc_before:
        conclusions.append(
            f"No better than the gate before tuning (AUC {gate.auc:.3f}, not above {gate.auc_before:.3f}, on "
            "held-out questions): keep that one."
        )
    if gate.choice.guaranteed and rate > _MAX_USEFUL_RATE:
        conclusions.append(f"Retrieving for {rate:.1%}, this gate saves next to nothing.")
    return [
        gate.choice.guarantee,
        f"Threshold {gate.choice.threshold:.3f}: retrieves for {rate:.1%}.",
        f"AUC of P(known) on held-out questions: {gate.auc:.3f}; before tuning: {gate.auc_before:.3f} "
        f"(n = {len(gate.p)}).",
        f"Takes {rate * rag + (1 - rate) * direct:.3g} s per question (measured median, without the gate's own time) "
        f"instead of {rag:.3g} s with retrieval for every question.",
        *conclusions,
    ]


def write_page(
    labels: Labels, question: FittedGate, answer_first: FittedGate | None, readings: Readings, notes: Notes
) -> str:
    """Return the report on a tuned gate, as a self-contained HTML page.

    It also shows the prior, the gate from which tuning started, as "before tuning". A tuned gate's
    P(known) of a question is from a fit that has not seen this question.

    Args:
        labels: The labelled answers.
        question: The gate for the question alone.
        answer_first: The gate for partial answers, or None.
        readings: The decisions of the prior about the questions.
        notes: The sentences about the gates.
    """
    question_notes, partial_notes = notes.values()
    threshold = readings.decisions[0].threshold
    prior = replace(
        question, choice=replace(question.choice, threshold=threshold), p=sigmoids(readings.prior)
    )
    gates = [("tuned, question alone", question, question_notes), ("before tuning", prior, [])]
    if answer_first is None:
        gates[0] = ("tuned, question alone", question, question_notes + partial_notes)
    else:
        gates.insert(1, ("tuned, answer first", answer_first, partial_notes))
    return report_page([_as_result(name, labels, readings, gate, lines) for name, gate, lines in gates])


def _as_result(
    name: str, labels: Labels, readings: Readings, gate: FittedGate, notes: Sequence[str]
) -> Result:
    rows = []
    for index, p in zip(gate.indices, gate.p, strict=True):
        answered, decision = labels.answered[index], readings.decisions[index]
        rows.append(
            ReportedQuestion(
                question=answered.question.text,
                dataset=answered.question.dataset or "all questions",
                draft=answered.direct.text,
                p_known=round(float(p), 5),
                override=None if decision.override is None else decision.override.retrieve,
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
    """Return the model card of a tuned gate's folder, in Markdown."""
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
    for gate, sentences in notes.items():
        lines += [f"## {gate.capitalize()}", "", *(f"- {note}" for note in sentences), ""]
    lines.append(
        f'Load it with `load_gate("{gate_argument(name)}")`. If it has an answer-first gate, '
        f'`load_gate("{name}/answer-first")` judges partial answers.'
    )
    return "\n".join(lines) + "\n"
