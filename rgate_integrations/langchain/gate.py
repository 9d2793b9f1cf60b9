"""`RetrievalGate`: a gate as a LangChain runnable, with a router and a guarded retriever made from it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar, Self, TypeVar, Unpack

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.messages import AnyMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableLike, coerce_to_runnable
from langchain_core.runnables.utils import ConfigurableFieldSpec, get_unique_config_specs
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.look_first import LookFirst
from rgate_integrations.answering.query_plan import QueryPlan, plan_queries_flow
from rgate_integrations.answering.rewriting import Rewriter
from rgate_integrations.answering.routing import Strategy
from rgate_integrations.decision import Decision, Draft, Threshold, valid_threshold
from rgate_integrations.engine.decider import Decider
from rgate_integrations.engine.loading import (
    DEFAULT_GATE,
    DEFAULT_GATES,
    GateOptions,
    answer_first_gates,
    resolve_gate,
)
from rgate_integrations.engine.own_gate import GateLike
from rgate_integrations.errors import ConfigurationError, InvalidQuestionError
from rgate_integrations.gates.base import Gate
from rgate_integrations.gates.evidence.draft import generation_cost
from rgate_integrations.langchain.bound_decision import (
    THRESHOLD_SPEC,
    bind_decision,
    emit_decision_event,
    read_bound,
    read_threshold,
)
from rgate_integrations.langchain.chat_models import get_llm_name, runnables_in
from rgate_integrations.langchain.corpora import (
    CorpusChain,
    CorpusRetriever,
    PerCorpus,
    as_searched,
    profile_searched,
)
from rgate_integrations.langchain.documents import fuse_documents
from rgate_integrations.langchain.drafting import ChatDrafter, GateCall, condense_follow_ups
from rgate_integrations.langchain.questions import QuestionInput
from rgate_integrations.langchain.router import RetrievalRouter
from rgate_integrations.langchain.runnable import BatchCall, FlowRunnable, Run
from rgate_integrations.runtime.flow import Flow

_Input = TypeVar("_Input")
_Retrieved = TypeVar("_Retrieved")
_Direct = TypeVar("_Direct")

_log = logging.getLogger("rgate_integrations")

LLM_NAME_SOURCE = "its chat model"
"""Where the name of an LLM was found, for decisions that say whose knowledge they judge."""

UNCONDENSED = "The follow-up could not be condensed."


class RetrievalGate(FlowRunnable[QuestionInput, Decision]):
    """Decides whether to retrieve: question in, `Decision` out. Nothing is loaded until the first decision.

    The question is a string, a dict, messages or a prompt value. A batch is decided in one call of the gate,
    also with a threshold of its own for each item, in ``config["configurable"]["retrieval_threshold"]``.

    Args:
        gate: A `Gate`, what `load_gate` takes, any object with `decide_batch` and `adecide_batch`, or one of
            LangChain's decision models; the default gate when None.
        threshold: Retrieve iff p_known is below it, at least 0; the gate's own when None. The one of a call's
            config goes before it.
        input_key: Key of the question in dict inputs; ``question``, ``input``, ``query`` or ``messages``
            when None.
        llm: Your own chat model: it writes its first tokens, and the gate judges them; by far the strongest
            evidence. The default is then ``answer:default,default-answer``. On skip the draft is in the
            decision and, for the direct arm of a router, in ``config["metadata"]["rgate_draft"]``. When it writes
            none, the gate has nothing to judge and retrieves. Its drafting runs have the tags ``nostream``,
            which LangGraph hides, and ``rgate_draft``. The draft is a call of its own for every question, and a
            known one is then answered by another; ``route(..., answer_first=True)`` costs neither.
        tokens: Maximum number of tokens it writes, at least 1.
        condense: A runnable from messages to one self-contained question, for follow-ups. Without it, a gate that
            reads the earlier turns decides; for one that does not, a follow-up is retrieved for, with a warning. So
            it is when ``condense`` fails.
        llm_name: Name of the LLM that answers, or folder of ``rgate ability``: what it knows is judged. Without it,
            the name of the chat model in the direct arm of `route`, or of ``llm``, counts: of several, such as
            fallbacks, the one that knows least.
        name: The name of its runs in traces.
        **options: ``always=`` and ``never=``: rules as of `load_gate`, in place of the gate's own. ``corpus=``, with
            ``prefer=``, ``when_uncovered=`` and ``top=``: what is searched, as of `load_gate`; with True, `route` and
            `guard` make a profile of the passages, if these are at hand.

    Raises:
        ConfigurationError: A rule is none, or the gate is an object of the user's own, which takes no rules and no
            corpus; or the threshold is not a number of at least 0.
        ProfileError: The profile of a corpus cannot be read.

    Example:
        >>> from rgate_integrations.langchain import RetrievalGate
        >>> gate = RetrievalGate("constant:never")
        >>> gate.invoke("who wrote hamlet?").retrieve
        False
    """

    gate: Any  # what decides; as Any, it can stand in the schema of a config
    threshold: Threshold | None = None
    input_key: str | None = None
    llm: Runnable[Any, Any] | None = None
    tokens: int = Field(default=32, ge=1)
    condense: Runnable[Any, Any] | None = None
    llm_name: str = ""
    always: Any = ()  # `RuleOrRules`; as fields, no dump loses them
    never: Any = ()
    corpus: Any = None
    prefer: Any = None
    when_uncovered: Any = None
    top: int | None = None

    _gate_name: str | None = PrivateAttr(default=None)
    _origin: Decider = PrivateAttr()
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
        if is_decision_model(gate):
            from rgate_integrations.langchain.decisions import DecisionModelGate

            gate = DecisionModelGate(gate)
        if condense is not None:
            condense = coerce_to_runnable(condense)
        super().__init__(
            # Not in a validator: pydantic would turn its errors into one of its own.
            gate=resolve_gate(gate, llm_name, **options),
            threshold=None if threshold is None else valid_threshold(threshold),
            input_key=input_key,
            llm=llm,
            tokens=tokens,
            condense=condense,
            llm_name=llm_name,
            name=name,
            **options,
        )
        if isinstance(gate, str) and "@" not in gate:  # a dump, which traces have, must not have a login
            self._gate_name = gate
        self._origin = self.gate
        if llm is not None:
            self.gate = self.gate.for_llm(get_llm_name(llm), LLM_NAME_SOURCE)
            self._drafter = ChatDrafter(llm, tokens)

    @property
    def origin(self) -> Decider:
        """What decides, as the user gave it, where this is a copy that judges the LLM of an arm."""
        return self._origin

    def for_arm(self, direct: Runnable[Any, Any]) -> Self:
        """Return a copy that judges what the LLM of an arm knows; itself if its name is unknown, or was given."""
        gate = self.gate.for_llm(get_llm_name(direct), LLM_NAME_SOURCE)
        return self if gate is self.gate else self.model_copy(update={"gate": gate})

    @property
    def lc_attributes(self) -> dict[str, Any]:
        """What ``dumpd`` writes instead of a field: a gate's name, where it was made from one."""
        return {} if self._gate_name is None else {"gate": self._gate_name}

    @property
    def config_specs(self) -> list[ConfigurableFieldSpec]:
        """The per-call threshold."""
        return [THRESHOLD_SPEC]

    @property
    def InputType(self) -> Any:
        """The type of the input, in those of its forms that JSON can hold."""
        return str | dict[str, Any] | list[AnyMessage]

    def flow(self, runs: list[Run]) -> Flow[list[Decision | Exception]]:
        """Decide for a batch in one call of the gate; an input without a question is its own error.

        The call's option ``drafts``, one an input, is what is judged instead of any that would be written: a draft,
        None, or the error of what should have written it.

        Raises:
            ConfigurationError: Of ``corpus=True``, neither `route` nor `guard` has said what is searched.
        """
        if self.corpus is True:
            raise ConfigurationError(
                "corpus=True: nothing is searched here.", hint="gate.guard(retriever), gate.route(…)"
            )
        drafts = runs[0].options.get("drafts")
        calls = [self._read(each, reuse=drafts is None) for each in runs]
        waiting = [call for call in calls if call.result is None]
        yield from condense_follow_ups(self.condense, waiting)
        if drafts is not None:
            for call, draft in zip(calls, drafts, strict=True):
                call.draft = draft
        elif self._drafter is not None:
            yield from self._drafter.write_for(waiting)
        decisions = yield from self.gate.flow([call.item() for call in waiting])
        for call, decision in zip(waiting, decisions, strict=True):
            changed: dict[str, Any] = {}
            if call.condense_error is not None:
                _log.warning("A follow-up could not be condensed: %s", type(call.condense_error).__name__)
                changed["warnings"] = (UNCONDENSED,)
            if drafts is None and isinstance(call.draft, Draft):  # it was written for this decision
                changed["cost"] = decision.cost + generation_cost([call.draft])
            call.result = decision.model_copy(update=changed)
        return [call.result for call in calls]

    def _read(self, each: Run, *, reuse: bool) -> GateCall:
        """Read the question of an input; in the same request nothing is decided twice."""
        call = GateCall.read(each, self.input_key)
        call.threshold = read_threshold(self, each.config)
        bound = read_bound(each.config)
        if call.result is not None or bound is None or not reuse:
            return call
        if bound.concerns(call.turn.question, self.llm) and bound.repeats(self.origin, call.threshold):
            call.result = bound.decision
        return call

    def route(
        self,
        *,
        retrieve: RunnableLike[_Input, _Retrieved] | Mapping[str, RunnableLike[_Input, _Retrieved]],
        direct: RunnableLike[_Input, _Direct],
        answer_first: bool | AnswerFirst = False,
        look_first: bool | LookFirst = False,
        condensed_key: str | None = None,
    ) -> RetrievalRouter[_Input, _Retrieved | _Direct]:
        """Return a runnable that sends each input to one of two arms.

        Args:
            retrieve: Gets the inputs of unknown questions; an existing RAG chain. With several corpora also a mapping
                from their names to chains: that of the best corpus runs, whatever ``top`` is, or the first one where
                the gate failed.
            direct: Gets the inputs of known questions; the LLM without retrieval.
            answer_first: Let ``direct`` begin to answer and judge its first tokens: it goes on if they are known, and
                is stopped if not. ``llm=`` is not asked then. This gate judges, or the one for partial answers that
                belongs to it, as there is beside the default and a tuned one; `AnswerFirst` has more to choose.
            look_first: Run ``retrieve`` up to its retriever for every input, while the gate decides, and compare what
                the LLM knows with what was found: only passages that help are read. Nothing is searched twice.
                `LookFirst` has more to choose. With ``answer_first``, an answer is begun only where that can change
                the outcome, and what was begun is compared with what was found.
            condensed_key: Hand both arms a mapping with the question under this key, so that they need not search
                for "And when?": of a follow-up, what ``condense`` made of it. Mappings keep their other keys; any
                other input stands under ``input``. By default arms get the input unchanged.

        Raises:
            ConfigurationError: ``look_first`` or `AnswerFirst.prefetch`, and ``retrieve`` is neither a sequence of
                steps nor a retriever; or ``answer_first``, and the gate reads the question alone; or
                ``condensed_key``, and the gate has no ``condense``; or chains with other names than the corpora.
        """
        searched = self._as_searched(retrieve, CorpusChain)
        if self.corpus is True:
            looks: Any = {"answer_first": answer_first, "look_first": look_first}
            return self._knowing(searched).route(
                retrieve=searched, direct=direct, condensed_key=condensed_key, **looks
            )
        arm: Runnable[Any, Any] = coerce_to_runnable(direct)  # type: ignore[arg-type]  # a mapping is one
        chooses = next(runnables_in(searched, PerCorpus), None) is not None
        strategy = Strategy(look_first=LookFirst.coerce(look_first), chooses_corpus=chooses)
        first = AnswerFirst.coerce(answer_first)
        if first is not None:
            judge, question_gate = answer_first_gates(self.gate, first.question_gate)
            strategy = replace(
                strategy,
                answer_first=first,
                judge=self._sibling_gate(judge).for_arm(arm),
                question_gate=question_gate and self._sibling_gate(question_gate).for_arm(arm),
            )
        if condensed_key is not None and self.condense is None:
            raise ConfigurationError(
                "condensed_key= needs a gate that condenses.", hint="RetrievalGate(condense=...)"
            )
        gate = self.for_arm(arm)
        return RetrievalRouter(
            gate, retrieve=searched, direct=arm, strategy=strategy, condensed_key=condensed_key
        )

    def _as_searched(self, given: Any, kind: type[Any]) -> Runnable[Any, Any]:
        return as_searched(given, kind, self.gate.corpora, by_itself=self.corpus is True)

    def _knowing(self, searched: Runnable[Any, Any]) -> Self:
        """Return a gate that knows what is searched, by its passages; itself unless it is to find that out."""
        if self.corpus is not True:
            return self
        return type(self)(**{**dict(self), "gate": self.origin, "corpus": profile_searched(searched)})

    def _sibling_gate(self, gate: Decider) -> RetrievalGate:
        """Return another gate that reads inputs as this one does, and drafts nothing."""
        return RetrievalGate(
            gate.for_llm(self.llm_name),  # one of the two may judge no LLM by its name
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
        known_message: str | None = None,
    ) -> GatedRetriever:
        """Return a retriever that finds nothing for known questions, and searches claims for the others.

        Args:
            retriever: What to guard: a retriever, or any runnable or function from a query to documents. For a gate
                with several corpora also a mapping from their names to these: at most ``top`` are asked, or all of
                them where the gate failed.
            k: Maximum number of documents; by default no limit of its own.
            always_include_question: Whether the question itself is always searched.
            max_queries: Maximum number of queries a question, at least 1.
            filter_claims: Whether the gate judges each claim and drops the known ones.
            known_message: Text of the one document that a known question finds, for `create_retriever_tool`; by
                default it finds none.

        Raises:
            ConfigurationError: The retrievers' names are not those of the gate's corpora.
        """
        searched = self._as_searched(retriever, CorpusRetriever)
        return GatedRetriever(
            retriever=searched,
            gate=self._knowing(searched),
            k=k,
            always_include_question=always_include_question,
            max_queries=max_queries,
            filter_claims=filter_claims,
            known_message=known_message,
        )


