"""A served proxy whose server is slow, broken or lies."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import random
import re
import socket
import time
from contextlib import suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

from rgate_integrations import Decision, Request, load_gate
from rgate_integrations.errors import ServerError
from rgate_integrations.models.bounded_http import LONGEST_BODY
from rgate_integrations.models.remote import RemoteModel
from tests.fake_server import Fake, answer, running
from tests.soak.callers import in_threads
from tests.soak.scenario import Scenario, expect

KEY = "sk-soak-0123456789"
# What is wrong with the answer to a question that names it. Each of these must end in a decision to retrieve.
BROKEN = {
    "refused": (401, json.dumps({"error": f"{KEY} is no key"})),
    "gone": (404, "no such model"),
    "failing": (500, f"Traceback: Authorization: Bearer {KEY}"),
    "garbage": (200, "<html>gateway</html>"),
    "truncated": (200, '{"choices": [{"message": {"con'),
    "empty": (200, "{}"),
    "no-choice": (200, '{"choices": []}'),
    "wrong-shapes": (200, '{"choices": [{"message": 5, "logprobs": {"content": "x"}}]}'),
    "null": (200, "null"),
    "deep": (200, "[" * 50_000),
    "no-logprobs": (200, json.dumps(answer("Yes", logprobs=False))),
    "thinking": (200, json.dumps(answer("<think>", {"<think>": -0.01, "Okay": -6.0}))),
    "certain": (200, json.dumps(answer("Yes", {"Yes": math.inf, "No": -1.0}))),
    "huge-tokens": (200, json.dumps(answer("x" * 300_000, {"x" * 300_000: -0.01}))),
    "endless": (200, " " * (LONGEST_BODY + 1)),
}
_BUSY = "busy"  # refused once, answered then
_DROPPED = "dropped"  # the connection is closed in the middle of the answer
_PACKED = "packed"  # a megabyte in a kilobyte of gzip
_DRIPPING = "dripping"  # a byte now and then, for ever
_PLAIN = "plain"


def certainty(text: str) -> float:
    """Return the probability of "Yes" that the server gives for a text."""
    return 0.05 + 0.9 * hashlib.sha256(text.encode()).digest()[0] / 255


class ByText:
    """A gate whose decision about each question is unmistakable."""

    def decide_batch(self, requests: list[Request]) -> list[Decision]:
        decisions = []
        for request in requests:
            p = certainty(request.question)
            decisions.append(Decision(question=request.question, retrieve=p < 0.5, p_known=p))
        return decisions

    async def adecide_batch(self, requests: list[Request]) -> list[Decision]:
        return self.decide_batch(requests)


class _Lying(Fake):
    refused: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        self._drip()

    def do_POST(self) -> None:
        if self.path == "/v1/decide":
            self._drip()
            return
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        # Mood and number from a question such as "Is sample plain-17 right?".
        mood, number = re.search(r"sample ([a-z-]+)-(\d+) right", text).groups()
        if mood == _DROPPED:
            self._send(200, '{"choices": ', ("Content-Length", "1000"))
            self.connection.shutdown(socket.SHUT_RDWR)
        elif mood == _DRIPPING:
            self._drip()
        elif mood == _PACKED:
            self._send(200, gzip.compress(b" " * 1_000_000), ("Content-Encoding", "gzip"))
        elif mood == _BUSY and number not in self.refused:
            self.refused.add(number)  # a question is asked by one caller, one try after the other
            self._send(429, "later")
        elif mood in BROKEN:
            self._send(*BROKEN[mood])
        else:
            sure = certainty(number)
            tops = {"Yes": math.log(sure), "No": math.log(1 - sure)}
            self._send(200, json.dumps(answer("Yes", tops)))

    def _drip(self) -> None:
        """Send headers that never end, each piece in time."""
        self.send_response(200)
        self.flush_headers()
        with suppress(OSError):  # until the client has left
            while True:
                self.wfile.write(b"X-More: 1\r\n")
                time.sleep(0.05)

    def _send(self, status: int, body: str | bytes, *headers: tuple[str, str]) -> None:
        content = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for name, value in headers or (("Content-Length", str(len(content))),):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()


class QuietServer(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients that hung up


class Served(Scenario):
    """A gate whose proxy is a server: right decisions of good answers, retrieval for all others, no key shown."""

    name = "served"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.server = running(QuietServer(("127.0.0.1", 0), _Lying))
        url = self.server.__enter__()
        proxy = RemoteModel(f"{url}/v1", "m", api_key=KEY, timeout=10.0, retries=1)
        self.gate = load_gate("ik", proxy=proxy, tokens=0)
        hasty = RemoteModel(f"{url}/v1", "m", api_key=KEY, timeout=0.3, retries=0)
        self.dripping = [load_gate("ik", proxy=hasty, tokens=0), load_gate(url, request_seconds=0.3)]
        # Nothing listens on port 9.
        self.dead = load_gate("ik", proxy=RemoteModel("http://127.0.0.1:9/v1", "m", retries=0), tokens=0)

    def step(self, chance: random.Random) -> None:
        faults = [_BUSY, _DROPPED, _PACKED, *BROKEN]
        moods = chance.choices([_PLAIN, *faults], weights=[20, *[1] * len(faults)], k=8)
        if chance.random() < 0.1:
            decision = self.dead.decide("Is anybody there?")
            self.counts["dead servers"] += 1
            failed = decision.error is not None and decision.error.type == ServerError.__name__
            expect(decision.retrieve and failed, "a dead server:", decision)
        if chance.random() < 0.1:
            gate = chance.choice(self.dripping)
            decision = gate.decide(f"Is sample {_DRIPPING}-{chance.randrange(10**9)} right?")
            self.counts["dripping servers"] += 1
            failed = decision.error is not None and decision.error.type == ServerError.__name__
            expect(decision.retrieve and failed, "a dripping server:", decision)
        asked = [(mood, f"{chance.randrange(10**9)}") for mood in moods]
        texts = [f"Is sample {mood}-{number} right?" for mood, number in asked]
        decisions = in_threads(self.gate.decide, texts)
        for (mood, number), decision in zip(asked, decisions, strict=True):
            self.check(mood, number, decision)

    def check(self, mood: str, number: str, decision: Decision) -> None:
        """Compare the decision of a question with the scripted answer of the server."""
        self.counts["decisions"] += 1
        expect(KEY not in decision.model_dump_json(), "the key is shown:", mood)
        if mood in (_PLAIN, _BUSY):
            expect(decision.error is None, mood, decision)
            right = math.isclose(decision.p_known, certainty(number), abs_tol=1e-3)
            expect(right, mood, decision.p_known, "is not", certainty(number))
        else:
            self.counts["broken answers"] += 1
            expect(decision.retrieve and decision.error is not None, mood, decision)

    def close(self) -> None:
        self.server.__exit__(None, None, None)
