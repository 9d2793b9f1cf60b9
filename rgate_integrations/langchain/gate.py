"""`RetrievalGate`: a gate as a LangChain runnable, with a router and a retriever made from it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableLike
from langchain_core.runnables.config import patch_config
from langchain_core.runnables.utils import ConfigurableFieldSpec

from rgate_integrations.calling import DecidesBatches, adecide_safely, as_gate, decide_safely
from rgate_integrations.decision import Decision
from rgate_integrations.errors import InvalidQuestionError
from rgate_integrations.langchain.drafts import ChatDrafter
from rgate_integrations.langchain.questions import history_of, is_follow_up, question_of
from rgate_integrations.loading import DEFAULT_GATES

if TYPE_CHECKING:
    from rgate_integrations.langchain.retriever import GatedRetriever
    from rgate_integrations.langchain.router import RetrievalRouter

_log = logging.getLogger("rgate_integrations")

FOLLOW_UP = (
    "The question follows earlier turns, which the gate did not see: give RetrievalGate(condense=...)."
)
THRESHOLD_KEY = "retrieval_threshold"

THRESHOLD_SPEC = ConfigurableFieldSpec(
    id=THRESHOLD_KEY,
    annotation=float,
    name="Retrieval threshold",
    description="Retrieve iff p_known is below it; overrides the gate's own for one call.",
    default=None,
)


class RetrievalGate(Runnable[Any, Decision]):
    """Decides whether to retrieve: question in, `Decision` out. Nothing is loaded until the first decision.

    The question is a string, a dict, messages or a prompt value. A batch is decided in one call of the gate,
    also with a threshold of its own for each item, in ``config["configurable"]["retrieval_threshold"]``.

    Args:
        gate: A `Gate`, what `load_gate` takes, or any object with `decide_batch` and `adecide_batch`; the
            default gate when None.
        input_key: Key of the question in dict inputs; ``question``, ``input``, ``query`` or ``messages``
            when None.
        llm: Your own chat model: it writes its first tokens, and the gate judges them; by far the strongest
            evidence. The default gate is then ``default-recorded``. On skip the draft is in the decision and,
            for the direct arm of a router, in ``config["metadata"]["draft"]``.
        tokens: How many tokens it writes.
        condense: A runnable from messages to one self-contained question, for follow-ups. Without it the last
            human message is the question as it stands, and the decision carries a warning.

    Example:
        >>> from rgate_integrations.langchain import RetrievalGate
        >>> gate = RetrievalGate("constant:never")
        >>> gate.invoke("who wrote hamlet?").retrieve
        False
    """

    def __init__(
        self,
        gate: DecidesBatches | str | None = None,
        *,
        input_key: str | None = None,
        llm: Runnable[Any, Any] | None = None,
        tokens: int = 32,
        condense: Runnable[Any, Any] | None = None,
    ) -> None:
        self.gate = as_gate(DEFAULT_GATES["llm"] if gate is None and llm is not None else gate)
        self.input_key = input_key
        self.drafter = ChatDrafter(llm, tokens) if llm is not None else None
        self.condense = condense

    @property
    def config_specs(self) -> list[ConfigurableFieldSpec]:
        """The per-call threshold."""
        return [THRESHOLD_SPEC]

    @property
    def OutputType(self) -> type[Decision]:
        """The type of the output."""
        return Decision

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Decision:
        """Decide for one input."""
        return self._call_with_config(self._one, input, config, **kwargs)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Decision:
        """Decide for one input without blocking the event loop."""
        return await self._acall_with_config(self._aone, input, config, **kwargs)

    def batch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any | None,
    ) -> list[Decision]:
        """Decide for a batch in one call of the gate."""
        return self._batch_with_config(
            self._many, inputs, config, return_exceptions=return_exceptions, **kwargs
        )

    async def abatch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any | None,
    ) -> list[Decision]:
        """Decide for a batch in one call of the gate, without blocking the event loop."""
        return await self._abatch_with_config(
            self._amany, inputs, config, return_exceptions=return_exceptions, **kwargs
        )

    def route(
        self,
        *,
        retrieve: RunnableLike[Any, Any],
        direct: RunnableLike[Any, Any],
        speculative: bool = False,
    ) -> RetrievalRouter:
        """Return a runnable that sends each input to one of two arms.

        Args:
            retrieve: Gets the inputs of unknown questions; an existing RAG chain.
            direct: Gets the inputs of known questions; the LLM without retrieval.
            speculative: Run the first step of ``retrieve``, the retriever's, while the gate decides.
        """
        from rgate_integrations.langchain.router import RetrievalRouter

        return RetrievalRouter(self, retrieve=retrieve, direct=direct, speculative=speculative)

    def guard(self, retriever: BaseRetriever, *, k: int | None = None, **options: Any) -> GatedRetriever:
        """Return a retriever that finds nothing for known questions, and searches claims for the others.

        Args:
            retriever: The retriever to guard.
            k: Greatest number of documents; by default no limit of its own.
            **options: Fields of `GatedRetriever`.
        """
        from rgate_integrations.langchain.retriever import GatedRetriever

        return GatedRetriever(retriever=retriever, gate=self.gate, drafter=self.drafter, k=k, **options)

    def _one(self, value: Any, run_manager: Any, config: RunnableConfig) -> Decision:
        return _raised(self._many([value], [run_manager], [config])[0])

    async def _aone(self, value: Any, run_manager: Any, config: RunnableConfig) -> Decision:
        return _raised((await self._amany([value], [run_manager], [config]))[0])

    def _many(
        self, values: list[Any], run_manager: list[Any], config: list[RunnableConfig]
    ) -> list[Decision | Exception]:
        batch = _Inputs.read(values, self.input_key)
        inner = _children(config, run_manager)
        if self.condense is not None and batch.follow_ups:
            some = batch.follow_ups
            rewritten = self.condense.batch(
                [history_of(values[i], self.input_key) for i in some],
                [inner[i] for i in some],
                return_exceptions=True,
            )
            batch.condensed(rewritten)
        asked = batch.asked
        drafts = None
        if self.drafter is not None and asked:
            drafts = self.drafter.draft([batch.question(i) for i in asked], [inner[i] for i in asked])
        thresholds = [_threshold(config[i]) for i in asked]
        return batch.decisions(
            decide_safely(self.gate, [batch.question(i) for i in asked], threshold=thresholds, drafts=drafts)
        )

    async def _amany(
        self, values: list[Any], run_manager: list[Any], config: list[RunnableConfig]
    ) -> list[Decision | Exception]:
        batch = _Inputs.read(values, self.input_key)
        inner = _children(config, run_manager)
        if self.condense is not None and batch.follow_ups:
            some = batch.follow_ups
            rewritten = await self.condense.abatch(
                [history_of(values[i], self.input_key) for i in some],
                [inner[i] for i in some],
                return_exceptions=True,
            )
            batch.condensed(rewritten)
        asked = batch.asked
        drafts = None
        if self.drafter is not None and asked:
            drafts = await self.drafter.adraft([batch.question(i) for i in asked], [inner[i] for i in asked])
        thresholds = [_threshold(config[i]) for i in asked]
        return batch.decisions(
            await adecide_safely(
                self.gate, [batch.question(i) for i in asked], threshold=thresholds, drafts=drafts
            )
        )


@dataclass
class _Inputs:
    """The questions of a batch: what could be read, and which are follow-ups of earlier turns."""

    questions: list[str | Exception]
    follow_ups: list[int]

    @classmethod
    def read(cls, values: Sequence[Any], input_key: str | None) -> _Inputs:
        questions: list[str | Exception] = []
        follow_ups = []
        for i, value in enumerate(values):
            try:
                questions.append(question_of(value, input_key))
                if is_follow_up(value, input_key):
                    follow_ups.append(i)
            except InvalidQuestionError as error:
                questions.append(error)
        return cls(questions, follow_ups)

    @property
    def asked(self) -> list[int]:
        return [i for i, q in enumerate(self.questions) if isinstance(q, str)]

    def question(self, i: int) -> str:
        return str(self.questions[i])

    def condensed(self, rewritten: Sequence[Any]) -> None:
        """Take the condensed questions; where condensing failed the question stays a marked follow-up."""
        failed = []
        for i, text in zip(self.follow_ups, rewritten, strict=True):
            if isinstance(text, Exception):
                _log.warning("A follow-up could not be condensed: %s: %s", type(text).__name__, text)
                failed.append(i)
            else:
                self.questions[i] = question_of(text)
        self.follow_ups = failed

    def decisions(self, found: Sequence[Decision]) -> list[Decision | Exception]:
        decisions = iter(found)
        placed = [q if isinstance(q, Exception) else next(decisions) for q in self.questions]
        for i in self.follow_ups:
            decision = placed[i]
            if isinstance(decision, Decision):
                placed[i] = decision.model_copy(update={"warnings": (*decision.warnings, FOLLOW_UP)})
        return placed


def _raised(found: Decision | Exception) -> Decision:
    if isinstance(found, Exception):
        raise found
    return found


def _children(config: Sequence[RunnableConfig], managers: Sequence[Any]) -> list[RunnableConfig]:
    return [
        patch_config(c, callbacks=m.get_child() if m is not None else None)
        for c, m in zip(config, managers, strict=True)
    ]


def _threshold(config: RunnableConfig) -> float | None:
    value = config.get("configurable", {}).get(THRESHOLD_KEY)
    return None if value is None else float(value)