def as_gate_runnable(gate: Any = None) -> Runnable[Any, Decision]:
    """Return a runnable as it is, and make one of anything that `RetrievalGate` takes as its ``gate``."""
    if isinstance(gate, Runnable) and not is_decision_model(gate):
        return gate
    return RetrievalGate(gate)


def is_decision_model(gate: Any) -> bool:
    """Whether it is one of LangChain's decision models, which are runnables from a state to typed answers."""
    # Older versions have none; where one is, its module is imported.
    module = sys.modules.get("langchain_core.decisions")
    return module is not None and isinstance(gate, module.BaseDecisionModel)


class QueryPlanner(BaseModel):
    """What runnables that plan queries have in common: a gate, and the options of a plan.

    Attributes:
        gate: A `RetrievalGate`, what its ``gate`` takes, or any runnable from a question to a `Decision`.
        always_include_question: Whether the question itself is always a query.
        max_queries: Maximum number of queries a question, at least 1.
        filter_claims: Whether the gate judges each claim and drops the known ones. A runnable that is not a
            `RetrievalGate` judges no claims: then all are searched.
    """

    gate: Any = Field(default=None, validate_default=True)
    always_include_question: bool = True
    max_queries: int = Field(default=6, ge=1)
    filter_claims: bool = False

    @field_validator("gate", mode="before")
    @classmethod
    def _runnable(cls, gate: Any) -> Runnable[Any, Decision]:
        return as_gate_runnable(gate)

    def plans(self, decisions: Iterable[Decision], rewriter: Rewriter | None = None) -> Flow[list[QueryPlan]]:
        """Plan the queries of questions; see `plan_queries`."""
        judge = getattr(self.gate, "gate", None)
        if not self.filter_claims or not isinstance(judge, Decider):
            judge = None
        return plan_queries_flow(
            list(decisions),
            gate=judge,
            rewriter=rewriter,
            always_include_question=self.always_include_question,
            max_queries=self.max_queries,
        )


