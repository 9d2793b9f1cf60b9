"""Files of somebody else: whatever is in them, what comes out is data or a typed error with a hint."""

import gzip
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rgate_integrations.errors import DataFormatError, RGateError
from rgate_integrations.evaluation.collect import DATASETS, from_rows, read_questions
from rgate_integrations.evaluation.paired import read_paired
from rgate_integrations.evaluation.report import read_results, report_page
from rgate_integrations.evidence.neighbours import LabelledQuestions
from rgate_integrations.index import read_passages
from rgate_integrations.training.examples import read_examples
from rgate_integrations.training.pairs import pairs_for, rewriter_pairs

FUZZ = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ODD = st.sampled_from(
    [
        None, True, False, 0, 1, -1, 5, 10**400, 1e308, float("nan"), float("inf"), float("-inf"), "", " ", "x",
        "../x", "/etc/passwd", "\x00", "\ud800", "\u2028", "1e999", [], {}, [None], [[]], [{}], ["x", 5], [0.5],
        [float("nan")], {"question": 5}, "a" * 5_000,
    ]
)  # fmt: skip
JSON = st.recursive(
    ODD | st.text(max_size=8) | st.floats() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def changed(good):
    """A JSON value of which any part may be another value, or be missing, or have things beside it."""
    if isinstance(good, dict):
        parts = {key: changed(value) for key, value in good.items()}
        some = st.fixed_dictionaries({}, optional=parts)
        same_or_other = st.one_of(
            st.fixed_dictionaries(parts), some, st.builds(lambda a, b: a | b, some, some)
        )
    elif isinstance(good, list):
        same_or_other = st.lists(st.one_of([changed(item) for item in good]) if good else ODD, max_size=4)
    else:
        same_or_other = st.just(good)
    return st.integers(0, 9).flatmap(lambda dice: JSON if dice == 0 else same_or_other)


RECORD = {
    "id": "1",
    "question": "Who wrote Hamlet?",
    "gold_answers": ["Shakespeare"],
    "answer": "Shakespeare",
    "dataset": "d",
    "popularity": 0.5,
    "closed_book_correct": True,
    "closed_book_answer": "Shakespeare",
    "closed_book_text": "Shakespeare",
    "closed_book_logprobs": [-0.1, -2],
    "rag_correct": False,
    "rag_answer": "Marlowe",
    "context": "A play.",
    "certainty": 0.5,
    "claims": [{"claim": "It is a play.", "query": "hamlet", "needs_search": True}],
    "rewritten": "",
    "known": True,
    "text": "a passage",
    "title": "t",
}


def examples_and_pairs(path):
    for label in ("closed_book_correct", "certainty", "match_ratio"):
        try:
            files = read_examples([path], label)
        except RGateError:
            continue
        for gate in ("ik", "adapt"):
            pairs_for(gate, [e for file in files for e in file.examples], None)


def paired_with_drafts(path):
    for file in read_paired([path], rag=False):
        for record in file.records:
            record.draft()


def passages(path):
    for passage in read_passages(path):
        json.dumps(passage.metadata)


READERS = {
    "examples": examples_and_pairs,
    "paired": paired_with_drafts,
    "questions": lambda path: read_questions(str(path)),
    "rewriter": lambda path: rewriter_pairs([path]),
    "passages": passages,
}


@pytest.mark.parametrize("name", READERS)
@FUZZ
@given(records=st.lists(changed(RECORD), min_size=1, max_size=3))
def test_any_record_is_read_or_named(name, records, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    try:
        READERS[name](path)
    except RGateError as error:
        assert "data.jsonl" in str(error) or "Hamlet" in str(error) or "gold_answers" in str(error)


@pytest.mark.parametrize("name", READERS)
@FUZZ
@given(noise=st.binary(max_size=40), at=st.integers(0, 200), packed=st.booleans())
def test_any_bytes_are_read_or_refused(name, noise, at, packed, tmp_path):
    whole = (json.dumps(RECORD) + "\n").encode() * 3
    if packed:
        whole = gzip.compress(whole, mtime=0)
    path = tmp_path / ("data.jsonl.gz" if packed else "data.jsonl")
    path.write_bytes(whole[:at] + noise + whole[at + len(noise) :])
    try:
        READERS[name](path)
    except RGateError as error:
        assert "data.jsonl" in str(error)


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ({"gold_answers": 5}, "line 1: gold_answers is neither a text nor a list of texts"),
        ({"gold_answers": [{"a": 1}]}, "line 1: gold_answers holds a dict, not a text"),
        ({"popularity": "much"}, "line 1: popularity holds something else than a finite number"),
        ({"closed_book_logprobs": "abc"}, "line 1: closed_book_logprobs is no list of numbers"),
        ({"closed_book_logprobs": [0.9]}, "line 1: closed_book_logprobs has a value above 0"),
        ({"question": "\ud800?"}, "line 1: question has half a surrogate pair"),
        ({"question": " "}, "line 1: no question"),
        ({"closed_book_text": ["x"]}, "line 1: closed_book_text holds a list, not a text"),
    ],
)
def test_what_a_field_cannot_be_is_said(tmp_path, field, why):
    record = RECORD | field
    if "gold_answers" in field:
        del record["closed_book_correct"]
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(DataFormatError, match=why):
        read_paired([path])


def test_one_gold_answer_may_stand_alone(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({**RECORD, "gold_answers": "Shakespeare"}) + "\n")
    assert read_examples([path])[0].examples[0].gold == ("Shakespeare",)
    assert read_questions(str(path))[0]["gold_answers"] == ["Shakespeare"]


def test_a_corpus_that_is_not_utf_8_names_line_and_byte(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"text": "fine"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(DataFormatError, match=r"corpus\.jsonl, line 2: byte 14 of it is not UTF-8") as caught:
        list(read_passages(path))
    assert caught.value.hint == "Save the file as UTF-8."


@FUZZ
@given(row=changed({"question": "q?", "answer": ["a"], "possible_answers": '["a"]', "s_pop": 3, "id": 7}))
def test_rows_of_any_data_set_are_read_or_refused(row):
    for name in DATASETS:
        try:
            list(from_rows([row], DATASETS[name], name))
        except RGateError as error:
            assert "Row 1" in str(error)


def test_labelled_questions_of_any_kind(tmp_path):
    for line, why in (("5", "not a JSON object"), ('{"question": "a?", "known": 1}', "no label")):
        path = tmp_path / "labelled.jsonl"
        path.write_text(line + "\n")
        with pytest.raises(DataFormatError, match=why):
            LabelledQuestions(str(path), "nowhere")


RESULT = {
    "gate": "g",
    "draft": "none",
    "threshold": 0.5,
    "break_even": None,
    "sets": {},
    "pooled": {},
    "questions": [
        {"question": "q?", "dataset": "d", "p_known": 0.5, "closed_book_correct": True, "rag_correct": None}
    ],
}


@FUZZ
@given(result=changed(RESULT))
def test_a_page_of_any_results_is_made_or_refused(result, tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    try:
        report_page(read_results([path]))
    except RGateError as error:
        assert "result.json" in str(error)
