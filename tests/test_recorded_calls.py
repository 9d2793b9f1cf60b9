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
    (request,) = Llama.requests
    assert request["cache_prompt"] is False
    assert request["temperature"] == 0
    (line,) = (tmp_path / "llm.jsonl").read_text().splitlines()
    call = json.loads(line)
    assert call["meta"] == {"id": "q1", "arm": "direct"}
    assert [token["token"] for token in call["tokens"]] == WORDS
    assert call["tokens"][0]["top"] == [["Vincent", -0.1], ["?", -3.0]]
    assert (call["prompt_tokens"], call["completion_tokens"], call["finish_reason"]) == (20, 5, "stop")


def test_other_limits_and_messages_are_other_calls(served: ModuleType, url: str, tmp_path: Path) -> None:
    chat = served.RecordedChat(record=served.Record(tmp_path / "llm.jsonl", "llm"), url=url)
    chat.invoke(served.closed_book("one?"))
    chat.invoke(served.closed_book("two?"))
    chat.bind(max_tokens=4).invoke(served.closed_book("two?"))
    assert [request["max_tokens"] for request in Llama.requests] == [48, 48, 4]


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


def test_the_speed_is_that_of_undisturbed_calls(served: ModuleType) -> None:
    disturbed = {"prompt_tokens": 100, "prompt_ms": 10_000, "completion_tokens": 10, "predicted_ms": 5_000}
    quiet = {"prompt_tokens": 100, "prompt_ms": 1_000, "completion_tokens": 10, "predicted_ms": 500}
    speed = served.Speed.of([disturbed] * 5 + [quiet] * 5)
    assert (speed.read, speed.written) == (100, 20)
    assert speed.seconds(prompt=200, written=10) == pytest.approx(2.5)


def test_any_beginning_of_the_mixture_is_a_fair_sample(served: ModuleType) -> None:
    import mixture

    kinds = {}
    for kind in ("a", "b"):
        kinds[kind] = [mixture.Question(f"{kind}{n}", kind, f"{n}?", (), "test", "here") for n in range(300)]
    chosen = mixture.in_order(kinds, {"a": 75, "b": 25}, 200, 0)
    assert len({each.id for each in chosen}) == 200
    for end in (20, 60, 200):
        assert sum(each.kind == "a" for each in chosen[:end]) == pytest.approx(0.75 * end, abs=1)
    assert chosen == mixture.in_order(kinds, {"a": 75, "b": 25}, 200, 0)


def test_questions_with_nearly_the_same_words_are_known(served: ModuleType) -> None:
    import mixture

    seen = mixture.Seen(["Who wrote the opera Carmen in 1875?", "Where is Paris?"])
    assert "who wrote the opera Carmen in 1875" in seen
    assert "So who wrote the opera Carmen in 1875?" in seen
    assert "Who wrote the opera Tosca?" not in seen
