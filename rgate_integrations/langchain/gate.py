"""`RetrievalGate`: a gate as a LangChain runnable, which also makes routers and guarded retrievers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self, Unpack

from langchain_core.documents import Document
from langchain_core.messages import AnyMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import Other, RunnableLike
from langchain_core.runnables.utils import ConfigurableFieldSpec, Input, Output
from pydantic import BeforeValidator, Field, PrivateAttr

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.look_first import LookFirst
from rgate_integrations.answering.routing import Strategy
from rgate_integrations.decision import Decision, Draft, Threshold, valid_count, valid_threshold
from rgate_integrations.engine.decider import Decider
from rgate_integrations.engine.loading import DEFAULT_GATE, DEFAULT_GATES, GateOptions, resolve_gate
from rgate_integrations.engine.own_gate import GateLike
from rgate_integrations.errors import ConfigurationError, InvalidQuestionError
from rgate_integrations.gates.base import Gate
from rgate_integrations.gates.evidence.model_outputs import generation_cost
from rgate_integrations.langchain.chat_models import (
    as_runnable,
    get_llm_name,
    runnables_in,
)
from rgate_integrations.langchain.corpora import (
    CorpusChain,
    CorpusRetriever,
    PerCorpus,
    as_searched,
    fuse_documents,
    longest,
    profile_searched,
)
from rgate_integrations.langchain.decisions import (
    THRESHOLD_SPEC,
    QueryPlanner,
    bind_decision,
    emit_decision_event,
    read_bound,
    read_threshold,
    with_config,
)
from rgate_integrations.langchain.questions import (
    CONDENSE_FAILED,
    ChatDrafter,
    GateCall,
    QuestionInput,
    condense_follow_ups,
)
from rgate_integrations.langchain.router import RetrievalRouter
from rgate_integrations.langchain.runnable import FlowRetriever, FlowRunnable, Run, run_groups
from rgate_integrations.runtime.flow import Flow

LLM_NAME_SOURCE = "its chat model"  # source of an LLM's name, as decisions report it


class RetrievalGate(FlowRunnable[QuestionInput, Decision]):
    """Decides whether to retrieve: question in, `Decision` out. The first decision loads the models.

    The question is a string, a dict, messages or a prompt value. A batch is one call of the gate, even if its items
    have their own thresholds in ``config["configurable"]["retrieval_threshold"]``.

    Args:
        gate: A `Gate`, an argument for `load_gate`, or any object with `decide_batch` and `adecide_batch`; the
            default gate when None.
        threshold: The gate retrieves if p_known is below this number (at least 0), unless an override such as
            a rule decides; the gate's own when None. A per-call threshold overrides it.
        input_key: Key of the question in dict inputs; when None, the first of ``question``, ``input``, ``query`` and
            ``messages`` that is not empty.
        llm: Your own chat model: it drafts an answer, which the gate judges. The default gate is then
            ``answer:default,default-answer``, which also reads drafts. Each question costs an LLM call for
            the draft, besides the one for the answer. With ``route(..., answer_first=True)``, ``llm`` is not used,
            and a known question costs only one call. Drafting runs have the tags ``nostream``, which hides them in
            LangGraph, and ``rgate_draft``. If retrieval is skipped, a router's direct arm gets the draft in
            ``config["metadata"]["rgate_draft"]``.
        tokens: Maximum number of tokens of the draft, at least 1.
        condense: A runnable from messages to one standalone question, for follow-ups, that is, questions with
            earlier turns. If it fails, the follow-up retrieves, with a warning. Without it, a gate that does
            not read the earlier turns retrieves for every follow-up.
        llm_name: Name of the LLM that answers, or a folder made by ``rgate ability``: P(known) is adjusted to it. By
            default the name comes from the chat model in the direct arm of `route`, or from ``llm``; with several
            models, such as fallbacks, the least capable one counts.
        name: The name of its runs in traces.
        **options: ``always=`` and ``never=``: rules as in `load_gate`, instead of the gate's own. ``corpus=``, with
            ``prefer=``, ``when_uncovered=`` and ``top=``: the corpus, as in `load_gate`. With ``corpus=True``,
            `route` and `guard` make a profile of the passages in your index.

    Raises:
        ConfigurationError: The gate, a rule or an option is invalid, the gate does not accept the option, the
            threshold is not a finite number of at least 0, ``llm`` is a text or keeps a message history, or
            ``condense`` is neither a runnable nor a function. Raised by a call: its threshold is invalid, or with
            ``corpus=True``, the gate was called directly.
        pydantic.ValidationError: ``llm`` is another object that is not a runnable, or ``tokens`` is below 1.
        UnknownNameError: No gate has that name.
        ModelLoadError: A trained gate cannot be read or downloaded, or a measured ability cannot be read.
        MissingDependencyError: The gate is a URL, and the extra ``openai`` is not installed.
        ProfileError: The profile of a corpus cannot be read.
        InvalidQuestionError: Raised by a call: the input has no question.

    Examples:
        >>> RetrievalGate("constant:never").invoke("who wrote hamlet?").retrieve
        False
    """

    gate: Any  # a `Decider`; declared as Any, so that a config's JSON schema can be made
    threshold: Threshold | None = None
    input_key: str | None = None
    llm: Runnable[Any, Any] | None = None
    tokens: int = Field(default=32, ge=1)
    condense: Runnable[Any, Any] | None = None
    llm_name: str = ""
    always: Any = ()  # `RuleOrRules`; the options are fields, so that a dump contains them
    never: Any = ()
    corpus: Any = None
    prefer: Any = None
    when_uncovered: Any = None
    top: int | None = None

    _gate_name: str | None = PrivateAttr(default=None)
    _unadjusted: Decider = PrivateAttr()
    _adjusted: dict[tuple[Decider, str], Decider] = PrivateAttr(default_factory=dict)
    _drafter: ChatDrafter | None = PrivateAttr(default=None)

    def __init__(
        self,
        gate: GateLike | Gate | str | None = None,
        *,
        threshold: float | None = None,
        input_key: str | None = None,
        llm: Runnable[Any, Any] | None = None,
        tokens: int = 32,
        condense: RunnableLike[Any, Any] | None = None,
        llm_name: str = "",
        name: str | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        if gate is None:
            gate = DEFAULT_GATE if llm is None else DEFAULT_GATES["llm"]
        if isinstance(llm, str):
            raise ConfigurationError(
                f"llm={llm!r} is a string, not a chat model.",
                hint="Pass the chat model itself or, for a gate that needs no drafts, its name as llm_name=.",
            )
        if condense is not None:
            condense = as_runnable(condense, "condense")
        super().__init__(
            # Not in a validator: pydantic would wrap our errors in its own.
            gate=resolve_gate(gate, llm_name, adapter=type(self), **options),
            threshold=None if threshold is None else valid_threshold(threshold),
            input_key=input_key,
            llm=llm,
            tokens=tokens,
            condense=condense,
            llm_name=llm_name,
            name=name,
            **options,
        )
        # Traces contain the dump, so a URL with a login must not get into it.
        if isinstance(gate, str) and "@" not in gate:
            self._gate_name = gate
        self._unadjusted = self.gate
        if llm is not None:
            self.gate = self.gate.for_llm(get_llm_name(llm), LLM_NAME_SOURCE)
            self._drafter = ChatDrafter(llm, tokens)

    @property
    def unadjusted(self) -> Decider:
        """The wrapped gate without the adjustment to a detected LLM: the one in ``llm=`` or in an arm.

        An adjustment to ``llm_name=`` is kept. A copy made by `for_llm` has the same unadjusted gate.
        """
        return self._unadjusted

    def for_llm(self, name: str) -> Self:
        """Return a copy of this gate, adjusted to the LLM that answers in an arm.

        If that changes nothing, for example because ``llm_name=`` was given, this gate itself is returned.

        Args:
            name: The LLM's name; may be empty.
        """
        key = self.gate, name
        # Kept, because calls whose config has this gate share its batches only if they share the copy.
        if key not in self._adjusted:
            self._adjusted[key] = self.gate.for_llm(key[1], LLM_NAME_SOURCE)
        gate = self._adjusted[key]
        return self if gate is self.gate else self.model_copy(update={"gate": gate})

    @property
    def lc_attributes(self) -> dict[str, Any]:
        """What ``dumpd`` writes as ``gate``: a name, folder or URL; nothing for an object or a URL with a login."""
        return {} if self._gate_name is None else {"gate": self._gate_name}

    @property
    def config_specs(self) -> list[ConfigurableFieldSpec]:
        """The configurable field of a call: the threshold."""
        return [THRESHOLD_SPEC]

    @property
    def InputType(self) -> Any:
        """The type of the input, without the forms that a JSON schema cannot express."""
        return str | dict[str, Any] | list[AnyMessage]

    def flow(self, runs: list[Run]) -> Flow[list[Decision | Exception]]:
        """Decide for a batch in one call of the gate.

        An input without a question or with an invalid threshold gets an error as its result. So does one whose
        decision fails, if the gate has ``on_error="raise"``.

        A router passes the option ``drafts``: for each input the draft to judge, the exception that prevented one, or
        None to judge only the question.

        Raises:
            ConfigurationError: ``corpus=True``, but the gate was not used through `route` or `guard`.
        """
        if self.corpus is True:
            raise ConfigurationError(
                "With corpus=True, the gate cannot decide by itself: it reads the passages of a retriever or chain.",
                hint="Call guard(…) or route(…), and use what they return. Or pass a CorpusProfile as corpus=.",
            )
        drafts = runs[0].options.get("drafts")
        calls = [self._read(single, reuse=drafts is None) for single in runs]
        waiting = [call for call in calls if call.result is None]
        yield from condense_follow_ups(self.condense, waiting)
        if drafts is not None:
            for call, draft in zip(calls, drafts, strict=True):
                call.draft = draft
        else:
            for call in waiting:
                self._reuse(call)
            waiting = [call for call in waiting if call.result is None]
            if self._drafter is not None:
                yield from self._drafter.write_for(waiting)
        outcomes = yield from self.gate.outcomes([call.item() for call in waiting])
        for call, outcome in zip(waiting, outcomes, strict=True):
            changes: dict[str, Any] = {}
            if call.condense_error is not None:
                changes["warnings"] = (CONDENSE_FAILED,)
            if isinstance(outcome, Decision) and drafts is None and isinstance(call.draft, Draft):
                # It was written for this decision.
                changes["cost"] = outcome.cost + generation_cost(call.draft)
            call.result = outcome if isinstance(outcome, Exception) else outcome.model_copy(update=changes)
        return [call.result for call in calls]

    def _read(self, single: Run, *, reuse: bool) -> GateCall:
        """Return the call for an input.

        Its `GateCall.result` is set already if the input or its threshold is invalid, or if it reuses the decision
        that the config has for this question.

        Args:
            single: The input and its run.
            reuse: Whether a decision in the config may be reused; see `_reuse`.
        """
        call = GateCall.read(single, self.input_key)
        try:
            call.threshold = read_threshold(self, single.config)
        except ConfigurationError as error:
            call.result = error
        bound = read_bound(single.config)
        # A decision for any question waits until the question is condensed.
        if call.result is None and bound is not None and bound.question is not None and reuse:
            self._reuse(call)
        return call

    def _reuse(self, call: GateCall) -> None:
        """Set a call's result to the decision in its config, if this gate would make the same decision again."""
        bound, question = read_bound(call.run.config), call.turn.question
        if bound is None or not bound.repeats(call.threshold, self.unadjusted, self.gate):
            return
        if bound.concerns(question, self.llm):
            call.result = bound.about(question)

    def route(
        self,
        *,
        retrieve: RunnableLike[Input, Output] | Mapping[str, RunnableLike[Input, Output]],
        direct: RunnableLike[Any, Other],
        answer_first: bool | AnswerFirst = False,
        look_first: bool | LookFirst = False,
        condensed_key: str | None = None,
        config: RunnableConfig | None = None,
    ) -> RetrievalRouter[Input, Output | Other]:
        """Return a runnable that sends each input to one of two arms.

        Configure what it returns: a gate made by ``configurable_fields`` would pass on only its default.

        Args:
            retrieve: The arm for unknown questions, such as an existing RAG chain. With several corpora, it may be a
                mapping from their names to chains: only the best corpus's chain runs, whatever ``top`` is; if the
                gate fails, the first. With at most one corpus, any other mapping is a ``RunnableParallel``.
            direct: The arm for known questions, such as the LLM without retrieval.
            answer_first: Let ``direct`` start to answer, and judge its first tokens: if the LLM knows, the answer
                continues; otherwise it is cancelled. The gate's ``llm=`` is not used. Options: `AnswerFirst`.
            look_first: Run ``retrieve`` up to its retriever for every input, while the gate decides (with
                several corpora, after its decision). The LLM reads the passages if they help more than its own
                knowledge. Options: `LookFirst`.
            condensed_key: Pass both arms a mapping with the standalone question of ``condense`` under this key. If
                the input is a mapping, its other keys are kept; any other input is put under ``input``.
            config: The config of the gate's runs. ``gate.with_config(…).route(…)`` passes its own.

        Raises:
            ConfigurationError: ``retrieve`` or ``direct`` is not a runnable, function or mapping, but for example a
                vector store. ``answer_first`` or ``look_first`` is neither a bool nor its options. With
                ``look_first`` or `AnswerFirst.prefetch`: ``retrieve`` is neither a sequence of steps nor a
                retriever. With ``answer_first``: the gate cannot judge an answer, or ``direct`` is a graph. With
                ``condensed_key``: ``condense`` is missing. With ``corpus=True``: the passages cannot be read. With
                several corpora: the names of chains and corpora differ.
            RGateError: `AnswerFirst.question_gate` is invalid or cannot be loaded.
            ProfileError: With ``corpus=True``: a corpus has no passages.
            ModelLoadError: With ``corpus=True``: the encoder cannot be loaded.
            DownloadError: With ``corpus=True``: the encoder could not be downloaded.
        """
        if condensed_key is not None and self.condense is None:
            raise ConfigurationError(
                "condensed_key= needs condense=.",
                hint="Pass condense= to RetrievalGate, or leave out condensed_key=.",
            )
        searched, gate = self._searched_and_profiled(retrieve, CorpusChain)
        arm = as_runnable(direct, "direct")
        llm_name = get_llm_name(arm)
        strategy = Strategy.from_options(
            gate.gate,
            lambda decider: with_config(self._sibling_gate(decider).for_llm(llm_name), config),
            answer_first=answer_first,
            look_first=look_first,
            chooses_corpus=next(runnables_in(searched, PerCorpus), None) is not None,
        )
        strategy.made_for = with_config(gate.for_llm(llm_name), config)
        return RetrievalRouter(
            strategy.made_for, retrieve=searched, direct=arm, strategy=strategy, condensed_key=condensed_key
        )

    def _searched_and_profiled(self, value: Any, kind: type[Any]) -> tuple[Runnable[Any, Any], Self]:
        """Convert a retriever or a retrieve arm with `as_searched`; return it, and the gate to use with it.

        With ``corpus=True``, that gate is a copy of this one with profiles of the arm's passages; otherwise this one.
        """
        searched = as_searched(value, kind, self.gate.corpora, any_corpora=self.corpus is True)
        if self.corpus is not True:
            return searched, self
        fields = {**dict(self), "gate": self.unadjusted, "corpus": profile_searched(searched)}
        return searched, type(self)(**fields)

    def _sibling_gate(self, gate: Decider) -> RetrievalGate:
        """Return a `RetrievalGate` with another gate. It reads inputs as this one does, but writes no drafts."""
        return RetrievalGate(
            gate.for_llm(self.llm_name),  # a gate passed as question_gate= is not adjusted to it yet
            threshold=self.threshold,
            input_key=self.input_key,
            condense=self.condense,
        )

    def guard(
        self,
        retriever: RunnableLike[str, list[Document]] | Mapping[str, RunnableLike[str, list[Document]]],
        *,
        k: int | None = None,
        always_include_question: bool = True,
        max_queries: int = 6,
        filter_claims: bool = False,
        known_message: str | Document | None = None,
        config: RunnableConfig | None = None,
    ) -> GatedRetriever:
        """Return a retriever that does not search for known questions; see `GatedRetriever`.

        Args:
            retriever: A retriever, or any runnable or function from a query to documents. With several corpora, it
                may be a mapping from their names to retrievers: at most ``top`` of them run, or all if the gate
                fails or has no corpora.
            k: Maximum number of documents, at least 1; None for no limit.
            always_include_question: See `QueryPlanner`.
            max_queries: See `QueryPlanner`.
            filter_claims: See `QueryPlanner`.
            known_message: A document to return for known questions, or its text, for tools of
                `create_retriever_tool`; with None, no document is returned. If the tool has a ``document_prompt``,
                pass a document whose metadata has the prompt's variables.
            config: See `route`.

        Raises:
            ConfigurationError: ``retriever`` is an empty mapping; or it is not a runnable, function or mapping, but
                for example a vector store. The names of the retrievers and the gate's corpora differ. With
                ``corpus=True``: the passages cannot be read.
            ProfileError, ModelLoadError, DownloadError: With ``corpus=True``, see `route`.
            pydantic.ValidationError: ``k`` or ``max_queries`` is below 1.
        """
        searched, gate = self._searched_and_profiled(retriever, CorpusRetriever)
        return GatedRetriever(
            retriever=searched,
            gate=with_config(gate, config),
            k=k,
            always_include_question=always_include_question,
            max_queries=max_queries,
            filter_claims=filter_claims,
            known_message=known_message,
        )


