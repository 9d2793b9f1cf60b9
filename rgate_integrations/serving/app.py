"""The decision server as an ASGI application: its routes, and what becomes of errors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from rgate_integrations import __version__
from rgate_integrations.answering.claims import planning
from rgate_integrations.decision import Decision
from rgate_integrations.errors import RGateError
from rgate_integrations.runtime.flow import arun
from rgate_integrations.serving.gateway import Gateway
from rgate_integrations.serving.guard import problem
from rgate_integrations.serving.service import DecisionService, FullError
from rgate_integrations.serving.wire import (
    NO_LLM,
    DecideItem,
    DecideRequest,
    DecideResponse,
    ProblemResponse,
    QueriesResponse,
    SystemOneRequest,
    SystemOneResponse,
)

_log = logging.getLogger("rgate_integrations.serving")

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
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

    async def systemone(
        self, body: SystemOneRequest, request: Request, timeout: Milliseconds = None
    ) -> Response:
        """Answer typed questions about a state: a noul ``known``, a choice of ``retrieve`` or ``direct``."""
        asked = body.asked()
        began = time.perf_counter()
        gates = self.service.gates("" if body.model == NO_LLM else body.model)
        decision = await self.service.decide_asked(asked, gates, _seconds(timeout))
        _note(request, began)
        return _json(SystemOneResponse.of(body, decision).model_dump_json())

    async def decide(self, body: DecideRequest, request: Request, timeout: Milliseconds = None) -> Response:
        """Decide about questions, each with a draft, its history and passages if there are any."""
        decisions = await self._decided(body, request, timeout)
        return _json(DecideResponse(decisions=decisions).model_dump_json())

    async def queries(self, body: DecideRequest, request: Request, timeout: Milliseconds = None) -> Response:
        """Say what to search for: the question and the claims of its draft; nothing where it is known."""
        decisions = await self._decided(body, request, timeout)
        plans = await arun(planning(decisions))
        return _json(QueriesResponse(plans=plans).model_dump_json())

    async def health(self) -> Response:
        """Say that the process runs."""
        return PlainTextResponse("ok\n")

    async def ready(self) -> Response:
        """Say whether the model is loaded."""
        return PlainTextResponse("ready\n") if self.is_ready else PlainTextResponse("loading\n", 503)

    async def metrics(self) -> Response:
        """Return Prometheus's counters."""
        text = self.service.metrics.text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def refused(self, request: Request, error: Exception) -> Response:
        """Say what is wrong with a request that has the right format, or that it would have to wait too long."""
        self.service.metrics.failed(type(error).__name__)
        message, hint = getattr(error, "message", str(error)), getattr(error, "hint", "")
        response = problem(422, type(error).__name__, message, hint)
        if isinstance(error, FullError):
            response.status_code = 529
            response.headers["retry-after"] = "1"
        return response

    async def invalid(self, request: Request, error: Exception) -> Response:
        """Say what is wrong with the format of a request."""
        said = []
        # Without the input: a question may be long, and belongs in nobody's log.
        for each in error.errors()[:_MOST_ERRORS] if isinstance(error, RequestValidationError) else ():
            where = ".".join(map(str, each["loc"][1:])) or "body"
            said.append(f"{where[:100]}: {each['msg']}")
        return problem(422, "InvalidRequest", "; ".join(said), "GET /openapi.json has the format.")

    async def no_route(self, request: Request, error: Exception) -> Response:
        """Answer what is asked of no route, or in a wrong way."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        return problem(status, "HTTPError", str(getattr(error, "detail", "")))

    async def broken(self, request: Request, error: Exception) -> Response:
        """Answer where the server itself failed."""
        self.service.metrics.failed(type(error).__name__)
        return problem(500, "InternalError", "The server failed; its log says why.")

    async def _decided(self, body: DecideRequest, request: Request, timeout: float | None) -> list[Decision]:
        began = time.perf_counter()
        gates = self.service.gates(body.llm, body.llm_known_by)
        decisions = await self.service.decide(body.items(), gates, _seconds(timeout))
        _note(request, began)
        return decisions

    async def _warm_up(self) -> None:
        """Let the gate decide something; one that fails is asked again."""
        pause = 1.0
        asked = [DecideItem(question="Is this a question?")]
        while not self.is_ready:
            (decision,) = await self.service.decide(asked, self.service.gates())
            self.is_ready = decision.error is None
            if decision.error is not None:
                _log.warning("The gate does not decide yet: %s", decision.error.message)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)


def make_app(service: DecisionService, gateway: Gateway | None = None) -> FastAPI:
    """Return the application that decides with a service, and answers with a gateway if there is one."""
    routes = DecisionRoutes(service, gateway)
    app = FastAPI(
        title="rgate",
        version=__version__,
        summary="Does the LLM know the answer, or is it to be retrieved?",
        lifespan=routes.lifespan,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        responses={422: {"model": ProblemResponse}, 529: {"model": ProblemResponse}},
    )
    app.post("/v1/systemone", response_model=SystemOneResponse)(routes.systemone)
    app.post("/v1/decide", response_model=DecideResponse)(routes.decide)
    app.post("/v1/queries", response_model=QueriesResponse)(routes.queries)
    for path, route in (("/health", routes.health), ("/ready", routes.ready), ("/metrics", routes.metrics)):
        app.get(path, response_class=PlainTextResponse)(route)
    if gateway is not None:
        app.add_route("/v1/chat/completions", gateway.chat, methods=["POST"], include_in_schema=False)
        app.add_route("/{path:path}", gateway.forward, methods=_METHODS, include_in_schema=False)
    app.add_exception_handler(RGateError, routes.refused)
    app.add_exception_handler(RequestValidationError, routes.invalid)
    app.add_exception_handler(HTTPException, routes.no_route)
    app.add_exception_handler(Exception, routes.broken)
    return app


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _note(request: Request, began: float) -> None:
    """Note how long the gate took, for the header Server-Timing."""
    request.state.timings["gate"] = (time.perf_counter() - began) * 1e3


def _json(body: str) -> Response:
    return Response(body, media_type="application/json")
