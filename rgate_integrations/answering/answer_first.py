"""Answer first: the options, and which questions are decided before the direct arm begins to answer.

`screen` says whether a question alone is clearly known or unknown. `settle` says whether that is enough to decide,
together with what a search found. If not, the direct arm begins to answer, and the gate judges its first tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from rgate_integrations.answering.look_first import (
    LookFirst,
    decide_with_passages,
    help_no_llm,
    is_never_known,
)
from rgate_integrations.decision import Decision
from rgate_integrations.engine.loading import OWN
from rgate_integrations.engine.own_gate import GateLike
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.passage_utility import FoundPassage


@dataclass(frozen=True)
class AnswerFirst:
    """The options of answer first; ``answer_first=True`` in an adapter stands for these defaults.

    Attributes:
        tokens: How many tokens are held back and judged, at least 1.
        retrieve_below: A question with a P(known) below it is clearly unknown.
        answer_above: A question with at least this P(known) is clearly known.
        question_gate: A gate that reads the question alone, or what `load_gate` takes. A clearly unknown question
            goes to the retrieve arm without asking the LLM; the answer to a clearly known one is not held back. None
            judges every answer. ``"own"`` is the gate that belongs to the judge: of the default gate and of a tuned
            one; any other gate judges every answer.
        prefetch: Whether the search of a single question starts with its answer, for slow searches. If the answer
            goes on, the search is cancelled, or its result dropped. The retrieve arm must be one that can search
            ahead, as for look first, which makes this needless.

    Raises:
        ConfigurationError: A number is out of range, or ``retrieve_below`` is above ``answer_above``.
    """

    tokens: int = 32
    retrieve_below: float = 0.3
    answer_above: float = 0.9
    question_gate: GateLike | str | None = OWN
    prefetch: bool = False

    def __post_init__(self) -> None:
        if not self.tokens >= 1:
            raise ConfigurationError(f"tokens must be at least 1, not {self.tokens!r}.")
        limits = (self.retrieve_below, self.answer_above)
        if any(isinstance(limit, bool) for limit in limits) or not limits[0] <= limits[1]:  # as with NaN
            raise ConfigurationError(
                f"retrieve_below={limits[0]!r} must be a number at most answer_above={limits[1]!r}."
            )

    @classmethod
    def coerce(cls, value: bool | AnswerFirst) -> AnswerFirst | None:
        """Return the options that an adapter's ``answer_first=`` stands for; None for False."""
        if isinstance(value, cls):
            return value
        return cls() if value else None


class Screening(Enum):
    """What the question alone says about the LLM's knowledge."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    UNCLEAR = "unclear"


class Search(Enum):
    """What a search found, compared with what the LLM knows."""

    NOTHING = "nothing"  # there was no search, it failed, or it found nothing to judge
    HELPS = "helps"
    ADDS_LITTLE = "adds little"


# Whether that is enough to decide. If not, the LLM begins to answer.
IS_SETTLED = {
    (Screening.KNOWN, Search.NOTHING): True,  # answered directly
    (Screening.KNOWN, Search.ADDS_LITTLE): True,  # answered directly
    (Screening.KNOWN, Search.HELPS): False,
    (Screening.UNKNOWN, Search.NOTHING): True,  # retrieved for
    (Screening.UNKNOWN, Search.HELPS): True,  # retrieved for
    (Screening.UNKNOWN, Search.ADDS_LITTLE): False,
    (Screening.UNCLEAR, Search.NOTHING): False,
    (Screening.UNCLEAR, Search.HELPS): False,
    (Screening.UNCLEAR, Search.ADDS_LITTLE): False,
}


def screen(decision: Decision, options: AnswerFirst) -> Screening:
    """Return how clear a decision by the question alone is; an override or a failure is clear."""
    if decision.error is not None or decision.override is not None:
        return Screening.UNKNOWN if decision.retrieve else Screening.KNOWN
    if decision.p_known < min(options.retrieve_below, decision.threshold):
        return Screening.UNKNOWN
    if decision.p_known >= max(options.answer_above, decision.threshold):
        return Screening.KNOWN
    return Screening.UNCLEAR


def settle(
    decision: Decision,
    passages: Sequence[FoundPassage] | Exception,
    options: AnswerFirst,
    look: LookFirst | None,
) -> Decision | None:
    """Return the decision about a question that needs no partial answer; None if the LLM is to begin.

    Args:
        decision: The gate's, by the question alone.
        passages: The passages, best first, or the search's exception; unused without ``look``.
        options: Thresholds of clear questions.
        look: How passages are judged; None to look at the question alone.
    """
    screening = screen(decision, options)
    search = Search.NOTHING
    if look is not None:
        decision = decide_with_passages(decision, passages, look)
        if decision.p_helps is not None and not isinstance(passages, Exception):
            search = Search.HELPS if decision.retrieve else Search.ADDS_LITTLE
            # Neither depends on what the LLM will write.
            if is_never_known(decision) or help_no_llm(decision.question, passages, look):
                return decision
    return decision if IS_SETTLED[screening, search] else None
