"""An OpenAI-compatible server that answers what a test wants, token by token, and notes what became of that."""

import asyncio
import json

from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rgate_integrations.index import Passage
from rgate_integrations.index.retriever import Hit

OWN = {"x-own": "kept"}
ANSWER = [{"content": token} for token in ("The ", "answer ", "is ", "42.")]
WHOLE = {"role": "assistant", "content": "The answer is 42."}
CALL = {"index": 0, "id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


class ScriptedUpstream:
    """Streams its deltas; an endless answer ends when its client leaves."""

    def __init__(self, deltas=ANSWER, *, status=200, endless=False):
        self.deltas = deltas
        self.status = status
        self.endless = endless
        self.requests = []
        self.headers = []
        self.finished = 0
        self.cancelled = asyncio.Event()
        chat = Route("/v1/chat/completions", self.chat, methods=["POST"])
        other = Route("/{path:path}", self.other, methods=["GET", "POST", "DELETE"])
        self.app = Starlette(routes=[chat, other])

    async def chat(self, request):
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if self.status != 200:
            return JSONResponse({"error": {"message": "no"}}, self.status, headers=OWN)
        if body.get("stream"):
            return StreamingResponse(self.stream(), media_type="text/event-stream", headers=OWN)
        return Response(json.dumps({"choices": [{"message": WHOLE}]}, indent=3), headers=OWN)

    async def stream(self):
        try:
            for delta in self.deltas:
                event = {"id": "x", "model": "scripted", "choices": [{"index": 0, "delta": delta}]}
                # The spelling of a server's own: whoever writes it anew would write it otherwise.
                yield f"data:  {json.dumps(event, separators=(', ', ' : '))}\r\n\r\n".encode()
                await asyncio.sleep(0)
            yield b"data: [DONE]\r\n\r\n"
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
        return Response(b"\x00\xff raw", 203, headers=OWN)


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
