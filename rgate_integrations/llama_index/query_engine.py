"""`GatedQueryEngine`: one line around an existing query engine."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks import CallbackManager
from llama_index.core.indices.empty import EmptyIndex
from llama_index.core.llms import LLM
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import QueryBundle

from rgate_integrations import speculative as searching
from rgate_integrations.calling import DecidesBatches
from rgate_integrations.decision import Decision
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.llama_index.deciding import Decider
from rgate_integrations.llama_index.retriever import fresh


class GatedQueryEngine(BaseQueryEngine):
    """Answers known questions with the LLM alone, the others with the wrapped engine.

    The response's ``metadata["rgate"]`` is the decision. The direct arm is LlamaIndex's own engine without an
    index, so it never says "Empty Response".

    Args:
        query_engine: The engine for unknown questions.
        direct: The engine for known questions.
        gate: A gate, or what `load_gate` takes; the default gate when None.
        draft_llm: Writes its first tokens, and the gate judges them; the gate's own drafts when None.
        tokens: How many tokens it writes.
        speculative: Start searching while the gate decides. When the question is known the search is dropped, and
            what it raises is logged only. Needs an engine with ``retrieve`` and ``synthesize``.
    """

    def __init__(
        self,
        query_engine: BaseQueryEngine,
        direct: BaseQueryEngine,
        gate: DecidesBatches | str | None = None,
        callback_manager: CallbackManager | None = None,
        *,
        draft_llm: LLM | None = None,
        tokens: int = 32,
        speculative: bool = False,
    ) -> None:
        if speculative and not (hasattr(query_engine, "retriever") and hasattr(query_engine, "synthesize")):
            raise ConfigurationError(
                f"{type(query_engine).__name__} does not retrieve and synthesize in two steps.",
                hint="Leave speculative=False.",
            )
        self.query_engine = query_engine
        self.direct = direct
        self.decide = Decider(gate, draft_llm, tokens)
        self.speculative = speculative
        super().__init__(callback_manager)

    @classmethod
    def from_defaults(
        cls,
        query_engine: BaseQueryEngine,
        gate: DecidesBatches | str | None = None,
        llm: LLM | None = None,
        *,
        streaming: bool = False,
        tokens: int | None = None,
        speculative: bool = False,
    ) -> GatedQueryEngine:
        """Wrap a query engine.

        Args:
            query_engine: Any query engine.
            gate: A gate, or what `load_gate` takes; the default gate when None.
            llm: Answers known questions; by default the engine's own.
            streaming: Whether the direct arm streams; set it as the engine was made.
            tokens: Let the LLM itself write so many tokens, and the gate judge them: by far the strongest
                evidence. None leaves drafts to the gate's proxy model.
            speculative: Start searching while the gate decides.

        Raises:
            ConfigurationError: No LLM was given and the engine does not show its own.
        """
        chosen = llm or _llm_of(query_engine)
        direct = EmptyIndex().as_query_engine(llm=chosen, streaming=streaming)
        return cls(
            query_engine,
            direct,
            gate,
            callback_manager=query_engine.callback_manager,
            draft_llm=chosen if tokens is not None else None,
            tokens=tokens or 32,
            speculative=speculative,
        )

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        if not self.speculative:
            decision = self.decide(query_bundle.query_str)
            return _marked(self._arm(decision).query(fresh(query_bundle)), decision)
        search = searching.start(self.query_engine.retrieve, fresh(query_bundle))
        decision = self.decide(query_bundle.query_str)
        if decision.retrieve:
            return _marked(self.query_engine.synthesize(fresh(query_bundle), search.result()), decision)
        searching.drop(search)
        return _marked(self.direct.query(fresh(query_bundle)), decision)

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        if not self.speculative:
            decision = await self.decide.decide(query_bundle.query_str)
            return _marked(await self._arm(decision).aquery(fresh(query_bundle)), decision)
        search = asyncio.ensure_future(self.query_engine.aretrieve(fresh(query_bundle)))  # type: ignore[attr-defined]
        try:
            decision = await self.decide.decide(query_bundle.query_str)
            if decision.retrieve:
                nodes = await search
                return _marked(await self.query_engine.asynthesize(fresh(query_bundle), nodes), decision)
            return _marked(await self.direct.aquery(fresh(query_bundle)), decision)
        finally:
            searching.drop(search)

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


def _marked(response: RESPONSE_TYPE, decision: Decision) -> RESPONSE_TYPE:
    response.metadata = {**(response.metadata or {}), "rgate": decision.model_dump(mode="json")}
    return response
