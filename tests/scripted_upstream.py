"""An OpenAI-compatible server that answers what a test wants, token by token, and notes what became of that."""

import asyncio
import json

from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rgate_integrations.index import Passage
from rgate_integrations.index.retriever import Hit


class ScriptedUpstream:
    """Streams ``tokens``; where ``gates`` has an event for a token, it waits for that before it."""

    def __init__(self, tokens=("The ", "answer ", "is ", "42.")):
        self.tokens = list(tokens)
        self.status = 200
        self.tool_call = False
        self.requests = []
        self.headers = []
        self.finished = 0
        self.cancelled = asyncio.Event()
        self.endless = False
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/{path:path}", self.other, methods=["GET", "POST", "DELETE"]),
            ]
        )

    def events(self):
        for number, token in enumerate(self.tokens):
            delta = {"content": token}
            if self.tool_call:
                call = {
                    "index": 0,
                    "id": "1",
                    "type": "function",
                    "function": {"name": "f", "arguments": token},
                }
                delta = {"tool_calls": [call]}
            # The spelling of a server's own: whoever writes it anew would write it otherwise.
            event = {"id": "x", "model": "scripted", "choices": [{"index": 0, "delta": delta}], "n": number}
            yield f"data:  {json.dumps(event, separators=(', ', ' : '))}\r\n\r\n".encode()
        yield b"data: [DONE]\r\n\r\n"

    async def chat(self, request):
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if self.status != 200:
            return JSONResponse({"error": {"message": "no"}}, self.status, headers={"x-own": "kept"})
        if not body.get("stream"):
            message = {"role": "assistant", "content": "".join(self.tokens)}
            return Response(
                json.dumps({"choices": [{"message": message}]}, indent=3), headers={"x-own": "kept"}
            )
        return StreamingResponse(self.stream(), media_type="text/event-stream", headers={"x-own": "kept"})

    async def stream(self):
        try:
            for event in self.events():
                yield event
                await asyncio.sleep(0)
            while self.endless:
                yield b": still here\n\n"
                await asyncio.sleep(0.01)
            self.finished += 1
        except BaseException:
            self.cancelled.set()
            raise

    async def other(self, request):
        self.requests.append((request.method, str(request.url), await request.body()))
        self.headers.append(dict(request.headers))
        return Response(b"\x00\xff raw", 203, headers={"x-own": "kept"})


class Shelf:
    """A retriever that remembers what it was asked, and has one passage."""

    def __init__(self, text="Hamlet was written by William Shakespeare.", title="Hamlet"):
        self.passage = Passage("1", text, title=title)
        self.queries = []
        self.error = None

    def search(self, queries, k):
        self.queries += queries
        if self.error is not None:
            raise self.error
        return [[Hit(self.passage, 1.0, query)] for query in queries]
