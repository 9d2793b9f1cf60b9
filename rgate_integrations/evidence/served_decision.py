"""Evidence of a decision server: what a gate elsewhere has decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import SecretStr

from rgate_integrations.decision import Decision
from rgate_integrations.evidence.base import Context, EvidenceSpec, Inputs, Piece
from rgate_integrations.models.decision_server import DecisionServer


@dataclass(frozen=True)
class ServedDecisionSpec(EvidenceSpec[Decision]):
    """The decision of a server's gate, at its own threshold.

    Attributes:
        url: The server.
        token: Its token.
        seconds: How long a request may take.
        llm: The LLM whose knowledge is judged; may be empty.
        llm_known_by: Who said so, if the name was found and not given.
    """

    reads_model: ClassVar[bool] = False  # the server cuts what is too long
    reads_history: ClassVar[bool] = True

    url: str
    token: SecretStr | None
    seconds: float
    llm: str = ""
    llm_known_by: str = ""

    def compute(self, context: Context) -> Sequence[Piece[Decision]]:
        """Ask the server about all questions at once."""
        server = context.memory(
            ("decision server", self.url), lambda: DecisionServer(self.url, self.token, self.seconds)
        )
        items = [_item(each) for each in context.inputs]
        decisions = server.decide(items, self.llm, self.llm_known_by)
        return [Piece(decision, decision.cost) for decision in decisions]


def _item(inputs: Inputs) -> dict[str, Any]:
    item: dict[str, Any] = {"question": inputs.question, "history": list(inputs.history)}
    if inputs.draft is not None:
        item["draft"] = inputs.draft.model_dump(mode="json")
    if inputs.popularity is not None:
        item["popularity"] = inputs.popularity
    return item
