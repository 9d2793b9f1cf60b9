"""How everything in this folder decides: by the gate, on the LLM's own draft where there is an LLM for it."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from typing import Any, Self

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole
from llama_index.core.llms import LLM, LLMMetadata
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.memory.types import BaseMemory
from llama_index.core.schema import QueryBundle
from llama_index_instrumentation.dispatcher import active_instrument_tags, instrument_tags

from rgate_integrations.answering.partial_answer import DraftRequest, says_unsupported
from rgate_integrations.decision import Decision, Draft
from rgate_integrations.engine.decision_engine import DecisionEngine
from rgate_integrations.engine.gate_like import GateLike, decide_messages, for_llm, resolve_gate
from rgate_integrations.engine.loading import DEFAULT_GATES
from rgate_integrations.engine.requests import valid_threshold
from rgate_integrations.llama_index.decision_context import (
    DRAFT_TAG,
    BoundDecision,
    announce,
    attach,
    bind,
    bound_decision,
)
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.flow import Call, Flow
from rgate_integrations.runtime.logprobs import read_logprobs

KNOWN_BY = "LlamaIndex's metadata"
"""Who told the name of an LLM that was not given."""


def name_of(llm: LLM | None) -> str:
    """Return the name of an LLM, as its metadata tell it; empty where they tell none."""
    name = "" if llm is None else llm.metadata.model_name
    return "" if name == LLMMetadata.model_fields["model_name"].default else name


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
    ) -> None:
        if gate is None and llm is not None:
            gate = DEFAULT_GATES["llm"]
        self.origin = resolve_gate(gate)
        self.gate = for_llm(self.origin, name_of(answers or llm), KNOWN_BY)
        self.llm = llm
        self.drafter = LLMDrafter(llm, tokens) if llm is not None else None
        self.memory = memory
        self.threshold: float | None = None

    def decide(self, bundle: QueryBundle) -> Flow[Decision]:
        """Decide as `judge` does, and announce a decision that did not come with the request."""
        decision = yield from self.judge(bundle)
        if self.taken(bundle) is None:
            announce(decision)
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
        drafting = None if self.drafter is None else self._draft(self.drafter, bundle)
        (decision,) = yield from decide_messages(
            self.gate, [bundle.query_str], [history], drafting=drafting, threshold=self.threshold
        )
        return decision

    def taken(self, bundle: QueryBundle) -> Decision | None:
        """Return the decision that came with the request, if it is one that this decider would only repeat."""
        given = self._given(bundle)
        if given is None or self.threshold not in (None, given.maker.threshold):
            return None
        repeats = self._drafts_like(given.maker) and _same_gate(self.origin, given.maker.origin)
        return given.decision if repeats else None

    def drafted(self, bundle: QueryBundle) -> Flow[Decision]:
        """Return a decision for the sake of its draft, whichever gate made it, or decide."""
        given = self._given(bundle)
        if given is not None and given.decision.draft is not None and self._drafts_like(given.maker):
            return given.decision
        return (yield from self.decide(bundle))

    def bind(self, decision: Decision, bundle: QueryBundle) -> AbstractContextManager[None]:
        """Hand a decision of this decider to everything that is called inside."""
        return bind(replace(self._bound(decision, bundle), bundle=None))

    def attach(self, decision: Decision, bundle: QueryBundle) -> None:
        """Leave a decision of this decider with its bundle, for what the caller does next with the bundle."""
        bound = self._bound(decision, bundle)
        if bound.maker is self:  # what came with the request is there already
            attach(replace(bound, bundle=bundle))

    def _bound(self, decision: Decision, bundle: QueryBundle) -> BoundDecision:
        given = bound_decision(bundle)
        if given is not None and given.decision is decision:
            return given
        return BoundDecision(bundle.query_str, decision, maker=self)

    def _given(self, bundle: QueryBundle) -> BoundDecision | None:
        given = bound_decision(bundle)
        # One of its own was left by an earlier request with the same bundle.
        return None if given is None or given.maker is self else given

    def _drafts_like(self, maker: Decider) -> bool:
        """Whether another decider's draft is by the LLM that is to draft here, if there is one."""
        return self.llm is None or self.llm is maker.llm

    def _draft(self, drafter: LLMDrafter, bundle: QueryBundle) -> Flow[list[Draft | None]]:
        """Draft for a batch of one, as gates take drafts; what this LLM wrote for the request already will do."""
        given = self._given(bundle)
        if given is not None and given.maker.llm is self.llm:
            draft = given.decision.draft
            if draft is not None and draft.source == "llm":
                return [draft]
        return [(yield from drafter.drafting(bundle.query_str))]

    def _history(self, question: str) -> Flow[tuple[str, ...]]:
        """Return the turns before the question, as gates read them."""
        if self.memory is None:
            return ()
        messages: list[ChatMessage] = yield Call(self.memory.get, self.memory.aget)
        turns = []
        for message in messages:
            if message.role in (MessageRole.USER, MessageRole.ASSISTANT) and message.content:
                turns.append(f"{message.role.value}: {message.content}")
        if turns and turns[-1] == f"user: {question}":  # some engines note the question before they retrieve
            turns.pop()
        return tuple(turns)


