"""Labels: one rule for "the answer is right", whoever asks; and what the papers make of it."""

import json

import pytest

from rgate_integrations import Draft
from rgate_integrations.evaluation import read_paired
from rgate_integrations.evaluation.collect import collect
from rgate_integrations.training.examples import read_examples
from tests.scripted_proxy import ScriptedProxy

ANSWERS = [
    ("I do not know the answer.", ["no"], False),  # "no" is in "not" and "know", but no word of the answer
    ("No, he did not.", ["no"], True),
    ("He was born in 1969.", ["9"], False),
    ("It was the Beatles!", ["The Rolling Stones", "beatles"], True),
    ("Anything.", ["the", "!"], False),  # gold answers that normalise to nothing
]


class Says(ScriptedProxy):
    def __init__(self, text):
        super().__init__()
        self.text = text

    def generate(self, prompt, values, *, tokens=64, adapter=None):
        return [Draft(text=self.text) for _ in values]


@pytest.mark.parametrize(("text", "gold", "right"), ANSWERS)
def test_every_way_to_a_label_agrees(tmp_path, text, gold, right):
    question = {"id": "1", "question": "Did he do it?", "gold_answers": gold, "dataset": "d"}
    collected = collect([question], Says(text), tmp_path / "collected.jsonl")
    (learned,) = read_examples([collected])[0].examples
    (measured,) = read_paired([collected], rag=False)[0].records
    recorded = tmp_path / "recorded.jsonl"
    recorded.write_text(json.dumps({**question, "closed_book_answer": text}) + "\n")
    (judged,) = read_paired([recorded], rag=False)[0].records
    labels = [learned.known, measured.closed_book_correct, judged.closed_book_correct]
    if len(gold) == 1:  # the label of SlimPLM asks for more than half of the gold answers
        (ratio,) = read_examples([collected], "match_ratio")[0].examples
        labels.append(ratio.known)
    assert labels == [right] * len(labels)


def test_answers_that_hold_line_separators_are_collected(tmp_path):
    questions = [{"id": i, "question": f"q{i}?", "gold_answers": ["é"], "dataset": "d"} for i in "12"]
    out = collect(questions[:1], Says("one\u2028é\x85two"), tmp_path / "p.jsonl")
    whole = out.read_bytes()
    out.write_bytes(whole + whole[: whole.index("é".encode()) + 1])  # a kill inside a character
    collect(questions, Says("é"), out)
    (file,) = read_paired([out], rag=False)
    assert [r.closed_book_text for r in file.records] == ["one\u2028é\x85two", "é"]
