"""`RetrievalGate`: a gate as a LangChain runnable, with a router and a retriever made from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableLike
from langchain_core.runnables.utils import ConfigurableFieldSpec

from rgate_integrations.decision import Decision
from rgate_integrations.errors import InvalidQuestionError
from rgate_integrations.gates.calling import DecidesBatches, adecide_safely, as_gate, decide_safely
from rgate_integrations.langchain.questions import question_of

if TYPE_CHECKING:
    from rgate_integrations.langchain.retriever import GatedRetriever
    from rgate_integrations.langchain.router import RetrievalRouter

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

    Example:
        >>> from rgate_integrations.langchain import RetrievalGate
        >>> gate = RetrievalGate("constant:never")
        >>> gate.invoke("who wrote hamlet?").retrieve
        False
    """

    def __init__(self, gate: DecidesBatches | str | None = None, *, input_key: str | None = None) -> None:
        self.gate = as_gate(gate)
        self.input_key = input_key

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

    def route(self, *, retrieve: RunnableLike[Any, Any], direct: RunnableLike[Any, Any]) -> RetrievalRouter:
        """Return a runnable that sends each input to one of two arms.

        Args:
            retrieve: Gets the inputs of unknown questions; an existing RAG chain.
            direct: Gets the inputs of known questions; the LLM without retrieval.
        """
        from rgate_integrations.langchain.router import RetrievalRouter

        return RetrievalRouter(self, retrieve=retrieve, direct=direct)

    def guard(self, retriever: BaseRetriever, *, k: int | None = None, **options: Any) -> GatedRetriever:
        """Return a retriever that finds nothing for known questions, and searches claims for the others.

        Args:
            retriever: The retriever to guard.
            k: Greatest number of documents; by default no limit of its own.
            **options: Fields of `GatedRetriever`.
        """
        from rgate_integrations.langchain.retriever import GatedRetriever

        return GatedRetriever(retriever=retriever, gate=self.gate, k=k, **options)

    def _one(self, value: Any, run_manager: Any, config: RunnableConfig) -> Decision:
        return decide_safely(self.gate, [self._question(value)], threshold=[_threshold(config)])[0]

    async def _aone(self, value: Any, run_manager: Any, config: RunnableConfig) -> Decision:
        return (await adecide_safely(self.gate, [self._question(value)], threshold=[_threshold(config)]))[0]

    def _many(
        self, values: list[Any], run_manager: Any, config: list[RunnableConfig]
    ) -> list[Decision | Exception]:
        questions = [self._read(v) for v in values]
        asked, thresholds = self._asked(questions, config)
        return _in_place(questions, decide_safely(self.gate, asked, threshold=thresholds))

    async def _amany(
        self, values: list[Any], run_manager: Any, config: list[RunnableConfig]
    ) -> list[Decision | Exception]:
        questions = [self._read(v) for v in values]
        asked, thresholds = self._asked(questions, config)
        return _in_place(questions, await adecide_safely(self.gate, asked, threshold=thresholds))

    def _question(self, value: Any) -> str:
        return question_of(value, self.input_key)

    def _read(self, value: Any) -> str | Exception:
        try:
            return self._question(value)
        except InvalidQuestionError as error:
            return error

    @staticmethod
    def _asked(
        questions: Sequence[str | Exception], config: Sequence[RunnableConfig]
    ) -> tuple[list[str], list[float | None]]:
        pairs = [(q, _threshold(c)) for q, c in zip(questions, config, strict=True) if isinstance(q, str)]
        return [q for q, _ in pairs], [t for _, t in pairs]


def _threshold(config: RunnableConfig) -> float | None:
    value = config.get("configurable", {}).get(THRESHOLD_KEY)
    return None if value is None else float(value)


def _in_place(
    questions: Sequence[str | Exception], decisions: Sequence[Decision]
) -> list[Decision | Exception]:
    found = iter(decisions)
    return [q if isinstance(q, Exception) else next(found) for q in questions]
