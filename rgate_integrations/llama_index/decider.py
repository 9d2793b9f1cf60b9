"""`QueryDecider`: makes one decision per request, which travels with its query.

An engine, a retriever or a tool binds its decision while its arm runs, so that the same gate inside does not
decide or draft again. A selector cannot, because the router runs the arm after the selector has returned. So
its decision is attached to the query bundle, which the router passes to the arm.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.llms import LLM, LLMMetadata
from llama_index.core.memory.types import BaseMemory
from llama_index.core.prompts.mixin import PromptDictType, PromptMixin
from llama_index.core.schema import QueryBundle
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.dispatcher import active_instrument_tags, instrument_tags

from rgate_integrations.answering.drafting import DRAFT_TAG, DraftWriter, attach_draft
from rgate_integrations.decision import (
    Decision,
    Draft,
    Request,
    RequestFields,
    valid_count,
    valid_threshold,
)
from rgate_integrations.engine.decider import BoundDecision, Decider, Failed, read_item
from rgate_integrations.engine.loading import DEFAULT_GATES, GateOptions, resolve_gate
from rgate_integrations.engine.own_gate import GateLike
from rgate_integrations.errors import ConfigurationError, EvidenceError
from rgate_integrations.gates.evidence.model_outputs import generation_cost
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.flow import Call, Flow, variable_set
from rgate_integrations.runtime.records import read_logprobs
from rgate_integrations.runtime.replies import get_field

LLM_NAME_SOURCE = "LlamaIndex's metadata"  # source of an LLM's name, as decisions report it
_SPEAKERS = {
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",  # some providers use this role and the next
    MessageRole.MODEL: "assistant",
}
_PARTS = {
    "retrieve": ("a retriever", "Pass index.as_retriever(), or for a PassageIndex, IndexRetriever(index)."),
    "search": (
        "an index",
        "Pass a PassageIndex, BM25Index or HybridIndex; PassageIndex.load reads a folder.",
    ),
    "query": (
        "a query engine",
        "Pass index.as_query_engine(). For a chat engine, put a GatedRetriever around its retriever.",
    ),
    "complete": ("an LLM", 'Pass an LLM, such as OpenAI("gpt-4o"), or its name to load_gate(llm_name=…).'),
    "format_messages": ("a prompt", 'Pass PromptTemplate("Answer in one sentence: {query_str}").'),
    "postprocess_nodes": (
        "a node postprocessor",
        "Pass a list, such as [SimilarityPostprocessor(similarity_cutoff=0.7)].",
    ),
    "aget_all": ("a memory", "Pass ChatMemoryBuffer.from_defaults(), the one that the chat engine has."),
    "__call__": ("a tool", "Pass QueryEngineTool.from_defaults(engine), or a function."),
}
# How LlamaIndex's RetrieverTool asks the question of an agent, and how its QueryEngineTool does if the agent does not
# name the argument "input".
_RETRIEVER_TOOL_INPUT = re.compile(r"\n(?:input|question|query) is (.*)\n", re.DOTALL)
_ENGINE_TOOL_INPUT = re.compile(r"\{'\w+': (?:'.*'|\".*\")\}", re.DOTALL)
_dispatcher = get_dispatcher(__name__)


class RetrievalGateEvent(BaseEvent):
    """A LlamaIndex event: a gate has made a decision.

    Attributes:
        decision: The decision.
    """

    decision: Decision

    @classmethod
    def class_name(cls) -> str:
        """Return the name of the event."""
        return "RetrievalGateEvent"


def get_llm_name(llm: LLM | None) -> str:
    """Return the name of an LLM from its metadata; empty without an LLM, or if the metadata has no name.

    Raises:
        ConfigurationError: ``llm`` is not an LLM, but for example its name.
    """
    if llm is None:
        return ""
    check_part(llm, "complete")
    name = llm.metadata.model_name
    return "" if name == LLMMetadata.model_fields["model_name"].default else name


def read_question(bundle: QueryBundle) -> str:
    """Return the question of a query in its own words, without the name of an argument that an agent gave it."""
    text: Any = bundle.query_str  # the gate refuses what is no string
    if isinstance(text, str) and (match := _RETRIEVER_TOOL_INPUT.fullmatch(text)):
        return match[1]
    if isinstance(text, str) and _ENGINE_TOOL_INPUT.fullmatch(text):
        try:
            arguments = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # no dict in Python after all
            return text
        if len(arguments) == 1:
            (text,) = arguments.values()
    return text


def copy_bundle(bundle: QueryBundle) -> QueryBundle:
    """Return a copy of a bundle, with its question in its own words.

    A copy, because LlamaIndex's vector retriever writes the embedding into the bundle that it gets.
    """
    return replace(bundle, query_str=read_question(bundle))


def bundle_for(text: str, bundle: QueryBundle) -> QueryBundle:
    """Return the query that searches for a text of a request: a copy of ``bundle`` if the text is its question."""
    if text.strip() == bundle.query_str.strip():
        return copy_bundle(bundle)
    # What to embed, and the embedding, belong to the question.
    return QueryBundle(text, image_path=bundle.image_path)


def read_bundle(bundle: QueryBundle, **fields: Unpack[RequestFields]) -> Request | Failed:
    """Return a query as a request; as `Failed` if it has an image, which a retriever reads, but not the LLM alone."""
    item = read_item(read_question(bundle), **fields)
    if not bundle.image_path or isinstance(item, Failed):
        return item
    error = EvidenceError(
        "The query has an image, which the gate cannot read.",
        hint="To let the gate judge the text alone, leave image_path out of the QueryBundle.",
    )
    return Failed(error, item.question, item.threshold)


def check_part(part: object, method: str) -> None:
    """Raise a `ConfigurationError` if a user's object lacks the method of its role, such as ``retrieve``."""
    if not hasattr(part, method):
        kind, hint = _PARTS[method]
        raise ConfigurationError(
            f"An object of type {type(part).__name__} cannot be used as {kind}: it has no method {method}.",
            hint=hint,
        )


