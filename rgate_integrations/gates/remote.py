"""The gate of a decision server (``rgate serve``), ``load_gate("http://localhost:8377")``, and its HTTP client."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field, SecretStr, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from rgate_integrations.decision import Decision, Override
from rgate_integrations.errors import EvidenceError, ServerError
from rgate_integrations.gates.base import Gate, GateInfo, NamedLLMGate, Score, Specs
from rgate_integrations.gates.evidence.base import Context, Evidence, EvidenceSpec, Piece
from rgate_integrations.models.bounded_http import Answer, make_client, request, run_requests
from rgate_integrations.models.credentials import read_credentials

TOKEN = "RGATE_TOKEN"  # noqa: S105  its name, not itself
"""The environment variable that has the token of a decision server, for the server and for its clients."""

_PROBE = 0.25  # seconds
_QUOTED = 300  # characters of a server's own words in an error
_ANSWER = TypeAdapter(dict[str, list[Decision]])
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
        llm_name_source: Where the name was found; empty if it was given.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "remote", "the gate of a server (rgate serve)", "what that gate looks at", "no", "one pass"
    )
    argument: ClassVar[str] = "url"

    url: str
    token: SecretStr | None = Field(default=None, exclude=True, repr=False)
    request_seconds: float = Field(default=10.0, gt=0, allow_inf_nan=False)

    def answer_gate(self) -> Gate:
        """Return itself: the server has both gates."""
        return self

    def question_gate(self) -> Gate:
        """Return itself: the server has both gates."""
        return self

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
        override, reason = decision.override, decision.reason
        if override is not None:  # whoever applies it says its reason again
            reason = reason.removeprefix(override.reason).strip()
        elif decision.retrieve and decision.p_known >= decision.threshold:
            override = Override(retrieve=True, reason="The server's gate retrieves whatever P(known) is.")
        return Score(
            decision.p_known,
            reason,
            decision.draft,
            decision.warnings,
            decision.signals,
            decision.llm,
            decision.threshold,
            override,
            decision.p_covered,
            decision.corpora,
            decision.outcome,
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
            ("decision server", gate.url), lambda: DecisionClient(gate.url, gate.token, gate.request_seconds)
        )
        items = [to_jsonable_python(each, include=_SENT) for each in context.requests]
        decisions = server.decide(items, gate.llm_name, gate.llm_name_source)
        return [Piece(decision, decision.cost) for decision in decisions]


class DecisionClient:
    """Asks a decision server, one request at a time.

    A server that did not answer is looked at before it is asked again: the question costs as long as it takes to
    refuse a connection, or at most a quarter of a second, until the server says that it is ready.

    Args:
        url: The server's base, such as ``http://localhost:8377``.
        token: The bearer token; that of the environment's ``RGATE_TOKEN`` when None.
        seconds: How long a request and its whole answer may take.

    Raises:
        ConfigurationError: The URL cannot be used, or the token cannot be sent.
    """

    def __init__(self, url: str, token: SecretStr | None, seconds: float) -> None:
        self.url, self._credentials = read_credentials(url, token or os.environ.get(TOKEN))
        self._seconds = seconds
        self._is_broken = False

    def decide(self, items: Sequence[Mapping[str, Any]], llm: str, llm_name_source: str) -> list[Decision]:
        """Ask about several questions.

        Args:
            items: The questions, as ``/v1/decide`` takes them.
            llm: Name of the LLM whose knowledge is judged; may be empty.
            llm_name_source: Where the name was found; empty if it was given.

        Raises:
            ServerError: The server could not be asked, is full, refused the request, or gave no such answer.
        """
        if self._is_broken and self._send("GET", "/ready", seconds=_PROBE).status != 200:
            raise ServerError(f"The decision server at {self.url} is not ready.")
        self._is_broken = False
        body = {"questions": items, "llm": llm, "llm_name_source": llm_name_source}
        answer = self._send("POST", "/v1/decide", seconds=self._seconds, body=body)
        if answer.status != 200:
            said = self._credentials.redact(answer.text)[:_QUOTED]
            raise ServerError(
                f"The decision server at {self.url} answered {answer.status}: {said}",
                hint=f"Set {TOKEN}." if answer.status == 401 else "",
            )
        try:
            decisions = _ANSWER.validate_json(answer.content)["decisions"]
        except (ValidationError, LookupError):
            decisions = []
        if len(decisions) != len(items):
            raise ServerError(f"{self.url} does not answer as a decision server does.", hint="rgate serve")
        return decisions

    def _send(self, method: str, path: str, *, seconds: float, body: Any = None) -> Answer:
        import httpx

        try:
            return run_requests(self._request(method, path, seconds, body))
        except TimeoutError:
            trouble = f"no complete answer within {seconds:g} s"
        except httpx.RequestError as error:
            trouble = self._credentials.redact(f"{type(error).__name__}: {error}")
        self._is_broken = True
        # Nothing is raised inside an `except`: a chained error of httpx may quote what was sent.
        raise ServerError(
            f"The decision server at {self.url} could not be asked: {trouble}", hint="Is rgate serve running?"
        )

    async def _request(self, method: str, path: str, seconds: float, body: Any) -> Answer:
        headers = {"x-rgate-timeout-ms": str(1e3 * seconds)}
        async with make_client(self.url, self._credentials.headers) as client:
            return await request(client, method, self.url + path, seconds=seconds, body=body, headers=headers)
