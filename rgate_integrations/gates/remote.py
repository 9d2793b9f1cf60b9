"""A gate that asks a decision server, ``load_gate("http://localhost:8377")``, and the HTTP client that it uses."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, ClassVar

from pydantic import ConfigDict, Field, SecretStr, TypeAdapter, ValidationError
from pydantic_core import from_json, to_jsonable_python

from rgate_integrations.decision import Decision, Override
from rgate_integrations.errors import ConfigurationError, EvidenceError, ServerError
from rgate_integrations.gates.ability import read_measured
from rgate_integrations.gates.base import Gate, GateInfo, NamedLLMGate, Score, Specs
from rgate_integrations.gates.evidence.base import Context, Evidence, EvidenceSpec, Piece
from rgate_integrations.models.bounded_http import (
    MAX_QUOTED,
    Answer,
    make_client,
    read_credentials,
    request,
    run_requests,
)

TOKEN = "RGATE_TOKEN"  # noqa: S105  the variable's name, not a token
"""Name of the environment variable with a decision server's token, for the server and for its clients."""

_READY_TIMEOUT = 0.25  # seconds; questions must not wait long for a server that has just failed
_ANSWER = TypeAdapter(dict[str, list[Decision]])
# The fields to send: not metadata, which only the client's rules read, nor threshold and timeout, which the client
# applies.
_SENT = {"question", "history", "draft", "popularity"}


class RemoteGate(NamedLLMGate):
    """Asks the gate of a decision server, for questions and for partial answers.

    A threshold of the request comes first, then this gate's ``threshold``, then the server's. A ``threshold`` of 0.5,
    the default, counts as not set. Concurrent callers share HTTP requests. If the server is down, slow or
    overloaded, the gate fails, so the question retrieves. Rules (``always=``, ``never=``) are applied here, and not
    sent.

    Attributes:
        url: Base URL of the server, such as ``http://localhost:8377``.
        token: The server's bearer token; None for the environment's ``RGATE_TOKEN``. Never part of a config.
        request_seconds: Maximum time of a request to the server, in seconds, above 0.
        llm_name: The LLM whose knowledge is judged; empty for the one that the server was started for.
        llm_name_source: Where the name was detected; empty if the user gave it.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "remote", "the gate of a server (rgate serve)", "what that gate looks at", "no", "one pass"
    )
    argument: ClassVar[str] = "url"
    model_config = ConfigDict(hide_input_in_errors=True)  # which may be the token, or a URL with a login

    url: str
    token: SecretStr | None = Field(default=None, exclude=True, repr=False)
    request_seconds: float = Field(default=10.0, gt=0, allow_inf_nan=False)

    def model_post_init(self, _: Any) -> None:
        """Check the URL, the token and the LLM's name now, not at the first decision.

        Raises:
            ConfigurationError: The URL or the token is invalid, both a token and a login in the URL were given, or
                the name is a folder with a measured ability, which a server cannot read.
            MissingDependencyError: The extra ``openai`` is not installed.
        """
        read_credentials(self.url, self.token or os.environ.get(TOKEN))
        # The server would judge an unknown LLM instead, and skip retrieval for what the measured one does not know.
        if self.llm_name and not self.llm_name_source and read_measured(self.llm_name) is not None:
            raise ConfigurationError(
                f"A decision server cannot read the measured ability in {self.llm_name!r}.",
                hint="Start the server with it: rgate serve --llm-name FOLDER; and omit llm_name= here.",
            )

    def answer_gate(self) -> Gate:
        """Return this gate. If the server's gate cannot judge partial answers, the server judges the question."""
        return self

    def question_gate(self) -> Gate:
        """Return this gate: the server also judges the question alone."""
        return self

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, re.sub("//.*@", "//***@", value) if name == "url" else value

    @property
    def specs(self) -> Specs:
        """The spec of the server's decision."""
        return (ServedDecisionSpec(self),)

    def score(self, evidence: Evidence) -> Score:
        """Return the server's decision as a score.

        Raises:
            EvidenceError: The server's gate failed.
        """
        decision = evidence[ServedDecisionSpec(self)]
        if decision.error is not None:
            raise EvidenceError(
                f"The server's gate failed: {decision.error.type}: {decision.error.message}",
                hint=decision.error.hint,
            )
        override, reason = decision.override, decision.reason
        if override is not None:  # the engine prepends it again
            reason = reason.removeprefix(override.reason).strip()
        elif decision.retrieve and decision.p_known >= decision.threshold:
            override = Override(retrieve=True, reason="The server's gate retrieves, whatever P(known) is.")
        return Score(
            decision.p_known,
            reason,
            decision.draft,
            decision.warnings,
            decision.signals,
            decision.llm,
            decision.threshold if self.threshold == type(self).model_fields["threshold"].default else None,
            override,
            decision.p_covered,
            decision.corpora,
            decision.outcome,
        )


