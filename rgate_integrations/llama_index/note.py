"""The note: a node that stands in for passages when a question is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from llama_index.core.schema import NodeWithScore, TextNode
from pydantic import Field, SkipValidation

from rgate_integrations.decision import Decision

KNOWN = "No passages were needed for this question: answer it from what you know."
SCORE = 1e9
"""Above every cutoff, also those for BM25 and inner products; finite, for JSON."""


class _Metadata(dict[str, Any]):
    """Metadata that has every key: postprocessors that sort by a ``date`` fail on a node without one."""

    def __missing__(self, key: str) -> None:
        return None


class _Note(TextNode):
    """A text node that keeps its metadata as it is; validation would make a plain dict of it."""

    metadata: Annotated[dict[str, Any], SkipValidation] = Field(default_factory=_Metadata, alias="extra_info")


def note_of(decision: Decision, text: str = KNOWN) -> NodeWithScore:
    """Return the note for a decision, which its ``metadata["rgate"]`` is, as in the metadata of a response."""
    node = _Note(
        text=text,
        extra_info=_Metadata(rgate=decision.model_dump(mode="json")),
        excluded_llm_metadata_keys=["rgate"],
        excluded_embed_metadata_keys=["rgate"],
    )
    return NodeWithScore(node=node, score=SCORE)


def facts_in(nodes: Sequence[NodeWithScore]) -> dict[str, Any] | None:
    """Return what the note among some nodes says of its decision; None when there is no note."""
    for node in nodes:
        facts = node.node.metadata.get("rgate")
        if isinstance(facts, dict) and facts.get("retrieve") is False:
            return facts
    return None
