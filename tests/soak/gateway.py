"""A gateway between clients and an upstream that sets cookies and drips.

Its retriever hangs now and then. Every client must get the answer to its own question, with its own cookies.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from rgate_integrations.index import Passage
from rgate_integrations.index.retriever import Hit
from tests.fake_server import running
from tests.http_servers import serving_gateway
from tests.soak.scenario import Scenario, expect
from tests.soak.served import ByText, QuietServer, certainty

_CLIENTS = 8
_PASSAGE = "A passage that the shelf has."
_HANGS = "a search that hangs"
_DRIPS = "an answer that drips"
_CHAT = "/v1/chat/completions"
_JSON = "application/json"


class _Echo(BaseHTTPRequestHandler):
    """Answers with what came: the cookie and the last message. Each answer sets a cookie, for this client alone."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = body["messages"][-1]["content"]
        answer = json.dumps({"cookie": self.headers.get("cookie"), "text": text}).encode()
        self.send_response(200)
        self.send_header("content-type", _JSON)
        self.send_header("set-cookie", f"session={random.getrandbits(32)}; Path=/")
        self.send_header("access-control-allow-origin", "*")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        size = 64 if _DRIPS in text else len(answer)
        for start in range(0, len(answer), size):
            self.wfile.write(answer[start : start + size])
            self.wfile.flush()
            time.sleep(0.01 if size == 64 else 0)

    def log_message(self, *args: object) -> None:
        pass


class _Shelf:
    """A retriever with one passage, which hangs for longer than the gateway waits if the question says so."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        if _HANGS in queries[0]:
            self.is_over.wait(2.0)
        return [[Hit(Passage("1", _PASSAGE), 1.0, query)] * 100 for query in queries]


class Between(Scenario):
    """Cookies, hanging searches, dripping answers and cut emojis, all at once."""

    name = "gateway"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.stack = ExitStack()
        upstream = self.stack.enter_context(running(QuietServer(("127.0.0.1", 0), _Echo)))
        self.shelf = _Shelf()
        served = serving_gateway(ByText(), f"{upstream}/base/v1", self.shelf, timeout=0.5)
        self.host = self.stack.enter_context(served).removeprefix("http://")
        self.pool = self.stack.enter_context(ThreadPoolExecutor(_CLIENTS))

    def step(self, chance: random.Random) -> None:
        actions = {
            "questions": self._ask,
            "clients who left": self._vanish,
        }
        drawn = chance.choices(list(actions), weights=[16, 1], k=2 * _CLIENTS)
        self.counts.update(drawn)
        asked = [self.pool.submit(actions[each], random.Random(chance.random())) for each in drawn]
        for each in asked:
            each.result()

    def _ask(self, chance: random.Random) -> None:
        fault = chance.choices(["", _HANGS, _DRIPS, "a cut emoji \ud83d"], weights=[12, 1, 1, 2])[0]
        self.counts[fault.rstrip("\ud83d ") or "plain questions"] += 1
        question = f"Is {chance.random()} {fault} right?"
        own = chance.choice([None, f"client={chance.random()}"])
        status, headers, content = self._send("POST", _CHAT, question, {"cookie": own} if own else {})
        expect(status == 200, question, "got", status, content[:200])
        answer = json.loads(content)
        expect(
            answer["cookie"] == own,
            question,
            "sent the cookie",
            own,
            "and the upstream got",
            answer["cookie"],
        )
        expect(answer["text"].endswith(question), repr(question), "got", repr(answer["text"]))
        seen = question.encode(errors="replace").decode()
        way = "retrieve" if certainty(seen) < 0.5 else "direct"
        expect(headers.get("x-rgate-decision") == way, repr(question), way, headers)
        # A search that hangs, and those after several that did, find nothing; the question is asked all the same.
        found = int(headers.get("x-rgate-passages", 0))
        expect(found == 0 or (way == "retrieve" and _HANGS not in question), question, headers)
        expect(answer["text"].count(_PASSAGE) == found <= 3, question, headers, answer["text"])
        expect("access-control-allow-origin" not in headers, "a page may read the answer:", headers)

    def _vanish(self, chance: random.Random) -> None:
        connection = self._connect(f"Is {chance.random()} {_DRIPS} right?", {}, "POST", _CHAT)
        connection.close()

    def _send(
        self, method: str, target: str, question: str, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        connection = self._connect(question, headers, method, target)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, content

    def _connect(
        self, question: str, headers: dict[str, Any], method: str, target: str
    ) -> http.client.HTTPConnection:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": question}]})
        connection = http.client.HTTPConnection(self.host, timeout=60.0)
        connection.request(method, target, body, {"content-type": _JSON, **headers})
        return connection

    def close(self) -> None:
        self.shelf.is_over.set()
        self.stack.close()
