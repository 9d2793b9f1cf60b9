"""An OpenAI-compatible server that answers what a test wants, token by token, and notes what became of that."""

import asyncio
import json

from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rgate_integrations.index import Passage
from rgate_integrations.index.retriever import Hit

OWN = {"x-own": "kept"}


class ScriptedUpstream:
    """Streams tokens, or calls of a tool; an endless answer ends when its client leaves."""

    def __init__(
        self, tokens=("The ", "answer ", "is ", "42."), *, status=200, tool_call=False, endless=False
    ):
        self.tokens = tokens
        self.status = status
        self.tool_call = tool_call
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
        message = {"role": "assistant", "content": "".join(self.tokens)}
        return Response(json.dumps({"choices": [{"message": message}]}, indent=3), headers=OWN)

    async def stream(self):
        try:
            for number, token in enumerate(self.tokens):
                delta = {"content": token}
                if self.tool_call:
                    function = {"name": "f", "arguments": token}
                    call = {"index": 0, "id": "1", "type": "function", "function": function}
                    delta = {"tool_calls": [call]}
                # The spelling of a server's own: whoever writes it anew would write it otherwise.
                event = {
                    "id": "x",
                    "model": "scripted",
                    "choices": [{"index": 0, "delta": delta}],
                    "n": number,
                }
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
