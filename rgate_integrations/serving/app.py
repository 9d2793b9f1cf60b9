"""The decision server as an ASGI application: its routes, and its error responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import httpx
from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from rgate_integrations import __version__
from rgate_integrations.answering.query_plan import plan_queries_flow
from rgate_integrations.decision import Failure
from rgate_integrations.engine.loading import WARM_UP
from rgate_integrations.errors import EvidenceError, RGateError
from rgate_integrations.models.download import forbid_downloads
from rgate_integrations.runtime.flow import arun
from rgate_integrations.runtime.text import redact
from rgate_integrations.serving import logger
from rgate_integrations.serving.gateway import Gateway
from rgate_integrations.serving.service import LLM_NAME_SOURCE, DecisionService, QueueFullError
from rgate_integrations.serving.wire import (
    METHODS,
    NO_LLM,
    DecideRequest,
    DecideResponse,
    ProblemResponse,
    QueriesResponse,
    SystemOneRequest,
    SystemOneResponse,
    describe_errors,
    problem,
)

_MAX_PAUSE = 30.0  # seconds between two attempts to load the model

Milliseconds = Annotated[
    float | None,
    Header(
        alias="x-rgate-timeout-ms",
        gt=0,
        allow_inf_nan=False,
        description="Timeout of a decision in milliseconds; a late decision retrieves.",
    ),
]


class DecisionRoutes:
    """The routes of the server.

    Args:
        service: Makes the decisions.
        gateway: Handles all other routes; None without an upstream.

    Attributes:
        is_ready: Whether the gate has made a decision without an error, so that its models are loaded.
    """

    def __init__(self, service: DecisionService, gateway: Gateway | None = None) -> None:
        self.service = service
        self.gateway = gateway
        self.is_ready = False

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Load the models in the background, and close the gateway when the server stops."""
        # In the background, because /health must answer while the model loads.
        warming = asyncio.create_task(self._warm_up())
        try:
            yield
        finally:
            self.is_ready = False
            warming.cancel()
            if self.gateway is not None:
                await self.gateway.upstream.close()

    async def systemone(self, body: SystemOneRequest, timeout: Milliseconds = None) -> SystemOneResponse:
        """Answer a System One request: P(the LLM knows), or the choice between ``retrieve`` and ``direct``."""
        llm = "" if body.model == NO_LLM else body.model
        (decision,) = await self.service.decide([body.item()], llm, LLM_NAME_SOURCE, timeout)
        return SystemOneResponse.from_decision(body, decision)

    async def decide(self, body: DecideRequest, timeout: Milliseconds = None) -> DecideResponse:
        """Return one decision per question. A question may come with a draft, history and passages."""
        decisions = await self.service.decide(body.items(), body.llm, body.llm_name_source, timeout)
        return DecideResponse(decisions=decisions)

    async def queries(self, body: DecideRequest, timeout: Milliseconds = None) -> QueriesResponse:
        """Return search queries for each question (itself and its draft's claims); none if no retrieval is needed."""
        items = body.items()
        decisions = await self.service.decide(items, body.llm, body.llm_name_source, timeout)
        histories = [item.history for item in items]
        return QueriesResponse(plans=await arun(plan_queries_flow(decisions, histories=histories)))

    async def health(self) -> Response:
        """Return 200 as long as the process runs."""
        return PlainTextResponse("ok\n")

    async def ready(self) -> Response:
        """Return 200 if the models are loaded, else 503."""
        if self.is_ready:
            return PlainTextResponse("ready\n")
        return PlainTextResponse("loading\n", 503)

    async def metrics(self) -> Response:
        """Return the metrics for Prometheus."""
        return Response(self.service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def failed(self, request: Request, error: Exception) -> Response:
        """Return the response to an invalid request, or to a failure of the server."""
        # FastAPI could not parse the body, or did not try to, because of the content type.
        if (isinstance(error, HTTPException) and error.status_code == 400) or (
            isinstance(error, RequestValidationError) and not isinstance(error.body, dict)
        ):
            return problem(
                422,
                "InvalidRequest",
                "The body must be a JSON object in UTF-8, not compressed, without deep nesting or numbers with "
                "thousands of digits.",
                "Send the header Content-Type: application/json. See /openapi.json for the format.",
            )
        if isinstance(error, HTTPException):  # no such route, or the wrong method
            return problem(
                error.status_code, "HTTPError", str(error.detail), "See /openapi.json for the routes."
            )
        if isinstance(error, RequestValidationError):
            message = describe_errors(error.errors(), error.body)
            return problem(422, "InvalidRequest", message, "See /openapi.json for the format.")
        kind = type(error).__name__
        self.service.metrics.errors.labels(kind).inc()
        if isinstance(error, QueueFullError):
            return problem(529, kind, error.message, error.hint, headers={"retry-after": "1"})
        if isinstance(error, RGateError):
            return problem(422, kind, error.message, error.hint)
        from_upstream = self.gateway is not None and request.scope.get("endpoint") == self.gateway.answer
        if from_upstream and isinstance(error, httpx.HTTPError):
            # Its message may contain the key.
            logger.error("The upstream server failed: %s: %s", kind, redact(error, *request.headers.values()))
            return problem(
                502,
                "UpstreamError",
                f"The request to the upstream server failed ({kind}).",
                "Check the server of --upstream and its log.",
            )
        # The message is left out: it may quote the question or a secret.
        return problem(500, "InternalError", "The server failed; its log says why.")

    async def _try_gate(self, draft: str | None = None) -> Failure | None:
        """Decide about a question, without the queue, and return the error if that fails."""
        try:
            decision = await self.service.gate.adecide(WARM_UP, draft=draft, timeout=self.service.timeout)
        except Exception as raised:  # by a gate with on_error="raise"
            return Failure.from_error(raised)
        return decision.error

    async def _warm_up(self) -> None:
        """Load the models by deciding about a question, and repeat until that succeeds."""
        # A model may be missing for a while, for example until a volume is mounted, so we keep trying, ever more
        # slowly.
        pause = 1.0
        while not self.is_ready:
            error = await self._try_gate()
            if error is not None and error.type == EvidenceError.__name__:
                error = await self._try_gate(draft="Yes.")  # the gate judges only drafts, and writes none
            self.is_ready = error is None
            if error is not None:
                hint = f" Hint: {redact(error.hint)}" if error.hint else ""
                logger.warning("The gate is not ready yet: %s%s", redact(error.message), hint)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _MAX_PAUSE)


