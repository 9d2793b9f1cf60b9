"""The benchmarks' record of an LLM's calls: each is made once, and what a chain pays is counted by it."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from tests.patience import PATIENCE

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
WORDS = ["Vincent", " van", " Gogh", "."]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import served

    return served


class Llama(BaseHTTPRequestHandler):
    """Streams four words as llama.cpp does, and counts the requests."""

    requests: list[dict] = []  # noqa: RUF012

    def do_POST(self) -> None:
        Llama.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()
        for word in WORDS:
            top = [{"token": word, "logprob": -0.1}, {"token": "?", "logprob": -3.0}]
            told = {"content": [{"token": word, "logprob": -0.1, "top_logprobs": top}]}
            self._send({"choices": [{"delta": {"content": word}, "logprobs": told}]})
        timings = {"prompt_n": 20, "prompt_ms": 200.0, "predicted_n": 5, "predicted_ms": 100.0}
        self._send({"choices": [{"delta": {}, "finish_reason": "stop"}], "timings": timings})

    def _send(self, data: dict) -> None:
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Llama.requests.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Llama)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(PATIENCE)
    server.server_close()


def test_a_call_is_made_once_and_kept(served: ModuleType, url: str, tmp_path: Path) -> None:
    for _ in range(2):  # the second time from the file alone
        record = served.Record(tmp_path / "llm.jsonl", "llm")
        chat = served.RecordedChat(record=record, url=url, meta={"id": "q1", "arm": "direct"})
        assert chat.invoke(served.closed_book("who painted it?")).text == "Vincent van Gogh."
    chat.bind(max_tokens=4).invoke(served.closed_book("who painted it?"))
    assert [request["max_tokens"] for request in Llama.requests] == [48, 4], "another limit is another call"
    (line, _) = (tmp_path / "llm.jsonl").read_text().splitlines()
    call = json.loads(line)
    assert call["meta"] == {"id": "q1", "arm": "direct"}
    assert [token["token"] for token in call["tokens"]] == WORDS
    assert call["tokens"][0]["top"] == [["Vincent", -0.1], ["?", -3.0]]
    assert (call["prompt_tokens"], call["completion_tokens"], call["finish_reason"]) == (20, 5, "stop")


def test_a_stream_that_is_left_costs_what_was_written(served: ModuleType, url: str, tmp_path: Path) -> None:
    clock = served.Clock()
    record = served.Record(tmp_path / "llm.jsonl", "llm")
    chat = served.RecordedChat(record=record, url=url, clock=clock, speed=served.Speed(read=10, written=2))
    stream = chat.stream(served.closed_book("who painted it?"))
    first, second = next(stream), next(stream)
    assert [first.text, second.text] == ["Vincent", " van"]
    assert first.response_metadata["logprobs"]["content"][0]["logprob"] == -0.1
    stream.close()
    (call,) = clock.calls
    assert (call["prompt"], call["written"], call["whole"]) == (20, 2, False)
    assert clock.seconds == pytest.approx(20 / 10 + 2 / 2)


def test_without_a_server_only_the_record_answers(served: ModuleType, tmp_path: Path) -> None:
    chat = served.RecordedChat(record=served.Record(tmp_path / "llm.jsonl", "llm"))
    with pytest.raises(served.NotRecorded):
        chat.invoke(served.closed_book("who painted it?"))
