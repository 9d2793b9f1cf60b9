"""How the gateway carries out `RoutedCall`, for one chat completion."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import httpx

from rgate_integrations.answering.claims import planning
from rgate_integrations.answering.partial_answer import BufferedAnswer, PartialAnswer, TokenStream
from rgate_integrations.answering.routing import Outcomes, RoutedCall, Strategy
from rgate_integrations.decision import Decision, Draft
from rgate_integrations.engine.gate_like import decide_messages
from rgate_integrations.errors import EvidenceError
from rgate_integrations.gates.evidence.search import FoundPassage
from rgate_integrations.index.hybrid import fuse
from rgate_integrations.index.retriever import Hit, Retriever, passage_id
from rgate_integrations.runtime.files import parse_json
from rgate_integrations.runtime.flow import Call, Flow, Step, run
from rgate_integrations.runtime.records import as_logprob
from rgate_integrations.serving.upstream import read_chunks
from rgate_integrations.serving.wire import Asked

_LONGEST_LINE = 1 << 20


class UpstreamAnswer(BufferedAnswer):
    """An answer as the upstream streams it: server-sent events, whose bytes are kept as they come.

    Args:
        send: Sends the request.

    Attributes:
        response: The upstream's response; None before it came. Of a status other than 200 nothing is read: it is
            for the client.
    """

    def __init__(self, send: Callable[[], Any]) -> None:
        super().__init__(PartialAnswer(), TokenStream(_never_blocking, self._open))
        self.response: httpx.Response | None = None
        self._send = send
        self._line = b""

    @property
    def is_refused(self) -> bool:
        """Whether the upstream did not begin to answer, and said why."""
        return self.response is not None and self.response.status_code != 200

    async def _open(self) -> AsyncIterator[bytes]:
        self.response = await self._send()
        if self.is_refused:
            raise EvidenceError(f"The upstream server answered {self.response.status_code}.")
        self.partial.has_end = False
        return read_chunks(self.response)

    def read(self, chunk: bytes) -> bool:
        """Note the text in the events that end in a chunk; returns False for a call of a tool."""
        *lines, self._line = (self._line + chunk).split(b"\n")
        self._line = self._line[:_LONGEST_LINE]
        is_text = True
        for line in lines:
            if line.startswith(b"data:"):
                is_text = self._read_event(line[5:].strip()) and is_text
        return is_text

    def _read_event(self, data: bytes) -> bool:
        if data == b"[DONE]":
            self.partial.has_end = True
            return True
        try:
            event = parse_json(data)
            choice = event["choices"][0]
            if choice.get("finish_reason"):
                self.partial.has_end = True
            delta = choice["delta"]
            if delta.get("tool_calls") or delta.get("function_call"):
                return False
            text = delta.get("content")
            if isinstance(text, str) and text:
                self.partial.pieces.append(text)
            self.partial.model = str(event.get("model") or "")
            # Only where the client asked for them: then each token has one.
            for token in (choice.get("logprobs") or {}).get("content") or ():
                logprob = as_logprob(float(token["logprob"]))
                self.partial.tokens.append(str(token["token"]))
                self.partial.logprobs.append(logprob)
        except (AttributeError, LookupError, TypeError, ValueError):
            pass  # an event of another kind
        return True


class GatewayCall(RoutedCall):
    """One chat completion.

    Args:
        strategy: What is looked at before there is a decision.
        asked: The question and the turns before it.
        search: Searches for queries; None where there is nothing to search.
        send: Sends the request as the client sent it.
        timeout: How long a gate may take, in seconds.
    """

    def __init__(
        self,
        strategy: Strategy,
        asked: Asked,
        *,
        search: PassageSearch | None,
        send: Callable[[], Any],
        timeout: float,
    ) -> None:
        super().__init__(strategy, [None])
        self._asked = asked
        self._search = search
        self._send = send
        self._timeout = timeout

    def decide(self) -> Flow[list[Decision | Exception]]:
        """Ask the gate about the question."""
        return list((yield from self._ask(self.strategy.question_gate)))

    def screen(self) -> Flow[list[Decision | Exception | None]]:
        """Ask the gate about the question."""
        return list((yield from self._ask(self.strategy.question_gate)))

    def judge(self, drafts: dict[int, Draft | None]) -> Flow[Outcomes]:
        """Ask the gate about what was begun."""
        found = yield from self._ask(self.strategy.judge, drafts=list(drafts.values()))
        return dict(zip(drafts, found, strict=True))

    def begin(self, place: int) -> UpstreamAnswer:
        """Let the upstream begin to answer."""
        return UpstreamAnswer(self._send)

    def search(self) -> Step:
        """Return the step that searches for the question; its result is a list with the list of hits."""
        assert self._search is not None  # noqa: S101  a strategy that searches ahead has it
        return Call(self._search.find_each, None, [self._asked.search_text])

    def passages(self, place: int, found: Any) -> Sequence[FoundPassage]:
        """Return what was found as it is judged."""
        return [FoundPassage(hit.passage.text, hit.passage.title) for hit in found]

    def question(self, place: int) -> str:
        """Return the question."""
        return self._asked.question

    def _ask(self, gate: Any, **options: Any) -> Flow[list[Decision]]:
        asked = self._asked
        return (
            yield from decide_messages(
                gate, [asked.question], [asked.history], timeout=self._timeout, **options
            )
        )


class PassageSearch:
    """Searches for what decisions need.

    Args:
        retriever: Searches.
        k: Passages a question.
    """

    def __init__(self, retriever: Retriever, k: int) -> None:
        self._retriever = retriever
        self._k = k

    def find_each(self, queries: list[str]) -> list[list[Hit]]:
        """Return the hits of each query."""
        return self._retriever.search(queries, self._k)

    def find(self, asked: Asked, decision: Decision) -> list[Hit]:
        """Return what is found for a question and for the claims of its draft."""
        (plan,) = run(planning([decision]))
        queries = [asked.search_text]
        for query in plan.queries:
            if query.claim is not None:
                queries.append(query.text)
        return fuse(self.find_each(queries), key=passage_id, k=self._k)


def _never_blocking() -> Iterator[Any]:
    raise NotImplementedError("The gateway only awaits.")
