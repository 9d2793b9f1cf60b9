"""How everything in this folder decides: by the gate, on the LLM's own draft where there is an LLM for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace

from llama_index.core.llms import LLM, ChatMessage, LLMMetadata, MessageRole
from llama_index.core.memory.types import BaseMemory
from llama_index.core.schema import QueryBundle

from rgate_integrations.decision import Decision, Draft
from rgate_integrations.engine.decision_engine import DecisionEngine
from rgate_integrations.engine.gate_like import GateLike, decide_messages, for_llm, resolve_gate
from rgate_integrations.engine.loading import DEFAULT_GATES
from rgate_integrations.engine.requests import valid_threshold
from rgate_integrations.llama_index.carried import Carried, carried_for, carrying, leave
from rgate_integrations.llama_index.drafts import LLMDrafter
from rgate_integrations.llama_index.events import announce
from rgate_integrations.runtime.flow import Call, Flow

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
        self.drafter = LLMDrafter(llm, tokens) if llm is not None else None
        self.memory = memory
        self.threshold: float | None = None

    @property
    def raises(self) -> bool:
        """Whether failures are raised, and not answered by retrieval; the gate says so."""
        return getattr(self.gate, "on_error", "retrieve") == "raise"

    def with_threshold(self, threshold: float | None) -> Decider:
        """Return a copy that decides at another threshold; None is the gate's own.

        Raises:
            ConfigurationError: It is not a number of at least 0.
        """
        if threshold is not None:
            valid_threshold(threshold)
        changed = copy(self)
        changed.threshold = threshold
        return changed

    def decide(
        self, bundle: QueryBundle, *, then: Callable[[Decision], Flow[Decision]] | None = None
    ) -> Flow[Decision]:
        """Decide, as a flow.

        A failing gate or LLM retrieves, unless the gate has ``on_error="raise"``. So does a question that the gate
        cannot understand without what was said before.

        Args:
            bundle: The question.
            then: What may still change the decision before it is announced; None changes nothing.
        """
        question = bundle.query_str
        taken = self.taken(bundle)
        if taken is not None:
            return taken
        carried = self._given(bundle)
        drafting = None
        if self.drafter is not None:
            drafting = _drafting(self.drafter, question, carried)
        history = yield from self._history(question)
        (decision,) = yield from decide_messages(
            self.gate, [question], [history], drafting=drafting, threshold=self.threshold
        )
        if then is not None:
            decision = yield from then(decision)
        announce(decision)
        return decision

    def taken(self, bundle: QueryBundle) -> Decision | None:
        """Return the decision that came with the request, if it is one that this decider would only repeat."""
        carried = self._given(bundle)
        return carried.decision if carried is not None and self._takes(carried) else None

    def drafted(self, bundle: QueryBundle) -> Flow[Decision]:
        """Return a decision for the sake of its draft, whichever gate made it, or decide."""
        carried = self._given(bundle)
        if carried is not None and carried.decision.draft is not None and self._has_its_writer(carried):
            return carried.decision
        return (yield from self.decide(bundle))

    def carrying(self, decision: Decision, bundle: QueryBundle) -> AbstractContextManager[None]:
        """Carry a decision of this decider to everything that is called inside."""
        return carrying(replace(self._carried(decision, bundle), bundle=None))

    def leave(self, decision: Decision, bundle: QueryBundle) -> None:
        """Leave a decision of this decider with its bundle, for what the caller does next with the bundle."""
        carried = self._carried(decision, bundle)
        if carried.maker is self:  # what came with the request is there already
            leave(replace(carried, bundle=bundle))

    def _carried(self, decision: Decision, bundle: QueryBundle) -> Carried:
        earlier = carried_for(bundle)
        if earlier is not None and earlier.decision is decision:
            return earlier
        llm = self.drafter.llm if self.drafter is not None else None
        return Carried(bundle.query_str, decision, self.origin, llm, self.threshold, maker=self)

    def _given(self, bundle: QueryBundle) -> Carried | None:
        carried = carried_for(bundle)
        if carried is not None and carried.maker is self:
            return None  # left by an earlier request with the same bundle
        return carried

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

    def _takes(self, carried: Carried) -> bool:
        """Whether this decider would only repeat what was done for a decision that came with the request."""
        if self.threshold not in (None, carried.threshold):
            return False
        return self._has_its_writer(carried) and _same(self.origin, carried.gate)

    def _has_its_writer(self, carried: Carried) -> bool:
        """Whether the draft that came with the request is by the LLM that is to draft here, if there is one."""
        return self.drafter is None or self.drafter.llm is carried.llm


def _drafting(drafter: LLMDrafter, question: str, carried: Carried | None) -> Flow[list[Draft | None]]:
    """Draft for a batch of one, as gates take drafts; what this LLM wrote for the request already will do."""
    if carried is not None and carried.llm is drafter.llm:
        draft = carried.decision.draft
        if draft is not None and draft.source == "llm":
            return [draft]
    draft = yield from drafter.drafting(question)
    return [draft]


def _same(one: GateLike, other: GateLike) -> bool:
    """Whether two gates are one, or were made alike: each ``gate=None`` loads a gate of its own."""
    if one is other:
        return True
    if not isinstance(one, DecisionEngine) or not isinstance(other, DecisionEngine):
        return False
    return one.config() == other.config() and one.llm is other.llm
