"""Files of somebody else: whatever is in them, what comes out is data or a typed error with a hint."""

import gzip
import hashlib
import json
import os
import re
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save as save_tensors

from rgate_integrations import load_gate
from rgate_integrations.errors import DataFormatError, ModelLoadError, RGateError
from rgate_integrations.gates.ability import read_measured
from rgate_integrations.gates.folder import read_gate, save_gate, tuned_files
from rgate_integrations.gates.papers.baselines import LabelledQuestions
from rgate_integrations.gates.registry import saved_gate
from rgate_integrations.gates.rules import Rules
from rgate_integrations.index import read_passages
from rgate_integrations.models.download import cached_path, resolve_model
from rgate_integrations.runtime.files import read_file, write_folder
from rgate_integrations.tuning.arms import ModelArm
from rgate_integrations.tuning.collection import Answers
from rgate_integrations.tuning.fine_tuning import pairs_for, rewriter_pairs
from rgate_integrations.tuning.questions import Question, read_examples, read_paired, read_questions
from rgate_integrations.tuning.report import read_results, report_page
from tests.saved_gates import PROBE, TUNED, change, save_ik
from tests.scripted_proxy import ScriptedProxy
from tests.tuning_parts import write

FUZZ = settings(
    max_examples=60,
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


def refusal(work, *given, **options):
    """The message of the typed error that work ends with, or None; any other error fails the test."""
    try:
        work(*given, **options)
    except RGateError as error:
        return str(error)
    return None


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


def pairs_by(label, path):
    (file,) = read_examples([path], label)
    for gate, example in product(("ik", "adapt"), file.examples):
        pairs_for(gate, example, None)


READERS = {
    **{label: partial(pairs_by, label) for label in ("closed_book_correct", "certainty", "match_ratio")},
    "paired": lambda path: read_paired([path]),
    "questions": lambda path: read_questions(str(path)),
    "rewriter": lambda path: rewriter_pairs([path]),
    "passages": lambda path: [json.dumps(passage.metadata) for passage in read_passages(path)],
}


@pytest.mark.parametrize("name", READERS)
@FUZZ
@given(
    kind=st.sampled_from(["records", "records", "bytes", "packed"]),
    records=st.lists(changed(RECORD), min_size=1, max_size=3),
    noise=st.binary(max_size=40),
    at=st.integers(0, 200),
)
def test_any_file_is_read_or_named(name, kind, records, noise, at, tmp_path):
    path = tmp_path / ("data.jsonl.gz" if kind == "packed" else "data.jsonl")
    lines = records if kind == "records" else [RECORD] * 3
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    if kind == "packed":
        content = gzip.compress(content, mtime=0)
    if kind != "records":
        content = content[:at] + noise + content[at + len(noise) :]
    path.write_bytes(content)
    message = refusal(READERS[name], path)
    assert message is None or "data.jsonl" in message or "has no gold_answers" in message


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ({"gold_answers": {"a": 1}}, "line 1: gold_answers is neither a string nor a list"),
        ({"gold_answers": [{"a": 1}]}, "line 1: gold_answers is neither a string nor a list"),
        ({"popularity": "much"}, "line 1: popularity is not a finite number"),
        ({"popularity": -1}, "line 1: popularity is below 0"),
        ({"closed_book_logprobs": "abc"}, "line 1: closed_book_logprobs is not a list of log-probabilities"),
        (
            {"closed_book_logprobs": [0.9]},
            "closed_book_logprobs is not a list .*a log-probability must be at most 0, not 0.9",
        ),
        ({"question": "\ud800?"}, "line 1: question is empty or not a string.*unicode"),
        ({"question": " "}, "line 1: question is empty or not a string"),
        ({"closed_book_text": ["x"]}, "line 1: closed_book_text is not a string or finite number"),
        # Regression: a missing value of pandas was read as the text "nan", of an answer, too.
        ({"closed_book_text": float("nan")}, "line 1: closed_book_text is not a string or finite number"),
        ({"gold_answers": float("nan")}, "line 1: gold_answers is neither a string nor a list"),
        ({"gold_answers": ["x", float("inf")]}, "line 1: gold_answers is neither a string nor a list"),
        ({"gold_answers": True}, "line 1: gold_answers is neither a string nor a list"),
    ],
)
def test_what_a_field_cannot_be_is_said(tmp_path, field, why):
    record = RECORD | field
    if "gold_answers" in field:
        del record["closed_book_correct"]
    with pytest.raises(DataFormatError, match=why):
        read_paired([write(tmp_path / "data.jsonl", record)])


def test_the_mark_before_utf_8_is_no_part_of_a_file(tmp_path):
    path = tmp_path / "file"
    path.write_text('{"text": "fine"}\n', encoding="utf-8-sig")
    assert [passage.text for passage in read_passages(path)] == ["fine"]
    path.write_text('{"always": ["fine"]}', encoding="utf-8-sig")
    assert Rules.read(path).always == ("fine",)


