"""The client of ``rgate serve``: decisions over HTTP, and what to do while the server does not answer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr, TypeAdapter, ValidationError

from rgate_integrations.decision import Decision
from rgate_integrations.errors import ServerError
from rgate_integrations.models.credentials import read_credentials
from rgate_integrations.runtime.threads import reset_after_fork

if TYPE_CHECKING:
    import httpx

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
        seconds: How long a request may take.

    Raises:
        ConfigurationError: The URL cannot be used, or the token cannot be sent.
    """

    def __init__(self, url: str, token: SecretStr | None, seconds: float) -> None:
        self.url, self._credentials = read_credentials(url, token or os.environ.get(TOKEN))
        self._seconds = seconds
        self.after_fork()
        reset_after_fork(self)

    def after_fork(self) -> None:
        """Forget the connections, which are the parent's."""
        self._client: httpx.Client | None = None
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
        if self._is_broken and self._send("GET", "/ready", seconds=_PROBE).status_code != 200:
            raise ServerError(f"The decision server at {self.url} is not ready.")
        self._is_broken = False
        body = {"questions": items, "llm": llm, "llm_known_by": llm_known_by}
        response = self._send("POST", "/v1/decide", seconds=self._seconds, json=body)
        said = self._credentials.redact(response.text)[:_QUOTED]
        if response.status_code != 200:
            raise ServerError(
                f"The decision server at {self.url} answered {response.status_code}: {said}",
                hint=f"Set {TOKEN}." if response.status_code == 401 else "",
            )
        try:
            decisions = _ANSWER.validate_json(response.content)["decisions"]
        except (ValidationError, LookupError):
            decisions = []
        if len(decisions) != len(items):
            raise ServerError(f"{self.url} does not answer as a decision server does.", hint="rgate serve")
        return decisions

    def _send(self, method: str, path: str, *, seconds: float, **options: Any) -> httpx.Response:
        import httpx

        if self._client is None:
            self._client = httpx.Client(headers=self._credentials.headers)
        headers = {"x-rgate-timeout-ms": str(1e3 * seconds)}
        try:
            return self._client.request(method, self.url + path, headers=headers, timeout=seconds, **options)
        except httpx.HTTPError as error:
            self._is_broken = True
            trouble = self._credentials.redact(f"{type(error).__name__}: {error}")
            # The error of httpx is not chained: it may quote what was sent.
            raise ServerError(
                f"The decision server at {self.url} could not be asked: {trouble}",
                hint="Is rgate serve running?",
            ) from None
