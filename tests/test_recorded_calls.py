"""The benchmarks' record of an LLM's calls: each is made once, and what a chain pays is counted by it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rgate_integrations.models.remote import RemoteModel
from tests.fake_server import Fake

served = pytest.importorskip("served")

WORDS = ["Vincent", " van", " Gogh", "."]


def event(data: dict) -> str:
    return f"data: {json.dumps(data)}\n\n"


def word(text: str) -> str:
    """A word as llama.cpp streams it."""
    top = [{"token": text, "logprob": -0.1}, {"token": "?", "logprob": -3.0}]
    logprobs = {"content": [{**top[0], "top_logprobs": top}]}
    return event({"choices": [{"delta": {"content": text}, "logprobs": logprobs}]})


TIMINGS = {"prompt_n": 20, "prompt_ms": 200.0, "predicted_n": 5, "predicted_ms": 100.0}
END = event({"choices": [{"delta": {}, "finish_reason": "stop"}], "timings": TIMINGS})


@pytest.fixture
def url(fake: Callable[..., RemoteModel]) -> str:
    return fake((200, "".join(map(word, WORDS)) + END)).url.removesuffix("/v1")


def test_a_call_is_made_once_and_kept(url: str, tmp_path: Path) -> None:
    for _ in range(2):  # the second time from the file alone
        record = served.Record(tmp_path / "llm.jsonl", "llm")
        chat = served.RecordedChat(record=record, url=url, meta={"id": "q1", "arm": "direct"})
        assert chat.invoke(served.closed_book("who painted it?")).text == "Vincent van Gogh."
    chat.bind(max_tokens=4).invoke(served.closed_book("who painted it?"))
    assert [body["max_tokens"] for _, body, _ in Fake.seen] == [48, 4], "another limit is another call"
    (line, _) = (tmp_path / "llm.jsonl").read_text().splitlines()
    call = json.loads(line)
    assert call["meta"] == {"id": "q1", "arm": "direct"}
    assert [text for text, _ in call["chunks"]] == WORDS
    assert [call["chunks"][0][1][0][key] for key in ("token", "logprob")] == ["Vincent", -0.1]
    assert (call["prompt_tokens"], call["completion_tokens"], call["finish_reason"]) == (20, 5, "stop")


def test_a_stream_that_is_left_costs_what_was_written(url: str, tmp_path: Path) -> None:
    record = served.Record(tmp_path / "llm.jsonl", "llm")
    chat = served.RecordedChat(record=record, url=url, speed=served.Speed(read=10, written=2))
    stream = chat.stream(served.closed_book("who painted it?"))
    first, second = next(stream), next(stream)
    assert [first.text, second.text] == ["Vincent", " van"]
    assert first.response_metadata["logprobs"]["content"][0]["logprob"] == -0.1
    stream.close()
    (call,) = chat.calls
    assert (call["prompt"], call["written"]) == (20, 2)
    assert chat.seconds == pytest.approx(20 / 10 + 2 / 2)


def test_without_a_server_only_the_record_answers(tmp_path: Path) -> None:
    chat = served.RecordedChat(record=served.Record(tmp_path / "llm.jsonl", "llm"))
    with pytest.raises(served.NotRecorded):
        chat.invoke(served.closed_book("who painted it?"))
