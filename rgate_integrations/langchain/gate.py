"""`RetrievalGate`: a gate as a LangChain runnable, with a router and a retriever made from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from langchain_core.documents import Document
from langchain_core.runnables import Runnable
from langchain_core.runnables.base import RunnableLike, coerce_to_runnable

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.look_first import LookFirst
from rgate_integrations.answering.routing import Strategy
from rgate_integrations.engine.gate_like import GateLike, answer_first_gates, for_llm, resolve_gate
from rgate_integrations.engine.loading import DEFAULT_GATE, DEFAULT_GATES
from rgate_integrations.gates.base import Gate
from rgate_integrations.langchain.gate_runnable import GateRunnable
from rgate_integrations.langchain.retriever import GatedRetriever
from rgate_integrations.langchain.router import RetrievalRouter

_Input = TypeVar("_Input")
_Retrieved = TypeVar("_Retrieved")
_Direct = TypeVar("_Direct")


class RetrievalGate(GateRunnable):
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

    Example:
        >>> from rgate_integrations.langchain import RetrievalGate
        >>> gate = RetrievalGate("constant:never")
        >>> gate.invoke("who wrote hamlet?").retrieve
        False
    """

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
    ) -> None:
        if gate is None:
            gate = DEFAULT_GATE if llm is None else DEFAULT_GATES["llm"]
        super().__init__(
            gate,
            threshold=threshold,
            input_key=input_key,
            llm=llm,
            tokens=tokens,
            condense=None if condense is None else coerce_to_runnable(condense),
            llm_name=llm_name,
            name=name,
        )

    def route(
        self,
        *,
        retrieve: RunnableLike[_Input, _Retrieved],
        direct: RunnableLike[_Input, _Direct],
        answer_first: bool | AnswerFirst = False,
        look_first: bool | LookFirst = False,
    ) -> RetrievalRouter[_Input, _Retrieved | _Direct]:
        """Return a runnable that sends each input to one of two arms.

        Args:
            retrieve: Gets the inputs of unknown questions; an existing RAG chain.
            direct: Gets the inputs of known questions; the LLM without retrieval.
            answer_first: Let ``direct`` begin to answer and judge its first tokens: it goes on if they are known,
                and is stopped if not. ``llm=`` is not asked then. This gate judges, or the one for begun answers
                that belongs to it, as there is beside the default and beside a tuned one; `AnswerFirst` has more
                to choose.
            look_first: Run ``retrieve`` up to its retriever for every input, while the gate decides, and compare what
                the LLM knows with what was found: only passages that help are read. Nothing is searched twice.
                `LookFirst` has more to choose. With ``answer_first``, an answer is begun only where that can change
                the outcome, and what was begun is compared with what was found.

        Raises:
            ConfigurationError: ``look_first`` or `AnswerFirst.prefetch`, and ``retrieve`` is neither a sequence of
                steps nor a retriever; or ``answer_first``, and the gate reads the question alone.
        """
        arm: Runnable[Any, Any] = coerce_to_runnable(direct)  # type: ignore[arg-type]  # a mapping is one
        strategy = Strategy(look_first=LookFirst.of(look_first))
        options = AnswerFirst.of(answer_first)
        if options is not None:
            judge, question_gate = answer_first_gates(self.gate, options.question_gate)
            strategy = replace(
                strategy,
                answer_first=options,
                judge=(self if judge is self.gate else self._reading_alike(judge)).for_arm(arm),
                question_gate=None
                if question_gate is None
                else self._reading_alike(question_gate).for_arm(arm),
            )
        return RetrievalRouter(self.for_arm(arm), retrieve=retrieve, direct=arm, strategy=strategy)

    def _reading_alike(self, gate: GateLike | Gate | str) -> RetrievalGate:
        """Return another gate that reads inputs as this one does."""
        if self.llm_name:  # one of the two may judge no LLM by its name
            gate = for_llm(resolve_gate(gate), self.llm_name)
        return RetrievalGate(
            gate,
            threshold=self.threshold,
            input_key=self.input_key,
            condense=self.condense,
        )

    def guard(
        self,
        retriever: RunnableLike[str, list[Document]],
        *,
        k: int | None = None,
        always_include_question: bool = True,
        max_queries: int = 6,
        filter_claims: bool = False,
        when_known: str = "",
    ) -> GatedRetriever:
        """Return a retriever that finds nothing for known questions, and searches claims for the others.

        Args:
            retriever: What to guard: a retriever, or any runnable or function from a query to documents.
            k: Maximum number of documents; by default no limit of its own.
            always_include_question: Whether the question itself is always searched.
            max_queries: Maximum number of queries a question, at least 1.
            filter_claims: Whether the gate judges each claim and drops the known ones.
            when_known: Text of the one document that a known question finds, for `create_retriever_tool`; by default
                it finds none.
        """
        return GatedRetriever(
            retriever=coerce_to_runnable(retriever),
            gate=self,
            k=k,
            always_include_question=always_include_question,
            max_queries=max_queries,
            filter_claims=filter_claims,
            when_known=when_known,
        )


def as_retrieval_gate(gate: RetrievalGate | GateLike | Gate | str | None) -> RetrievalGate:
    """Return a `RetrievalGate` as it is, and make one of anything that its ``gate`` argument takes."""
    return gate if isinstance(gate, RetrievalGate) else RetrievalGate(gate)
