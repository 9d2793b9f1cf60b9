"""What a decision server and the gateway cost, on loopback.

    python benchmarks/serve.py [--requests 400] [--clients 1 8 64] [--processes 2] [--gateway]

Decisions a second and latency of a server (`rgate serve`) with several clients at a time, each request with one
question; of the same gate in this process, asked by as many tasks; the memory of server, worker and gate; what is
refused past capacity; and what the gateway adds to the time to the first byte where it decides nothing.
"""

import argparse
import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable

import httpx
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from rgate_integrations import load_gate
from rgate_integrations.serving.app import make_app
from rgate_integrations.serving.gateway import Gateway
from rgate_integrations.serving.metrics import Metrics
from rgate_integrations.serving.server import make_server
from rgate_integrations.serving.service import DecisionService
from rgate_integrations.serving.upstream import Upstream

Ask = Callable[[str], Awaitable[bool]]
Timed = tuple[np.ndarray, float]
COMMAND = "from rgate_integrations.cli import main; main()"
GATE = "from rgate_integrations import load_gate; load_gate().decide('Who wrote Hamlet?')"
WORKER = (
    "import httpx; from rgate_integrations import load_gate; load_gate({url!r}).decide('Who wrote Hamlet?')"
)
WAIT = "; print('ready', flush=True); import sys; sys.stdin.read()"


def question(number: int) -> str:
    return f"Who wrote the {number}th book about the history of Portugal?"


async def timed(ask: Ask, requests: int, clients: int) -> Timed:
    """Ask with some clients at a time; returns seconds of each request that was answered, and of all together."""
    numbers, seconds = iter(range(requests)), []

    async def client() -> None:
        for number in numbers:
            began = time.perf_counter()
            if await ask(question(number)):
                seconds.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return np.array(seconds), time.perf_counter() - began


def row(name: str, clients: int, requests: int, seconds: np.ndarray, whole: float) -> None:
    p50, p95, p99 = np.quantile(seconds * 1e3, [0.5, 0.95, 0.99])
    rate, refused = len(seconds) / whole, requests - len(seconds)
    print(f"| {name} | {clients} | {rate:.0f} | {p50:.0f} | {p95:.0f} | {p99:.0f} | {refused} |", flush=True)


def memory(pid: int) -> float:
    """Return the memory that only this process has, in MB: what others share is not counted twice."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        kilobytes = re.findall(r"^Private_\w+:\s+(\d+) kB", file.read(), re.MULTILINE)
    return sum(map(int, kilobytes)) / 1e3


def started(code: str) -> subprocess.Popen:
    process = subprocess.Popen(  # noqa: S603  a fixed command
        [sys.executable, "-c", code + WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    return process


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


def decisions(args: argparse.Namespace) -> None:
    print(
        "| | clients | decisions/s | p50, ms | p95, ms | p99, ms | refused |\n|---|---|---|---|---|---|---|"
    )
    gate = load_gate(on_error="raise")
    gate.decide("Who wrote Hamlet?")

    async def here(text: str) -> bool:
        await gate.adecide(text)
        return True

    for clients in args.clients:
        row("in process", clients, args.requests, *asyncio.run(timed(here, args.requests, clients)))
    limits = httpx.Limits(max_connections=None)

    async def over_http(url: str, clients: int) -> Timed:
        async with httpx.AsyncClient(timeout=600, limits=limits) as client:

            async def ask(text: str) -> bool:
                response = await client.post(f"{url}/v1/decide", json={"questions": [text]})
                return response.status_code == 200 and response.json()["decisions"][0]["error"] is None

            return await timed(ask, args.requests, clients)

    server, url = serve("--timeout", "600")
    for clients in args.clients:
        row("server", clients, args.requests, *asyncio.run(over_http(url, clients)))
    gates = [started(GATE) for _ in range(args.processes)]
    workers = [started(WORKER.format(url=url)) for _ in range(args.processes)]
    each = [np.mean([memory(process.pid) for process in some]) for some in (gates, workers)]
    print(
        f"\nmemory: a gate in its own process {each[0]:.0f} MB, a worker that asks the server {each[1]:.0f} MB, ",
        end="",
    )
    own = memory(server.pid)
    print(f"the server {own:.0f} MB")
    print(f"eight gates {8 * each[0]:.0f} MB, eight workers and a server {8 * each[1] + own:.0f} MB")
    for process in (*gates, *workers, server):
        process.kill()
    server, url = serve("--timeout", "600", "--queue", "16")
    print()
    row(
        "server, --queue 16",
        max(args.clients),
        args.requests,
        *asyncio.run(over_http(url, max(args.clients))),
    )
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
    service = DecisionService(load_gate("constant:never", on_error="raise"), Metrics())
    between = Listening(make_app(service, Gateway(service, Upstream(upstream.url))))
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    times, cpu = {"alone": [], "gateway": []}, {"alone": 0.0, "gateway": 0.0}
    with httpx.Client(timeout=60, headers={"x-rgate": "off"}) as client:
        for _ in range(args.requests):
            for name, url in (("alone", upstream.url), ("gateway", between.url)):  # in turns
                began, busy = time.perf_counter(), time.process_time()
                with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                    chunks = response.iter_raw()
                    next(chunks)
                    times[name].append(time.perf_counter() - began)
                    list(chunks)
                cpu[name] += time.process_time() - busy
    for name, seconds in times.items():
        p50, p95 = np.quantile(np.array(seconds) * 1e3, [0.5, 0.95])
        used = (
            cpu[name] / args.requests * 1e3
        )  # by client, gateway and upstream, which are all in this process
        print(f"first byte, {name}: p50 {p50:.1f} ms, p95 {p95:.1f} ms; {used:.1f} ms of CPU a request")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--gateway", action="store_true", help="the gateway alone")
    parser.add_argument("--processes", type=int, default=2)
    parsed = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    gateway(parsed)
    if not parsed.gateway:
        decisions(parsed)
