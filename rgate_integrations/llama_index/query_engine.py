"""`GatedQueryEngine`: gates an existing query engine in one line, and makes the engine for known questions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Self, Unpack

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks import CBEventType, EventPayload
from llama_index.core.indices.empty import EmptyIndex
from llama_index.core.llms import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate, SelectorPromptTemplate
from llama_index.core.prompts.chat_prompts import TEXT_QA_SYSTEM_PROMPT
from llama_index.core.prompts.default_prompts import DEFAULT_SIMPLE_INPUT_PROMPT
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import QueryBundle
from llama_index.core.settings import Settings
from pydantic import PrivateAttr

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.corpora import check_corpora
from rgate_integrations.answering.look_first import LookFirst
from rgate_integrations.answering.routing import QuestionCall, RoutedInput, Strategy
from rgate_integrations.decision import Decision, valid_flag
from rgate_integrations.engine.loading import GateOptions
from rgate_integrations.engine.own_gate import GateLike
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.passage_utility import FoundPassage
from rgate_integrations.llama_index.answer_first import EngineAnswer, with_logprobs
from rgate_integrations.llama_index.decider import (
    LLM_NAME_SOURCE,
    Gated,
    QueryDecider,
    check_part,
    copy_bundle,
    get_llm_name,
    read_bundle,
)
from rgate_integrations.llama_index.retriever import CorpusRetriever, profile_searched
from rgate_integrations.runtime.flow import Call, Flow, Gather, arun, run
from rgate_integrations.runtime.text import logger


class EngineOptions(GateOptions, total=False):
    """Options that `GatedQueryEngine.from_defaults` passes to the class."""

    answer_first: bool | AnswerFirst
    look_first: bool | LookFirst


class GatedQueryEngine(Gated, BaseQueryEngine):
    """Answers known questions with the LLM alone, and the others with the wrapped engine.

    The response's ``metadata["rgate"]`` is the decision, as a dict. `from_defaults` makes ``direct``.

    Args:
        query_engine: The engine for unknown questions.
        direct: The engine for known questions.
        gate: A gate, or an argument for `load_gate`; the default gate when None.
        llm: The LLM of ``direct``, to which P(known) is adjusted.
        tokens: Maximum number of tokens of a draft that this LLM writes for the gate to judge, at least 1;
            when None, the gate writes any drafts that it needs. Unused with ``answer_first``.
        answer_first: Let ``direct``, which should stream, start to answer, and judge its first tokens: if the LLM
            knows, the answer continues; otherwise it is cancelled. A `ClaimFusionRetriever` in
            ``query_engine`` then searches for the claims of the partial answer, unless its ``draft_llm`` is
            another LLM. Options: `AnswerFirst`.
        streaming: Whether the caller gets an answer of ``direct`` as a stream, if ``direct`` streams.
        look_first: Search for every question, while the gate decides (with several corpora, after its
            decision). The LLM reads the passages if they help more than its own knowledge. The engine
            needs a ``retriever`` without a gate, and ``synthesize``, like a ``RetrieverQueryEngine``.
            Options: `LookFirst`.
        **gate_options: ``always=`` and ``never=``: rules as in `load_gate`, instead of the gate's own. ``corpus=``,
            with ``prefer=``, ``when_uncovered=`` and ``top=``: the corpus, as in `load_gate`; ``corpus=True`` makes
            a profile of the passages in your index.

    Raises:
        ConfigurationError: The gate or an option is invalid, an engine is not a query engine, or the names
            of retrievers and corpora differ. With ``look_first`` or `AnswerFirst.prefetch`: the engine has
            no ``retriever`` or ``synthesize``, or the retriever has a gate. With ``answer_first``: the gate cannot
            judge an answer. With ``corpus=True``: the passages cannot be read.
        RGateError: `AnswerFirst.question_gate` is invalid or cannot be loaded.
        UnknownNameError: No gate has that name.
        ModelLoadError: A trained gate or, with ``corpus=True``, the encoder cannot be loaded.
        MissingDependencyError: The gate is a URL, and the extra ``openai`` is not installed.
        DownloadError: With ``corpus=True``, the encoder could not be downloaded.
        ProfileError: The profile of a corpus cannot be read, or a corpus has no passages.
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
        **gate_options: Unpack[GateOptions],
    ) -> None:
        for part in (query_engine, direct):
            check_part(part, "query")
        retriever: Any = getattr(query_engine, "retriever", query_engine)
        if gate_options.get("corpus") is True:
            gate_options["corpus"] = profile_searched(retriever)
        self.query_engine = query_engine
        self.direct = direct
        # Answer first needs no drafts, but the claims to search for come from what the LLM has written.
        drafter = llm if tokens is not None or answer_first else None
        self.decider = QueryDecider(
            gate, drafter, 32 if tokens is None else tokens, llm=llm, adapter=type(self), **gate_options
        )
        if isinstance(retriever, CorpusRetriever):
            check_corpora(self.decider.gate.corpora, retriever.parts)
        self.streaming = valid_flag(streaming, "streaming")
        name = get_llm_name(llm)
        self.strategy = Strategy.from_options(
            self.decider.gate,
            lambda decider: decider.for_llm(name, LLM_NAME_SOURCE),
            answer_first=answer_first,
            look_first=look_first,
            chooses_corpus=isinstance(retriever, CorpusRetriever),
        )
        if self.strategy.searches_ahead:
            _check_two_steps(query_engine)
        self.logprobs_llm: LLM | None = None  # the LLM of `direct`, if log-probabilities are requested
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
        direct_prompt: BasePromptTemplate | None = None,
        direct: BaseQueryEngine | None = None,
        **options: Unpack[EngineOptions],
    ) -> GatedQueryEngine:
        """Return a gated engine that wraps a query engine.

        By default, the direct arm sends ``llm`` the system messages of the engine's own prompt, and the
        question. This arm is the engine of LlamaIndex's ``EmptyIndex``, which never answers "Empty Response". The
        wrapped engine's ``output_cls`` also applies to the arm; such an answer does not stream.

        Args:
            query_engine: Any query engine.
            gate: A gate, or an argument for `load_gate`; the default gate when None.
            llm: Answers known questions; by default ``Settings.llm``, as everywhere in LlamaIndex. Pass the LLM that
                the engine was made with.
            streaming: Whether the caller gets answers to known questions as streams; when None, only if
                ``query_engine`` streams.
            tokens: Maximum number of tokens of a draft that the LLM writes for the gate to judge, at least 1;
                when None, the gate writes any drafts that it needs. Unused with ``answer_first``.
            direct_prompt: The LLM's prompt for known questions, with ``query_str``.
            direct: Your own engine for known questions; pass its LLM as ``llm``.
            **options: ``answer_first``, ``look_first`` and those of the gate; see the class.

        Raises:
            ConfigurationError: ``llm`` is not an LLM, ``direct_prompt`` is not a prompt or has no ``query_str``, or
                both ``direct`` and ``direct_prompt`` were given.
            ImportError, ValueError: No LLM was given, and LlamaIndex's ``Settings`` have none.
            RGateError: The errors of the class.
        """
        llm = llm or Settings.llm
        check_part(llm, "complete")
        if direct_prompt is not None:
            check_part(direct_prompt, "format_messages")
        if streaming is None:
            streaming = bool(getattr(find_synthesizer(query_engine), "_streaming", False))
        first = AnswerFirst.coerce(options.get("answer_first", False))
        logprobs_llm = with_logprobs(llm) if direct is None and first is not None else None
        if direct is None:
            streams = streaming or first is not None  # only a stream can be cancelled halfway
            direct = direct_engine(query_engine, logprobs_llm or llm, direct_prompt, streaming=streams)
        elif direct_prompt is not None:
            raise ConfigurationError(
                "direct_prompt= does not apply to the engine in direct=.", hint="Pass one of them, not both."
            )
        engine = cls(query_engine, direct, gate, llm=llm, tokens=tokens, streaming=streaming, **options)
        engine.logprobs_llm = logprobs_llm
        return engine

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        return run(self._answer(query_bundle))

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        return await arun(self._answer(query_bundle))

    def _answer(self, bundle: QueryBundle) -> Flow[RESPONSE_TYPE]:
        """Decide, and return the chosen arm's answer. If that arm began before the decision, it continues."""
        call = EngineCall(self, bundle)
        (routed,) = yield from call.route()
        decision = routed.decision
        engine = self.query_engine
        # Gated parts inside the engines reuse the decision.
        with self.decider.bind(decision, bundle):
            if not decision.retrieve:
                answer = routed.answer
                if not isinstance(answer, EngineAnswer):
                    answer = call.begin(call.inputs[0])
                response: RESPONSE_TYPE = yield from answer.response(streaming=self.streaming)
            elif routed.searched:
                # The event that the engine's own method query emits.
                payload: dict[str, Any] = {EventPayload.QUERY_STR: bundle.query_str}
                with self.callback_manager.event(CBEventType.QUERY, payload=payload) as event:
                    response = yield Call(
                        engine.synthesize, engine.asynthesize, copy_bundle(bundle), routed.passages
                    )
                    event.on_end(payload={EventPayload.RESPONSE: response})
            else:
                response = yield Call(engine.query, engine.aquery, copy_bundle(bundle))
        response.metadata = {**(response.metadata or {}), "rgate": decision.model_dump(mode="json")}
        return response

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"query_engine": self.query_engine, "direct": self.direct}


