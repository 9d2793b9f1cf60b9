"""What a tuned gate saves: in tokens of the LLM, at the user's own prices, and in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.runtime.arrays import BoolArray, Float64Array
from rgate_integrations.tuning.asking import Answered
from rgate_integrations.tuning.break_even import StageTimes
from rgate_integrations.tuning.first_look import FirstLook
from rgate_integrations.tuning.gates import FittedGate
from rgate_integrations.tuning.labelling import Labels

_CHARACTERS_A_TOKEN = 4
_A_MILLION, _QUESTIONS = 1e6, 1_000


@dataclass(frozen=True)
class Prices:
    """What a million tokens of the LLM cost, in any currency.

    Attributes:
        read: Of prompts.
        written: Of answers.

    Raises:
        ConfigurationError: A price is below 0 or no number.
    """

    read: float
    written: float

    def __post_init__(self) -> None:
        if not (self.read >= 0 and self.written >= 0):
            raise ConfigurationError(f"A price is at least 0: {self}.")


@dataclass(frozen=True)
class Costs:
    """What the user says of costs.

    Attributes:
        times: What an answer costs without and with retrieval, in any unit; measured seconds when None.
        prices: What tokens cost; only tokens are counted when None.
    """

    times: StageTimes | None = None
    prices: Prices | None = None


@dataclass(frozen=True)
class Tokens:
    """Tokens of an LLM, a question on average.

    Attributes:
        read: Of prompts.
        written: Of answers.
    """

    read: float
    written: float


def cost_notes(labels: Labels, gate: FittedGate, costs: Costs) -> list[str]:
    """Say in sentences what a gate spends, against retrieving always."""
    answered = [labels.answered[place] for place in gate.places]
    retrieved = gate.p < gate.chosen.threshold
    rate = float(retrieved.mean())
    notes = []
    direct, rag, unit = _times(answered, costs.times)
    if rag > 0:
        spent = rate * rag + (1 - rate) * direct
        notes.append(
            f"Takes {spent:.3g} {unit} a question instead of {rag:.3g} with retrieval always, without the gate's own "
            "work."
        )
    begun = retrieved if gate.artifact.tokens else np.zeros(len(retrieved), dtype=bool)
    gated = tokens_spent(answered, retrieved, begun, gate.artifact.tokens)
    always = tokens_spent(answered, np.ones(len(retrieved), dtype=bool), np.zeros(len(retrieved), dtype=bool))
    if gated is None or always is None:
        notes.append("The answers do not say how long their prompts were: tokens cannot be counted.")
    else:
        notes.append(_saved(gated, always, costs.prices))
    return notes


def first_look_note(
    labels: Labels, question: FittedGate, answer_first: FittedGate, look: FirstLook, costs: Costs
) -> str:
    """Say what a first look at the question spares before an answer is begun."""
    first = held_out_of(question, answer_first)
    answered = [labels.answered[place] for place in answer_first.places]
    early = first < look.low
    retrieved = early | (answer_first.p < answer_first.chosen.threshold)
    low, high = look.interval
    note = (
        f"A first look at the question, AnswerFirst(retrieve_below={look.low:.3f}, answer_above=1.0), sends "
        f"{look.early_exit_rate:.1%} of {look.n} held-out questions to retrieval before an answer is begun. "
        f"Right answers: {look.difference:+.1%} (95 % interval {low:+.1%} to {high:+.1%}); retrieval: "
        f"{look.retrieval_difference:+.1%}."
    )
    spent = tokens_spent(answered, retrieved, retrieved & ~early, answer_first.artifact.tokens)
    always = tokens_spent(answered, np.ones(len(early), dtype=bool), np.zeros(len(early), dtype=bool))
    if spent is None or always is None:
        return note
    return f"{note} {_saved(spent, always, costs.prices)}"


def tokens_spent(
    answered: Sequence[Answered], retrieved: BoolArray, begun: BoolArray, begun_tokens: int = 0
) -> Tokens | None:
    """Return the tokens a question that a way of answering takes; None if a prompt's length is not known.

    Args:
        answered: The questions, with the answers of both arms.
        retrieved: Which of them are answered with retrieval, shape (n,).
        begun: For which of these the answer without retrieval is begun and dropped, shape (n,).
        begun_tokens: After how many tokens it is dropped.
    """
    read: list[float] = []
    written: list[float] = []
    for each, with_retrieval, dropped in zip(answered, retrieved, begun, strict=True):
        answer = each.retrieve if with_retrieval else each.direct
        read.append(answer.prompt_tokens)
        written.append(_length(answer))
        if dropped:
            read[-1] += each.direct.prompt_tokens
            written[-1] += min(_length(each.direct), begun_tokens)
        if 0 in (each.direct.prompt_tokens, each.retrieve.prompt_tokens):
            return None
    return Tokens(float(np.mean(read)), float(np.mean(written)))


def _length(answer: Draft) -> float:
    """Return how many tokens an answer has; about that, where the server lists none."""
    return len(answer.tokens) or len(answer.text) / _CHARACTERS_A_TOKEN


def _saved(spent: Tokens, always: Tokens, prices: Prices | None) -> str:
    sentence = (
        f"Tokens of the LLM a question: {spent.read:.0f} read and {spent.written:.0f} written, instead of "
        f"{always.read:.0f} and {always.written:.0f} with retrieval always."
    )
    if prices is None:
        return sentence
    now, before = (_QUESTIONS * _price(each, prices) for each in (spent, always))
    share = ""
    if before > 0:
        share = f" ({abs(now / before - 1):.0%} {'less' if now <= before else 'more'})"
    return f"{sentence} At your prices {now:.3g} for 1,000 questions instead of {before:.3g}{share}."


def _price(tokens: Tokens, prices: Prices) -> float:
    return (tokens.read * prices.read + tokens.written * prices.written) / _A_MILLION


def _times(answered: Sequence[Answered], times: StageTimes | None) -> tuple[float, float, str]:
    """Return what an answer costs without and with retrieval, and in which unit."""
    if times is not None:
        return times.direct, times.search + times.rag, "(your figures)"
    direct = float(np.median([each.seconds["direct"] for each in answered]))
    rag = float(np.median([each.seconds["retrieve"] for each in answered]))
    return direct, rag, "s (median, as measured)"


def held_out_of(question: FittedGate, answer_first: FittedGate) -> Float64Array:
    """Return the question gate's held-out P(known) of the questions that the other gate judged, shape (n,)."""
    return question.p[np.searchsorted(question.places, answer_first.places)]
