"""`GatedQueryEngine`: one line around an existing query engine."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks import CallbackManager
from llama_index.core.indices.empty import EmptyIndex
from llama_index.core.llms import LLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.settings import Settings

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.look_first import LookFirst
from rgate_integrations.decision import Decision
from rgate_integrations.engine.gate_like import GateLike
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.llama_index.answer_first import Ahead, DirectFirst, SearchedMeanwhile
from rgate_integrations.llama_index.decider import Decider, name_of
from rgate_integrations.llama_index.look_first import SearchedFirst
from rgate_integrations.llama_index.note import facts_in, note_of
from rgate_integrations.llama_index.retriever import fresh
from rgate_integrations.llama_index.streaming import streams
from rgate_integrations.llama_index.watching import with_logprobs
from rgate_integrations.runtime.flow import Call, Flow, arun, run


class GatedQueryEngine(BaseQueryEngine):
    """Answers known questions with the LLM alone, the others with the wrapped engine.

    The response's ``metadata["rgate"]`` is the decision. The direct arm is LlamaIndex's own engine without an
    index, so it never says "Empty Response".

    In two steps, `retrieve` finds a note for a known question, and `synthesize` answers directly where it is given
    that note.

    Args:
        query_engine: The engine for unknown questions.
        direct: The engine for known questions.
        gate: A gate, or what `load_gate` takes; the default gate when None.
        callback_manager: LlamaIndex's callbacks.
        draft_llm: Writes its first tokens, and the gate judges them; the gate's own drafts when None.
        tokens: Maximum number of tokens that it writes, at least 1.
        answer_first: Let ``direct`` begin to answer, and judge its first tokens: it goes on if they are known, and is
            stopped if not. It should stream. The gate judges, or the one for begun answers that belongs to it;
            `AnswerFirst` has more to choose. Give its LLM as ``draft_llm``, too: so what retrieves by claims takes
            what it had written.
        streaming: Whether an answer that was begun as a stream is given as one.
        look_first: Search for every question, while the gate decides, and compare what the LLM knows with what was
            found: only passages that help are read, and nothing is searched twice. `LookFirst` has more to choose.
            Needs an engine that retrieves and synthesizes in two steps, and a retriever that does not decide or draft
            itself. With ``answer_first``, an answer is begun only where that can change the outcome, and what was
            begun is compared with what was found.
        llm: The LLM of ``direct``: the gate judges what it knows, by its name. ``draft_llm`` when None.

    Raises:
        ConfigurationError: ``look_first`` or `AnswerFirst.prefetch`, and the engine does not work in two steps, or
            its retriever decides; or ``answer_first``, and the gate reads the question alone.
    """

    def __init__(
        self,
        query_engine: BaseQueryEngine,
        direct: BaseQueryEngine,
        gate: GateLike | str | None = None,
        callback_manager: CallbackManager | None = None,
        *,
        draft_llm: LLM | None = None,
        tokens: int = 32,
        answer_first: bool | AnswerFirst = False,
        streaming: bool = True,
        look_first: bool | LookFirst = False,
        llm: LLM | None = None,
    ) -> None:
        self.look = LookFirst.of(look_first)
        options = AnswerFirst.of(answer_first)
        if self.look is not None or (options is not None and options.prefetch):
            _check_two_steps(query_engine)
        self.query_engine = query_engine
        self.direct = direct
        self.decider = Decider(gate, draft_llm, tokens, answers=llm)
        self.first: DirectFirst | None = None
        if options is not None:
            name = name_of(llm or draft_llm)
            self.first = DirectFirst(direct, self.decider.gate, options, streaming=streaming, llm_name=name)
        super().__init__(callback_manager)

    @classmethod
    def from_defaults(
        cls,
        query_engine: BaseQueryEngine,
        gate: GateLike | str | None = None,
        llm: LLM | None = None,
        *,
        streaming: bool | None = None,
        tokens: int | None = None,
        answer_first: bool | AnswerFirst = False,
        look_first: bool | LookFirst = False,
    ) -> GatedQueryEngine:
        """Wrap a query engine.

        Args:
            query_engine: Any query engine.
            gate: A gate, or what `load_gate` takes; the default gate when None.
            llm: Answers known questions; by default ``Settings.llm``, as everywhere in LlamaIndex. Give it the LLM
                that the engine was made with.
            streaming: Whether the direct arm streams; by default it does if the engine does.
            tokens: Let the LLM itself write so many tokens, at least 1, and the gate judge them: by far the
                strongest evidence. None leaves drafts to the gate's proxy model.
            answer_first: Let the LLM begin to answer, and judge its first tokens: 32, or ``tokens``. Known: it goes
                on, so that nothing is asked twice. Unknown: it is stopped, and the engine answers.
            look_first: Search for every question, and read only passages that help.

        Raises:
            ConfigurationError: No LLM was given and LlamaIndex's ``Settings`` have none.
        """
        chosen = llm or _llm_of_settings()
        if streaming is None:
            streaming = streams(query_engine)
        options = AnswerFirst.of(answer_first)
        if options is not None and tokens is not None:
            options = replace(options, tokens=tokens)
        telling = None if options is None else with_logprobs(chosen)
        direct = EmptyIndex().as_query_engine(
            llm=telling or chosen, streaming=streaming or options is not None
        )
        engine = cls(
            query_engine,
            direct,
            gate,
            callback_manager=query_engine.callback_manager,
            draft_llm=None if tokens is None and options is None else chosen,
            tokens=32 if tokens is None else tokens,
            answer_first=options or False,
            streaming=streaming,
            look_first=look_first,
            llm=chosen,
        )
        if engine.first is not None:
            engine.first.telling = telling
        return engine

    def with_threshold(self, threshold: float | None) -> GatedQueryEngine:
        """Return this engine at another threshold, for a query or for good.

        Args:
            threshold: Retrieve where P(known) is below it, at least 0; None is the gate's own.

        Raises:
            ConfigurationError: It is not a number of at least 0.
        """
        changed = copy(self)
        changed.decider = self.decider.with_threshold(threshold)
        return changed

    def update_prompts(self, prompts_dict: dict[str, BasePromptTemplate]) -> None:
        """Update prompts by the names that `get_prompts` gives them.

        LlamaIndex's own method does not take names of prompts that are two levels down, as those of both arms are.
        """
        rest = dict(prompts_dict)
        for name, module in self._get_prompt_modules().items():
            below = {key: rest.pop(key) for key in list(rest) if key.startswith(f"{name}:")}
            module.update_prompts({key.removeprefix(f"{name}:"): prompt for key, prompt in below.items()})
        super().update_prompts(rest)

    def retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Return the engine's nodes for an unknown question, and a note for a known one."""
        return run(self._retrieving(query_bundle))

    async def aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Return the engine's nodes for an unknown question, and a note for a known one."""
        return await arun(self._retrieving(query_bundle))

    def synthesize(
        self,
        query_bundle: QueryBundle,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
    ) -> RESPONSE_TYPE:
        """Answer from nodes with the engine, or directly if the note of `retrieve` is among them."""
        return run(self._synthesizing(query_bundle, nodes, additional_source_nodes))

    async def asynthesize(
        self,
        query_bundle: QueryBundle,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
    ) -> RESPONSE_TYPE:
        """Answer from nodes with the engine, or directly if the note of `retrieve` is among them."""
        return await arun(self._synthesizing(query_bundle, nodes, additional_source_nodes))

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        return run(self._answering(query_bundle))

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        return await arun(self._answering(query_bundle))

    def _answering(self, bundle: QueryBundle) -> Flow[RESPONSE_TYPE]:
        nodes: list[NodeWithScore] | None = None
        response: RESPONSE_TYPE | None = None
        first = self.first if self.decider.taken(bundle) is None else None
        if self.look is not None:
            decision, response, nodes = yield from self._looking_first(self.look, first, bundle)
        elif first is not None:
            decision, response, nodes = yield from self._answering_first(first, bundle)
        else:
            decision = yield from self.decider.decide(bundle)
        if response is None:
            with self.decider.carrying(decision, bundle):
                response = yield from self._running_arm(decision, bundle, nodes)
        response.metadata = {**(response.metadata or {}), "rgate": decision.model_dump(mode="json")}
        return response

    def _looking_first(
        self, options: LookFirst, first: DirectFirst | None, bundle: QueryBundle
    ) -> Flow[tuple[Decision, RESPONSE_TYPE | None, list[NodeWithScore] | None]]:
        """Search and decide; the nodes to read come with the decision, or a response that was begun."""
        search = SearchedFirst(self._search(bundle), options)
        if first is not None:
            return (yield from search.answering(first, self.decider, bundle))
        decision, nodes = yield from search.decide(self.decider, bundle)
        return decision, None, nodes

    def _answering_first(
        self, first: DirectFirst, bundle: QueryBundle
    ) -> Flow[tuple[Decision, RESPONSE_TYPE | None, list[NodeWithScore] | None]]:
        """Let the direct engine begin to answer; with `prefetch`, what was found meanwhile comes with a decision."""
        if not first.options.prefetch:
            decision, response = yield from first.answering(bundle, self.decider.threshold, Ahead())
            return decision, response, None
        search = SearchedMeanwhile(self._search(bundle))
        nodes: list[NodeWithScore] | None = None
        try:
            decision, response = yield from first.answering(bundle, self.decider.threshold, search)
            if decision.retrieve and search.job is not None:
                nodes = yield search.job
        finally:
            if search.job is not None:
                search.job.drop()  # for a known question, and when the gate raises or the caller leaves
        return decision, response, nodes

    def _running_arm(
        self, decision: Decision, bundle: QueryBundle, nodes: list[NodeWithScore] | None
    ) -> Flow[RESPONSE_TYPE]:
        """Answer in the arm that was decided for, from what was found already if there is something."""
        engine = self.query_engine
        response: RESPONSE_TYPE
        if not decision.retrieve:
            response = yield from self._directly(bundle)
        elif nodes is None:
            response = yield Call(engine.query, engine.aquery, fresh(bundle))
        else:
            response = yield Call(engine.synthesize, engine.asynthesize, fresh(bundle), nodes)
        return response

    def _directly(self, bundle: QueryBundle) -> Flow[RESPONSE_TYPE]:
        if self.first is not None:
            return (yield from self.first.asking(bundle))
        response: RESPONSE_TYPE = yield Call(self.direct.query, self.direct.aquery, fresh(bundle))
        return response

    def _search(self, bundle: QueryBundle) -> Call:
        engine = self.query_engine
        return Call(engine.retrieve, getattr(engine, "aretrieve", None), fresh(bundle))

    def _retrieving(self, bundle: QueryBundle) -> Flow[list[NodeWithScore]]:
        if self.look is not None:
            search = SearchedFirst(self._search(bundle), self.look)
            decision, found = yield from search.decide(self.decider, bundle)
            return [note_of(decision)] if found is None else found
        decision = yield from self.decider.decide(bundle)
        if not decision.retrieve:
            return [note_of(decision)]
        with self.decider.carrying(decision, bundle):
            nodes: list[NodeWithScore] = yield self._search(bundle)
        return nodes

    def _synthesizing(
        self,
        bundle: QueryBundle,
        nodes: list[NodeWithScore],
        additional: Sequence[NodeWithScore] | None,
    ) -> Flow[RESPONSE_TYPE]:
        known = facts_in(nodes)
        engine = self.query_engine
        response: RESPONSE_TYPE
        if known is None:
            response = yield Call(engine.synthesize, engine.asynthesize, fresh(bundle), nodes, additional)
            return response
        response = yield from self._directly(bundle)
        response.source_nodes = [*response.source_nodes, *(additional or [])]
        response.metadata = {**(response.metadata or {}), "rgate": known}
        return response

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"query_engine": self.query_engine, "direct": self.direct}


def _check_two_steps(engine: BaseQueryEngine) -> None:
    """Raise a `ConfigurationError` for an engine that cannot begin to search before there is a decision."""
    retriever = getattr(engine, "retriever", None)
    if retriever is None or not hasattr(engine, "synthesize"):
        problem = f"{type(engine).__name__} does not retrieve and synthesize in two steps."
    elif isinstance(getattr(retriever, "decider", None), Decider):
        problem = (
            f"{type(retriever).__name__} decides and drafts itself, so it cannot search ahead of a decision."
        )
    else:
        return
    raise ConfigurationError(problem, hint="Leave look_first=False, and AnswerFirst.prefetch=False.")


def _llm_of_settings() -> LLM:
    try:
        return Settings.llm
    except (ImportError, ValueError) as error:  # none is set, and OpenAI's package or key is missing
        raise ConfigurationError(
            "There is no LLM for known questions: none was given, and LlamaIndex's Settings have none.",
            hint="Pass the engine's own: GatedQueryEngine.from_defaults(engine, llm=llm). Or set Settings.llm.",
        ) from error
