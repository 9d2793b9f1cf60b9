"""Look first: search, and let the LLM read the passages only if they help more than its own knowledge.

Look first compares P(helps), the probability that the LLM answers correctly with the passages, and P(known), the
probability that it does so without them. If both are low, so that neither arm is likely to be right, the outcome is
"abstain". It never is for questions about news or private documents, which no LLM knows: their passages are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self, TypeGuard

import numpy as np

from rgate_integrations.decision import Decision, Outcome, Override, to_float, valid_choice
from rgate_integrations.engine.follow_ups import is_follow_up
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.passage_utility import (
    FoundPassage,
    PassageUtilityModel,
    read_utility_model,
    search_features,
)
from rgate_integrations.runtime.text import logger, redact


class RoutingOptions:
    """Base class of the options that an argument such as ``answer_first=`` accepts instead of True or False.

    Attributes:
        argument: Name of the argument.
    """

    argument: ClassVar[str]

    @classmethod
    def coerce(cls, value: bool | Self) -> Self | None:
        """Return the options for a value of the argument: the defaults for True, None for False.

        Raises:
            ConfigurationError: The value is neither a bool nor an object of this class.
        """
        if isinstance(value, bool):
            return cls() if value else None
        if isinstance(value, cls):
            return value
        raise ConfigurationError(
            f"{cls.argument}= must be True, False or {cls.__name__}(...), not {type(value).__name__}.",
            hint=f"Use {cls.argument}=True, or {cls.argument}={cls.__name__}(...) to set options.",
        )


@dataclass(frozen=True)
class LookFirst(RoutingOptions):
    """The options of look first; ``look_first=True`` means these defaults.

    Attributes:
        min_gain: Passages are read if P(helps), the probability of a correct answer with them, exceeds P(known) by
            more than this, in [-1, 1]. Values above 0 save tokens.
        abstain_below: If both probabilities are below this, in [0, 1], no answer is likely to be right. Questions
            about news or private documents read the passages anyway.
        on_abstain: What to do in that case: ``"retrieve"``, or ``"direct"``, which costs less. Either way the
            decision's outcome is ``"abstain"``, so that an application can say that it does not know.
        model: The model of P(helps), a `PassageUtilityModel`; the shipped one when None.

    Raises:
        ConfigurationError: A value is invalid or out of range.
    """

    argument = "look_first"

    min_gain: float = 0.0
    abstain_below: float = 0.1
    on_abstain: Literal["retrieve", "direct"] = "retrieve"
    model: PassageUtilityModel | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("min_gain", self.min_gain, -1), ("abstain_below", self.abstain_below, 0)):
            number = to_float(value)
            if number is None or not least <= number <= 1:
                raise ConfigurationError(f"{name} must be a number in [{least}, 1], not {value!r}.")
        valid_choice(self.on_abstain, "on_abstain", ("retrieve", "direct"))
        if not isinstance(self.model, PassageUtilityModel | None):
            raise ConfigurationError(
                f"model= must be a PassageUtilityModel, not {type(self.model).__name__}.",
                hint="Leave out model= to use the shipped model.",
            )


def decide_with_passages(
    decision: Decision,
    passages: Sequence[FoundPassage] | Exception,
    options: LookFirst,
    *,
    direct_threshold: float | None = None,
) -> Decision:
    """Return a decision, revised in view of the passages; see `compare`.

    The gate's decision stands if the search or the gate failed, nothing was found, an override such as a rule
    decided, or the threshold is above 1. It also stands for a follow-up, whose words say too little about what the
    passages should contain. If judging the passages fails, they are read.

    Args:
        decision: The gate's decision.
        passages: The passages, best first, or the search's exception.
        options: How the passages are judged.
        direct_threshold: The caller's threshold; None if there is none. At or above this P(known), the LLM answers
            directly, however good the passages are.
    """
    # The order matters: each check below relies on the ones before it.
    if not needs_passages(decision):
        return decision
    if isinstance(passages, Exception):
        return _warn(decision, f"The search failed ({type(passages).__name__}), so the gate alone decided.")
    if not passages:
        return _warn(decision, "The search found nothing to judge, so the gate alone decided.")
    try:
        p_helps = estimate_p_helps(decision.question, passages, decision.p_known, options)
    except Exception as error:  # the user's model may raise anything; failing means reading the passages
        message = redact(error, decision.question, *(passage.text for passage in passages))
        logger.warning("Judging the passages failed: %s: %s", type(error).__name__, message)
        override = Override(
            retrieve=True, reason=f"Judging the passages failed ({type(error).__name__}), so they are read."
        )
        return decision.with_retrieve(True, override=override, warnings=(*decision.warnings, override.reason))
    return compare(decision, p_helps, options, direct_threshold=direct_threshold)


def needs_passages(outcome: object) -> TypeGuard[Decision]:
    """Return whether an outcome is a decision that the passages may revise; see `decide_with_passages`."""
    return (
        isinstance(outcome, Decision)
        and outcome.error is None
        and outcome.override is None
        and outcome.threshold <= 1  # above, it always retrieves
        and not is_follow_up(outcome.question)
    )


def is_never_known(decision: Decision) -> bool:
    """Return whether the question is probably about news or private documents, which no LLM is likely to know."""
    return decision.signals.get("private", 0.0) + decision.signals.get("fresh", 0.0) >= 0.5


def are_useless(question: str, passages: Sequence[FoundPassage], options: LookFirst) -> bool:
    """Return whether passages are so poor that they help no LLM, whatever it knows.

    Passages help if P(helps) exceeds P(known) by more than `LookFirst.min_gain`. This is tested only for an LLM whose
    P(known) is `LookFirst.abstain_below`. Passages that do not help that LLM do not help one that knows more. For an
    LLM that knows less, P(helps) is even lower: with a ``min_gain`` of 0, both probabilities are below
    ``abstain_below``, so the outcome is "abstain".
    """
    least = options.abstain_below
    return estimate_p_helps(question, passages, least, options) - options.min_gain <= least


def estimate_p_helps(
    question: str, passages: Sequence[FoundPassage], p_known: float, options: LookFirst
) -> float:
    """Return the probability, in [0, 1], that the LLM answers correctly with these passages.

    Args:
        question: The question.
        passages: The passages, best first; at least one.
        p_known: The probability, in [0, 1], that it answers correctly without them.
        options: The options, with the model that estimates P(helps).
    """
    model = options.model or read_utility_model()
    p_holds = model.p_contains_answer(search_features(question, passages)[None])
    return float(model.p_helps(p_holds, np.array([p_known]))[0])


def compare(
    decision: Decision, p_helps: float, options: LookFirst, *, direct_threshold: float | None = None
) -> Decision:
    """Return the decision, revised by comparing P(known) with ``p_helps``; see `decide_with_passages`.

    Its outcome is the first that fits:

    - *direct* if P(known) is at least ``direct_threshold``;
    - *retrieve* if the question is about news or private documents, see `is_never_known`: P(helps) compares words, so
      it is low for a passage that answers in other words, and the LLM alone cannot answer;
    - *abstain* if both probabilities are below `LookFirst.abstain_below`;
    - *retrieve* if P(helps) exceeds P(known) by more than `LookFirst.min_gain`;
    - otherwise *direct*.
    """
    p_known = decision.p_known
    outcome: Outcome
    if direct_threshold is not None and p_known >= direct_threshold:
        outcome, threshold = "direct", direct_threshold
        reason = f"P(known) {p_known:.2f} is at least the threshold of {threshold:.2f}."
    elif is_never_known(decision):
        outcome, threshold = "retrieve", 1.0
        reason = "The passages are read, since no LLM can know the answer."
    elif max(p_known, p_helps) < options.abstain_below:
        outcome, threshold = "abstain", options.abstain_below
        reason = f"Neither the LLM (P(known) {p_known:.2f}) nor the passages ({p_helps:.2f}) are likely to be enough."
    else:
        threshold = max(0.0, p_helps - options.min_gain)
        outcome = "retrieve" if p_known < threshold else "direct"
        compared = "help more than" if outcome == "retrieve" else "add too little to"
        reason = f"The passages ({p_helps:.2f}) {compared} the LLM's own knowledge ({p_known:.2f})."
    return decision.with_retrieve(
        outcome == "retrieve" or (outcome == "abstain" and options.on_abstain == "retrieve"),
        threshold=threshold,
        p_helps=p_helps,
        outcome=outcome,
        reason=" ".join((decision.reason, reason)).strip(),
    )


def _warn(decision: Decision, warning: str) -> Decision:
    return decision.model_copy(update={"warnings": (*decision.warnings, warning)})
