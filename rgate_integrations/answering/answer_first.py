"""Answer first: the options, and which questions are decided before the direct arm starts to answer.

`is_clear` says whether the question alone is enough to decide. With look first, `settle` says whether the question
and the passages found are enough. If not, the direct arm starts to answer, and the gate judges its first tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rgate_integrations.answering.look_first import (
    LookFirst,
    RoutingOptions,
    are_useless,
    decide_with_passages,
    is_never_known,
)
from rgate_integrations.decision import Decision, to_float, valid_count, valid_flag
from rgate_integrations.engine.loading import OWN
from rgate_integrations.engine.own_gate import GateLike
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.passage_utility import FoundPassage


@dataclass(frozen=True)
class AnswerFirst(RoutingOptions):
    """The options of answer first; ``answer_first=True`` means these defaults.

    Attributes:
        tokens: Number of tokens to hold back and judge, at least 1.
        retrieve_below: A question is clearly unknown if its P(known) is below this and below the threshold, or
            if the threshold is above 1.
        answer_above: A question is clearly known if its P(known) reaches this and the threshold.
        question_gate: Reads the question before the LLM is asked: a gate, or an argument for `load_gate`. A
            clearly unknown question goes to the retrieve arm without asking the LLM; the answer to a clearly
            known one is not held back. With look first, the passages may overrule the gate in either case.
            ``"own"`` means the question gate that comes with your gate; the default gate, tuned gates and gates on a
            server have one. With None, or if your gate has none, every answer is judged.
        prefetch: Whether the search starts together with the answer, for slow searches; only in calls with one
            question. If the answer continues, the search is cancelled, or its result dropped. The retrieve arm must
            be able to search before the decision. Prefetching has no effect with look first, which searches earlier.

    Raises:
        ConfigurationError: ``tokens`` is not a whole number of at least 1, ``prefetch`` is not a bool,
            ``retrieve_below`` is above ``answer_above``, or one of these two is not a number.
    """

    argument = "answer_first"

    tokens: int = 32
    retrieve_below: float = 0.3
    answer_above: float = 0.9
    question_gate: GateLike | str | None = field(default=OWN, repr=False)  # it may be a URL with a login
    prefetch: bool = False

    def __post_init__(self) -> None:
        valid_count(self.tokens, "tokens")
        valid_flag(self.prefetch, "prefetch")
        for name in ("retrieve_below", "answer_above"):
            number = to_float(getattr(self, name))
            if number is None or math.isnan(number):
                raise ConfigurationError(f"{name} must be a number, not {getattr(self, name)!r}.")
        if self.retrieve_below > self.answer_above:
            raise ConfigurationError(
                f"retrieve_below ({self.retrieve_below}) must not be above answer_above ({self.answer_above}).",
                hint="Lower retrieve_below, or raise answer_above.",
            )


def is_clear(decision: Decision, options: AnswerFirst) -> bool:
    """Return whether a question is clearly known or clearly unknown, so that no answer needs to be judged.

    Always True after an override or a failure, and if the threshold is above 1, because that always retrieves.

    Args:
        decision: The decision by the question alone.
        options: `AnswerFirst.retrieve_below` and `AnswerFirst.answer_above` say what is clear.
    """
    if decision.error is not None or decision.override is not None:
        return True
    # A clear case must also be on the same side of the threshold.
    if decision.retrieve:
        return decision.p_known < options.retrieve_below or decision.threshold > 1
    return decision.p_known >= options.answer_above


def settle(
    decision: Decision,
    passages: Sequence[FoundPassage] | Exception,
    options: AnswerFirst,
    look: LookFirst,
    *,
    direct_threshold: float | None = None,
) -> Decision | None:
    """Return the decision if the question and the passages are enough to make it.

    None means that the LLM must begin to answer first, so that its words can be judged. If no passages could be
    judged, a clear question is enough (see `is_clear`). If passages were judged, they are enough

    - for a clear question, if they do not change its arm;
    - for any question, if no LLM is likely to know the answer (see `is_never_known`), or if they are useless (see
      `are_useless`).

    Args:
        decision: The gate's decision by the question alone.
        passages: The passages, best first, or the search's exception.
        options: What is clear, see `is_clear`.
        look: How passages are judged.
        direct_threshold: See `decide_with_passages`.
    """
    clear = is_clear(decision, options)
    revised = decide_with_passages(decision, passages, look, direct_threshold=direct_threshold)
    if revised.p_helps is None or isinstance(passages, Exception):  # nothing was judged
        return revised if clear else None
    # In both cases the LLM's answer could not change the decision.
    if is_never_known(revised) or are_useless(revised.question, passages, look):
        return revised
    return revised if clear and revised.retrieve == decision.retrieve else None