def _check_two_steps(engine: BaseQueryEngine) -> None:
    """Raise a `ConfigurationError` for an engine that cannot search before the decision."""
    retriever = getattr(engine, "retriever", None)
    # Every engine inherits both methods, which raise NotImplementedError.
    has_methods = (
        type(engine).retrieve is not BaseQueryEngine.retrieve
        and type(engine).synthesize is not BaseQueryEngine.synthesize
    )
    if retriever is None or not has_methods:
        lacking = "retriever" if retriever is None else "methods retrieve and synthesize"
        problem = f"{type(engine).__name__} has no {lacking}, so it cannot search before the decision."
    elif isinstance(getattr(retriever, "decider", None), QueryDecider):
        problem = f"{type(retriever).__name__} has its own gate, so it cannot search before the decision."
    else:
        return
    raise ConfigurationError(
        problem,
        hint="Leave out look_first and AnswerFirst.prefetch, or wrap a RetrieverQueryEngine without a gate.",
    )


class EngineCall(QuestionCall):
    """Routes one question to an arm of the engine.

    Args:
        engine: The gated engine.
        bundle: The question.

    Attributes:
        made: The decision that came with the request, from which the engine's strategy goes on; None without one.
    """

    def __init__(self, engine: GatedQueryEngine, bundle: QueryBundle) -> None:
        strategy, decider = engine.strategy, engine.decider
        self.made = decider.reusable(bundle)
        if self.made is None and strategy.question_gate is not None:
            self.made = decider.reusable(bundle, strategy.question_gate)
        if self.made is not None and self.made.draft is not None:  # the LLM's words have been judged
            strategy = replace(strategy, answer_first=None)
        super().__init__(strategy, read_bundle(bundle, threshold=decider.threshold))
        self.engine = engine
        self.bundle = bundle

    def decide(self) -> Flow[Sequence[Decision | Exception]]:
        """Return the decision that came with the request, or else a new one."""
        return [(yield from self.engine.decider.judge(self.bundle))]

    def screen(self) -> Flow[Sequence[Decision | Exception]]:
        """Return the question gate's decision, which may have come with the request."""
        return (yield from super().screen()) if self.made is None else [self.made]

    def begin(self, item: RoutedInput) -> EngineAnswer:
        """Return the direct engine's answer, which starts when its first token is requested."""
        return EngineAnswer(self.engine.direct, self.bundle, self.engine.logprobs_llm)

    def emit(self, item: RoutedInput, decision: Decision) -> Flow[None]:
        """Emit a decision to LlamaIndex's listeners, unless it came with the request."""
        yield from ()
        # Answer first may have added only how long its steps took.
        if self.made != decision.model_copy(
            update={"partial_answer": self.made and self.made.partial_answer}
        ):
            self.engine.decider.emit(decision)

    def search(self, inputs: Sequence[RoutedInput]) -> Gather:
        """Return the step in which the engine retrieves; its result is one list of nodes per input."""
        return Gather([Call(run, arun, self._retrieve(item)) for item in inputs])

    def _retrieve(self, item: RoutedInput) -> Flow[Any]:
        engine: Any = self.engine.query_engine
        decision = item.latest_decision if self.strategy.chooses_corpus else None
        # A retriever over several corpora finds in the bound decision which of them to search.
        with nullcontext() if decision is None else self.engine.decider.bind(decision, self.bundle):
            return (yield Call(engine.retrieve, getattr(engine, "aretrieve", None), copy_bundle(self.bundle)))

    def read_passages(self, item: RoutedInput) -> Sequence[FoundPassage]:
        """Return the nodes that the search found, as passages."""
        nodes = [found.node for found in item.passages]
        return [FoundPassage.from_metadata(node.get_content(), node.metadata) for node in nodes]


