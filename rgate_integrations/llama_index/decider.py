"""`QueryDecider`: one decision a request, which travels with its query, for everything in this folder.

An engine or a retriever binds its decision while its arm runs, so that nothing inside decides or drafts again. A
selector cannot: the router runs the arm after the selector has returned. So its decision is attached to the query
bundle, which the router passes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.llms import LLM, LLMMetadata
from llama_index.core.memory.types import BaseMemory
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.schema import QueryBundle, QueryType
from llama_index_instrumentation import get_dispatcher

from rgate_integrations.answering.drafting import attach_draft
from rgate_integrations.decision import Decision, Draft, Request, valid_threshold
from rgate_integrations.engine.decider import BoundDecision, read_item
from rgate_integrations.engine.loading import DEFAULT_GATES, GateOptions, resolve_gate
from rgate_integrations.engine.own_gate import GateLike
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.evidence.draft import generation_cost
from rgate_integrations.llama_index.drafting import LLMDrafter
from rgate_integrations.runtime.flow import Call, Flow

LLM_NAME_SOURCE = "LlamaIndex's metadata"  # where the name of an LLM was found, in decisions
_SPEAKERS = {
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",  # some providers' LLMs have these roles
    MessageRole.MODEL: "assistant",
}
_dispatcher = get_dispatcher(__name__)


class RetrievalGateEvent(BaseEvent):
    """A gate has decided.

    Attributes:
        decision: The decision.
    """

    decision: Decision

    @classmethod
    def class_name(cls) -> str:
        """Return the name of the event."""
        return "RetrievalGateEvent"


def get_llm_name(llm: LLM | None) -> str:
    """Return the name of an LLM from its metadata; empty if they have none."""
    name = "" if llm is None else llm.metadata.model_name
    return "" if name == LLMMetadata.model_fields["model_name"].default else name


def copy_bundle(query: QueryType) -> QueryBundle:
    """Return a new bundle: LlamaIndex's vector retriever writes the embedding into its own."""
    return QueryBundle(query) if isinstance(query, str) else replace(query)


@dataclass(frozen=True, kw_only=True)
class QueryDecision(BoundDecision):
    """A decision that travels with a query.

    Attributes:
        owner: The decider. Asked again, it decides anew: that is another request.
        bundle: The only bundle that the decision is for; None for every bundle with this question.
    """

    owner: QueryDecider
    bundle: QueryBundle | None = None


_current: ContextVar[QueryDecision | None] = ContextVar("rgate_decision", default=None)


def read_bound(bundle: QueryBundle) -> QueryDecision | None:
    """Return the decision that travels with a query; None if there is none, or it is for another bundle."""
    bound = _current.get()
    if bound is None or (bound.bundle is not None and bound.bundle is not bundle):
        return None
    return bound


