"""How everything in this folder decides: once a request, on the LLM's own draft where there is an LLM for it.

A decision travels with its query, so that nothing further down decides or drafts a second time. An engine or a
retriever that has decided binds the decision while its arm runs. A selector cannot: the router runs the arm after the
selector has returned. So its decision is attached to the query bundle, which the router hands on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.llms import LLM, LLMMetadata
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.memory.types import BaseMemory
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.schema import QueryBundle, QueryType
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.dispatcher import active_instrument_tags, instrument_tags

from rgate_integrations.answering.partial_answer import draft_options, says_unsupported
from rgate_integrations.decision import Decision, Draft
from rgate_integrations.engine.decision_engine import DecisionEngine
from rgate_integrations.engine.gate_like import (
    GateLike,
    decide_messages,
    for_llm,
    resolve_gate,
    with_rules,
)
from rgate_integrations.engine.loading import DEFAULT_GATES
from rgate_integrations.engine.requests import valid_threshold
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.rules import RuleOptions
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.flow import Call, Flow
from rgate_integrations.runtime.records import read_logprobs
from rgate_integrations.runtime.text import encodable, redact

KNOWN_BY = "LlamaIndex's metadata"
"""Who told the name of an LLM that was not given."""

DRAFT_TAG = "rgate_draft"
"""In the ``tags`` of every LlamaIndex event of a drafting call: what the LLM writes there is not the answer."""

_SPEAKERS = {
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",  # as some providers' LLMs name themselves
    MessageRole.MODEL: "assistant",
}
_log = logging.getLogger("rgate_integrations")
_dispatcher = get_dispatcher(__name__)


class RetrievalGateEvent(BaseEvent):
    """A gate has decided.

    Attributes:
        decision: The decision.
    """

    decision: Decision

    @classmethod
    def class_name(cls) -> str:
        """Return the name under which the event is sent."""
        return "RetrievalGateEvent"


def name_of(llm: LLM | None) -> str:
    """Return the name of an LLM, as its metadata tell it; empty where they tell none."""
    name = "" if llm is None else llm.metadata.model_name
    return "" if name == LLMMetadata.model_fields["model_name"].default else name


def copy_bundle(query: QueryType) -> QueryBundle:
    """Return a bundle of one's own: LlamaIndex's vector retriever writes the embedding into the one it is given."""
    return QueryBundle(query) if isinstance(query, str) else replace(query)


@dataclass(frozen=True)
class BoundDecision:
    """A decision of this request.

    Attributes:
        question: The question.
        decision: The decision.
        maker: Who decided. It decides anew when it is asked again: that is another request.
        bundle: The only bundle that the decision is for; None: for every bundle with this question.
    """

    question: str
    decision: Decision
    maker: Decider
    bundle: QueryBundle | None = None


_current: ContextVar[BoundDecision | None] = ContextVar("rgate_decision", default=None)


class Decider:
    """Decides for one question and announces the decision.

    A decision that came with the request is taken over: by the same gate, on a draft of the same LLM, at the same
    threshold. By another gate, the LLM's draft is.

    Args:
        gate: A gate, or what `load_gate` takes; when None the shipped default for the source of the draft.
        llm: Writes the drafts; None leaves them to the gate.
        tokens: Maximum number of tokens that it writes, at least 1.
        memory: Has the turns before the question, where it is not condensed.
        answers: The LLM that answers, if it is known: the gate judges what it knows. ``llm`` when None.
        **rules: ``always=`` and ``never=``, in place of the gate's own.

    Attributes:
        gate: What decides.
        origin: What decides, as the user gave it, before it was told which LLM it judges.
    """

    def __init__(
        self,
        gate: GateLike | str | None,
        llm: LLM | None = None,
        tokens: int = 32,
        memory: BaseMemory | None = None,
        *,
        answers: LLM | None = None,
        **rules: Unpack[RuleOptions],
    ) -> None:
        if gate is None and llm is not None:
            gate = DEFAULT_GATES["llm"]
        self.origin = with_rules(resolve_gate(gate), **rules)
        self.gate = for_llm(self.origin, name_of(answers or llm), KNOWN_BY)
        self.llm = llm
        self.drafter = None if llm is None else LLMDrafter(llm, tokens)
        self.memory = memory
        self.threshold: float | None = None

    def decide(self, bundle: QueryBundle) -> Flow[Decision]:
        """Decide as `judge` does, and announce it."""
        decision = yield from self.judge(bundle)
        self.announce(decision, bundle)
        return decision

    def judge(self, bundle: QueryBundle) -> Flow[Decision]:
        """Decide, as a flow.

        A failing gate or LLM retrieves, unless the gate has ``on_error="raise"``. So does a question that the gate
        cannot understand without what was said before.

        Args:
            bundle: The question.
        """
        taken = self.taken(bundle)
        if taken is not None:
            return taken
        history = yield from self._history(bundle.query_str)
        drafting, drafts = None, None
        if self.drafter is not None:
            given = self.given(bundle)
            draft = None if given is None else given.decision.draft
            if (
                draft is not None and draft.source == "llm"
            ):  # what this LLM wrote for the request already will do
                drafts = [draft]
            else:
                drafting = self._draft(self.drafter, bundle)
        (decision,) = yield from decide_messages(
            self.gate,
            [bundle.query_str],
            [history],
            drafting=drafting,
            drafts=drafts,
            threshold=self.threshold,
        )
        return decision

    def announce(self, decision: Decision, bundle: QueryBundle) -> None:
        """Tell LlamaIndex's listeners of a decision that did not come with the request."""
        if self.taken(bundle) is None:
            _dispatcher.event(RetrievalGateEvent(decision=decision))

    def taken(self, bundle: QueryBundle) -> Decision | None:
        """Return the decision that came with the request, if it is one that this decider would only repeat."""
        given = self.given(bundle)
        if given is None or self.threshold not in (None, given.maker.threshold):
            return None
        return given.decision if _same_gate(self.origin, given.maker.origin) else None

    def given(self, bundle: QueryBundle) -> BoundDecision | None:
        """Return what came with the request, whichever gate decided, if its draft is by the LLM that drafts here."""
        bound = _current.get()
        # One of its own was left by an earlier request with the same bundle.
        if bound is None or bound.question != bundle.query_str or bound.maker is self:
            return None
        if bound.bundle is not None and bound.bundle is not bundle:
            return None
        return bound if self.llm is None or self.llm is bound.maker.llm else None

    @contextmanager
    def bind(self, decision: Decision, bundle: QueryBundle) -> Iterator[None]:
        """Hand a decision to everything that is called inside."""
        bound = _current.get()
        if bound is None or bound.decision is not decision:
            bound = BoundDecision(bundle.query_str, decision, maker=self)
        token = _current.set(replace(bound, bundle=None))
        try:
            yield
        finally:
            _current.reset(token)

    def attach(self, decision: Decision, bundle: QueryBundle) -> None:
        """Leave a decision with its bundle, for what the caller does next with the bundle."""
        if self.taken(bundle) is None:  # what came with the request is there already
            _current.set(BoundDecision(bundle.query_str, decision, maker=self, bundle=bundle))

    def _draft(self, drafter: LLMDrafter, bundle: QueryBundle) -> Flow[list[Draft | None]]:
        """Draft for a batch of one, as gates take drafts."""
        return [(yield from drafter.drafting(encodable(bundle.query_str)))]

    def _history(self, question: str) -> Flow[tuple[str, ...]]:
        """Return the turns before the question, as gates read them."""
        if self.memory is None:
            return ()
        messages: list[ChatMessage] = yield Call(self.memory.get, self.memory.aget)
        turns = []
        for message in messages:
            speaker = _SPEAKERS.get(message.role)
            if speaker is not None and message.content:
                turns.append(f"{speaker}: {message.content}")
        if turns[-1:] == [f"user: {question}"]:  # some engines note the question before they retrieve
            turns.pop()
        return tuple(turns)


