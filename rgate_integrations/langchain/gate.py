"""`RetrievalGate`: a gate as a LangChain runnable, with a router and a retriever made from it."""

from __future__ import annotations

from typing import Any

from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableLike
from langchain_core.runnables.utils import ConfigurableFieldSpec

from rgate_integrations.calling import DecidesBatches, as_gate
from rgate_integrations.decision import Decision
from rgate_integrations.flow import Flow
from rgate_integrations.langchain.drafts import ChatDrafter
from rgate_integrations.langchain.judging import judging
from rgate_integrations.langchain.retriever import GatedRetriever
from rgate_integrations.langchain.router import RetrievalRouter
from rgate_integrations.langchain.runnable import FlowRunnable, RunBatch
from rgate_integrations.loading import DEFAULT_GATES

THRESHOLD_KEY = "retrieval_threshold"

THRESHOLD_SPEC = ConfigurableFieldSpec(
    id=THRESHOLD_KEY,
    annotation=float,
    name="Retrieval threshold",
    description="Retrieve iff p_known is below it; overrides the gate's own for one call.",
    default=None,
)


class RetrievalGate(FlowRunnable[Decision]):
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
            for the direct arm of a router, in ``config["metadata"]["rgate_draft"]``. When it writes none, the
            gate has nothing to judge and retrieves. Its drafting runs have the tags ``nostream``, which LangGraph
            hides, and ``rgate_draft``.
        tokens: Maximum number of tokens it writes.
        condense: A runnable from messages to one self-contained question, for follow-ups. Without it, a follow-up
            is judged only by a draft of ``llm``, which sees the earlier turns; else it is retrieved for. When it
            fails, the follow-up is retrieved for. Either way the decision carries a warning.
        history_key: Key of the earlier turns in dict inputs; ``chat_history`` or ``history`` when None.

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
        history_key: str | None = None,
    ) -> None:
        if gate is None and llm is not None:
            gate = DEFAULT_GATES["llm"]
        self.gate = as_gate(gate)
        self.input_key = input_key
        self.drafter = ChatDrafter(llm, tokens) if llm is not None else None
        self.condense = condense
        self.history_key = history_key

    @property
    def config_specs(self) -> list[ConfigurableFieldSpec]:
        """The per-call threshold."""
        return [THRESHOLD_SPEC]

    @property
    def OutputType(self) -> type[Decision]:
        """The type of the output."""
        return Decision

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
            speculative: Run the first step of ``retrieve``, the retriever's, while the gate decides. That is for
                single inputs: of a batch of several only the unknown questions are searched, after the decision.
        """
        return RetrievalRouter(self, retrieve=retrieve, direct=direct, speculative=speculative)

    def guard(self, retriever: BaseRetriever, *, k: int | None = None, **options: Any) -> GatedRetriever:
        """Return a retriever that finds nothing for known questions, and searches claims for the others.

        Args:
            retriever: The retriever to guard.
            k: Maximum number of documents; by default no limit of its own.
            **options: Fields of `GatedRetriever`.
        """
        return GatedRetriever(retriever=retriever, gate=self.gate, drafter=self.drafter, k=k, **options)

    def flow(self, batch: RunBatch) -> Flow[list[Decision | Exception]]:
        """Decide for a batch in one call of the gate; an input without a question is its own error."""
        return (yield from judging(self, batch, [_threshold(config) for config in batch.configs]))


def as_retrieval_gate(gate: RetrievalGate | DecidesBatches | str | None) -> RetrievalGate:
    """Return a `RetrievalGate` as it is, and make one of anything that its ``gate`` argument takes."""
    return gate if isinstance(gate, RetrievalGate) else RetrievalGate(gate)


def _threshold(config: RunnableConfig) -> float | None:
    value = config.get("configurable", {}).get(THRESHOLD_KEY)
    return None if value is None else float(value)