@dataclass(frozen=True, kw_only=True)
class QueryDecision(BoundDecision):
    """A decision that travels with a query to the other components that handle the same request.

    Attributes:
        owner: The decider that made the decision. If asked again, it decides anew, because that is a new request.
        bundle: The only bundle to which the decision applies; None for every bundle with this question.
    """

    owner: QueryDecider
    bundle: QueryBundle | None = None


_current: ContextVar[QueryDecision | None] = ContextVar("rgate_decision", default=None)


def read_bound(bundle: QueryBundle) -> QueryDecision | None:
    """Return the decision that travels with this query; None if there is none, or if it applies to another bundle."""
    bound = _current.get()
    if bound is None or (bound.bundle is not None and bound.bundle is not bundle):
        return None
    return bound


class QueryDecider:
    """Decides about one question, once per request.

    A decision may have come with the request, from a component that contains this one or ran before it. The decider
    reuses that decision if an equal gate made it. A decider with its own threshold or drafting LLM also requires that
    the decision was made with these. If only the gate or the threshold differs, the decider decides again, but reuses
    the draft of its drafting LLM.

    Args:
        gate: A gate, or an argument for `load_gate`; when None, the default gate, which depends on ``draft_llm``.
        draft_llm: Writes the drafts; when None, the gate writes any that it needs.
        tokens: Maximum number of tokens of a draft, at least 1.
        memory: A chat memory with the turns before the question, for engines that do not condense follow-ups.
        llm: The LLM that answers, to which P(known) is adjusted; ``draft_llm`` when None.
        adapter: The class that the user called, to be named in the error for an unknown option; this class when None.
        **options: Rules, instead of the gate's own, and corpora; see `GateOptions`.

    Attributes:
        gate: The gate, adjusted to the LLM.
        unadjusted: The same gate without the adjustment.
        threshold: The caller's threshold; None for the gate's own.

    Raises:
        ConfigurationError: ``tokens`` is not a whole number of at least 1, or ``draft_llm`` or ``llm`` is not an LLM.
        RGateError: The gate or an option is invalid; see `resolve_gate`.
    """

    def __init__(
        self,
        gate: GateLike | str | None,
        draft_llm: LLM | None = None,
        tokens: int = 32,
        memory: BaseMemory | None = None,
        *,
        llm: LLM | None = None,
        adapter: type | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        valid_count(tokens, "tokens")
        if gate is None and draft_llm is not None:
            gate = DEFAULT_GATES["llm"]
        self.unadjusted = resolve_gate(gate, adapter=adapter or type(self), **options)
        self.gate = self.unadjusted.for_llm(get_llm_name(llm or draft_llm), LLM_NAME_SOURCE)
        self.draft_llm = draft_llm
        self.drafter = None if draft_llm is None else LLMDrafter(draft_llm, tokens)
        if memory is not None:
            check_part(memory, "aget_all")
        self.memory = memory
        self.threshold: float | None = None

    def decide(self, bundle: QueryBundle) -> Flow[Decision]:
        """Return the decision about a question, as `judge` does, and emit it unless it came with the request."""
        decision = yield from self.judge(bundle)
        if self.reusable(bundle) is None:  # otherwise it has been emitted
            self.emit(decision)
        return decision

    def judge(self, bundle: QueryBundle) -> Flow[Decision]:
        """Return the decision about a question: the one that came with the request if `reusable`, or else a new one.

        If the gate fails, for example because the LLM wrote no draft, it retrieves, unless the gate has
        ``on_error="raise"``. It also retrieves for a question that the gate cannot understand without the
        earlier turns.
        """
        reusable = self.reusable(bundle)
        if reusable is not None:
            return reusable
        history = yield from self.read_history(bundle.query_str)
        item = read_bundle(bundle, history=history, threshold=self.threshold)
        new_drafts: list[Draft] = []
        if self.drafter is not None and isinstance(item, Request):
            inherited = self.inherited(bundle, self.draft_llm)
            draft: Draft | Exception | None = None if inherited is None else inherited.decision.draft
            # A draft with the source "llm" that came with the request is already by this LLM.
            if not isinstance(draft, Draft) or draft.source != "llm":
                (draft,) = yield from self.drafter.write_drafts([item.question])
                new_drafts = [draft] if isinstance(draft, Draft) else []
            item = attach_draft(item, draft)
        (decision,) = yield from self.gate.flow([item])
        return decision.model_copy(update={"cost": sum(map(generation_cost, new_drafts), decision.cost)})

    def emit(self, decision: Decision) -> None:
        """Emit a decision to LlamaIndex's listeners."""
        _dispatcher.event(RetrievalGateEvent(decision=decision))

    def reusable(self, bundle: QueryBundle, question_gate: Decider | None = None) -> Decision | None:
        """Return the decision that came with the request if this decider would make the same one; otherwise None.

        With ``question_gate``, which reads no draft: if that gate, adjusted to the drafting LLM, would.
        """
        bound = self.inherited(bundle, self.draft_llm if question_gate is None else None)
        if bound is None or (question_gate is not None and bound.llm is not None):
            return None
        gates = [self.unadjusted, self.gate]
        if question_gate is not None:
            gates = [question_gate]
            bound = replace(bound, gate=bound.gate.for_llm(get_llm_name(self.draft_llm), LLM_NAME_SOURCE))
        return bound.decision if bound.repeats(self.threshold, *gates) else None

    def inherited(self, bundle: QueryBundle, llm: LLM | None) -> QueryDecision | None:
        """Return the decision that came with the request; None if there is none.

        A decision about another question does not count. Nor does one that this decider made, because that was for an
        earlier request. Unless ``llm`` is None, the decision must have been made with the drafts of that LLM.
        """
        bound = read_bound(bundle)
        # Its own decision can only be from an earlier request with the same bundle.
        if bound is None or bound.owner is self or not bound.concerns(read_question(bundle), llm):
            return None
        return bound

    def bind(self, decision: Decision, bundle: QueryBundle) -> AbstractContextManager[None]:
        """Let all code in the ``with`` block, such as a gate inside an arm, find this decision."""
        bound = _current.get()
        if bound is None or bound.decision is not decision:
            bound = self._bound(decision, bundle)
        # Engines inside make new bundles of the question, so the decision applies to any bundle.
        return variable_set(_current, replace(bound, question=bundle.query_str, bundle=None))

    def attach(self, decision: Decision, bundle: QueryBundle) -> None:
        """Attach a decision to its bundle, for the next component that gets this bundle."""
        if self.reusable(bundle) is None:  # otherwise it is already attached
            _current.set(self._bound(decision, bundle))

    def _bound(self, decision: Decision, bundle: QueryBundle) -> QueryDecision:
        return QueryDecision(
            bundle.query_str,
            decision,
            gate=self.unadjusted,
            llm=self.draft_llm,
            threshold=self.threshold,
            owner=self,
            bundle=bundle,
        )

    def read_history(self, question: str) -> Flow[tuple[str, ...]]:
        """Return the turns before the question in the format that gates read: ``user: …`` and ``assistant: …``."""
        messages: list[ChatMessage] = []
        if self.memory is not None:
            # Without what `get` adds to the turns, such as facts or a summary that an LLM writes.
            messages = yield Call(self.memory.get_all, self.memory.aget_all)
        turns = []
        for message in messages:
            speaker = _SPEAKERS.get(message.role)
            if speaker is not None and message.content:
                turns.append(f"{speaker}: {message.content}")
        # The question itself is not an earlier turn.
        if turns[-1:] == [f"user: {question}"]:  # some engines store the question before they retrieve
            turns.pop()
        return tuple(turns)


class Gated(PromptMixin):
    """Mixin for an engine, retriever or selector with a gate.

    It adds `with_threshold`, which returns a copy, and an ``update_prompts`` that reaches prompts of nested parts.
    """

    decider: QueryDecider

    def with_threshold(self, threshold: float | None) -> Self:
        """Return a copy with another threshold; this object keeps its own.

        Args:
            threshold: The threshold for P(known), at least 0; None restores the gate's own.

        Raises:
            ConfigurationError: The threshold is not a finite number of at least 0.
        """
        changed = copy(self)
        # A shallow copy, which shares gate, LLM and index.
        changed.decider = copy(self.decider)
        changed.decider.threshold = None if threshold is None else valid_threshold(threshold)
        return changed

    def update_prompts(self, prompts_dict: PromptDictType) -> None:
        """Replace prompts, given by their keys in ``get_prompts``.

        Raises:
            ConfigurationError: ``get_prompts`` has no such key, or a value is not a prompt.
        """
        known = self.get_prompts()
        for key, prompt in prompts_dict.items():
            check_part(prompt, "format_messages")
            if key not in known:
                raise ConfigurationError(
                    f"Unknown prompt key {key!r}.", hint=f"The keys are: {', '.join(known) or 'none'}."
                )
        # LlamaIndex's own method accepts only the keys of a part, not those of a part's parts.
        for key, prompt in prompts_dict.items():
            part: Any = self
            *names, last = key.split(":")
            for name in names:
                part = part._get_prompt_modules()[name]  # noqa: SLF001
            part.update_prompts({last: prompt})


class WithoutPrompts:
    """Mixin for LlamaIndex components without prompts."""

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        pass


# --- drafts -------------------------------------------------------------------------------------------------


class LLMDrafter(DraftWriter[str]):
    """Lets a LlamaIndex LLM write the first tokens of its answer. The call's events have the tag `DRAFT_TAG`.

    Args:
        llm: The answering LLM.
        tokens: Maximum number of tokens of a draft, at least 1.
    """

    def __init__(self, llm: LLM, tokens: int) -> None:
        super().__init__(tokens)
        self.llm = llm
        limit = _length_option(llm, tokens)
        if limit:  # it is not an option of a call, so it is set in a copy
            self.llm = llm.model_copy(update=limit)
            self.forms = [{}]
        elif llm.class_name() == "GenAI":  # Google's has an option of another form
            self.forms = [{"generation_config": {"max_output_tokens": tokens}}]

    def ask(self, prompts: Sequence[str], options: dict[str, Any]) -> Flow[list[Any]]:
        """Ask the LLM a question, the only item of ``prompts``; return a list with its response or exception."""
        (question,) = prompts
        llm = self.llm
        if llm.metadata.is_chat_model:
            system = ChatMessage(role=MessageRole.SYSTEM, content=ANSWER.system)
            messages = [system, ChatMessage(role=MessageRole.USER, content=question)]
            call = Call(llm.chat, llm.achat, messages, **options)
        else:
            prompt = f"{ANSWER.system}\n\nQuestion: {question}\nAnswer:"
            call = Call(llm.complete, llm.acomplete, prompt, **options)
        try:
            with instrument_tags({**active_instrument_tags.get(), DRAFT_TAG: True}):
                return [(yield call)]
        except Exception as error:  # each provider raises its own exceptions
            return [error]

    def read_draft(self, answer: ChatResponse | CompletionResponse) -> Draft:
        """Convert a response to a draft."""
        # Each position is a list: the generated token, then other likely ones.
        tokens, logprobs = read_logprobs([position[0] for position in answer.logprobs or [] if position])
        return Draft.from_message(
            answer if isinstance(answer, CompletionResponse) else answer.message,
            usage=get_field(answer.raw, "usage"),
            tokens=tokens,
            logprobs=logprobs or None,
            source="llm",
            model=self.llm.metadata.model_name,
        )

    def private_texts(self, prompt: str) -> list[str]:
        """Return the only text that logs must not quote, the question."""
        return [prompt]


def _length_option(llm: Any, tokens: int) -> dict[str, Any]:
    """Return the field that limits the answers of an LLM whose calls have no option ``max_tokens``; else nothing."""
    fields = type(llm).model_fields
    if "max_tokens" not in fields:
        if "max_output_tokens" in fields:
            return {"max_output_tokens": max(16, tokens)}  # OpenAI's Responses refuse less
        if "max_new_tokens" in fields:
            return {"max_new_tokens": tokens}
        if llm.class_name() == "Ollama_llm":
            return {"additional_kwargs": {**llm.additional_kwargs, "num_predict": tokens}}
    return {}
