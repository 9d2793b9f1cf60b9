"""The gateway stands in front of an LLM's server (the upstream), and adds retrieval to unchanged applications.

It fails open: if the gate or the search fails, the upstream still answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.corpora import check_corpora, chosen_corpora
from rgate_integrations.answering.look_first import LookFirst
from rgate_integrations.answering.query_plan import plan_queries_flow
from rgate_integrations.answering.routing import QuestionCall, RoutedInput, Strategy
from rgate_integrations.decision import Decision, Failure, valid_count
from rgate_integrations.engine.decider import fallback_decision, read_item
from rgate_integrations.engine.follow_ups import list_search_texts
from rgate_integrations.errors import ConfigurationError, RGateError
from rgate_integrations.gates.passage_utility import FoundPassage
from rgate_integrations.index.hybrid import fuse
from rgate_integrations.index.retriever import Hit, Retriever
from rgate_integrations.prompts import format_passages, strip_control_tokens
from rgate_integrations.runtime.flow import Call, Gather, Start, Step, arun
from rgate_integrations.runtime.jsonl import JsonlLog
from rgate_integrations.runtime.text import encodable, redact
from rgate_integrations.serving import logger
from rgate_integrations.serving.llm_requests import LLMRequest, UndecidedError
from rgate_integrations.serving.service import DecisionService, QueueFullError
from rgate_integrations.serving.upstream import OWN_HEADER, Relay, Upstream, UpstreamAnswer, never_blocking
from rgate_integrations.serving.wire import one_line, problem, route_label

_COMMANDS = ("", "off", "retrieve", "direct")
_LOGGED = {
    "question",
    "retrieve",
    "p_known",
    "threshold",
    "reason",
    "override",
    "gate",
    "llm",
    "error",
    "p_covered",
    "corpus",
}
_SHADOW_KEYS = ("question", "retrieve", "p_known")
# A hanging search cannot be stopped and keeps its thread: the limit saves the rest of the process.
_THREADS = 32


class Gateway:
    """Forwards requests to an LLM, and adds passages to those with a question that needs retrieval.

    Args:
        service: Makes the decisions.
        upstream: The server of the LLM.
        retriever: Finds the passages. A mapping has one retriever per corpus of the gate; those that the
            decision names are searched, or all if it names none. With None, the gateway only reports
            decisions in headers.
        k: Maximum number of passages per question, at least 1.
        answer_first: Whether, and how, the beginning of a streamed answer is judged, too. Its
            ``question_gate`` is ignored: the service's gate judges the question.
        look_first: Whether, and how, the passages of a search are judged, too.
        condense: Whether the upstream rewrites follow-ups as search queries.
        shadow: Only log decisions, each after its answer, to this file, which ``rgate tune`` reads. Follow-ups
            are left out, and so are requests whose client left. None to act on decisions.

    Raises:
        ConfigurationError: An option is invalid, look first or prefetch has no retriever, answer first has no gate
            for partial answers, or the names of the retrievers and the gate's corpora differ.
        DataFormatError: The file of ``shadow`` has other content.
        WriteError: The file of ``shadow`` cannot be written.
    """

    def __init__(
        self,
        service: DecisionService,
        upstream: Upstream,
        retriever: Retriever | Mapping[str, Retriever] | None = None,
        *,
        k: int = 3,
        answer_first: bool | AnswerFirst = False,
        look_first: bool | LookFirst = False,
        condense: bool = False,
        shadow: str | Path | None = None,
    ) -> None:
        # Shadow mode must not change anything, so it starts no answers at the upstream.
        partial_answers = AnswerFirst.coerce(answer_first) if shadow is None else None
        retrievers: Mapping[str, Retriever] = {}
        if isinstance(retriever, Mapping):
            check_corpora(service.gate.corpora, retriever)
            retrievers = retriever
        elif retriever is not None:
            retrievers = {"": retriever}
        # With a single corpus, the search need not wait for a decision.
        self.strategy = Strategy(
            partial_answers, LookFirst.coerce(look_first), chooses_corpus=len(retrievers) > 1
        )
        if self.strategy.searches_ahead and not retrievers:
            raise ConfigurationError(
                "look_first= (--look-first) and AnswerFirst.prefetch need a retriever.",
                hint="Pass retriever= (--index or --retriever).",
            )
        if partial_answers is not None and service.gates().answer is None:
            raise ConfigurationError(
                "answer_first= (--answer-first) needs a gate that judges partial answers, and this one only reads "
                "questions.",
                hint="Omit answer_first= (--answer-first), or use the default gate.",
            )
        self.service = service
        self.upstream = upstream
        self._searches = {
            name: LimitedSearch(search, k=k, timeout=service.timeout) for name, search in retrievers.items()
        }
        self._k = valid_count(k, "k")
        self._condense = condense
        # The last one, because it makes a file.
        self._shadow = None if shadow is None else JsonlLog(shadow, _SHADOW_KEYS)

    async def answer(self, request: Request) -> Response:
        """Forward any request, after a decision if it has a question for the LLM.

        In a POST request, the header ``x-rgate`` overrides the gate. With ``off``, the request is forwarded without a
        decision; with ``retrieve`` or ``direct``, that is the decision (not in shadow mode). Other values get status
        400.
        """
        content = await request.body()
        # Only a POST can ask an LLM; lists of models and the like pass unchanged.
        if request.method != "POST":
            return await self.upstream.forward(request, content)
        # The header is for the gateway alone; `upstream` removes it before forwarding.
        command = request.headers.get(OWN_HEADER, "").strip().lower()
        if command not in _COMMANDS:
            return problem(
                400, "InvalidRequest", f"{OWN_HEADER} must be off, retrieve or direct, not {command[:40]!r}."
            )
        if command == "off":
            self.service.metrics.requests.labels("off").inc()
            return await self.upstream.forward(request, content)
        try:
            llm_request = LLMRequest.parse(request, content)
        except UndecidedError as undecided:
            self.service.metrics.requests.labels("undecided").inc()
            self.service.metrics.undecided.labels(str(undecided)).inc()
            # In shadow mode, not even a header may differ.
            headers = {f"{OWN_HEADER}-undecided": str(undecided)} if self._shadow is None else {}
            return await self.upstream.forward(request, content, headers)
        if self._shadow is not None:
            self.service.metrics.requests.labels("shadow").inc()
            response = await self.upstream.forward(request, content)
            # After the answer, which the decision must not delay.
            response.background = BackgroundTask(self._log_decision, llm_request, self._shadow)
            return response
        if command:
            forced = Decision(
                question=llm_request.turn.question,
                retrieve=command == "retrieve",
                p_known=float(command == "direct"),
                reason=f"The request says so ({OWN_HEADER}: {command}).",
            )
            return await self._answer_routed(llm_request, RoutedInput(outcome=forced))
        return await self._answer_routed(llm_request, await self._route(llm_request))

    async def _answer_routed(self, llm_request: LLMRequest, routed: RoutedInput) -> Response:
        """Continue a partial answer, or forward the request, with passages if they are needed."""
        decision, content = routed.decision, llm_request.content
        self.service.metrics.requests.labels(route_label(decision)).inc()
        headers = _make_headers(decision)
        if isinstance(routed.answer, UpstreamAnswer) and routed.answer.response is not None:
            return Relay(routed.answer.response, routed.answer.astream(), headers)
        # The search text is condensed only now, so that a known follow-up costs no extra LLM call.
        if decision.retrieve and self._searches:
            hits = routed.passages if routed.searched else await self.search(llm_request, decision)
            count = 0
            # A body that is too deeply nested to be serialised again is forwarded without passages.
            with suppress(RecursionError):
                if hits:
                    # A chat template's control token in a passage would end the user's turn.
                    passages = strip_control_tokens(encodable(format_passages([hit.passage for hit in hits])))
                    content, count = llm_request.with_passages(passages), len(hits)
            headers[f"{OWN_HEADER}-passages"] = str(count)
            if error := getattr(llm_request.request.state, "search_error", ""):
                headers[f"{OWN_HEADER}-error"] = error
        return await self.upstream.forward(llm_request.request, content, headers)

    async def _route(self, llm_request: LLMRequest) -> RoutedInput:
        """Return the question with its decision, which is to retrieve if the queue is full or anything fails."""
        try:
            with self.service.counting(1) as decisions:
                (routed,) = await arun(GatewayCall(self, llm_request).route())
                decisions.append(routed.decision)
        except Exception as error:  # fail open: the upstream answers
            # Under overload, masking a long history would take the time that is lacking.
            if isinstance(error, QueueFullError):
                self.service.metrics.errors.labels(type(error).__name__).inc()
            else:
                self._log_failure("The gateway retrieves without a decision", error, llm_request)
            return RoutedInput(outcome=fallback_decision(error, question=llm_request.turn.question))
        return routed

    async def search(self, llm_request: LLMRequest, decision: Decision | None = None) -> list[Hit]:
        """Return the best hits for the question and the claims of the decision's draft, in the decision's corpora.

        Without a decision, only the question is searched for, in all corpora. A corpus whose search fails or times
        out has no hits.
        """
        queries = await self._search_texts(llm_request)
        if decision is not None:
            (plan,) = await arun(plan_queries_flow([decision], histories=[llm_request.turn.history]))
            # The plan also has the question itself, which the search texts replace.
            queries += [query.text for query in plan.queries if query.claim is not None]
        names = chosen_corpora(decision, list(self._searches))
        hits = await asyncio.gather(*(self._search_corpus(name, queries, llm_request) for name in names))
        # A passage may be in several corpora, under different ids.
        return fuse(list(chain.from_iterable(hits)), key=_as_found, k=self._k)

    async def _search_texts(self, llm_request: LLMRequest) -> list[str]:
        """Return what to search for instead of the question, which may be a follow-up.

        With ``condense``, the upstream rewrites the follow-up of a chat as a search query. Otherwise, or if that
        fails, the texts are those of `list_search_texts`.
        """
        body = llm_request.condense_body if self._condense else None
        if body is not None:
            try:
                async with asyncio.timeout(self.service.timeout):
                    return [await self.upstream.complete(llm_request.request, body)]
            except Exception as error:  # the upstream may answer with anything
                self._log_failure("A follow-up was not condensed", error, llm_request)
        return list_search_texts(llm_request.turn.question, llm_request.turn.history)

    async def _search_corpus(
        self, corpus: str, queries: list[str], llm_request: LLMRequest
    ) -> list[list[Hit]]:
        """Return the hits of each query in a corpus; empty if its search fails."""
        try:
            return await self._searches[corpus].search(queries)
        except Exception as error:  # the retriever is the application's own code, and may raise anything
            what = f"The search of corpus {corpus!r} failed" if corpus else "The search failed"
            # The queries may have words of the upstream: a draft's claim, or a follow-up that it rewrote.
            self._log_failure(what, error, llm_request, *queries)
            llm_request.request.state.search_error = type(error).__name__
            return []

    def _log_failure(self, what: str, error: Exception, llm_request: LLMRequest, *private: str) -> None:
        """Count an error, and log it without quoting the client's text or that of ``private``."""
        turn, failure = llm_request.turn, Failure.from_error(error)
        message = redact(
            RGateError(failure.message, hint=failure.hint), *turn.history, turn.question, *private
        )
        logger.warning("%s: %s: %s", what, failure.type, message)
        self.service.metrics.errors.labels(failure.type).inc()

    async def _log_decision(self, llm_request: LLMRequest, log: JsonlLog) -> None:
        """Decide after the upstream's answer; log the decision unless it is on a follow-up. Never raises."""
        try:
            routed = await self._route(llm_request)
            # Tuning asks each question on its own, which is impossible for follow-ups.
            if not llm_request.follows_turns:
                log.append([routed.decision.model_dump(mode="json", include=_LOGGED)])
        except Exception as error:
            self._log_failure("A decision was not logged", error, llm_request)