# --- the direct arm -----------------------------------------------------------------------------------------

_PROMPTS = ("text_qa_template", "summary_template", "simple_template")  # a synthesizer uses one of these
_MARK = "\0"
# Stand for what a synthesizer puts into a prompt, to see which messages contain it. LlamaIndex leaves any other word
# in braces as it is, such as in LaTeX.
_MARKS = {"context_str": _MARK, "query_str": _MARK}


def find_synthesizer(engine: BaseQueryEngine) -> BaseSynthesizer | None:
    """Return the response synthesizer of an engine, or of the first engine nested in it that has one; else None."""
    engines = [engine] if isinstance(engine, BaseQueryEngine) else []
    for part in engines:  # grows
        synthesizer = vars(part).get("_response_synthesizer")
        if isinstance(synthesizer, BaseSynthesizer):
            return synthesizer
        for value in vars(part).values():
            for inner in value if isinstance(value, list) else [value]:
                # By identity: comparing engines, such as each other's fallbacks, may never end.
                if isinstance(inner, BaseQueryEngine) and not any(inner is known for known in engines):
                    engines.append(inner)
    return None


def direct_engine(
    query_engine: BaseQueryEngine, llm: LLM, prompt: BasePromptTemplate | None, *, streaming: bool
) -> BaseQueryEngine:
    """Return an engine in which an LLM answers alone.

    If the RAG engine has an ``output_cls``, the answers are objects of that class.

    Args:
        query_engine: The RAG engine.
        llm: The LLM.
        prompt: The prompt, with ``query_str``; a `DirectPrompt` when None.
        streaming: Whether the engine streams; with structured output it never does.

    Raises:
        ConfigurationError: The prompt does not contain the question.
    """
    if prompt is None:
        prompt = DirectPrompt(query_engine)
    elif not _shows_question(prompt, llm):
        raise ConfigurationError(
            "direct_prompt= has no {query_str}, so the LLM would not see the question.",
            hint='For example, PromptTemplate("Answer in one sentence: {query_str}").',
        )
    output_cls = getattr(find_synthesizer(query_engine), "_output_cls", None)
    if output_cls is not None and not isinstance(llm, StructuredLLM):
        llm = llm.as_structured_llm(output_cls)
    # A structured answer is an object, which exists only once it is complete.
    streaming = streaming and not isinstance(llm, StructuredLLM)
    callbacks = getattr(query_engine, "callback_manager", None)  # what is no engine is refused later
    return EmptyIndex().as_query_engine(
        llm=llm, simple_template=prompt, streaming=streaming, callback_manager=callbacks
    )


