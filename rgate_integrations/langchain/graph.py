"""LangGraph: a node that decides whether to retrieve, the conditional edge that follows it, and checkpoints.

Nothing here imports langgraph: in every version, a node is a runnable and an edge is a function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda

from rgate_integrations.answering.claims import Claim
from rgate_integrations.answering.corpora import check_corpora, unknown_corpus
from rgate_integrations.answering.query_plan import JudgedClaim, Query, QueryPlan
from rgate_integrations.decision import Cost, Decision, Draft, Failure, Override, PartialAnswerInfo
from rgate_integrations.engine.own_gate import GateLike
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.langchain.decisions import check_decision, emit_decision_event
from rgate_integrations.langchain.gate import as_gate_runnable
from rgate_integrations.langchain.questions import as_mapping
from rgate_integrations.runtime.flow import Call, Flow, arun, run
from rgate_integrations.runtime.replies import get_field

STATE_KEY = "retrieval_decision"

_VALUES = (
    Decision,
    Override,
    Draft,
    Cost,
    Failure,
    PartialAnswerInfo,
    QueryPlan,
    Query,
    JudgedClaim,
    Claim,
)
CHECKPOINT_TYPES = tuple((kind.__module__, kind.__name__) for kind in _VALUES)
"""Module and name of each class of this package whose values a graph's state may hold.

A checkpoint names the class of each value. In strict mode, LangGraph restores only listed classes; in other modes,
it warns about the rest:

    serde = JsonPlusSerializer(allowed_msgpack_modules=CHECKPOINT_TYPES)
    graph.compile(checkpointer=InMemorySaver(serde=serde))
"""


def gate_node(
    gate: Runnable[Any, Decision] | GateLike | str | None = None, *, decision_key: str = STATE_KEY
) -> Runnable[Any, dict[str, Any]]:
    """Return a node that decides about the question in a graph's state, and stores the `Decision` there.

    The state is a mapping, a dataclass or a pydantic model, in which `RetrievalGate` finds the question and the
    earlier turns. The decision is also emitted as a custom event ``retrieval_gate``, and as
    ``{"retrieval_gate": {...}}`` in the graph's custom stream.

    Args:
        gate: A `RetrievalGate`, a ``gate`` argument for one, or any runnable from a question to a `Decision`; the
            default gate when None.
        decision_key: The key of the decision in the state.

    Raises:
        RGateError: The gate is invalid; see `RetrievalGate`.
        InvalidQuestionError: Raised by the node: the state has no question.
        ConfigurationError: Raised by the node: the threshold in the config is invalid, or the gate does not return a
            `Decision`.

    Examples:
        >>> node = gate_node("constant:never")
        >>> node.invoke({"question": "who wrote hamlet?"})["retrieval_decision"].retrieve
        False
    """
    judge = as_gate_runnable(gate)

    def decide_flow(state: Any, config: RunnableConfig) -> Flow[dict[str, Any]]:
        decision: Any = check_decision((yield Call(judge.invoke, judge.ainvoke, as_mapping(state), config)))
        # A gate does not emit its decisions, because a router emits them itself.
        yield from emit_decision_event(decision, config)
        return {decision_key: decision}

    def decide(state: Any, config: RunnableConfig) -> dict[str, Any]:
        return run(decide_flow(state, config))

    async def adecide(state: Any, config: RunnableConfig) -> dict[str, Any]:
        return await arun(decide_flow(state, config))

    return RunnableLambda(decide, adecide, name="gate")


def route_edge(
    *, retrieve: str | Mapping[str, str], direct: str, decision_key: str = STATE_KEY
) -> Callable[[Any], str | list[str]]:
    """Return a conditional edge that follows `gate_node`: known and unknown questions go to different nodes.

    Args:
        retrieve: The node for unknown questions, such as the one that searches; or a mapping from the names of the
            gate's corpora to nodes. With ``top=2`` the edge may lead to two nodes; if the gate failed, it leads to
            the first node of the mapping.
        direct: The node for known questions, such as the one that answers.
        decision_key: The key of the decision in the state. A decision restored from a checkpoint may be a mapping.

    Raises:
        ConfigurationError: ``retrieve`` is an empty mapping, or neither a string nor a mapping. Raised by the edge:
            the state has no decision, or ``retrieve`` has no node for any corpus that the decision names.

    Examples:
        >>> edge = route_edge(retrieve="search", direct="answer")
        >>> edge(gate_node("constant:never").invoke({"question": "who wrote hamlet?"}))
        'answer'
    """
    if not isinstance(retrieve, str | Mapping):
        raise ConfigurationError(
            f"retrieve= must be the name of a node, or a mapping to such names, not {type(retrieve).__name__}.",
            hint='For several corpora, pass their names and nodes: {"docs": "search_docs", "hr": "search_hr"}.',
        )
    nodes = {"": retrieve} if isinstance(retrieve, str) else dict(retrieve)
    check_corpora((), nodes)

    def route(state: Any) -> str | list[str]:
        decision = as_mapping(state).get(decision_key)
        must_retrieve = retrieves(decision)
        if must_retrieve is None:
            raise ConfigurationError(
                f"The state has no decision under {decision_key!r}.",
                hint="Put gate_node(...) with the same decision_key= before this edge, and declare that key in the "
                "schema of the state.",
            )
        if not must_retrieve:
            return direct
        corpora = get_field(decision, "corpora") or ()
        chosen = [nodes[name] for name in corpora if name in nodes]
        if corpora and not chosen and not isinstance(retrieve, str):
            raise unknown_corpus(corpora[0], nodes)
        # A single node as a string, which is the usual form of an edge's result.
        return chosen if len(chosen) > 1 else [*chosen, *nodes.values()][0]

    # LangGraph compiles and draws edges to the nodes in the return annotation.
    route.__annotations__["return"] = Literal[(*nodes.values(), direct)]
    return route


def retrieves(decision: Any) -> bool | None:
    """Return whether a decision retrieves; None for anything else. The decision may be a mapping from its JSON."""
    value = get_field(decision, "retrieve")
    return value if isinstance(value, bool) else None
