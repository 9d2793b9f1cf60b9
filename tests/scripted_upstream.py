"""An OpenAI-compatible server that answers what a test wants, token by token, and notes what became of that."""

import asyncio
import json
import re
import socket
import socketserver
import threading
from contextlib import contextmanager

from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rgate_integrations.index import Passage
from rgate_integrations.index.retriever import Hit
from tests.fake_server import running

OWN = {"x-own": "kept"}
ANSWER = [{"content": token} for token in ("The ", "answer ", "is ", "42.")]
CALL = {"index": 0, "id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


class ScriptedUpstream:
    """Writes its deltas; an endless stream ends when its client leaves.

    Attributes:
        requests: The body of each request.
        breaks_off: After how many deltas a stream ends without an end, as when a server dies; None never.
        fails: Whether the stream ends with an event that says that the server failed.
        pings: How many comments come before each event, whose bytes then come one by one.
    """

    own = OWN

    def __init__(self, deltas=ANSWER, *, status=200, endless=False):
        self.deltas = deltas
        self.status = status
        self.endless = endless
        self.breaks_off = None
        self.fails = False
        self.pings = 0
        self.requests = []
        self.headers = []
        self.finished = 0
        self.cancelled = threading.Event()
        chat = Route("/v1/chat/completions", self.chat, methods=["POST"])
        other = Route("/{path:path}", self.other, methods=["GET", "POST", "DELETE"])
        self.app = Starlette(routes=[chat, other])

    def answer(self, body):
        """Return the deltas that answer a request."""
        return self.deltas

    async def chat(self, request):
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if self.status != 200:
            return JSONResponse({"error": {"message": "no"}}, self.status, headers=self.own)
        deltas = self.answer(body)
        if body.get("stream"):
            return StreamingResponse(self.stream(deltas), media_type="text/event-stream", headers=self.own)
        message = {"role": "assistant", "content": "".join(delta.get("content", "") for delta in deltas)}
        message |= {name: value for name, value in deltas[-1].items() if name == "tool_calls"}
        whole = completion("chat.completion", message=message, finish_reason="stop")
        return Response(json.dumps(whole | {"usage": USAGE}, indent=3), headers=self.own)

    async def stream(self, deltas):
        try:
            for delta in deltas[: self.breaks_off]:
                for _ in range(self.pings):
                    yield b": PROCESSING\n\n"
                written = event(delta=delta, finish_reason=None)
                for part in map(chr, written) if self.pings else [written]:
                    yield part
                await asyncio.sleep(0)
            if self.fails:
                yield b'data: {"error": {"message": "overloaded", "code": 503}}\n\ndata: [DONE]\n\n'
                return
            if self.breaks_off is None:
                yield event(delta={}, finish_reason="stop")
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
        return Response(b"\x00\xff raw", 203, headers=self.own)


def completion(kind, **choice):
    return {"id": "x", "object": kind, "created": 0, "model": "scripted", "choices": [{"index": 0, **choice}]}


def event(**choice):
    # The spelling of a server's own: whoever writes it anew would write it otherwise.
    written = json.dumps(completion("chat.completion.chunk", **choice), separators=(", ", " : "))
    return f"data:  {written}\r\n\r\n".encode()


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


@contextmanager
def raw_upstream(answer=b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok"):
    """Run a server on a bare socket, which answers every request with the same bytes.

    Gives its URL, and a list of the head of each request.
    """
    received = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            head = b"".join(iter(self.rfile.readline, b"\r\n"))
            length = re.search(rb"content-length: (\d+)", head.lower())
            self.rfile.read(int(length[1]) if length else 0)  # left unread, it would reset the connection
            received.append(head)
            self.wfile.write(answer)

    with running(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)) as url:
        yield url, received


def send_raw(url, *parts):
    """Send bytes on a socket, each part after an answer to the last; return what comes until the server hangs up."""
    host, port = url.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        for part in parts[:-1]:
            connection.sendall(part)
            received += connection.recv(65536)
        connection.sendall(parts[-1])
        return received + connection.makefile("rb").read()


def raw_request(target, *headers, method="GET", body=b"", host="127.0.0.1"):
    """Return a request as bytes, whose connection is closed after its answer."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}", *headers]
    lines.append("Connection: close")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
