"""What a first look at the question says, and whether that, with what a search found, is enough to decide.

Where the direct arm answers first, most questions need no begun answer: they are clearly known or clearly unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.look_first import (
    LookFirst,
    decide_with_passages,
    help_no_llm,
    is_never_known,
)
from rgate_integrations.decision import Decision
from rgate_integrations.gates.passage_utility import FoundPassage


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