class GatedRetriever(FlowRunnable[QuestionInput, list[Document]], BaseRetriever, QueryPlanner):
    """Guards a retriever: ``[]`` for known questions; for the others its results for every query of the plan.

    The question is a string, a dict, messages or a prompt value. A batch makes one call of the gate and one batch of
    the guarded retriever. Each decision is a child run in traces and a custom event, ``retrieval_gate``.
    ``config["configurable"]["retrieval_threshold"]`` is the threshold of one call, or of one item of a batch. Keyword
    arguments of a call, such as ``filter=``, reach the guarded retriever.

    The results of the queries are fused by reciprocal rank and freed of duplicates. Each document's metadata says
    what found it: ``rgate_query``, ``rgate_claim`` and ``rgate_rank``. A key that a document has already is kept.

    Attributes:
        retriever: What is guarded: a retriever, or any runnable from a query to a list of documents.
        gate: A `RetrievalGate`, what its ``gate`` takes, or any runnable from a question to a `Decision`.
        always_include_question: Whether the question itself is always searched.
        max_queries: Maximum number of queries a question.
        filter_claims: Whether the gate judges each claim and drops the known ones. A runnable that is not a
            `RetrievalGate` judges no claims: then all are searched.
        k: Maximum number of documents; None for no limit. ``invoke(..., k=)`` overrides it, and reaches the guarded
            retriever, too.
        known_message: Text of the one document that a known question finds, for a tool whose output an agent reads;
            by default it finds none.

    Raises:
        ConfigurationError: What is guarded does not return documents.
        InvalidQuestionError: An input holds no question, or an empty one.
    """

    model_config = ConfigDict(extra="forbid")
    run_type: ClassVar[str] = "retriever"

    retriever: Runnable[Any, Any]
    k: int | None = Field(default=None, ge=1)
    known_message: str | None = None

    @property
    def config_specs(self) -> list[ConfigurableFieldSpec]:
        """The specs of the gate and of what is guarded."""
        return get_unique_config_specs([*self.gate.config_specs, *self.retriever.config_specs])

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        # A retriever must have this, and old code calls it.
        return self.invoke(query, {"callbacks": run_manager.get_child()}, **options)

    def flow(self, runs: list[Run]) -> Flow[list[list[Document] | Exception]]:
        """Decide for a batch in one call of the gate, and search for its unknown questions in one batch."""
        children = [each.child("gate") for each in runs]
        decisions = yield BatchCall(self.gate, [each.input for each in runs], children)
        calls = [GateCall(each) for each in runs]
        for call, decision in zip(calls, decisions, strict=True):
            call.result = yield from self._check_decision(call.run, decision)
        decided = [call for call in calls if isinstance(call.result, Decision)]
        plans = yield from self.plans([call.result for call in decided])
        queries: list[str] = []
        configs: list[RunnableConfig] = []
        for call, plan in zip(decided, plans, strict=True):
            queries += plan.texts
            # Who searches several corpora reads there which of them.
            config = bind_decision(call.run.child(), self.gate, call.run.input, call.result)
            configs += [config] * len(plan.queries)
        options = runs[0].options
        hits = iter((yield BatchCall(self.retriever, queries, configs, **options)))
        for call, plan in zip(decided, plans, strict=True):
            rankings = list(islice(hits, len(plan.queries)))
            if call.result.retrieve:
                origins = [{"rgate_query": query.text, "rgate_claim": query.claim} for query in plan.queries]
                call.result = fuse_documents(origins, rankings, options.get("k", self.k))
            else:
                call.result = [] if self.known_message is None else [Document(self.known_message)]
        return [call.result for call in calls]

    def _check_decision(self, each: Run, decision: Any) -> Flow[Any]:
        """Return a decision that there is something to search for, and emit it; or why there is none."""
        if isinstance(decision, Exception):
            return decision
        if not isinstance(decision, Decision):
            raise ConfigurationError(
                f"The gate returned {type(decision).__name__} and no Decision.",
                hint="Pass a RetrievalGate, or what its gate= takes.",
            )
        bound = read_bound(each.config)
        if bound is None or bound.decision is not decision:  # else a router above has emitted it
            yield from emit_decision_event(decision, each.child())
        if decision.question.strip():
            return decision
        # as of an input without a question: there is nothing to search for
        return InvalidQuestionError("The question is empty.", hint="Pass at least one word.")