@pytest.mark.parametrize(
    ("line", "why"),
    [("5", "not a JSON object"), ('{"question": "a?", "known": 2}', "must be true or false, not 2")],
)
def test_labelled_questions_of_any_kind(tmp_path, line, why):
    (tmp_path / "labelled.jsonl").write_text(line + "\n")
    with pytest.raises(DataFormatError, match=why):
        LabelledQuestions(str(tmp_path / "labelled.jsonl"), "nowhere")


RESULT = {
    "gate": "g",
    "draft": "none",
    "threshold": 0.5,
    "break_even": None,
    "sets": {},
    "pooled": {},
    "questions": [
        {"question": "q?", "dataset": "d", "p_known": 0.5, "closed_book_correct": True, "rag_correct": False}
    ],
}


@FUZZ
@given(result=changed(RESULT))
def test_a_page_of_any_results_is_made_or_refused(result, tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    message = refusal(lambda: report_page(read_results([path])))
    assert message is None or "result.json" in message


# --- saved gates -------------------------------------------------------------------------------------------


def calibrated(folder):
    return save_gate(saved_gate(load_gate("calibrated", inner="ik").gate, {"scores": [0.1, 0.9]}), folder)


KINDS = {
    "probe": lambda folder: save_gate(PROBE, folder),
    "heads": lambda folder: save_gate(replace(read_gate("default"), base_model="scripted"), folder),
    "tuned": lambda folder: write_folder(
        folder, tuned_files(TUNED, save_gate(PROBE, folder.with_name("prior")))
    ),
    "adapter": save_ik,
    "calibrated": calibrated,
}


@pytest.fixture(params=KINDS)
def gate_folder(request, tmp_path, monkeypatch):
    """A folder with a saved gate, of which the Hub is out of reach."""

    def no_hub(*arguments, **options):
        raise OSError("no network in this test")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_hub)
    folder = KINDS[request.param](tmp_path / "g")
    assert refusal(load_gate, str(folder)) is None
    return folder


def configs(folder):
    """The gate's configuration, with any part changed, and the gates and files it may name."""
    good = json.loads((folder / "gate.json").read_text())
    names = [str(folder), "..", "../g", "ik", f"probe:{folder}", "calibrated", "a/b", "constant:x"]
    named = st.sampled_from(names).map(
        lambda name: {"gate": name, "inner": name, "artifact": name, "gates": [name], "method": name}
    )
    return st.one_of(
        changed(good),
        st.builds(lambda more: good | {"parameters": more}, st.one_of(named, changed({}))),
        named.map(lambda names: good | names),
    )


@FUZZ
@given(data=st.data())
def test_any_configuration_of_a_gate_is_a_gate_or_refused(gate_folder, data):
    file = gate_folder / "gate.json"
    good = file.read_text()
    try:
        file.write_text(json.dumps(data.draw(configs(gate_folder))))
        refusal(load_gate, str(gate_folder))
        refusal(load_gate, "ik", adapter=str(gate_folder))
    finally:
        file.write_text(good)


@FUZZ
@given(noise=st.binary(max_size=40), at=st.integers(0, 600), name=st.integers(0, 4), vouched=st.booleans())
def test_any_bytes_in_a_gate_are_a_gate_or_refused(gate_folder, noise, at, name, vouched):
    files = sorted(path for path in gate_folder.rglob("*") if path.is_file() and path.suffix != ".md")
    file, config = files[name % len(files)], gate_folder / "gate.json"
    good = {path: path.read_bytes() for path in files}
    try:
        file.write_bytes(good[file][:at] + noise + good[file][at + len(noise) :])
        if vouched and file != config:  # who changes the weights can change their checksum
            change(gate_folder, weights_sha256=hashlib.sha256(file.read_bytes()).hexdigest())
        refusal(load_gate, str(gate_folder))
    finally:
        for path, content in good.items():
            path.write_bytes(content)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{", "5", "null", "[]", '{"format": 1}', "", "\x00", '{"a":' * 50_000]
)
def test_a_gate_whose_configuration_is_no_object_cannot_be_read(gate_folder, text):
    (gate_folder / "gate.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"(cannot be read|is damaged).* Hint: "):
        load_gate(str(gate_folder))


def named(folder, gates):
    """A calibrated gate's folder that names other gates instead of its own."""
    change(calibrated(folder), parameters={"inner": gates})
    return str(folder)


def test_a_saved_gate_names_no_other_folder(tmp_path):
    """Forty folders that each name two others would be opened 2 ** 40 times."""
    other = str(tmp_path / "g")
    for gates in (other, {"gate": "answer", "question": "default", "answer": other}):
        with pytest.raises(ModelLoadError, match="cannot be read"):
            load_gate(named(tmp_path / "g", gates))


def test_a_prior_has_weights_of_its_own(tmp_path):
    files = tuned_files(TUNED, save_gate(PROBE, tmp_path / "prior"))
    files["prior/gate.json"] = (calibrated(tmp_path / "c") / "gate.json").read_text()
    with pytest.raises(ModelLoadError, match=r"its method in gate\.json is 'calibrated'"):
        load_gate(str(write_folder(tmp_path / "tuned", files)))
    with pytest.raises(ModelLoadError, match=r"its method in gate\.json is 'calibrated'"):
        tuned_files(TUNED, tmp_path / "c")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_not_loaded(tmp_path, number):
    file = save_gate(PROBE, tmp_path / "g") / "gate.json"
    good = file.read_text()
    for part in ("bias", "slope", "intercept", "threshold"):
        file.write_text(re.sub(rf'"{part}": -?[0-9.]+', f'"{part}": {number}', good))
        with pytest.raises(
            ModelLoadError, match=f"{part}: .*(finite number|equal to 0|number of at least 0)"
        ):
            load_gate(str(tmp_path / "g"))


RIGHT = np.ones((2, 4), np.float32)
NOT_FINITE = np.array([[1, 1, 1, np.nan], [1, 1, 1, np.inf]], np.float32)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"weight": RIGHT[0]},
        {"weight": RIGHT[[0, 0, 1]]},
        {"weight": RIGHT[:, :0]},
        {"weight": RIGHT.astype(np.int64)},
        {"weight": NOT_FINITE},
        {"weight": RIGHT, "llm.more": RIGHT},
        {"weight": RIGHT, "nowhere.more": RIGHT},
        {"weight": RIGHT, "bias": RIGHT},
    ],
)
def test_weights_of_another_shape_or_kind_are_not_loaded(tmp_path, tensors):
    folder, weights = save_gate(PROBE, tmp_path / "g"), save_tensors(tensors)
    (folder / "weights.safetensors").write_bytes(weights)
    change(folder, weights_sha256=hashlib.sha256(weights).hexdigest())
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_gate(str(folder))


