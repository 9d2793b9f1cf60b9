"""The benchmarks' ways that ask the LLM first: what its words lead to, and which calls that takes."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import asked

    return asked


class Replies(dict):
    """Stands for a record: has an answer to every call, and notes the limits."""

    def __init__(self, text: str) -> None:
        self.text, self.limits, self.calls = text, [], self

    def key(self, messages: list[dict[str, Any]], tokens: int) -> str:
        self.limits.append(tokens)
        return "any"

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: str) -> dict[str, Any]:
        chunks = [[0.1, self.text, 0]]
        return {"chunks": chunks, "prompt_tokens": 10, "finish_reason": "stop", "tokens": []}


def answered(asked: ModuleType, way: str, text: str) -> tuple[str, list[int]]:
    """Answer by a way whose LLM says one thing; returns the answer, and the limits of its calls."""
    record = Replies(text)
    chat = asked.RecordedChat(record=record)
    arms = RunnableLambda(lambda question: "with passages"), RunnableLambda(lambda question: "alone")
    return asked.asked_chains(chat, *arms)[way].invoke("who painted it?"), record.limits


@pytest.mark.parametrize(
    ("text", "expected"),
    [("direct", "alone"), (" Direct.", "alone"), ("retrieve", "with passages"), ("1999", "with passages")],
)
def test_one_word_decides(asked: ModuleType, text: str, expected: str) -> None:
    assert answered(asked, asked.BY_PROMPT, text) == (expected, [4])


@pytest.mark.parametrize(
    ("choice", "expected"), [(1, "alone"), (2, "with passages"), ("neither", "with passages")]
)
def test_a_selection_decides(asked: ModuleType, choice: object, expected: str) -> None:
    text = json.dumps([{"choice": choice, "reason": "a reason"}])
    assert answered(asked, asked.BY_SELECTOR, text) == (expected, [96])


def test_a_selection_that_cannot_be_read_retrieves(asked: ModuleType) -> None:
    assert answered(asked, asked.BY_SELECTOR, "[{{ choice: 1, rea")[0] == "with passages"


@pytest.mark.parametrize(("text", "expected"), [("Van Gogh.", "Van Gogh."), ("RETRIEVE", "with passages")])
def test_an_answer_is_the_answer(asked: ModuleType, text: str, expected: str) -> None:
    assert answered(asked, asked.BY_ANSWER, text) == (expected, [48])


def test_what_is_not_recorded_is_not_a_selection(asked: ModuleType, tmp_path: Path) -> None:
    chat = asked.RecordedChat(record=asked.Record(tmp_path / "llm.jsonl", "llm"))
    with pytest.raises(asked.NotRecorded):
        asked.asked_by_selector(chat)("who painted it?")
