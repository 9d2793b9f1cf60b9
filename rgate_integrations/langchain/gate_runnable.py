"""`GateRunnable`: a gate as a LangChain runnable, from a question to a `Decision`. `RetrievalGate` adds to it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Self, TypeAlias

from langchain_core.messages import AnyMessage, BaseMessage
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.utils import ConfigurableFieldSpec
from pydantic import Field, PrivateAttr

from rgate_integrations.decision import Decision
from rgate_integrations.engine.gate_like import GateLike, decide_messages, for_llm, resolve_gate
from rgate_integrations.engine.loading import DEFAULT_GATE
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.base import Gate
from rgate_integrations.langchain.chat_models import CONDENSE_TAG, ChatDrafter, tagged
from rgate_integrations.langchain.chat_models import llm_name as name_in
from rgate_integrations.langchain.decision_context import bound_decision
from rgate_integrations.langchain.questions import Questions
from rgate_integrations.langchain.runnable import BatchCall, FlowRunnable, RunBatch
from rgate_integrations.runtime.flow import Flow

QuestionInput: TypeAlias = str | PromptValue | BaseMessage | Mapping[str, Any] | Sequence[Any]
"""What a question is read from: text, a prompt value, a message, a mapping that holds any of these, or messages."""

KNOWN_BY = "its chat model"
"""Who told the name of an LLM that was found in a chain."""

THRESHOLD_KEY = "retrieval_threshold"

THRESHOLD_SPEC = ConfigurableFieldSpec(
    id=THRESHOLD_KEY,
    annotation=float,
    name="Retrieval threshold",
    description="Retrieve iff p_known is below it; overrides the gate's own for one call.",
    default=None,
)


class GateRunnable(FlowRunnable[QuestionInput, Decision]):
    """Decides whether to retrieve; `RetrievalGate` describes its fields, and makes them."""

    gate: Any  # what decides; as Any, it can stand in the schema of a config
    threshold: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    input_key: str | None = None
    llm: Runnable[Any, Any] | None = None
    tokens: int = Field(default=32, ge=1)
    condense: Runnable[Any, Any] | None = None
    llm_name: str = ""

    _gate_name: str | None = PrivateAttr(default=None)
    _origin: Any = PrivateAttr(default=None)
    _drafter: ChatDrafter | None = PrivateAttr(default=None)

    def __init__(self, gate: GateLike | Gate | str, **fields: Any) -> None:
        # Not in a validator: pydantic would turn its errors into one of its own.
        named = fields.get("llm_name") or ""
        if is_decision_model(gate):
            from rgate_integrations.langchain.decisions import DecisionModelGate

            gate = DecisionModelGate(gate)
        super().__init__(gate=resolve_gate(gate, named), **fields)
        self._gate_name = gate if isinstance(gate, str) else None
        self._origin = self.gate
        if self.llm is not None:
            self.gate = for_llm(self.gate, name_in(self.llm), KNOWN_BY)
            self._drafter = ChatDrafter(self.llm, self.tokens)

    @property
    def origin(self) -> GateLike:
        """What decides, as the user gave it, where this is a copy that judges the LLM of an arm."""
        decides: GateLike = self._origin
        return decides

    def for_arm(self, direct: Runnable[Any, Any]) -> Self:
        """Return a copy that judges what the LLM of an arm knows; itself where that is not told, or was given."""
        gate = for_llm(self.gate, name_in(direct), KNOWN_BY)
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

    def flow(self, batch: RunBatch) -> Flow[list[Decision | Exception]]:
        """Decide for a batch in one call of the gate; an input without a question is its own error.

        The call's options may be ``drafts``, one an input, which are judged instead of any that would be written,
        and ``threshold_at_most``, above which no input's threshold goes.
        """
        thresholds = [given_threshold(self, config) for config in batch.configs]
        most = batch.options.get("threshold_at_most")
        if most is not None:
            thresholds = [most if given is None else min(given, most) for given in thresholds]
        drafts = batch.options.get("drafts")
        questions = Questions.read(batch.inputs, self.input_key)
        if drafts is None:
            # What was decided above in the same request is not decided again.
            for place, question in list(questions.texts.items()):
                decision = bound_decision(
                    batch.configs[place],
                    question,
                    gate=self.origin,
                    llm=self.llm,
                    threshold=thresholds[place],
                )
                if decision is not None:
                    questions.decide(place, decision)
        if self.condense is not None and questions.histories:
            conversations = questions.conversations
            configs = [tagged(batch.child(place), CONDENSE_TAG) for place in conversations]
            rewritten = yield BatchCall(self.condense, list(conversations.values()), configs)
            questions.condense(rewritten, on_error=getattr(self.gate, "on_error", "retrieve"))
        places = list(questions.texts)
        if not places:
            return questions.results([])
        asked = list(questions.texts.values())
        drafting = None
        if drafts is not None:
            drafts = [drafts[place] for place in places]
        elif self._drafter is not None:
            histories = [questions.histories.get(place, []) for place in places]
            drafting = self._drafter.drafting(asked, [batch.child(place) for place in places], histories)
        decisions = yield from decide_messages(
            self.gate,
            asked,
            questions.lines,
            drafting=drafting,
            drafts=drafts,
            threshold=[thresholds[place] for place in places],
            metadata=[batch.configs[place].get("metadata") for place in places],
        )
        return questions.results(decisions)


def given_threshold(gate: Runnable[Any, Decision], config: RunnableConfig) -> float | None:
    """Return the threshold that a caller gave, for one input or for the gate; None for the gate's own.

    Raises:
        ConfigurationError: The one in the config is not a number of at least 0.
    """
    given = config.get("configurable", {}).get(THRESHOLD_KEY)
    if given is None:
        return getattr(gate, "threshold", None)
    value = float(given) if isinstance(given, Real) else math.nan
    if not 0.0 <= value < math.inf:
        raise ConfigurationError(
            f"{THRESHOLD_KEY} must be a number of at least 0, not {given!r}.",
            hint='Pass it as {"configurable": {"' + THRESHOLD_KEY + '": 0.5}}.',
        )
    return value


def own_threshold(gate: Runnable[Any, Decision] | None) -> float | None:
    """Return the threshold of what a `RetrievalGate` is made of; None if it is not known."""
    return getattr(gate.gate, "threshold", None) if isinstance(gate, GateRunnable) else None


def as_gate_runnable(gate: Any = None) -> Runnable[Any, Decision]:
    """Return a runnable as it is, and make one of anything that `RetrievalGate` takes as its ``gate``."""
    if isinstance(gate, Runnable) and not is_decision_model(gate):
        return gate
    return GateRunnable(DEFAULT_GATE if gate is None else gate, name="RetrievalGate")


def is_decision_model(gate: Any) -> bool:
    """Whether it is one of LangChain's decision models, which are runnables from a state to typed answers."""
    # Older versions have none; where one is, its module is imported.
    module = sys.modules.get("langchain_core.decisions")
    return module is not None and isinstance(gate, module.BaseDecisionModel)
