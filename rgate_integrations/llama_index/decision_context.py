"""A decision travels with its query, so that nothing further down decides or drafts a second time.

An engine or a retriever that has decided binds the decision while its arm runs. A selector cannot: the router runs
the arm after the selector has returned. So its decision is attached to the query bundle, which the router hands on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Annotated, Any

from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.schema import NodeWithScore, QueryBundle, QueryType, TextNode
from llama_index_instrumentation import get_dispatcher
from pydantic import Field, SkipValidation

from rgate_integrations.decision import Decision

KNOWN = "No passages were needed for this question: answer it from what you know."
PLACEHOLDER_SCORE = 1e9
"""Above every cutoff, also those for BM25 and inner products; finite, for JSON."""


def copy_bundle(query: QueryType) -> QueryBundle:
    """Return a bundle of one's own: LlamaIndex's vector retriever writes the embedding into the one it is given."""
    return QueryBundle(query) if isinstance(query, str) else replace(query)


@dataclass(frozen=True)
class BoundDecision:
    """A decision of this request.

    Attributes:
        question: The question.
        decision: The decision.
        maker: The `Decider` that decided. It decides anew when it is asked again: that is another request.
        bundle: The only bundle that the decision is for; None: for every bundle with this question.
    """

    question: str
    decision: Decision
    maker: Any
    bundle: QueryBundle | None = None


_current: ContextVar[BoundDecision | None] = ContextVar("rgate_decision", default=None)


@contextmanager
def bind(bound: BoundDecision) -> Iterator[None]:
    """Hand a decision to everything that is called inside."""
    token = _current.set(bound)
    try:
        yield
    finally:
        _current.reset(token)


def attach(bound: BoundDecision) -> None:
    """Leave a decision with its bundle, for what the caller does next with that very bundle."""
    _current.set(bound)


def bound_decision(bundle: QueryBundle) -> BoundDecision | None:
    """Return the decision that came with a bundle, if there is one."""
    bound = _current.get()
    if bound is None or bound.question != bundle.query_str:
        return None
    return bound if bound.bundle is None or bound.bundle is bundle else None


class _Metadata(dict[str, Any]):
    """Metadata that has every key: postprocessors that sort by a ``date`` fail on a node without one."""

    def __missing__(self, key: str) -> None:
        return None


class _Placeholder(TextNode):
    """A text node that keeps its metadata as it is; validation would make a plain dict of it."""

    metadata: Annotated[dict[str, Any], SkipValidation] = Field(default_factory=_Metadata, alias="extra_info")


def placeholder_node(decision: Decision, text: str = KNOWN) -> NodeWithScore:
    """Return a node that stands in for passages when a question is known.

    Its ``metadata["rgate"]`` is the decision, as in the metadata of a response.
    """
    node = _Placeholder(
        text=text,
        extra_info=_Metadata(rgate=decision.model_dump(mode="json")),
        excluded_llm_metadata_keys=["rgate"],
        excluded_embed_metadata_keys=["rgate"],
    )
    return NodeWithScore(node=node, score=PLACEHOLDER_SCORE)


_dispatcher = get_dispatcher(__name__)

DRAFT_TAG = "rgate_draft"
"""In the ``tags`` of every LlamaIndex event of a drafting call: what the LLM writes there is not the answer."""


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


def announce(decision: Decision) -> None:
    """Send the decision through the dispatcher."""
    _dispatcher.event(RetrievalGateEvent(decision=decision))