def as_gate_runnable(gate: Any = None) -> Runnable[Any, Decision]:
    """Return a `RetrievalGate` for a ``gate`` argument; the default gate for None.

    A runnable, for example a `RetrievalGate`, is returned unchanged.

    Raises:
        RGateError: The gate is invalid; see `RetrievalGate`.
    """
    return gate if isinstance(gate, Runnable) else RetrievalGate(gate)


class GatedRetriever(FlowRunnable[QuestionInput, list[Document]], FlowRetriever, QueryPlanner):
    """Guards a retriever: searches for a question and the claims of its draft, unless the question is known.

    After earlier turns, the question is searched for alone, unless it is very short or an English follow-up, and
    together with the user's last turn. A gate with ``condense`` rewrites it instead.

    A known question gets ``[]``, or one document with ``known_message``. Each decision is a child run in
    traces and a custom event, ``retrieval_gate``, unless a surrounding router has emitted it. If that router has
    the same gate and searches before it decides, every question is searched for, without a decision. Keyword
    arguments of a call, such as ``filter=``, reach the guarded retriever.

    The results of the queries are fused by reciprocal rank, without duplicates. Each document's metadata says how it
    was found: ``rgate_query``, ``rgate_claim`` and ``rgate_rank``. Keys that a document already has are kept.

    Its runs have the type ``retriever``, but the events of a chain (``on_chain_start`` …); those of a retriever are
    for the guarded one.

    Attributes:
        retriever: A retriever, or any runnable from a query to a list of documents.
        gate: A `RetrievalGate`, a ``gate`` argument for one, or any runnable from a question to a `Decision`; the
            default gate when None.
        k: Maximum number of documents, at least 1; None for no limit. ``invoke(..., k=)`` overrides it, and
            reaches the guarded retriever, too.
        known_message: See `RetrievalGate.guard`; the other options are those of `QueryPlanner`.

    Raises:
        pydantic.ValidationError: An attribute is invalid, for example the gate, or ``k`` below 1.
        UnknownNameError: No gate has that name.
        ModelLoadError: A trained gate cannot be read or downloaded.
        MissingDependencyError: The gate is a URL, and the extra ``openai`` is not installed.
        ConfigurationError: Raised by a call: its ``k`` or threshold is invalid, the guarded runnable does not return
            documents, or the gate does not return a `Decision`.
        InvalidQuestionError: Raised by a call: an input has no question, or an empty one.
    """

    run_type: ClassVar[str] = "retriever"

    retriever: Runnable[Any, Any]
    gate: Annotated[Any, BeforeValidator(as_gate_runnable)] = Field(default=None, validate_default=True)
    k: int | None = Field(default=None, ge=1)
    known_message: str | Document | None = None

    def flow(self, runs: list[Run]) -> Flow[list[list[Document] | Exception]]:
        """Decide for a batch in one call of the gate, and search for its unknown questions in one batch.

        Each result is a list of documents, or the exception if that input failed.
        """
        options = runs[0].options
        k = options.get("k", self.k)
        if k is not None:
            valid_count(k, "k")
        results: list[Any] = yield from self.decide_and_plan(runs)
        unknown = []
        for index, (single, result) in enumerate(zip(runs, results, strict=True)):
            if isinstance(result, Exception):
                continue
            decision, _ = result
            yield from emit_decision_event(decision, single.child())
            if not decision.question.strip():
                results[index] = InvalidQuestionError("The question is empty.", hint="Pass a question.")
            elif decision.retrieve:
                unknown.append(index)
            else:
                note = self.known_message
                note = Document(note) if isinstance(note, str) else note
                results[index] = [] if note is None else [note.model_copy(deep=True)]
        # A retriever over several corpora finds in the config which of them to search.
        configs = [
            bind_decision(runs[index].child(), self.gate, runs[index].input, results[index][0])
            for index in unknown
        ]
        plans = [results[index][1] for index in unknown]
        found = yield from run_groups(self.retriever, [plan.texts for plan in plans], configs, **options)
        for index, plan, rankings in zip(unknown, plans, found, strict=True):
            origins = [{"rgate_query": query.text, "rgate_claim": query.claim} for query in plan.queries]
            # With two texts to search for, there are no more documents than with one.
            of_question = all(query.claim is None for query in plan.queries)
            results[index] = fuse_documents(
                origins, rankings, longest(rankings) if k is None and of_question else k
            )
        return results