class GatewayCall(QuestionCall):
    """One client request on its way through `RoutedCall.route`, which decides, searches and starts answers.

    Args:
        gateway: The gateway.
        llm_request: The client's request.
    """

    def __init__(self, gateway: Gateway, llm_request: LLMRequest) -> None:
        gates = gateway.service.gates(str(llm_request.body.get("model") or ""))
        # A new strategy for each request, because its model and its options say whether the LLM thinks.
        answer_first = gateway.strategy.answer_first if llm_request.can_be_judged_early else None
        strategy = replace(
            gateway.strategy, answer_first=answer_first, judge=gates.answer, question_gate=gates.question
        )
        turn = llm_request.turn
        super().__init__(
            strategy, read_item(turn.question, history=turn.history, timeout=gateway.service.timeout)
        )
        self._gateway = gateway
        self._llm_request = llm_request

    def begin(self, item: RoutedInput) -> UpstreamAnswer:
        """Return the upstream's answer, which is requested when it is first read."""
        return UpstreamAnswer(self._gateway.upstream, self._llm_request.request, self._llm_request.content)

    def search(self, inputs: Sequence[RoutedInput]) -> Step:
        """Return the step that searches for the question; its result is one list of hits per input."""
        decisions = [item.latest_decision if self.strategy.chooses_corpus else None for item in inputs]
        search = self._gateway.search
        return Gather([Call(never_blocking, search, self._llm_request, decision) for decision in decisions])

    def read_passages(self, item: RoutedInput) -> Sequence[FoundPassage]:
        """Convert the hits to the passages that look first judges."""
        return list(map(_as_found, item.passages))