@pytest.mark.parametrize(
    ("artifact", "name"),
    [
        (PROBE, "weight"),
        (read_gate("default").segments, "hidden"),
        (read_gate("default").facts, "known_weight"),
        (TUNED, "weight"),
    ],
)
def test_weights_that_are_not_finite_are_not_saved(artifact, name):
    with pytest.raises(ValueError, match="finite"):
        replace(artifact, **{name: np.full_like(getattr(artifact, name), np.nan)})


@pytest.mark.parametrize("name", ["gate.json", "*.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
def test_what_is_no_regular_file_or_too_large_is_not_read(gate_folder, name, kind):
    """Regression: a pipe hung, and /dev/zero filled the memory."""
    for file in gate_folder.glob(name):
        file.unlink()
        if kind == "large":
            file.touch()
            os.truncate(file, 1 << 40)  # it takes no space
        elif kind == "pipe":
            os.mkfifo(file)
        else:
            file.symlink_to("/dev/zero")
        with pytest.raises(ModelLoadError, match=r"cannot be read|is not a trained gate"):
            load_gate(str(gate_folder))


def test_every_reader_of_whole_files_refuses_pipes_and_devices(tmp_path):
    os.mkfifo(tmp_path / "ability.json")
    for path in (tmp_path / "ability.json", Path("/dev/zero")):
        for read in (
            read_file,
            Rules.read,
            lambda name: read_results([name]),
            lambda name: LabelledQuestions(str(name), ""),
        ):
            with pytest.raises((OSError, DataFormatError)):
                read(path)
    with pytest.raises(ModelLoadError):
        read_measured(tmp_path)
    for line in (read_passages, read_questions):
        with pytest.raises(DataFormatError, match="line 1: longer than"):
            list(line("/dev/zero"))


@FUZZ
@given(text=st.text(max_size=20), noise=st.binary(max_size=20))
def test_whatever_the_cache_says_of_itself_it_is_there_or_not(text, noise, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RGATE_CACHE", str(tmp_path))
        folder = tmp_path / "all-minilm-l6-v2"
        folder.mkdir(exist_ok=True)
        listed = json.dumps({"files": {text: 5, "\x00": 1, "../x": []}}).encode()
        for content in (noise, listed, b"[" * 100_000):
            (folder / "rgate.json").write_bytes(content)
            assert cached_path("all-minilm-l6-v2") is None


@FUZZ
@given(kept=st.lists(changed({"arm": "direct", "question": "q?", "draft": {"text": "x"}}), max_size=2))
def test_kept_answers_of_any_kind_are_used_or_refused(kept, tmp_path):
    path = tmp_path / "kept.jsonl"
    write(path, {"made_with": {}}, *kept)
    arms = {"direct": ModelArm(ScriptedProxy())}
    message = refusal(lambda: Answers(path, arms).ask([Question("q?")]))
    assert message is None or "kept.jsonl" in message


@pytest.mark.parametrize("name", ["a" * 5_000, "a" * 300 + "/b", "~nobody/gate", "~" * 300])
def test_a_name_that_no_file_can_have_is_a_typed_error(name):
    assert refusal(load_gate, name)
    assert refusal(resolve_model, f"{name}/x/y")
