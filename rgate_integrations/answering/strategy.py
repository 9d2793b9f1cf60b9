"""`Strategy`: what a router considers before it decides, in every framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.look_first import LookFirst
from rgate_integrations.engine.decider import Decider
from rgate_integrations.engine.loading import answer_first_gates


@dataclass
class Strategy:
    """What a router considers before it decides; by default only the question.

    Attributes:
        answer_first: Options for judging the beginning of the LLM's answer without passages; None to skip that.
        look_first: Options for judging the passages that a search finds; None to skip that.
        judge: The gate that judges partial answers: a `Decider`, or in LangChain a runnable; unused if
            ``answer_first`` is None.
        question_gate: The gate that judges the question alone. With ``answer_first``, it does so before the LLM
            starts to answer; if None, the LLM starts to answer every question.
        made_for: The gate for which ``judge`` and ``question_gate`` were made; None if they fit any.
        chooses_corpus: Whether a decision says where to search, so that a search must wait for it.
        llm_thinks: Whether the direct arm's LLM has sent thoughts before an answer since this strategy was made. If
            so, and if there is a ``question_gate``, no partial answer is judged any more.
    """

    answer_first: AnswerFirst | None = None
    look_first: LookFirst | None = None
    judge: Any = None
    question_gate: Any = None
    made_for: Any = field(default=None, compare=False)
    chooses_corpus: bool = False
    llm_thinks: bool = field(default=False, compare=False)

    @classmethod
    def from_options(
        cls,
        gate: Decider,
        adapt: Callable[[Decider], Any],
        *,
        answer_first: bool | AnswerFirst,
        look_first: bool | LookFirst,
        chooses_corpus: bool,
    ) -> Self:
        """Return the strategy for the options of a router or query engine.

        Args:
            gate: The gate of the router or query engine.
            adapt: Called with each gate that answer first needs; returns the gate adjusted to the answering LLM, in
                LangChain as a runnable.
            answer_first: See `AnswerFirst`.
            look_first: See `LookFirst`.
            chooses_corpus: See `Strategy`.

        Raises:
            ConfigurationError: An option is neither a bool nor an object of its class. With ``answer_first``: the
                gate cannot judge a partial answer.
            RGateError: `AnswerFirst.question_gate` is invalid or cannot be loaded; see `resolve_gate`.
        """
        strategy = cls(
            AnswerFirst.coerce(answer_first), LookFirst.coerce(look_first), chooses_corpus=chooses_corpus
        )
        if strategy.answer_first is not None:
            judge, question_gate = answer_first_gates(gate, strategy.answer_first.question_gate)
            strategy.judge = adapt(judge)
            strategy.question_gate = None if question_gate is None else adapt(question_gate)
        return strategy

    def __bool__(self) -> bool:
        # LangChain does not serialise false fields, so a plain router can be dumped and loaded again.
        return self.answer_first is not None or self.look_first is not None

    @property
    def searches_ahead(self) -> bool:
        """Whether the search may start before the final decision, as with look first or `AnswerFirst.prefetch`."""
        return self.look_first is not None or (self.answer_first is not None and self.answer_first.prefetch)
