"""Runs ASGI applications on real sockets, in a thread."""

import asyncio
import socket
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import AsyncMock, patch

import httpx

from rgate_integrations import Decision
from rgate_integrations.engine.loading import WARM_UP
from rgate_integrations.serving.app import make_app
from rgate_integrations.serving.gateway import Gateway
from rgate_integrations.serving.server import make_server
from rgate_integrations.serving.service import DecisionService
from rgate_integrations.serving.upstream import Upstream

CLIENT = httpx.Client(timeout=60)  # one for all: each new one reads the certificates of all authorities


def free_port():
    """Return a port on which nothing listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]


@contextmanager
def listening(app, port=0, **options):
    """Run an application; gives its URL."""
    server = make_server(app, "127.0.0.1", port, **options)
    thread = threading.Thread(target=server.run, daemon=True)
    # Looking often whether it is to shut down: by default that takes 0.3 s a server.
    with patch("uvicorn.server.asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": _sleep_less})):
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            thread.join(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join()


async def _sleep_less(seconds):
    await asyncio.sleep(seconds / 20)


@contextmanager
def serving_gate(gate, *, token="", receive_timeout=10.0, **options):
    """Serve decisions of a gate; gives the URL."""
    with listening(
        make_app(DecisionService(gate, **options)), token=token, receive_timeout=receive_timeout
    ) as url:
        yield url


@contextmanager
def serving_gateway(
    gate, upstream, retriever=None, *, token="", key=None, timeout=600.0, queue=512, **options
):
    """Stand before the server at a URL; gives the gateway's own."""
    service = DecisionService(gate, timeout=timeout, queue=queue)
    between = Gateway(service, Upstream(upstream, key=key, keeps_key=not token), retriever, **options)
    with listening(make_app(service, between), token=token) as url:
        yield url


class Words:
    """A gate that knows what has "known" in it.

    Attributes:
        asked: The requests of each call.
        fields: More of each decision.
    """

    reads_history = reads_drafts = True
    fields: ClassVar[dict] = {}

    def __init__(self):
        self.asked = []

    def decide_batch(self, requests):
        self.asked.append(requests)
        return list(map(self._decision, requests))

    async def adecide_batch(self, requests):
        return self.decide_batch(requests)

    def _decision(self, request):
        known = self.p_known(request)
        return Decision(question=request.question, retrieve=known < 0.5, p_known=known, **self.fields)

    def p_known(self, request):
        return 0.9 if "known" in request.question and "unknown" not in request.question else 0.1


class Unsure(Words):
    """Is unsure about every question, so that each answer starts; one that contains "42" is known."""

    def p_known(self, request):
        return 0.5 if request.draft is None else 0.9 * ("42" in request.draft.text)


class Blocking(Words):
    """The same, as soon as it may."""

    def __init__(self):
        super().__init__()
        self.may_decide = threading.Event()
        self.is_asked = threading.Event()

    async def adecide_batch(self, requests):
        if [each.question for each in requests] != [WARM_UP]:
            self.is_asked.set()
            await asyncio.to_thread(self.may_decide.wait)
        return self.decide_batch(requests)


class Broken(Words):
    """Fails."""

    def __init__(self, reason="no disk"):
        super().__init__()
        self.adecide_batch = AsyncMock(side_effect=OSError(reason))
