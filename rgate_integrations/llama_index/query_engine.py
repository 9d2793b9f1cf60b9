"""`GatedQueryEngine`: one line around an existing query engine."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks import CallbackManager
from llama_index.core.indices.empty import EmptyIndex
from llama_index.core.llms import LLM
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import QueryBundle

from rgate_integrations.decision import Decision
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.calling import DecidesBatches, adecide_safely, as_gate, decide_safely
from rgate_integrations.llama_index.events import announce


class GatedQueryEngine(BaseQueryEngine):
    """Answers known questions with the LLM alone, the others with the wrapped engine.

    The response's ``metadata["rgate"]`` is the decision. The direct arm is LlamaIndex's own engine without an
    index, so it never says "Empty Response".

    Args:
        query_engine: The engine for unknown questions.
        direct: The engine for known questions.
        gate: A gate, or what `load_gate` takes; the default gate when None.
    """

    def __init__(
        self,
        query_engine: BaseQueryEngine,
        direct: BaseQueryEngine,
        gate: DecidesBatches | str | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        self.query_engine = query_engine
        self.direct = direct
        self.gate = as_gate(gate)
        super().__init__(callback_manager)

    @classmethod
    def from_defaults(
        cls,
        query_engine: BaseQueryEngine,
        gate: DecidesBatches | str | None = None,
        llm: LLM | None = None,
        *,
        streaming: bool = False,
    ) -> GatedQueryEngine:
        """Wrap a query engine.

        Args:
            query_engine: Any query engine.
            gate: A gate, or what `load_gate` takes; the default gate when None.
            llm: Answers known questions; by default the engine's own.
            streaming: Whether the direct arm streams; set it as the engine was made.

        Raises:
            ConfigurationError: No LLM was given and the engine does not show its own.
        """
        chosen = llm or _llm_of(query_engine)
        direct = EmptyIndex().as_query_engine(llm=chosen, streaming=streaming)
        return cls(query_engine, direct, gate, callback_manager=query_engine.callback_manager)

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        decision = decide_safely(self.gate, [query_bundle.query_str])[0]
        announce(decision)
        return _marked(self._arm(decision).query(_fresh(query_bundle)), decision)

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        decision = (await adecide_safely(self.gate, [query_bundle.query_str]))[0]
        announce(decision)
        return _marked(await self._arm(decision).aquery(_fresh(query_bundle)), decision)

    def _arm(self, decision: Decision) -> BaseQueryEngine:
        return self.query_engine if decision.retrieve else self.direct

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"query_engine": self.query_engine, "direct": self.direct}


def _llm_of(engine: Any) -> LLM:
    synthesizer = getattr(engine, "_response_synthesizer", None)
    llm = getattr(synthesizer, "_llm", None)
    if not isinstance(llm, LLM):
        raise ConfigurationError(
            f"{type(engine).__name__} does not show its LLM.",
            hint="Pass it: GatedQueryEngine.from_defaults(engine, llm=llm).",
        )
    return llm


def _fresh(bundle: QueryBundle) -> QueryBundle:
    """Copy a bundle: LlamaIndex's vector retriever writes the embedding into the one it is given."""
    return QueryBundle(
        query_str=bundle.query_str,
        image_path=bundle.image_path,
        custom_embedding_strs=bundle.custom_embedding_strs,
        embedding=bundle.embedding,
    )


def _marked(response: RESPONSE_TYPE, decision: Decision) -> RESPONSE_TYPE:
    response.metadata = {**(response.metadata or {}), "rgate": decision.model_dump(mode="json")}
    return response
