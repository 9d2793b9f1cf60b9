"""`GatedQueryEngine`: one line around an existing query engine."""

from __future__ import annotations

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks import CallbackManager
from llama_index.core.indices.empty import EmptyIndex
from llama_index.core.llms import LLM
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import QueryBundle
from llama_index.core.settings import Settings

from rgate_integrations.calling import DecidesBatches
from rgate_integrations.decision import Decision
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.flow import Background, Call, Flow, Start, arun, run
from rgate_integrations.llama_index.decider import Decider
from rgate_integrations.llama_index.retriever import fresh


class GatedQueryEngine(BaseQueryEngine):
    """Answers known questions with the LLM alone, the others with the wrapped engine.

    The response's ``metadata["rgate"]`` is the decision. The direct arm is LlamaIndex's own engine without an
    index, so it never says "Empty Response".

    Args:
        query_engine: The engine for unknown questions.
        direct: The engine for known questions.
        gate: A gate, or what `load_gate` takes; the default gate when None.
        callback_manager: LlamaIndex's callbacks.
        draft_llm: Writes its first tokens, and the gate judges them; the gate's own drafts when None.
        tokens: Maximum number of tokens that it writes, at least 1.
        speculative: Start searching while the gate decides. When the question is known, or the gate raises, the
            search is dropped, and what it raises is logged only. Needs an engine that retrieves and synthesizes in
            two steps.

    Raises:
        ConfigurationError: ``speculative=True``, and the engine does not work in two steps.
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
        self.decider = Decider(gate, draft_llm, tokens)
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
            llm: Answers known questions; by default ``Settings.llm``, as everywhere in LlamaIndex. Give it the LLM
                that the engine was made with.
            streaming: Whether the direct arm streams; set it as the engine was made.
            tokens: Let the LLM itself write so many tokens, at least 1, and the gate judge them: by far the
                strongest evidence. None leaves drafts to the gate's proxy model.
            speculative: Start searching while the gate decides.

        Raises:
            ConfigurationError: No LLM was given and LlamaIndex's ``Settings`` have none.
        """
        chosen = llm or _llm_of_settings()
        direct = EmptyIndex().as_query_engine(llm=chosen, streaming=streaming)
        return cls(
            query_engine,
            direct,
            gate,
            callback_manager=query_engine.callback_manager,
            draft_llm=None if tokens is None else chosen,
            tokens=32 if tokens is None else tokens,
            speculative=speculative,
        )

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        return run(self._answering(query_bundle))

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        return await arun(self._answering(query_bundle))

    def _answering(self, bundle: QueryBundle) -> Flow[RESPONSE_TYPE]:
        if self.speculative:
            return (yield from self._searching_ahead(bundle))
        decision = yield from self.decider.deciding(bundle.query_str)
        arm = self.query_engine if decision.retrieve else self.direct
        response = yield Call(arm.query, arm.aquery, fresh(bundle))
        return _marked(response, decision)

    def _searching_ahead(self, bundle: QueryBundle) -> Flow[RESPONSE_TYPE]:
        engine = self.query_engine
        retrieve = Call(engine.retrieve, getattr(engine, "aretrieve", None), fresh(bundle))
        search: Background = yield Start(retrieve)
        try:
            decision = yield from self.decider.deciding(bundle.query_str)
            nodes = (yield search) if decision.retrieve else None
        finally:
            search.drop()  # for a known question, and when the gate raises or the caller leaves
        if decision.retrieve:
            response = yield Call(engine.synthesize, engine.asynthesize, fresh(bundle), nodes)
        else:
            response = yield Call(self.direct.query, self.direct.aquery, fresh(bundle))
        return _marked(response, decision)

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"query_engine": self.query_engine, "direct": self.direct}


def _llm_of_settings() -> LLM:
    try:
        return Settings.llm
    except (ImportError, ValueError) as error:  # none is set, and OpenAI's package or key is missing
        raise ConfigurationError(
            "There is no LLM for known questions: none was given, and LlamaIndex's Settings have none.",
            hint="Pass the engine's own: GatedQueryEngine.from_defaults(engine, llm=llm). Or set Settings.llm.",
        ) from error


def _marked(response: RESPONSE_TYPE, decision: Decision) -> RESPONSE_TYPE:
    response.metadata = {**(response.metadata or {}), "rgate": decision.model_dump(mode="json")}
    return response
