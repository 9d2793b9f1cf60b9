"""Answer first: the direct arm begins to answer, what it has written is judged, and it goes on or is stopped.

Most questions need no begun answer: `screen` says which are clearly known or unknown by the question alone, and
`settle` whether that, with what a search found, is enough to decide.
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
    """How an answer is begun and judged; ``answer_first=True`` in an adapter stands for these defaults.

    Attributes:
        tokens: How many tokens are held back and judged, at least 1.
        retrieve_below: A question whose P(known) is below it is clearly unknown.
        answer_above: A question whose P(known) is at least this is clearly known.
        question_gate: Reads the question alone: a gate, or what `load_gate` takes. What is clearly unknown goes to
            the retrieve arm, and the LLM is not asked; what is clearly known is answered, and nothing of it is held
            back. None begins every answer, and judges it. ``"own"`` is the gate of the same family as the one that
            judges: the shipped one beside the default, the one for the question beside a tuned one; and none beside
            any other gate, which nobody then overrules.
        prefetch: Whether the search of a single question starts when its answer is begun. That pays where searching
            takes long. Where the answer goes on, the search is cancelled, or what it finds or raises is dropped. The
            retrieve arm must be one whose search can be told from the rest, as for looking first;
            with looking first, all is searched before, and this changes nothing. Nor does it in agents, whose tools
            search.

    Raises:
        ConfigurationError: The numbers are out of their range or order.
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
        """Return what an adapter's ``answer_first=`` stands for; None for False."""
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

    NOTHING = "nothing"  # there was no search, it failed, or there is nothing to judge
    HELPS = "helps"
    ADDS_LITTLE = "adds little"


# Whether that is enough to decide. If not, the LLM begins to answer, and its first tokens are judged.
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
    """Return what a decision by the question alone says; an override or a failure is clear."""
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
    """Return what is decided without a begun answer; None if the LLM is to begin.

    Args:
        decision: The gate's, by the question alone.
        passages: What a search found, best first, or what it raised; read with ``look`` only.
        options: From where on a question is clear.
        look: How passages are judged; None to look at the question alone.
    """
    screening = screen(decision, options)
    search = Search.NOTHING
    if look is not None:
        decision = decide_with_passages(decision, passages, look)
        if decision.p_helps is not None and not isinstance(passages, Exception):
            search = Search.HELPS if decision.retrieve else Search.ADDS_LITTLE
            # Neither depends on what the LLM would write.
            if is_never_known(decision) or help_no_llm(decision.question, passages, look):
                return decision
    return decision if IS_SETTLED[screening, search] else None