@dataclass(frozen=True)
class ServedDecisionSpec(EvidenceSpec[Decision]):
    """Evidence: the decision of a server's gate, at that gate's threshold.

    Attributes:
        gate: The client's gate, which names the server and the LLM whose knowledge is judged.
    """

    reads_model: ClassVar[bool] = False  # the server truncates long questions itself
    reads_history: ClassVar[bool] = True

    gate: RemoteGate

    def compute(self, context: Context) -> Sequence[Piece[Decision]]:
        """Return the server's decision on each question, with one request for all."""
        gate = self.gate
        server = context.memory(
            ("decision server", gate.url, gate.token), lambda: DecisionClient(gate.url, gate.token)
        )
        items = [to_jsonable_python(request, include=_SENT) for request in context.requests]
        # Not longer than the callers wait: otherwise, they would give up, one after the other, before the client
        # finds the server slow.
        limits = [request.timeout or gate.request_seconds for request in context.requests]
        seconds = min(gate.request_seconds, max(limits))
        decisions = server.decide(items, gate.llm_name, gate.llm_name_source, seconds)
        # The client measures the time of the call, which includes the server's.
        return [
            Piece(decision, decision.cost.model_copy(update={"milliseconds": 0.0})) for decision in decisions
        ]


class DecisionClient:
    """Asks a decision server over HTTP.

    If the server did not answer, the next call first checks whether it is ready. So until the server is back,
    a call takes at most a quarter of a second instead of the whole timeout.

    Args:
        url: Base URL of the server, such as ``http://localhost:8377``.
        token: The bearer token; None for the environment's ``RGATE_TOKEN``.

    Raises:
        ConfigurationError: The URL or the token is invalid, or both a token and a login in the URL were
            given.
        MissingDependencyError: The extra ``openai`` is not installed.
    """

    def __init__(self, url: str, token: SecretStr | None) -> None:
        url, self._credentials = read_credentials(url, token or os.environ.get(TOKEN))
        self.url = url.removesuffix("/v1")
        self._is_broken = False
        self._next_probe = 0.0

    def decide(
        self, items: Sequence[Mapping[str, Any]], llm: str, llm_name_source: str, seconds: float
    ) -> list[Decision]:
        """Return a decision for each question.

        Args:
            items: The questions in the format of ``/v1/decide``.
            llm: Name of the LLM whose knowledge is judged; may be empty.
            llm_name_source: Where the name was detected; empty if the user gave it.
            seconds: Maximum time of the request and its complete answer, in seconds.

        Raises:
            ServerError: The server cannot be reached, did not answer in time, is not ready, rejected the
                request, or is not a decision server.
            ConfigurationError: The HTTP proxy in the environment is invalid.
        """
        if self._is_broken and not self._is_ready():
            raise ServerError(
                f"The decision server at {self.url} is not ready.",
                hint="Wait until it is ready, or check its log.",
            )
        self._is_broken = False
        body = {"questions": items, "llm": llm, "llm_name_source": llm_name_source}
        answer = self._send("POST", "/v1/decide", seconds=seconds, body=body)
        if answer.status != 200:
            try:
                words = from_json(answer.content)["error"]["message"]
            except (ValueError, LookupError, TypeError):  # another server, such as a proxy, answered
                words = answer.text
            raise ServerError(
                f"The decision server at {self.url} answered {answer.status}: "
                f"{self._credentials.redact(str(words))[:MAX_QUOTED]}",
                hint={
                    401: f"Set {TOKEN} to the server's token, or pass load_gate(url, token=...).",
                    529: "Add servers, or raise the server's --queue.",
                }.get(answer.status, "Check the URL and the server's log."),
            )
        try:
            decisions = _ANSWER.validate_json(answer.content)["decisions"]
        except (ValidationError, LookupError):
            decisions = []
        if len(decisions) != len(items):
            raise ServerError(
                f"The server at {self.url} does not answer like a decision server.",
                hint="Check that rgate serve runs at this URL, and that it is the same version as this client.",
            )
        return decisions

    def _is_ready(self) -> bool:
        """Ask a server that failed whether it is ready again; False if it was asked a moment ago."""
        start = monotonic()
        if start < self._next_probe:
            return False
        try:
            return self._send("GET", "/ready", seconds=_READY_TIMEOUT).status == 200
        finally:
            # As long again as this took; otherwise each batch in turn would wait for the same silent server.
            self._next_probe = 2 * monotonic() - start

    def _send(self, method: str, path: str, *, seconds: float, body: Any = None) -> Answer:
        import httpx

        try:
            return run_requests(self._request(method, path, seconds, body))
        except TimeoutError:
            problem = f"no complete answer within {seconds:g} s"
        except httpx.RequestError as error:
            problem = self._credentials.redact(f"{type(error).__name__}: {error}")
        self._is_broken = True
        # Raised outside the `except`, because a chained error of httpx may quote the request.
        raise ServerError(
            f"The decision server at {self.url} did not answer: {problem}",
            hint="Check the URL, and that rgate serve is running and not overloaded.",
        )

    async def _request(self, method: str, path: str, seconds: float, body: Any) -> Answer:
        headers = {**self._credentials.headers, "x-rgate-timeout-ms": str(1e3 * seconds)}
        async with make_client(self.url, headers) as client:
            return await request(client, method, self.url + path, seconds=seconds, body=body)
