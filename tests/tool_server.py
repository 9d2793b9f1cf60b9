"""An OpenAI-compatible server on loopback that really calls tools, by rules instead of a model.

It calls ``search_docs`` for a question with "unknown" in it and ``add`` for one with "sum", if it may; after a tool
it says what the tool said. Else it writes `KNOWN` or `UNSURE`.
"""

import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.begun_answers import KNOWN, UNSURE


class Rules:
    """What the server answers, and what it was asked.

    Attributes:
        requests: The body of each request.
        breaks_off: After how many pieces a stream ends without an end, as when a server dies; None never.
    """

    def __init__(self):
        self.requests = []
        self.breaks_off = None

    def answer(self, body):
        """Return the text to write and the calls to make, ``(name, arguments)`` each."""
        self.requests.append(body)
        messages = body["messages"]
        tools = [tool["function"]["name"] for tool in body.get("tools") or []]
        question = [_text(message) for message in messages if message["role"] == "user"][-1]
        if messages[-1]["role"] == "tool":
            return f"Read {_text(messages[-1])} .", []
        if "unknown" in question and "search_docs" in tools:
            return "", [("search_docs", {"query": question})]
        if "sum" in question and "add" in tools:
            return "", [("add", {"a": 1, "b": 2})]
        return UNSURE if "unknown" in question else KNOWN, []


@contextmanager
def tool_server():
    """Run the server; gives its URL and its `Rules`."""
    rules = Rules()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"rules": rules}))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", rules
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    rules: Rules

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text, calls = self.rules.answer(body)
        reason = "tool_calls" if calls else "stop"
        self.send_response(200)
        try:
            if body.get("stream"):
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                for number, delta in enumerate(_deltas(text, calls)):
                    if number == self.rules.breaks_off:
                        return
                    self._send_chunk(delta, None)
                self._send_chunk({}, reason)
                self.wfile.write(b"data: [DONE]\n\n")
            else:
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                message = {"role": "assistant", "content": text or None}
                if calls:
                    message["tool_calls"] = [_call(place, *each) for place, each in enumerate(calls)]
                choice = {"index": 0, "message": message, "finish_reason": reason}
                self.wfile.write(json.dumps(_envelope("chat.completion", choice)).encode())
        except (BrokenPipeError, ConnectionResetError):  # the answer was stopped
            pass

    def _send_chunk(self, delta, reason):
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        line = f"data: {json.dumps(_envelope('chat.completion.chunk', choice))}\n\n"
        self.wfile.write(line.encode())

    def log_message(self, *args):
        pass


def _envelope(kind, choice):
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    found = {"id": "answer", "object": kind, "created": 0, "model": "rules", "choices": [choice]}
    return found | ({"usage": usage} if kind == "chat.completion" else {})


def _deltas(text, calls):
    yield {"role": "assistant", "content": ""}
    for word in re.findall(r"\S+\s*", text):
        yield {"content": word}
    for place, (name, arguments) in enumerate(calls):
        begun = _call(place, name, {})
        written = json.dumps(arguments)
        begun["function"]["arguments"] = written[:5]  # a server writes the arguments bit by bit
        yield {"tool_calls": [{"index": place, **begun}]}
        yield {"tool_calls": [{"index": place, "function": {"arguments": written[5:]}}]}


def _call(place, name, arguments):
    return {
        "id": f"call-{place}",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    }


def _text(message):
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)
