"""The client of ``rgate serve``: decisions over HTTP, and what to do while the server does not answer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import SecretStr, TypeAdapter, ValidationError

from rgate_integrations.decision import Decision
from rgate_integrations.errors import ServerError
from rgate_integrations.models.bounded_http import Answer, make_client, request, run_requests
from rgate_integrations.models.credentials import read_credentials

TOKEN = "RGATE_TOKEN"  # noqa: S105  its name, not itself
"""The environment variable that has the token of a decision server, for the server and for its clients."""

_PROBE = 0.25  # seconds
_QUOTED = 300  # characters of a server's own words in an error
_ANSWER = TypeAdapter(dict[str, list[Decision]])


class DecisionServer:
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

    def decide(self, items: Sequence[Mapping[str, Any]], llm: str, llm_known_by: str) -> list[Decision]:
        """Ask about several questions.

        Args:
            items: The questions, as ``/v1/decide`` takes them.
            llm: Name of the LLM whose knowledge is judged; may be empty.
            llm_known_by: Who said so, if the name was found and not given.

        Raises:
            ServerError: The server could not be asked, is full, refused the request, or gave no such answer.
        """
        if self._is_broken and self._send("GET", "/ready", seconds=_PROBE).status != 200:
            raise ServerError(f"The decision server at {self.url} is not ready.")
        self._is_broken = False
        body = {"questions": items, "llm": llm, "llm_known_by": llm_known_by}
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
            trouble = f"there was no whole answer within {seconds:g} s"
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