class Gated:
    """What engines, retrievers and selectors have in common: a decider, whose threshold can be changed."""

    decider: Decider
    get_prompts: Callable[[], PromptDictType]

    def with_threshold(self, threshold: float | None) -> Self:
        """Return a copy of this at another threshold, for a question or for good.

        Args:
            threshold: Retrieve where P(known) is below it, at least 0; None is the gate's own.

        Raises:
            ConfigurationError: It is not a number of at least 0.
        """
        if threshold is not None:
            valid_threshold(threshold)
        changed = copy(self)
        changed.decider = copy(self.decider)
        changed.decider.threshold = threshold
        return changed

    def update_prompts(self, prompts_dict: PromptDictType) -> None:
        """Change prompts, by the keys that ``get_prompts`` gives.

        Raises:
            ConfigurationError: A key names a part that is not there.
        """
        # LlamaIndex's own method takes no key of a part within a part.
        for key, prompt in prompts_dict.items():
            part: Any = self
            *names, own_key = key.split(":")
            for name in names:
                parts = part._get_prompt_modules()
                if name not in parts:
                    raise ConfigurationError(
                        f"There are no prompts under {key!r}.",
                        hint=f"Known keys: {', '.join(self.get_prompts())}.",
                    )
                part = parts[name]
            part._update_prompts({own_key: prompt})


