"""What is told about a tuned gate: in sentences, as the card of its folder, and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rgate_integrations.artifacts.card import plain
from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.registry import loadable
from rgate_integrations.runtime.arrays import BoolArray, Float64Array
from rgate_integrations.tuning.collection import Answered
from rgate_integrations.tuning.first_look import FirstLook
from rgate_integrations.tuning.fitting import LEAST, FittedGate
from rgate_integrations.tuning.labelling import Labels
from rgate_integrations.tuning.report import report_page

_CHARACTERS_A_TOKEN = 4
_A_MILLION, _QUESTIONS = 1e6, 1_000


@dataclass(frozen=True)
class Prices:
    """What a million tokens of the LLM cost, in any currency.

    Attributes:
        input: Of prompts.
        output: Of answers.

    Raises:
        ConfigurationError: A price is below 0 or no number.
    """

    input: float
    output: float

    def __post_init__(self) -> None:
        if not (self.input >= 0 and self.output >= 0):
            raise ConfigurationError(f"A price is at least 0: {self}.")


@dataclass(frozen=True)
class Notes:
    """What is said of the two gates, in sentences.

    Attributes:
        question: Of the gate for the question alone.
        answer_first: Of the gate for begun answers; why there is none, if there is none.
    """

    question: list[str]
    answer_first: list[str]


def write_notes(
    labels: Labels,
    question: FittedGate,
    begun: FittedGate | None,
    look: FirstLook | None,
    prices: Prices | None,
) -> Notes:
    """Say what each gate guarantees, how good it is, and what it saves."""
    about_question = _notes_of(labels, question, prices)
    if begun is None:
        n = sum(each.direct.logprobs is not None for each in labels.answered)
        why = f"the {n} answers with log-probabilities are all right, or all wrong"
        if n < LEAST:
            why = f"{n} of {len(labels.answered)} answers came with log-probabilities, which not every server gives"
        return Notes(about_question, [f"There is no gate for begun answers: {why}."])
    about_begun = _notes_of(labels, begun, prices)
    if look is not None:
        early = question.p[np.searchsorted(question.places, begun.places)] < look.low
        low, high = look.interval
        about_begun.append(
            f"A first look at the question, AnswerFirst(retrieve_below={look.low:.3f}, answer_above=1.0), sends "
            f"{look.early_exit_rate:.1%} of {look.n} held-out questions to retrieval before an answer is begun. "
            f"Right answers: {look.difference:+.1%} (95 % interval {low:+.1%} to {high:+.1%}); retrieval: "
            f"{look.retrieval_difference:+.1%}."
        )
        about_begun += _token_notes(labels, begun, prices, early)
    return Notes(about_question, about_begun)


def _notes_of(labels: Labels, gate: FittedGate, prices: Prices | None) -> list[str]:
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
    no_early_exit = np.zeros(len(gate.p), dtype=bool)
    counted = _token_notes(labels, gate, prices, no_early_exit)
    return notes + (
        counted or ["The answers do not say how long their prompts were: tokens cannot be counted."]
    )


def _token_notes(labels: Labels, gate: FittedGate, prices: Prices | None, early: BoolArray) -> list[str]:
    """Say what the LLM reads and writes; ``early``: what is retrieved for before an answer is begun, shape (n,)."""
    answered = [labels.answered[place] for place in gate.places]
    retrieved = early | gate.retrieves
    begun = gate.artifact.tokens
    spent = mean_tokens(answered, retrieved, retrieved & ~early if begun else np.zeros_like(early), begun)
    always = mean_tokens(answered, np.ones_like(early), np.zeros_like(early))
    if spent is None or always is None:
        return []
    note = (
        f"Tokens of the LLM a question: {spent[0]:.0f} read and {spent[1]:.0f} written, instead of "
        f"{always[0]:.0f} and {always[1]:.0f} with retrieval always."
    )
    if prices is not None:
        price = np.array([prices.input, prices.output]) * _QUESTIONS / _A_MILLION
        now, before = float(price @ spent), float(price @ always)
        note += f" At your prices {now:.3g} for 1,000 questions instead of {before:.3g}"
        if before > 0:
            note += f" ({abs(now / before - 1):.0%} {'less' if now <= before else 'more'})"
        note += "."
    return [note]


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
            row = {
                "question": answered.question.text,
                "dataset": answered.question.dataset or "all questions",
                "draft": answered.direct.text,
                "p_known": round(float(score), 5),
                "closed_book_correct": labels.known[place],
                "rag_correct": labels.rag[place],
            }
            rows.append(row)
        about = [labels.description, *said]
        results.append({"gate": gate, "threshold": threshold, "questions": rows, "notes": about})
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