def make_app(service: DecisionService, gateway: Gateway | None = None) -> FastAPI:
    """Return the application of the decision server, with a gateway if there is one.

    It has no access control: run it with `rgate_integrations.serving.server.make_server`. Once this
    is called, the process downloads no models on first use: run ``rgate download`` beforehand. Mounted in another
    application, it becomes ready only if that application runs this one's lifespan.

    Args:
        service: Makes the decisions.
        gateway: Handles all other routes; None for decisions alone.
    """
    forbid_downloads()
    routes = DecisionRoutes(service, gateway)
    failures = (RGateError, RequestValidationError, HTTPException, Exception)
    app = FastAPI(
        title="rgate",
        version=__version__,
        summary="Does the LLM know the answer, or does it need retrieval?",
        lifespan=routes.lifespan,
        exception_handlers=dict.fromkeys(failures, routes.failed),
        docs_url=None,  # that page loads scripts from a CDN
        redoc_url=None,
        responses={422: {"model": ProblemResponse}, 529: {"model": ProblemResponse}},
    )
    app.post("/v1/systemone")(routes.systemone)
    app.post("/v1/decide")(routes.decide)
    app.post("/v1/queries")(routes.queries)
    for path, state in (("health", routes.health), ("ready", routes.ready), ("metrics", routes.metrics)):
        app.get(f"/{path}", response_class=PlainTextResponse)(state)
        app.head(f"/{path}", include_in_schema=False)(state)
    if gateway is not None:
        app.add_route("/{path:path}", gateway.answer, methods=METHODS, include_in_schema=False)
    return app