class SearchError(RGateError):
    """A search timed out or crashed."""


class LimitedSearch:
    """Searches in its own threads, with a timeout.

    A thread cannot be interrupted, so a search that hangs keeps its thread, but there are at most 32 of them.

    Args:
        retriever: The retriever.
        k: Passages per query; further ones are not read.
        timeout: Seconds for a search, including the wait for a thread.
    """

    def __init__(self, retriever: Retriever, *, k: int, timeout: float) -> None:
        self._retriever = retriever
        self._k = k
        self._timeout = timeout
        # Counts threads, not callers: a caller that times out leaves, but its thread may go on.
        self._free = asyncio.Semaphore(_THREADS)

    async def search(self, queries: list[str]) -> list[list[Hit]]:
        """Return the hits of each query that have text, best first.

        Raises:
            SearchError: The search timed out or crashed.
            Exception: The error of the retriever, or a `TypeError` if it returned something other than one list of
                hits per query.
        """
        try:
            async with asyncio.timeout(self._timeout) as deadline:
                return await self._run(queries)
        except TimeoutError as error:
            if not deadline.expired():  # the retriever's own
                raise
            raise SearchError(
                f"The search took longer than {self._timeout:g} s.",
                hint="Check the retriever, or raise the timeout (--timeout).",
            ) from error

    async def _run(self, queries: list[str]) -> list[list[Hit]]:
        """Search in a new thread, once fewer than 32 exist; a search that timed out counts until it ends."""
        await self._free.acquire()
        try:
            job = Start(Call(self._search, None, queries)).run().job
        except RuntimeError:  # the process has too many threads
            self._free.release()
            raise
        job.add_done_callback(partial(self._release, asyncio.get_running_loop()))
        return await asyncio.wrap_future(job)

    def _release(self, loop: asyncio.AbstractEventLoop, _: object) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(self._free.release)

    def _search(self, queries: list[str]) -> list[list[Hit]]:
        try:
            # `islice` also bounds a generator that never ends.
            rankings = islice(self._retriever.search(queries, self._k), len(queries))
            hits = [list(islice(ranking, self._k)) for ranking in rankings]
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise
            # SystemExit or a panic in Rust would stop the server, and a future cannot hold a StopIteration.
            raise SearchError(
                f"The retriever raised {type(error).__name__}, which a search must not raise.",
                hint="Catch it in the retriever, and raise an ordinary exception instead, such as RuntimeError.",
            ) from error
        if len(hits) < len(queries):
            raise TypeError(f"The retriever returned {len(hits)} lists of hits for {len(queries)} queries.")
        for hit in chain.from_iterable(hits):
            passage = getattr(hit, "passage", None)
            texts = [getattr(passage, name, None) for name in ("text", "title")]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError(
                    f"A result of the retriever, of type {type(hit).__name__}, has no passage, or the passage's text "
                    "or title is not a string."
                )
        return [[hit for hit in ranking if hit.passage.text.strip()] for ranking in hits]


def _make_headers(decision: Decision) -> dict[str, str]:
    """Convert a decision to response headers."""
    values = {
        "decision": route_label(decision),
        "p-known": f"{decision.p_known:.3f}",
        "reason": decision.reason,
    }
    if decision.p_covered is not None:
        values["p-covered"] = f"{decision.p_covered:.3f}"
    if decision.corpus is not None:
        values["corpus"] = decision.corpus
    if decision.error is not None:
        values["error"] = decision.error.type
    return {f"{OWN_HEADER}-{name}": one_line(value) for name, value in values.items()}


def _as_found(hit: Hit) -> FoundPassage:
    return FoundPassage(hit.passage.text, hit.passage.title)