class WithoutPrompts:
    """A part of LlamaIndex that could have prompts, and has none."""

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        pass


def _same_gate(one: GateLike, other: GateLike) -> bool:
    """Whether two gates are one, or were made alike: each ``gate=None`` loads a gate of its own."""
    if isinstance(one, DecisionEngine) and isinstance(other, DecisionEngine):
        return one.config() == other.config() and one.llm is other.llm
    return one is other


class LLMDrafter:
    """Lets a LlamaIndex LLM write the first tokens of its answer.

    It is asked with ``max_tokens`` and ``logprobs``. One that says that it does not take them is asked with fewer of
    them, and what worked is remembered. Events of the call have the tag `DRAFT_TAG`.

    Args:
        llm: The answering LLM. Of one with structured output the LLM inside drafts: the beginning of a JSON object
            says nothing.
        tokens: Maximum number of tokens of a draft, at least 1.
    """

    def __init__(self, llm: LLM, tokens: int = 32) -> None:
        while isinstance(llm, StructuredLLM):
            llm = llm.llm
        self.llm = llm
        self.tokens = tokens
        self._options = draft_options(tokens)

    def drafting(self, question: str) -> Flow[Draft | None]:
        """Write a draft, as a flow; None, and a line in the log, when the LLM fails."""
        llm = self.llm
        forms = self._options
        for number, options in enumerate(forms):
            if llm.metadata.is_chat_model:
                system = ChatMessage(role=MessageRole.SYSTEM, content=ANSWER.system)
                messages = [system, ChatMessage(role=MessageRole.USER, content=question)]
                asking = Call(llm.chat, llm.achat, messages, **options)
            else:
                prompt = f"{ANSWER.system}\n\nQuestion: {question}\nAnswer:"
                asking = Call(llm.complete, llm.acomplete, prompt, **options)
            try:
                with instrument_tags({**active_instrument_tags.get(), DRAFT_TAG: True}):
                    response = yield asking
            except Exception as error:  # providers raise errors of their own
                # A timeout says nothing about what the model takes: the next question is asked with everything.
                problem = redact(error, question)
                if not options or not says_unsupported(error):
                    _log.warning("The LLM wrote no draft: %s: %s", type(error).__name__, problem)
                    return None
                _log.info("The LLM refused %s: %s", ", ".join(options), problem)
            else:
                self._options = forms[number:]
                return self._draft(response)
        return None

    def _draft(self, response: ChatResponse | CompletionResponse) -> Draft:
        text = response.text if isinstance(response, CompletionResponse) else response.message.content
        # Each position is a list: the token that was written first, then those that were likely too.
        written = [position[0] for position in response.logprobs or [] if position]
        tokens, logprobs = read_logprobs(written)
        draft = Draft(
            text=(text or "").strip(),
            tokens=tokens,
            logprobs=logprobs or None,
            finished=False,
            source="llm",
            model=self.llm.metadata.model_name,
        )
        return draft.head(self.tokens)