def _shows_question(prompt: BasePromptTemplate, llm: LLM) -> bool:
    """Return whether a prompt contains the question, or fails without a real one."""
    try:
        messages = prompt.format_messages(llm=llm, query_str=_MARK)
    except Exception:  # the template may call the user's functions
        return True
    return any(_MARK in (message.content or "") for message in messages)


class DirectPrompt(SelectorPromptTemplate):
    """The system messages of a RAG engine's prompt, as it is at each question, followed by the question.

    Args:
        engine: The engine.
    """

    _engine: BaseQueryEngine = PrivateAttr()
    _failed: BasePromptTemplate | None = PrivateAttr(None)

    def __init__(self, engine: BaseQueryEngine) -> None:
        super().__init__(DEFAULT_SIMPLE_INPUT_PROMPT)
        self._engine = engine

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Return a copy for the copy of the engine, if one is made, too; ``get_prompts`` copies prompts alone."""
        return type(self)((memo or {}).get(id(self._engine), self._engine))

    def select(self, llm: BaseLLM | None = None) -> BasePromptTemplate:
        """Return the prompt for an LLM."""
        system = self._system_messages(llm)
        question = ChatMessage(role=MessageRole.USER, content="{query_str}")
        return ChatPromptTemplate(message_templates=[*system, question]) if system else self.default_template

    def _system_messages(self, llm: BaseLLM | None) -> list[ChatMessage]:
        """Return the system messages of the engine's prompt, except those with passages or the question.

        LlamaIndex's default system message is left out, because it forbids the LLM to use its own knowledge. If the
        prompt cannot be filled in, a warning is logged once, and no messages are returned.
        """
        synthesizer = find_synthesizer(self._engine)
        # The public method copies every prompt.
        prompts = {} if synthesizer is None else synthesizer._get_prompts()  # noqa: SLF001
        template = next((prompts[name] for name in _PROMPTS if name in prompts), None)
        if isinstance(template, SelectorPromptTemplate):
            template = template.select(llm)
        if template is None:
            return []
        try:
            messages = template.format_messages(llm=llm, **_MARKS)
        except Exception as error:  # the template may call the user's functions, which may need passages
            if template is not self._failed:
                self._failed = template
                logger.warning(
                    "Known questions are answered without the engine's prompt, which raised %s.",
                    type(error).__name__,
                )
            return []
        system = []
        for message in messages:
            text = message.content or ""
            if (
                message.role in (MessageRole.SYSTEM, MessageRole.DEVELOPER)
                and _MARK not in text
                and text != TEXT_QA_SYSTEM_PROMPT.content
            ):
                system.append(message)
        return system
