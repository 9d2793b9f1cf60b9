"""Labels: one rule for "the answer is right", whoever asks; and what the papers make of it."""

import json

import pytest
from typer.testing import CliRunner

from rgate_integrations import Draft
from rgate_integrations.artifacts.folder import read_gate
from rgate_integrations.cli.main import app
from rgate_integrations.errors import DataFormatError
from rgate_integrations.training.examples import read_examples
from rgate_integrations.training.sampling import read_sampled, to_be_sampled
from rgate_integrations.tuning import read_paired
from rgate_integrations.tuning.collect import collect
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


# --- labels of sampled answers (KBM, section 2.2) ----------------------------------------------------------


class Samples(ScriptedProxy):
    """Samples these answers, whatever is asked."""

    def __init__(self, *texts):
        super().__init__()
        self.texts = texts

    def sample(self, prompt, values, *, n, tokens, temperature, seed):
        self._called("sample", values)
        assert (n, temperature) == (30, 1.0)
        each = [Draft(text=self.texts[i % len(self.texts)]) for i in range(n)]
        return [tuple(each) for _ in values]


@pytest.fixture
def questions(tmp_path, monkeypatch):
    monkeypatch.setattr("rgate_integrations.training.sampling.cache_dir", lambda: tmp_path)
    path = tmp_path / "q.jsonl"
    lines = ({"question": f"q{i}? ", "gold_answers": ["Paris"], "dataset": "d"} for i in range(40))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def targets(files):
    return {example.target for file in files for example in file.examples}


def test_accuracy_is_the_share_of_right_samples(questions):
    proxy = Samples("Paris", "It is Paris.", "Rome")
    (file,) = read_sampled([questions], "accuracy", proxy)
    assert targets([file]) == {2 / 3}
    assert all(example.known for example in file.examples)
    assert file.examples[0].question == "q0?"


def test_certainty_needs_no_gold_answers(questions):
    questions.write_text('{"question": "q?"}\n')
    assert targets(read_sampled([questions], "certainty", Samples("Paris"))) == {1.0}
    assert targets(read_sampled([questions], "certainty", Samples("a1", "b1"), seed=1)) == {0.0}
    assert targets(read_sampled([questions], "certainty", Samples(""), seed=2)) == {0.0}
    with pytest.raises(DataFormatError, match="line 1: no gold_answers"):
        read_sampled([questions], "accuracy", Samples("Paris"))
    questions.write_text('["q?"]\n')
    with pytest.raises(DataFormatError, match="line 1: not a JSON object"):
        read_sampled([questions], "certainty", Samples("Paris"))


def test_sampling_goes_on_where_it_was_stopped(questions):
    proxy = Samples("Paris")
    read_sampled([questions], "accuracy", proxy)
    assert proxy.calls == ["sample"] * 2  # 40 questions, 32 at a time
    (kept,) = questions.parent.glob("samples/*.jsonl")
    whole = kept.read_bytes()
    kept.write_bytes(whole[: len(whole) * 9 // 10])  # a kill in the middle of a line
    again, seen = Samples("Paris"), []
    read_sampled([questions], "certainty", again, progress=lambda *at: seen.append(at))
    assert again.calls == ["sample"]
    assert seen == [("sampling answers", 40, 40)]
    assert kept.read_bytes() == whole


def test_labels_that_are_in_the_data_are_not_sampled(questions):
    assert to_be_sampled([questions], "accuracy")
    assert not to_be_sampled([questions], "closed_book_correct")
    questions.write_text('{"question": "a?"}\n{"question": "b?", "certainty": 0.5}\n')
    assert not to_be_sampled([questions], "certainty")


def test_training_on_sampled_labels_from_the_command_line(questions, tmp_path, monkeypatch):
    class Half(Samples):
        num_layers = 30
        fingerprint = "f" * 16

        def sample(self, prompt, values, **options):
            right, wrong = (super(Half, self).sample(prompt, values, **options)[0] for _ in range(2))
            wrong = tuple(Draft(text="Rome") for _ in wrong)
            return [right if int(v["question"][1:-1]) % 2 else wrong for v in values]

    monkeypatch.setattr("rgate_integrations.models.local.shared_proxy", lambda *a, **k: Half("Paris"))
    out = tmp_path / "g"
    options = ["--label", "accuracy", "--draft", "none", "--model", "tiny", "--out", str(out)]
    done = CliRunner().invoke(app, ["train", "--data", str(questions), *options])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "40 questions, 50% known" in done.output
    trained = read_gate(out)
    assert trained.llm == "tiny"
    assert trained.provenance["label"] == "accuracy of 30 answers of tiny"
