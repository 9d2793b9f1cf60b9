"""`GatedQueryEngine`: one line around an existing query engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import RESPONSE_TYPE
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
from rgate_integrations.llama_index.decider import Decider, Gated, name_of
from rgate_integrations.llama_index.decision_context import copy_bundle, known_decision, placeholder_node
from rgate_integrations.llama_index.look_first import SearchedFirst
from rgate_integrations.llama_index.streaming import streams
from rgate_integrations.llama_index.watching import with_logprobs
from rgate_integrations.runtime.flow import Call, Flow, arun, run


class GatedQueryEngine(Gated, BaseQueryEngine):
    """Answers known questions with the LLM alone, the others with the wrapped engine.

    The response's ``metadata["rgate"]`` is the decision. `from_defaults` makes the direct arm: LlamaIndex's own
    engine without an index, so it never says "Empty Response".

    In two steps, `retrieve` finds a note for a known question, and `synthesize` answers directly where it is given
    that note.

    Args:
        query_engine: The engine for unknown questions.
        direct: The engine for known questions.
        gate: A gate, or what `load_gate` takes; the default gate when None.
        llm: The LLM of ``direct``: the gate judges what it knows, by its name.
        tokens: Let this LLM write so many tokens, at least 1, for the gate to judge; None leaves drafts to the gate.
        answer_first: Let ``direct`` begin to answer, and judge its first tokens: it goes on if they are known, and is
            stopped if not. It should stream. The gate judges, or the one for begun answers that belongs to it;
            `AnswerFirst` has more to choose. With ``llm``, what retrieves by claims takes what it had written.
        streaming: Whether an answer that was begun as a stream is given as one.
        look_first: Search for every question, while the gate decides, and compare what the LLM knows with what was
            found: only passages that help are read, and nothing is searched twice. `LookFirst` has more to choose.
            Needs an engine that retrieves and synthesizes in two steps, and a retriever that does not decide or draft
            itself. With ``answer_first``, an answer is begun only where that can change the outcome, and what was
            begun is compared with what was found.

    Raises:
        ConfigurationError: ``look_first`` or `AnswerFirst.prefetch`, and the engine does not work in two steps, or
            its retriever decides; or ``answer_first``, and the gate reads the question alone.
    """

    def __init__(
        self,
        query_engine: BaseQueryEngine,
        direct: BaseQueryEngine,
        gate: GateLike | str | None = None,
        *,
        llm: LLM | None = None,
        tokens: int | None = None,
        answer_first: bool | AnswerFirst = False,
        streaming: bool = True,
        look_first: bool | LookFirst = False,
    ) -> None:
        options = AnswerFirst.of(answer_first)
        self.look = LookFirst.of(look_first)
        if self.look is not None or (options is not None and options.prefetch):
            _check_two_steps(query_engine)
        self.query_engine = query_engine
        self.direct = direct
        writer = llm if tokens is not None or options is not None else None
        self.decider = Decider(gate, writer, 32 if tokens is None else tokens, answers=llm)
        self.first: DirectFirst | None = None
        if options is not None:
            self.first = DirectFirst(
                direct, self.decider.gate, options, streaming=streaming, llm_name=name_of(llm)
            )
        super().__init__(query_engine.callback_manager)

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
        llm = llm or _llm_of_settings()
        if streaming is None:
            streaming = streams(query_engine)
        options = AnswerFirst.of(answer_first)
        answering, telling = llm, None
        if options is not None:
            options = options if tokens is None else replace(options, tokens=tokens)
            telling = with_logprobs(llm)
            answering = telling or llm
        # What is begun can only be stopped where it streams.
        direct = EmptyIndex().as_query_engine(llm=answering, streaming=streaming or options is not None)
        engine = cls(
            query_engine,
            direct,
            gate,
            llm=llm,
            tokens=tokens,
            answer_first=options or False,
            streaming=streaming,
            look_first=look_first,
        )
        if engine.first is not None:
            engine.first.telling = telling
        return engine

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
        return run(self._find(query_bundle))

    async def aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Return the engine's nodes for an unknown question, and a note for a known one."""
        return await arun(self._find(query_bundle))

    def synthesize(
        self,
        query_bundle: QueryBundle,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
    ) -> RESPONSE_TYPE:
        """Answer from nodes with the engine, or directly if the note of `retrieve` is among them."""
        return run(self._answer_from(query_bundle, nodes, additional_source_nodes))

    async def asynthesize(
        self,
        query_bundle: QueryBundle,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
    ) -> RESPONSE_TYPE:
        """Answer from nodes with the engine, or directly if the note of `retrieve` is among them."""
        return await arun(self._answer_from(query_bundle, nodes, additional_source_nodes))

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        return run(self._answer(query_bundle))

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        return await arun(self._answer(query_bundle))

    def _answer(self, bundle: QueryBundle) -> Flow[RESPONSE_TYPE]:
        """Decide, and answer in the arm that was decided for, from what was begun or found meanwhile."""
        engine = self.query_engine
        decision, response, nodes = yield from self._decide(bundle)
        if response is None:
            with self.decider.bind(decision, bundle):
                if not decision.retrieve:
                    response = yield from self._answer_directly(bundle)
                elif nodes is None:
                    response = yield Call(engine.query, engine.aquery, copy_bundle(bundle))
                else:
                    response = yield Call(engine.synthesize, engine.asynthesize, copy_bundle(bundle), nodes)
        response.metadata = {**(response.metadata or {}), "rgate": decision.model_dump(mode="json")}
        return response

    def _decide(
        self, bundle: QueryBundle
    ) -> Flow[tuple[Decision, RESPONSE_TYPE | None, list[NodeWithScore] | None]]:
        """Return the decision, with the response that was begun or the nodes that were found on the way to it."""
        response: RESPONSE_TYPE | None = None
        nodes: list[NodeWithScore] | None = None
        # What was decided further up is not begun again.
        first = self.first if self.decider.taken(bundle) is None else None
        if self.look is not None:
            looking = SearchedFirst(self._search(bundle), self.look)
            if first is not None:
                return (yield from looking.answering(first, self.decider, bundle))
            decision, nodes = yield from looking.decide(self.decider, bundle)
        elif first is None:
            decision = yield from self.decider.decide(bundle)
        elif not first.options.prefetch:
            decision, response = yield from first.answering(bundle, self.decider.threshold, Ahead())
        else:
            search = SearchedMeanwhile(self._search(bundle))
            try:
                decision, response = yield from first.answering(bundle, self.decider.threshold, search)
                if decision.retrieve and search.job is not None:
                    nodes = yield search.job
            finally:
                if search.job is not None:
                    search.job.drop()  # for a known question, and when the gate raises or the caller leaves
        return decision, response, nodes

    def _answer_directly(self, bundle: QueryBundle) -> Flow[RESPONSE_TYPE]:
        if self.first is not None:
            return (yield from self.first.asking(bundle))
        response: RESPONSE_TYPE = yield Call(self.direct.query, self.direct.aquery, copy_bundle(bundle))
        return response

    def _search(self, bundle: QueryBundle) -> Call:
        engine = self.query_engine
        return Call(engine.retrieve, getattr(engine, "aretrieve", None), copy_bundle(bundle))

    def _find(self, bundle: QueryBundle) -> Flow[list[NodeWithScore]]:
        if self.look is not None:
            looking = SearchedFirst(self._search(bundle), self.look)
            decision, found = yield from looking.decide(self.decider, bundle)
            return [placeholder_node(decision)] if found is None else found
        decision = yield from self.decider.decide(bundle)
        if not decision.retrieve:
            return [placeholder_node(decision)]
        with self.decider.bind(decision, bundle):
            nodes: list[NodeWithScore] = yield self._search(bundle)
        return nodes

    def _answer_from(
        self,
        bundle: QueryBundle,
        nodes: list[NodeWithScore],
        additional: Sequence[NodeWithScore] | None,
    ) -> Flow[RESPONSE_TYPE]:
        known = known_decision(nodes)
        engine = self.query_engine
        response: RESPONSE_TYPE
        if known is None:
            response = yield Call(
                engine.synthesize, engine.asynthesize, copy_bundle(bundle), nodes, additional
            )
            return response
        response = yield from self._answer_directly(bundle)
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
