"""Throughput and latency of a decision server and of the gateway, on loopback.

    python benchmarks/serve.py [--requests 400] [--clients 1 8 64 256] [--url URL]

Measures decisions a second and latency of `rgate serve` with several clients, one question a request. The same gate
in this process serves as many tasks for comparison. A full queue shows how many requests are refused. The gateway is
measured by what it adds to the time to the first byte if it decides nothing. `--url` measures a running server
instead.
"""

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager

import httpx
import numpy as np
from base import argument_parser, print_table
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from rgate_integrations import DecisionEngine, load_gate
from rgate_integrations.serving.app import make_app
from rgate_integrations.serving.gateway import Gateway
from rgate_integrations.serving.server import make_server
from rgate_integrations.serving.service import DecisionService
from rgate_integrations.serving.upstream import Upstream

Ask = Callable[[str], Awaitable[bool]]
COMMAND = "from rgate_integrations.cli import main; main()"
COLUMNS = ["", "clients", "decisions/s", "p50, ms", "p95, ms", "p99, ms", "refused"]


async def time_clients(name: str, asks: Sequence[Ask], requests: int) -> list[str]:
    """Run the clients, each of which asks one question after the other; returns a row of the table."""
    numbers = iter(range(requests))
    milliseconds: list[float] = []

    async def client(ask: Ask) -> None:
        for number in numbers:
            began = time.perf_counter()
            answered = await ask(f"Who wrote the {number}th book about the history of Portugal?")
            milliseconds.append(1e3 * (time.perf_counter() - began) if answered else np.nan)

    began = time.perf_counter()
    await asyncio.gather(*map(client, asks))
    seconds = time.perf_counter() - began
    refused = np.isnan(milliseconds).sum()
    quantiles = np.nanquantile(milliseconds, [0.5, 0.95, 0.99])
    cells = [(requests - refused) / seconds, *quantiles, refused]
    return [name, str(len(asks)), *(f"{number:.0f}" for number in cells)]


async def ask_in_process(gate: DecisionEngine, clients: int, requests: int) -> list[str]:
    async def ask(text: str) -> bool:
        await gate.adecide(text)
        return True

    return await time_clients("in process", [ask] * clients, requests)


async def ask_over_http(
    name: str, url: str, clients: int, requests: int, *, patient: bool = False
) -> list[str]:
    """Ask a server; each client opens its connection before the first question is timed.

    Args:
        name: First cell of the row.
        url: URL of the server.
        clients: Number of clients.
        requests: Number of questions.
        patient: Whether a refused client waits as long as the header ``retry-after`` says.
    """

    def make_ask(client: httpx.AsyncClient) -> Ask:
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
            asks.append(make_ask(client))
        return await time_clients(name, asks, requests)


@contextmanager
def run_server(*options: str) -> Iterator[str]:
    """Run `rgate serve`; yields its URL when it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "serve", "--port", "0", *options], stderr=subprocess.PIPE, text=True
    )
    url = next(match[0] for line in process.stderr if (match := re.search(r"http://[\d.:]+", line)))
    threading.Thread(target=process.stderr.read, daemon=True).start()
    while httpx.get(f"{url}/ready").status_code != 200:
        time.sleep(0.1)
    yield url
    process.kill()


def measure_decisions(clients: Sequence[int], requests: int) -> Iterator[list[str]]:
    """Yield a row for each way to ask and number of clients."""
    gate = load_gate(on_error="raise")
    gate.decide("Who wrote Hamlet?")
    for count in clients:
        yield asyncio.run(ask_in_process(gate, count, requests))
    with run_server("--timeout", "600") as url:
        for count in clients:
            yield asyncio.run(ask_over_http("server", url, count, requests))
    for patient, name in ((True, "full, clients wait"), (False, "full, clients do not wait")):
        with run_server("--timeout", "600", "--queue", "16") as url:
            yield asyncio.run(ask_over_http(name, url, 64, requests, patient=patient))


def start_app(app: ASGIApp) -> str:
    """Run an application in a thread, on a free port; returns its URL."""
    server = make_server(app, "127.0.0.1", 0)
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


async def stream(request: Request) -> StreamingResponse:
    return StreamingResponse(iter([b"data: {}\n\n"] * 3), media_type="text/event-stream")


def measure_gateway(requests: int) -> None:
    """Print the time to the first byte, without and with the gateway."""
    upstream = start_app(Starlette(routes=[Route("/v1/chat/completions", stream, methods=["POST"])]))
    service = DecisionService(load_gate("constant:never", on_error="raise"))
    between = start_app(make_app(service, Gateway(service, Upstream(upstream))))
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    times = {"alone": [], "gateway": []}
    with httpx.Client(timeout=60, headers={"x-rgate": "off"}) as client:
        for _ in range(requests):
            for name, url in (("alone", upstream), ("gateway", between)):  # in turns
                began = time.perf_counter()
                with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                    chunks = response.iter_raw()
                    next(chunks)
                    times[name].append(time.perf_counter() - began)
                    list(chunks)
    for name, seconds in times.items():
        p50, p95 = np.quantile(np.array(seconds) * 1e3, [0.5, 0.95])
        print(f"first byte, {name}: p50 {p50:.1f} ms, p95 {p95:.1f} ms")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--url", help="a server that runs already")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    if options.url:
        rows = [
            asyncio.run(ask_over_http(options.url, options.url, count, options.requests))
            for count in options.clients
        ]
    else:
        measure_gateway(options.requests)
        rows = list(measure_decisions(options.clients, options.requests))
    print_table(COLUMNS, rows)


if __name__ == "__main__":
    main()
