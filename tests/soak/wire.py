"""A decision server with clients that ask, ask wrongly, dawdle and vanish, and that is killed now and then."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from rgate_integrations import load_gate
from tests.soak.machine import Allowance, Held, give_back_at_once
from tests.soak.scenario import Scenario, expect
from tests.soak.served import ByText, certainty

_CLIENTS = 16
_ALLOWANCE = Allowance(memory=60, threads=40, descriptors=40)  # of the server
# What is sent, and the status that it must get.
WRONG = {
    "not JSON": (b"{", 422),
    "no questions": (b"{}", 422),
    "no text": (b'{"questions": [null]}', 422),
    "unknown field": (b'{"questions": ["a?"], "x": 1}', 422),
    "too many": (json.dumps({"questions": ["a?"] * 10_000}).encode(), 422),
    "too large": (b" " * (17 << 20), 413),
}


def serve(port: int) -> None:
    """Serve `ByText` until killed."""
    from rgate_integrations.serving.app import make_app
    from rgate_integrations.serving.server import make_server
    from rgate_integrations.serving.service import DecisionService

    give_back_at_once()  # which is impossible from outside
    make_server(make_app(DecisionService(ByText())), "127.0.0.1", port).run()


class Wire(Scenario):
    """Every question gets its own decision, or retrieves while the server is down; bad requests get a status."""

    name = "wire"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=60.0, trust_env=False)
        self.gate = load_gate(self.url)
        self.pool = ThreadPoolExecutor(_CLIENTS)
        self.first: Held | None = None
        self.start()

    def start(self) -> None:
        """Start the server, and wait until it decides."""
        code = f"from tests.soak.wire import serve; serve({self.port})"
        self.server = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
        while not self._is_ready():
            expect(self.server.poll() is None, "the server has ended")

    def step(self, chance: random.Random) -> None:
        if chance.random() < 0.004:
            self._kill(chance)
        actions = {
            "requests": self._ask,
            "decisions of a gate": self._gate,
            "wrong requests": self._wrong,
            "clients who left": self._vanish,
        }
        drawn = chance.choices(list(actions), weights=[12, 4, 2, 2], k=4 * _CLIENTS)
        self.counts.update(drawn)
        done = [self.pool.submit(actions[each], random.Random(chance.random())) for each in drawn]
        for each in done:
            each.result()
        held = Held.by(self.server.pid)
        self.first = self.first or held
        expect(not _ALLOWANCE.exceeded(self.first, held), "the server:", self.first, "then", held)

    def _ask(self, chance: random.Random) -> None:
        questions = [f"Is {chance.random()} right?" for _ in range(chance.choice((1, 1, 1, 5)))]
        answer = self.client.post("/v1/decide", json={"questions": questions})
        expect(answer.status_code == 200, "status", answer.status_code)
        for question, decision in zip(questions, answer.json()["decisions"], strict=True):
            expect(decision["question"] == question, question, "got", decision)
            expect(decision["p_known"] == certainty(question), question, "got", decision)

    def _gate(self, chance: random.Random) -> None:
        question = f"Is {chance.random()} right?"
        decision = self.gate.decide(question)
        expect(decision.error is None and decision.p_known == certainty(question), question, "got", decision)

    def _wrong(self, chance: random.Random) -> None:
        name = chance.choice(list(WRONG))
        content, status = WRONG[name]
        try:
            answer = self.client.post("/v1/decide", content=content)
        except (httpx.WriteError, httpx.ReadError):
            # The server hangs up on what is too large while it is still sent.
            expect(status == 413, name)
        else:
            expect(answer.status_code == status, name, "got", answer.status_code)

    def _vanish(self, chance: random.Random) -> None:
        body = json.dumps({"questions": [f"Is {chance.random()} right?"]}).encode()
        head = f"POST /v1/decide HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        sent = (head + body)[: chance.choice((1, len(head) // 2, len(head), len(head) + 5, len(head + body)))]
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(sent)

    def _kill(self, chance: random.Random) -> None:
        """Kill the server during requests: all of them get decisions, and the next server is used once it is up."""
        questions = [f"Is {chance.random()} right?" for _ in range(4 * _CLIENTS)]
        asked = [self.pool.submit(self.gate.decide, question) for question in questions]
        self.server.kill()
        self.server.wait()
        for question, future in zip(questions, asked, strict=True):
            decision = future.result()
            own = decision.error is None and decision.p_known == certainty(question)
            expect(own or (decision.retrieve and decision.error is not None), question, "got", decision)
        self.start()
        self.first = None
        decision = self.gate.decide(questions[0])
        expect(decision.error is None, "after the restart:", decision)
        self.counts["kills"] += 1

    def _is_ready(self) -> bool:
        try:
            return self.client.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def close(self) -> None:
        self.server.kill()
        self.server.wait()
        self.pool.shutdown()
        self.client.close()
