"""The decision server as an ASGI application: its routes, and what becomes of errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from rgate_integrations import __version__
from rgate_integrations.answering.query_plan import plan_queries_flow
from rgate_integrations.errors import RGateError
from rgate_integrations.models.first_use import forbid_downloads
from rgate_integrations.runtime.flow import arun
from rgate_integrations.runtime.text import redact
from rgate_integrations.serving.gateway import Gateway
from rgate_integrations.serving.service import LLM_NAME_SOURCE, DecisionService, QueueFullError
from rgate_integrations.serving.wire import (
    METHODS,
    NO_LLM,
    DecideItem,
    DecideRequest,
    DecideResponse,
    ProblemResponse,
    QueriesResponse,
    SystemOneRequest,
    SystemOneResponse,
    problem,
)

_log = logging.getLogger("rgate_integrations.serving")

_MOST_ERRORS = 5  # of one request that are listed
_LONGEST_PAUSE = 30.0  # seconds between two attempts to load the model

Milliseconds = Annotated[
    float | None,
    Header(
        alias="x-rgate-timeout-ms",
        gt=0,
        allow_inf_nan=False,
        description="A question without a decision by then retrieves.",
    ),
]


class DecisionRoutes:
    """What clients ask of a server.

    Args:
        service: Decides.
        gateway: Answers chat completions, and sends on what has no other route; None without an upstream.

    Attributes:
        is_ready: Whether the gate has decided something, so that its model is loaded.
    """

    def __init__(self, service: DecisionService, gateway: Gateway | None = None) -> None:
        self.service = service
        self.gateway = gateway
        self.is_ready = False

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Load the model beside what the server does, and be ready until the server ends."""
        warming = asyncio.create_task(self._warm_up())
        try:
            yield
        finally:
            self.is_ready = False
            warming.cancel()
            if self.gateway is not None:
                await self.gateway.close()

    async def systemone(self, body: SystemOneRequest, timeout: Milliseconds = None) -> SystemOneResponse:
        """Answer typed questions about a state: a noul ``known``, a choice of ``retrieve`` or ``direct``."""
        llm = "" if body.model == NO_LLM else body.model
        (decision,) = await self.service.decide([body.item()], llm, LLM_NAME_SOURCE, timeout)
        return SystemOneResponse.from_decision(body, decision)

    async def decide(self, body: DecideRequest, timeout: Milliseconds = None) -> DecideResponse:
        """Decide about questions, each with a draft, its history and passages if there are any."""
        decisions = await self.service.decide(body.items(), body.llm, body.llm_name_source, timeout)
        return DecideResponse(decisions=decisions)

    async def queries(self, body: DecideRequest, timeout: Milliseconds = None) -> QueriesResponse:
        """Say what to search for: the question and the claims of its draft; nothing if it is known."""
        decisions = await self.service.decide(body.items(), body.llm, body.llm_name_source, timeout)
        return QueriesResponse(plans=await arun(plan_queries_flow(decisions)))

    async def health(self) -> Response:
        """Say that the process runs."""
        return PlainTextResponse("ok\n")

    async def ready(self) -> Response:
        """Say whether the model is loaded."""
        if self.is_ready:
            return PlainTextResponse("ready\n")
        return PlainTextResponse("loading\n", 503)

    async def metrics(self) -> Response:
        """Return Prometheus's counters."""
        text = self.service.metrics.text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def wrong_method(self, request: Request) -> Response:
        """Say that a route only takes GET."""
        raise HTTPException(405)

    async def failed(self, request: Request, error: Exception) -> Response:
        """Say what is wrong with a request, or that the server itself failed."""
        if isinstance(error, HTTPException):  # there is no such route, or it is asked in another way
            return problem(error.status_code, "HTTPError", str(error.detail))
        if isinstance(error, RequestValidationError):
            messages = []
            # Without the input: a question may be long, and does not belong in a log.
            for detail in error.errors()[:_MOST_ERRORS]:
                field = ".".join(map(str, detail["loc"][1:])) or "body"
                messages.append(f"{field[:100]}: {detail['msg']}")
            return problem(422, "InvalidRequest", "; ".join(messages), "GET /openapi.json has the format.")
        kind = type(error).__name__
        self.service.metrics.errors.labels(kind).inc()
        if isinstance(error, QueueFullError):
            return problem(529, kind, error.message, error.hint, headers={"retry-after": "1"})
        if isinstance(error, RGateError):
            return problem(422, kind, error.message, error.hint)
        return problem(500, "InternalError", "The server failed; its log says why.")

    async def _warm_up(self) -> None:
        """Let the gate decide something; one that fails is asked again."""
        pause = 1.0
        while not self.is_ready:
            (decision,) = await self.service.decide([DecideItem(question="Is this a question?")])
            self.is_ready = decision.error is None
            if decision.error is not None:
                hint = f" Hint: {redact(decision.error.hint)}" if decision.error.hint else ""
                _log.warning("The gate does not decide yet: %s%s", redact(decision.error.message), hint)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)


def make_app(service: DecisionService, gateway: Gateway | None = None) -> FastAPI:
    """Return the application that decides with a service, and answers with a gateway if there is one.

    It lets everybody ask everything: it runs behind `rgate_integrations.serving.server.protect`. The process that
    makes it fetches no model on first use any more: download them beforehand.

    Args:
        service: Decides.
        gateway: Answers what has no other route; None for a server of decisions alone.
    """
    forbid_downloads()
    routes = DecisionRoutes(service, gateway)
    failures = (RGateError, RequestValidationError, HTTPException, Exception)
    app = FastAPI(
        title="rgate",
        version=__version__,
        summary="Does the LLM know the answer, or is it to be retrieved?",
        lifespan=routes.lifespan,
        exception_handlers=dict.fromkeys(failures, routes.failed),
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        responses={422: {"model": ProblemResponse}, 529: {"model": ProblemResponse}},
    )
    app.post("/v1/systemone")(routes.systemone)
    app.post("/v1/decide")(routes.decide)
    app.post("/v1/queries")(routes.queries)
    for path, state in (("health", routes.health), ("ready", routes.ready), ("metrics", routes.metrics)):
        app.get(f"/{path}", response_class=PlainTextResponse)(state)
        # Health needs no token: nothing but GET may get from there to an upstream.
        app.add_route(f"/{path}", routes.wrong_method, methods=METHODS, include_in_schema=False)
    if gateway is not None:
        app.add_route("/{path:path}", gateway.answer, methods=METHODS, include_in_schema=False)
    return app
