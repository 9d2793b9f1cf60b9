"""The gate of a decision server (``rgate serve``): ``load_gate("http://localhost:8377")``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field, SecretStr
from pydantic_core import to_jsonable_python

from rgate_integrations.decision import Decision, Override
from rgate_integrations.errors import EvidenceError
from rgate_integrations.gates.base import GateInfo, NamedLLMGate, Score, Specs
from rgate_integrations.gates.decision_server import DecisionServer
from rgate_integrations.gates.evidence.base import Context, Evidence, EvidenceSpec, Piece

_LOGIN = re.compile("//.*@")
_SENT = {"question", "history", "draft", "popularity"}


class RemoteGate(NamedLLMGate):
    """Decides as the gate of a server does, for questions and for begun answers, at the server's threshold.

    Concurrent callers share its requests. A server that is down, slow or full is a gate that fails: it retrieves.
    Rules are applied on this side.

    Attributes:
        url: The server, such as ``http://localhost:8377``.
        token: Its bearer token; that of the environment's ``RGATE_TOKEN`` when None. Never in a config.
        request_seconds: How long a request to the server may take.
        llm_name: The LLM whose knowledge is judged; where it is empty, the one that the server was started for.
        llm_known_by: Who said so, if the name was found and not given.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "remote", "the gate of a server (rgate serve)", "what that gate looks at", "no", "one pass"
    )
    argument: ClassVar[str] = "url"

    url: str
    token: SecretStr | None = Field(default=None, exclude=True, repr=False)
    request_seconds: float = Field(default=10.0, gt=0, allow_inf_nan=False)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, _LOGIN.sub("//***@", value) if name == "url" else value

    @property
    def specs(self) -> Specs:
        """The server's decision."""
        return (ServedDecisionSpec(self),)

    def score(self, evidence: Evidence) -> Score:
        """Take the server's score.

        Raises:
            EvidenceError: The server's gate failed.
        """
        decision = evidence[ServedDecisionSpec(self)]
        if decision.error is not None:
            failed = decision.error
            raise EvidenceError(
                f"The server's gate failed: {failed.type}: {failed.message}", hint=failed.hint
            )
        override = decision.override
        if override is None and decision.retrieve and decision.p_known >= decision.threshold:
            override = Override(retrieve=True, reason="The server's gate retrieves whatever P(known) is.")
        reason = decision.reason
        if override is not None:  # that of an override is put before it, here as on the server
            reason = reason.removeprefix(override.reason).strip()
        return Score(
            decision.p_known,
            reason,
            decision.draft,
            decision.warnings,
            decision.signals,
            decision.llm,
            decision.threshold,
            override,
        )


@dataclass(frozen=True)
class ServedDecisionSpec(EvidenceSpec[Decision]):
    """The decision of a server's gate, at its own threshold.

    Attributes:
        gate: Says which server, and whose knowledge is judged.
    """

    reads_model: ClassVar[bool] = False  # the server cuts what is too long
    reads_history: ClassVar[bool] = True

    gate: RemoteGate

    def compute(self, context: Context) -> Sequence[Piece[Decision]]:
        """Ask the server about all questions at once."""
        gate = self.gate
        server = context.memory(
            ("decision server", gate.url), lambda: DecisionServer(gate.url, gate.token, gate.request_seconds)
        )
        items = [to_jsonable_python(each, include=_SENT) for each in context.requests]
        decisions = server.decide(items, gate.llm_name, gate.llm_known_by)
        return [Piece(decision, decision.cost) for decision in decisions]