class Gated:
    """What engines, retrievers and selectors have in common: a decider, whose threshold can be changed."""

    decider: Decider

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


def _same_gate(one: GateLike, other: GateLike) -> bool:
    """Whether two gates are one, or were made alike: each ``gate=None`` loads a gate of its own."""
    if one is other:
        return True
    if not isinstance(one, DecisionEngine) or not isinstance(other, DecisionEngine):
        return False
    return one.config() == other.config() and one.llm is other.llm


_log = logging.getLogger("rgate_integrations")


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
        self.llm = llm
        self.writer = _plain(llm)
        self.tokens = tokens
        self.request = DraftRequest(tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the LLM and the length; what was learned about it is learned again."""
        return type(self), (self.llm, self.tokens)

    def drafting(self, question: str) -> Flow[Draft | None]:
        """Write a draft, as a flow; None, and a line in the log, when the LLM fails."""
        refusal: Exception | None = None
        for form in self.request.forms:
            try:
                with instrument_tags({**active_instrument_tags.get(), DRAFT_TAG: True}):
                    response = yield self._asking(question, form)
            except Exception as error:  # providers raise errors of their own
                if not says_unsupported(error):
                    # A timeout says nothing about what the model takes: the next question is asked with everything.
                    _log.warning("The LLM wrote no draft: %s: %s", type(error).__name__, error)
                    return None
                _log.info("The LLM refused %s: %s", ", ".join(form) or "a request without options", error)
                refusal = error
            else:
                self.request.worked(form)
                return self._draft(response)
        _log.warning(
            "The LLM wrote no draft: it refused every form of the request, at last with: %s", refusal
        )
        return None

    def _asking(self, question: str, form: dict[str, Any]) -> Call:
        if not self.writer.metadata.is_chat_model:
            prompt = f"{ANSWER.system}\n\nQuestion: {question}\nAnswer:"
            return Call(self.writer.complete, self.writer.acomplete, prompt, **form)
        messages = [
            ChatMessage(role=MessageRole.SYSTEM, content=ANSWER.system),
            ChatMessage(role=MessageRole.USER, content=question),
        ]
        return Call(self.writer.chat, self.writer.achat, messages, **form)

    def _draft(self, response: ChatResponse | CompletionResponse) -> Draft:
        text = response.message.content if isinstance(response, ChatResponse) else response.text
        # Each position is a list: the token that was written first, then those that were likely too.
        written = [position[0] for position in response.logprobs or [] if position]
        tokens, logprobs = read_logprobs(written)
        draft = Draft(
            text=(text or "").strip(),
            tokens=tokens,
            logprobs=logprobs or None,
            finished=False,
            source="llm",
            model=self.writer.metadata.model_name,
        )
        return draft.head(self.tokens)


def _plain(llm: LLM) -> LLM:
    while isinstance(llm, StructuredLLM):
        llm = llm.llm
    return llm
