"""`Strategy`: what a router looks at before it decides, in every framework."""

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
    """What a router looks at before it decides; by default the question alone.

    Attributes:
        answer_first: Also at the beginning of the direct arm's answer.
        look_first: Also at what a search finds.
        judge: The gate that judges partial answers, as the framework has gates; None without any.
        question_gate: The gate that screens questions before an answer begins; None begins every answer.
        chooses_corpus: Whether a decision says where to search, so that no search begins before there is one.
        llm_thinks: Whether the direct arm's LLM has sent thoughts before an answer, in an earlier call with this
            object. Then the question decides, and no answer begins.
    """

    answer_first: AnswerFirst | None = None
    look_first: LookFirst | None = None
    judge: Any = None
    question_gate: Any = None
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
        """Return the strategy that an adapter's options stand for.

        Args:
            gate: The adapter's gate.
            adapt: Turns the gates of answer first into gates of the framework, for the LLM that answers.
            answer_first: See `AnswerFirst`.
            look_first: See `LookFirst`.
            chooses_corpus: See the class.

        Raises:
            ConfigurationError: The gate cannot judge a partial answer.
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
        # LangChain writes no field that is false: a plain router can be written and read.
        return self.answer_first is not None or self.look_first is not None

    @property
    def searches_ahead(self) -> bool:
        """Whether the retrieve arm searches before there is a decision."""
        return self.look_first is not None or (self.answer_first is not None and self.answer_first.prefetch)
