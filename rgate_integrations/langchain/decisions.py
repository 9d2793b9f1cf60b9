"""What runnables do with decisions: bind them to a call's config, emit them as events, turn them into queries.

A router *binds* its decision to the config of the arm that it runs, where the same gate inside the arm finds it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import adispatch_custom_event, dispatch_custom_event
from langchain_core.runnables import Runnable, RunnableConfig, RunnableSequence
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import ensure_config, set_config_context
from langchain_core.runnables.utils import ConfigurableFieldSpec
from pydantic import Field

from rgate_integrations.answering.claims import Rewriter
from rgate_integrations.answering.query_plan import QueryPlan, plan_queries_flow
from rgate_integrations.decision import Decision, Options, valid_threshold
from rgate_integrations.engine.decider import BoundDecision, Decider
from rgate_integrations.engine.follow_ups import list_search_texts
from rgate_integrations.errors import ConfigurationError, InvalidQuestionError
from rgate_integrations.langchain.questions import UserTurn, parse_question
from rgate_integrations.langchain.runnable import Run, run_batch
from rgate_integrations.runtime.flow import Call, Flow

THRESHOLD_KEY = "retrieval_threshold"
THRESHOLD_SPEC = ConfigurableFieldSpec(
    id=THRESHOLD_KEY,
    annotation=float,
    name="Retrieval threshold",
    description="Retrieve iff p_known is below it; overrides the gate's own threshold for one call.",
    default=None,
)


def read_threshold(gate: Runnable[Any, Decision], config: RunnableConfig) -> float | None:
    """Return the threshold of the call, or else of the gate's own config or the `RetrievalGate`; None if none is set.

    Raises:
        ConfigurationError: The threshold in a config is not a finite number of at least 0.
    """
    threshold = config.get("configurable", {}).get(THRESHOLD_KEY)
    if threshold is None and isinstance(gate, RunnableSequence):
        return read_threshold(gate.last, config)
    if threshold is None and isinstance(gate, RunnableBindingBase):
        return read_threshold(gate.bound, gate.config)
    return getattr(gate, "threshold", None) if threshold is None else valid_threshold(threshold)


def with_config(gate: Runnable[Any, Decision], config: RunnableConfig | None) -> Runnable[Any, Decision]:
    """Return a gate with a config for its runs, or the gate itself if there is none."""
    return gate if config is None else gate.with_config(config)


# LangChain and LangGraph leave keys that begin with two underscores out of traces and checkpoints.
DECISION_KEY = "__rgate_decided"
AHEAD_KEY = "__rgate_ahead"
"""Key for the decision to search that a router binds when it searches before it has decided; see `search_config`."""


def bind_decision(
    config: RunnableConfig,
    gate: Runnable[Any, Decision],
    value: Any,
    decision: Decision | None,
    *,
    key: str = DECISION_KEY,
) -> RunnableConfig:
    """Return a copy of a config with a decision about an input, for the same gate inside an arm to reuse.

    Args:
        config: The config.
        gate: The gate that decided.
        value: The input.
        decision: The decision. None means that the gate has not decided yet; then a decision to search is bound.
        key: `DECISION_KEY` binds the decision for this question. `AHEAD_KEY`, for a search before the final decision
            (see `search_config`), binds it for any question, since the arm may rephrase it.
    """
    threshold = read_threshold(gate, config)
    # Unwrap the user's bindings and chains: a guarded retriever in an arm compares the gate itself with its own.
    while isinstance(gate, RunnableBindingBase | RunnableSequence):
        gate = gate.bound if isinstance(gate, RunnableBindingBase) else gate.last
    decision = decision or Decision(question="", retrieve=True, p_known=0.0)
    turn = UserTurn(decision.question)
    # The gate may be the user's own runnable, which reads inputs in its own way.
    with contextlib.suppress(InvalidQuestionError):
        turn = parse_question(value, getattr(gate, "input_key", None))
    bound = BoundDecision(
        # While searching ahead, it does not matter what the question becomes in the arm.
        turn.question if key == DECISION_KEY else None,
        decision,
        gate=getattr(gate, "unadjusted", gate),
        llm=getattr(gate, "llm", None),
        threshold=threshold,
        search_texts=list_search_texts(turn.question, turn.lines),
        # An arm may rephrase the question, and must not lose its passages by that.
        for_any=decision.retrieve,
    )
    # A decision replaces an earlier one to search ahead.
    return {**config, "configurable": {**config.get("configurable", {}), AHEAD_KEY: None, key: bound}}


def read_bound(config: RunnableConfig) -> BoundDecision | None:
    """Return the decision that `bind_decision` put into a config; None if there is none."""
    return config.get("configurable", {}).get(DECISION_KEY)


def search_config(config: RunnableConfig) -> RunnableConfig:
    """Return the config for the gate of a component that searches, such as a guarded retriever.

    While a surrounding router searches before it decides, this config makes the gate reuse the router's provisional
    decision to search. Otherwise the given config is returned unchanged.
    """
    bound = config.get("configurable", {}).get(AHEAD_KEY)
    rebound = {**config.get("configurable", {}), DECISION_KEY: bound}
    return config if bound is None else {**config, "configurable": rebound}


EVENT = "retrieval_gate"

_EMITTED = {
    "question",
    "retrieve",
    "p_known",
    "threshold",
    "reason",
    "override",
    "gate",
    "error",
    "warnings",
    "partial_answer",
    "p_helps",
    "outcome",
    "llm",
    "p_covered",
    "corpus",
    "corpora",
}


def emit_decision_event(decision: Decision, config: RunnableConfig | None = None) -> Flow[None]:
    """Emit a decision as a custom event named `EVENT`; in a LangGraph node, also in the graph's custom stream.

    The event is a dict with ``version`` and the main fields of the decision. In the stream, its key is `EVENT`. A
    decision that a surrounding router made, and so has emitted, is not emitted again.

    Args:
        decision: The decision.
        config: The config of the run that made it; when None, that of the surrounding run.
    """
    bound = read_bound(search_config(ensure_config(config)))
    if bound is not None:
        about_other = decision.question != bound.question and bound.concerns(decision.question, None)
        if bound.decision is decision or (about_other and bound.about(decision.question) == decision):
            return
    # Adding a key keeps the version; changing the meaning of one needs a new version.
    emitted = {"version": 1, **decision.model_dump(mode="json", include=_EMITTED)}
    with contextlib.suppress(RuntimeError):  # outside a run there are no listeners
        yield Call(dispatch_custom_event, adispatch_custom_event, EVENT, emitted, config=config)
    if "langgraph" in sys.modules:  # otherwise no graph is running, and langgraph may not be installed
        from langgraph.config import get_stream_writer

        # Of a chain that is a node, LangGraph sets the context only for the first step; later steps get the config.
        settings = {**ensure_config()["configurable"], **ensure_config(config)["configurable"]}
        # Outside a node of a graph there is no writer.
        with (
            contextlib.suppress(RuntimeError, KeyError),
            set_config_context({"configurable": settings}) as context,
        ):
            context.run(lambda: get_stream_writer()({EVENT: emitted}))


class QueryPlanner(Options):
    """A gate, and the options for turning its decisions into queries.

    Attributes:
        gate: A `RetrievalGate`, or any runnable from a question to a `Decision`.
        always_include_question: Whether the question is always a query; if not, it is one only if there is no
            claim to search for.
        max_queries: Maximum number of queries per question, at least 1.
        filter_claims: Whether the gate judges each claim and drops the known ones. Only a `RetrievalGate` can do
            that; with any other runnable, no claim counts as known. The threshold is that of the `RetrievalGate`,
            not the one of a call's config.
    """

    gate: Any
    always_include_question: bool = True
    max_queries: int = Field(default=6, ge=1)
    filter_claims: bool = False

    def decide_and_plan(
        self, runs: Sequence[Run], rewriter: Rewriter | None = None
    ) -> Flow[list[tuple[Decision, QueryPlan] | Exception]]:
        """Return the decision about each input and its query plan, or the exception of an input that failed.

        The gate is called once for all inputs. The earlier turns of an input are searched for with a follow-up.

        Args:
            runs: The inputs and their runs.
            rewriter: Turns drafts into claims; when None, each sentence is a claim.
        """
        configs = [search_config(single.child("gate")) for single in runs]
        outputs = yield from run_batch(self.gate, [single.input for single in runs], configs)
        results: list[Any] = list(map(check_decision, outputs))
        decided = [index for index, result in enumerate(results) if isinstance(result, Decision)]
        decider = getattr(self.gate, "gate", None)
        plans = yield from plan_queries_flow(
            [results[index] for index in decided],
            histories=[self._read_history(runs[index].input, results[index]) for index in decided],
            gate=decider if self.filter_claims and isinstance(decider, Decider) else None,
            threshold=getattr(self.gate, "threshold", None),
            rewriter=rewriter,
            always_include_question=self.always_include_question,
            max_queries=self.max_queries,
        )
        for index, plan in zip(decided, plans, strict=True):
            results[index] = results[index], plan
        return results

    def _read_history(self, value: Any, decision: Decision) -> tuple[str, ...]:
        """Return the turns before a decision's question; none if it is not in the input, because it was condensed."""
        try:
            turn = parse_question(value, getattr(self.gate, "input_key", None))
        except InvalidQuestionError:  # the user's own gate may read inputs in its own way
            return ()
        return turn.lines if turn.question == decision.question else ()


def check_decision(result: Any) -> Decision | Exception:
    """Return a gate's result for an input, if it is a decision or an exception.

    Raises:
        ConfigurationError: It is something else.
    """
    if isinstance(result, Decision | Exception):
        return result
    raise ConfigurationError(
        f"The gate returned {type(result).__name__} instead of a Decision.",
        hint="Make it return a Decision, or pass a RetrievalGate or anything that RetrievalGate(gate=...) accepts.",
    )
