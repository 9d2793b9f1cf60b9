"""An OpenAI-compatible server on loopback that answers what a test wants."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """Takes many clients at once. By default a sixth one is not heard, and tries again after a second."""

    request_queue_size = 128


class Fake(BaseHTTPRequestHandler):
    """Answers with what ``script`` says, in turn: a body, what makes one of the request, or status, text and headers.

    The last of the script is said again and again.
    """

    script: list = []  # noqa: RUF012
    seen: list = []  # noqa: RUF012
    cookies: list = []  # noqa: RUF012

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.path, body, self.headers.get("Authorization")))
        self.cookies.append(self.headers.get("Cookie"))
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if callable(answer):
            answer = answer(body)
        status, text, *headers = answer if isinstance(answer, tuple) else (200, json.dumps(answer))
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


@contextmanager
def running(server):
    """Run a server in a thread; gives its URL."""
    # Looking often whether it is to shut down: by default that takes half a second a test.
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def answer(text="Yes", tops=None, logprobs=True, reason="stop"):
    likeliest = [{"token": t, "logprob": v} for t, v in (tops or {}).items()]
    choice = {"message": {"content": text}, "finish_reason": reason}
    if logprobs:
        choice["logprobs"] = {"content": [{"token": text, "logprob": -0.1, "top_logprobs": likeliest}]}
    return {"choices": [choice], "usage": {"prompt_tokens": 7}}
