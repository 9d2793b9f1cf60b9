"""A decision travels with its request, so that nothing further down decides or drafts a second time.

An engine or a retriever that has decided carries the decision while its arm runs. A selector cannot: the router runs
the arm after the selector has returned. So its decision stays with the query bundle, which the router hands on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from llama_index.core.llms import LLM
from llama_index.core.schema import QueryBundle

from rgate_integrations.decision import Decision
from rgate_integrations.engine.gate_like import GateLike


@dataclass(frozen=True)
class Carried:
    """A decision of this request.

    Attributes:
        question: The question.
        decision: The decision.
        gate: The gate that made it, as the user gave it.
        llm: The LLM that wrote the draft; None if the gate drafted by itself.
        threshold: The threshold of this request; None for the gate's own.
        maker: Who decided. It decides anew when it is asked again: that is another request.
        bundle: The only bundle that the decision is for; None: for every bundle with this question.
    """

    question: str
    decision: Decision
    gate: GateLike
    llm: LLM | None
    threshold: float | None
    maker: object
    bundle: QueryBundle | None = None


_carried: ContextVar[Carried | None] = ContextVar("rgate_carried", default=None)


@contextmanager
def carrying(carried: Carried) -> Iterator[None]:
    """Carry a decision to everything that is called inside."""
    token = _carried.set(carried)
    try:
        yield
    finally:
        _carried.reset(token)


def leave(carried: Carried) -> None:
    """Leave a decision with its bundle, for what the caller does next with that very bundle."""
    _carried.set(carried)


def carried_for(bundle: QueryBundle) -> Carried | None:
    """Return the decision that came with a bundle, if there is one."""
    carried = _carried.get()
    if carried is None or carried.question != bundle.query_str:
        return None
    if carried.bundle is not None and carried.bundle is not bundle:
        return None
    return carried
