"""What a decision server and the gateway cost, on loopback.

    python benchmarks/serve.py [--requests 400] [--clients 1 8 64 256] [--gateway | --url URL]

Decisions a second and latency of a server (`rgate serve`) with several clients at a time, each request with one
question; of the same gate in this process, asked by as many tasks; what is refused past capacity; and what the
gateway adds to the time to the first byte where it decides nothing. With `--url`, of a server that runs already, such
as one on Ray Serve.
"""

import argparse
import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

import httpx
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from rgate_integrations import load_gate
from rgate_integrations.engine.decision_engine import DecisionEngine
from rgate_integrations.serving.app import make_app
from rgate_integrations.serving.gateway import Gateway
from rgate_integrations.serving.server import make_server
from rgate_integrations.serving.service import DecisionService
from rgate_integrations.serving.upstream import Upstream

Ask = Callable[[str], Awaitable[bool]]
Timed = tuple[np.ndarray, float, int]
COMMAND = "from rgate_integrations.cli import main; main()"


def question(number: int) -> str:
    return f"Who wrote the {number}th book about the history of Portugal?"


async def timed(asks: Sequence[Ask], requests: int) -> Timed:
    """Let each client ask one question after the other.

    Returns:
        Seconds of each request that was answered, of all together, and how many were refused.
    """
    numbers = iter(range(requests))
    seconds: list[float] = []
    refused = 0

    async def client(ask: Ask) -> None:
        nonlocal refused
        for number in numbers:
            began = time.perf_counter()
            if await ask(question(number)):
                seconds.append(time.perf_counter() - began)
            else:
                refused += 1

    began = time.perf_counter()
    await asyncio.gather(*map(client, asks))
    return np.array(seconds), time.perf_counter() - began, refused


async def in_process(gate: DecisionEngine, clients: int, requests: int) -> Timed:
    async def ask(text: str) -> bool:
        await gate.adecide(text)
        return True

    return await timed([ask] * clients, requests)


async def over_http(url: str, clients: int, requests: int, *, patient: bool = False) -> Timed:
    """Ask a server; each client has a connection, which is open before the first question is timed.

    Args:
        url: The server.
        clients: How many clients.
        requests: How many questions.
        patient: Whether a client that is refused waits as long as it is told.
    """

    def asking(client: httpx.AsyncClient) -> Ask:
        async def ask(text: str) -> bool:
            response = await client.post("/v1/decide", json={"questions": [text]})
            if response.status_code == 529 and patient:
                await asyncio.sleep(float(response.headers["retry-after"]))
            return response.status_code == 200 and response.json()["decisions"][0]["error"] is None

        return ask

    context = httpx.create_ssl_context()
    async with AsyncExitStack() as stack:
        asks = []
        for _ in range(clients):
            client = httpx.AsyncClient(base_url=url, timeout=600, verify=context)
            await stack.enter_async_context(client)
            await client.get("/health")
            asks.append(asking(client))
        return await timed(asks, requests)


def row(name: str, clients: int, found: Timed) -> None:
    seconds, whole, refused = found
    p50, p95, p99 = np.quantile(seconds * 1e3, [0.5, 0.95, 0.99])
    print(
        f"| {name} | {clients} | {len(seconds) / whole:.0f} | {p50:.0f} | {p95:.0f} | {p99:.0f} | {refused} |",
        flush=True,
    )


def serve(*options: str) -> tuple[subprocess.Popen, str]:
    """Start the command; returns its process and its URL, when it is ready."""
    process = subprocess.Popen(  # noqa: S603  a fixed command
        [sys.executable, "-c", COMMAND, "serve", "--port", "0", *options], stderr=subprocess.PIPE, text=True
    )
    url = next(found[0] for line in process.stderr if (found := re.search(r"http://[\d.:]+", line)))
    threading.Thread(target=process.stderr.read, daemon=True).start()
    while httpx.get(f"{url}/ready").status_code != 200:
        time.sleep(0.1)
    return process, url


def decisions(clients: Sequence[int], requests: int) -> None:
    gate = load_gate(on_error="raise")
    gate.decide("Who wrote Hamlet?")
    for some in clients:
        row("in process", some, asyncio.run(in_process(gate, some, requests)))
    server, url = serve("--timeout", "600")
    for some in clients:
        row("server", some, asyncio.run(over_http(url, some, requests)))
    server.kill()
    for patient, name in ((True, "full, clients wait"), (False, "full, clients do not wait")):
        server, url = serve("--timeout", "600", "--queue", "16")
        row(name, 64, asyncio.run(over_http(url, 64, requests, patient=patient)))
        server.kill()


class Listening:
    """An application on a port of its own, in a thread."""

    def __init__(self, app: ASGIApp) -> None:
        server = make_server(app, "127.0.0.1", 0)
        threading.Thread(target=server.run, daemon=True).start()
        while not server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


async def stream(request: Request) -> StreamingResponse:
    return StreamingResponse(iter([b"data: {}\n\n"] * 3), media_type="text/event-stream")


def gateway(args: argparse.Namespace) -> None:
    upstream = Listening(Starlette(routes=[Route("/v1/chat/completions", stream, methods=["POST"])]))
    service = DecisionService(load_gate("constant:never", on_error="raise"))
    between = Listening(make_app(service, Gateway(service, Upstream(upstream.url))))
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    times = {"alone": [], "gateway": []}
    with httpx.Client(timeout=60, headers={"x-rgate": "off"}) as client:
        for _ in range(args.requests):
            for name, url in (("alone", upstream.url), ("gateway", between.url)):  # in turns
                began = time.perf_counter()
                with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                    chunks = response.iter_raw()
                    next(chunks)
                    times[name].append(time.perf_counter() - began)
                    list(chunks)
    for name, seconds in times.items():
        p50, p95 = np.quantile(np.array(seconds) * 1e3, [0.5, 0.95])
        print(f"first byte, {name}: p50 {p50:.1f} ms, p95 {p95:.1f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--gateway", action="store_true", help="the gateway alone")
    parser.add_argument("--url", help="a server that runs already")
    parsed = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    if not parsed.url:
        gateway(parsed)
    if not parsed.gateway:
        print("| | clients | decisions/s | p50, ms | p95, ms | p99, ms | refused |")
        print("|---|---|---|---|---|---|---|")
    if parsed.url:
        for some in parsed.clients:
            row(parsed.url, some, asyncio.run(over_http(parsed.url, some, parsed.requests)))
    elif not parsed.gateway:
        decisions(parsed.clients, parsed.requests)
