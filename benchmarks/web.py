"""When the first token comes with many clients at once in one web process.

    python benchmarks/web.py [--clients 30] [--rounds 5]

A chain served over HTTP as in docs/guides/web.md, before an LLM that answers at once: with the LLM alone, behind a
gate that reads the question, and behind answer first. All clients ask at the same moment, each a question of its own
that the gate skips; one that it does not skip ends the run.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator

import httpx
import numpy as np
from base import argument_parser, print_table
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import Runnable, RunnableLambda
from serve import Listening
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from rgate_integrations import load_gate
from rgate_integrations.langchain import RetrievalGate

QUESTIONS = [
    f"What is the {what} of {country}?"
    for what in ("capital", "currency", "official language", "largest city", "national flag")
    for country in ("France", "Italy", "Spain", "Germany", "Portugal", "Japan")
]
ANSWER = "That is well known, and here it is, in a sentence of some words, so that there is enough to judge."


def retrieve(_: str) -> str:
    raise RuntimeError("A question was retrieved for, and this measures those that are not.")


def application(chain: Runnable) -> Starlette:
    async def ask(request: Request) -> StreamingResponse:
        async def stream() -> AsyncIterator[str]:
            async for chunk in chain.astream(request.query_params["question"]):
                yield f"data: {json.dumps(chunk)}\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    return Starlette(routes=[Route("/ask", ask)])


async def first_tokens(url: str, clients: int, rounds: int) -> list[float]:
    """Return the seconds until the first token of each request."""
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:

        async def seconds(question: str) -> float:
            began = time.perf_counter()
            async with client.stream("GET", f"{url}/ask", params={"question": question}) as response:
                async for _ in response.aiter_text():
                    return time.perf_counter() - began
            raise RuntimeError("the stream was empty")

        asked = [QUESTIONS[number % len(QUESTIONS)] for number in range(clients)]
        await asyncio.gather(*map(seconds, asked))  # connections and models are warm after the first round
        return [one for _ in range(rounds) for one in await asyncio.gather(*map(seconds, asked))]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--clients", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    llm = RunnableLambda(lambda _: "") | GenericFakeChatModel(messages=iter(lambda: AIMessage(ANSWER), None))
    direct = llm | StrOutputParser()
    rag = RunnableLambda(retrieve)
    gate = RetrievalGate(load_gate(on_error="raise"))
    ways = {
        "the LLM alone": direct,
        "question alone": gate.route(retrieve=rag, direct=direct),
        "answer first": gate.route(retrieve=rag, direct=direct, answer_first=True),
    }
    rows = []
    for name, chain in ways.items():
        url = Listening(application(chain)).url
        seconds = asyncio.run(first_tokens(url, args.clients, args.rounds))
        rows.append([name, *(f"{value:.2f} s" for value in np.quantile(seconds, [0.5, 0.95, 1]))])
    print_table(["", "median", "95 %", "worst"], rows)


if __name__ == "__main__":
    main()