class QueryDecider:
    """Decides for one question, once a request.

    A decision that came with the request is reused by the same gate, with the same LLM for drafts, at the same
    threshold. Another gate reuses its draft.

    Args:
        gate: A gate, or what `load_gate` takes; when None the shipped default for the source of the draft.
        draft_llm: Writes the drafts; None leaves them to the gate.
        tokens: Maximum number of tokens of a draft, at least 1.
        memory: Has the turns before the question, for engines that do not condense.
        llm: The LLM that answers, for P(known); ``draft_llm`` when None.
        **options: Rules, instead of the gate's own, and what is searched; see `GateOptions`.

    Attributes:
        gate: Decides, adjusted to the LLM.
        origin: The same gate before it was adjusted.
        threshold: The caller's threshold; None for the gate's own.
    """

    def __init__(
        self,
        gate: GateLike | str | None,
        draft_llm: LLM | None = None,
        tokens: int = 32,
        memory: BaseMemory | None = None,
        *,
        llm: LLM | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        if gate is None and draft_llm is not None:
            gate = DEFAULT_GATES["llm"]
        self.origin = resolve_gate(gate, **options)
        self.gate = self.origin.for_llm(get_llm_name(llm or draft_llm), LLM_NAME_SOURCE)
        self.draft_llm = draft_llm
        self.drafter = None if draft_llm is None else LLMDrafter(draft_llm, tokens)
        self.memory = memory
        self.threshold: float | None = None

    def decide(self, bundle: QueryBundle) -> Flow[Decision]:
        """Decide as `judge` does, and emit the decision."""
        decision = yield from self.judge(bundle)
        self.emit(decision, bundle)
        return decision

    def judge(self, bundle: QueryBundle) -> Flow[Decision]:
        """Return the decision for a question; reuse one that came with the request.

        A failing gate or LLM retrieves, unless the gate has ``on_error="raise"``. So does a question that the gate
        cannot understand without the earlier turns.
        """
        reusable = self.reusable(bundle)
        if reusable is not None:
            return reusable
        history = yield from self._read_history(bundle.query_str)
        item = read_item(bundle.query_str, history=history, threshold=self.threshold)
        new_drafts: list[Draft] = []
        if self.drafter is not None and isinstance(item, Request):
            inherited = self.inherited(bundle)
            draft: Draft | Exception | None = None if inherited is None else inherited.decision.draft
            if not isinstance(draft, Draft) or draft.source != "llm":  # else this LLM has written it already
                (draft,) = yield from self.drafter.write_drafts([item.question])
                new_drafts = [draft] if isinstance(draft, Draft) else []
            item = attach_draft(item, draft)
        (decision,) = yield from self.gate.flow([item])
        return decision.model_copy(update={"cost": decision.cost + generation_cost(new_drafts)})

    def emit(self, decision: Decision, bundle: QueryBundle) -> None:
        """Emit a new decision to LlamaIndex's listeners; one that came with the request has been emitted."""
        if self.reusable(bundle) is None:
            _dispatcher.event(RetrievalGateEvent(decision=decision))

    def reusable(self, bundle: QueryBundle) -> Decision | None:
        """Return the decision that came with the request, if this decider would only repeat it."""
        inherited = self.inherited(bundle)
        if inherited is None or not inherited.repeats(self.origin, self.threshold):
            return None
        return inherited.decision

    def inherited(self, bundle: QueryBundle) -> QueryDecision | None:
        """Return the decision that came with the request, if its draft is by the LLM that drafts here."""
        bound = read_bound(bundle)
        # One of its own is left from an earlier request with the same bundle.
        if bound is None or bound.owner is self or not bound.concerns(bundle.query_str, self.draft_llm):
            return None
        return bound

    @contextmanager
    def bind(self, decision: Decision, bundle: QueryBundle) -> Iterator[None]:
        """Pass a decision on to everything that is called inside."""
        bound = _current.get()
        if bound is None or bound.decision is not decision:
            bound = self._bound(decision, bundle)
        # Engines inside make new bundles of the question, so it holds for all of them.
        token = _current.set(replace(bound, bundle=None))
        try:
            yield
        finally:
            _current.reset(token)

    def attach(self, decision: Decision, bundle: QueryBundle) -> None:
        """Leave a decision with its bundle, for the next part to which the caller passes the bundle."""
        if self.reusable(bundle) is None:  # else it is there already
            _current.set(self._bound(decision, bundle))

    def _bound(self, decision: Decision, bundle: QueryBundle) -> QueryDecision:
        return QueryDecision(
            bundle.query_str,
            decision,
            gate=self.origin,
            llm=self.draft_llm,
            threshold=self.threshold,
            owner=self,
            bundle=bundle,
        )

    def _read_history(self, question: str) -> Flow[tuple[str, ...]]:
        """Return the turns before the question, as gates read them."""
        messages: list[ChatMessage] = []
        if self.memory is not None:
            messages = yield Call(self.memory.get, self.memory.aget)
        turns = []
        for message in messages:
            speaker = _SPEAKERS.get(message.role)
            if speaker is not None and message.content:
                turns.append(f"{speaker}: {message.content}")
        if turns[-1:] == [f"user: {question}"]:  # some engines store the question before they retrieve
            turns.pop()
        return tuple(turns)


class Gated:
    """An engine, a retriever or a selector with a decider, whose threshold can be changed."""

    decider: QueryDecider
    get_prompts: Callable[[], PromptDictType]

    def with_threshold(self, threshold: float | None) -> Self:
        """Return a copy with another threshold, for one question or for good.

        Args:
            threshold: Retrieve iff P(known) is below it, at least 0; None is the gate's own.

        Raises:
            ConfigurationError: It is not a number of at least 0.
        """
        if threshold is not None:
            valid_threshold(threshold)
        changed = copy(self)
        # Shallow: gate, LLM and index are shared.
        changed.decider = copy(self.decider)
        changed.decider.threshold = threshold
        return changed

    def update_prompts(self, prompts_dict: PromptDictType) -> None:
        """Change prompts, by the keys of ``get_prompts``.

        Raises:
            ConfigurationError: A key has no prompt.
        """
        known = self.get_prompts()
        for key in prompts_dict:
            if key not in known:
                raise ConfigurationError(
                    f"There are no prompts under {key!r}.", hint=f"Known keys: {', '.join(known)}."
                )
        # LlamaIndex's own method takes no key of a part inside a part, and what it calls is protected.
        for key, prompt in prompts_dict.items():
            part: Any = self
            *names, last = key.split(":")
            for name in names:
                part = part._get_prompt_modules()[name]  # noqa: SLF001
            part._update_prompts({last: prompt})  # noqa: SLF001


class WithoutPrompts:
    """A part of LlamaIndex that could have prompts, but has none."""

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        pass
