"""Collecting paired data, the report in a real browser, and drift."""

import json
from pathlib import Path

import numpy as np
import pytest

from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.gates.artifacts import SavedGate
from rgate_integrations.gates.folder import save_gate
from rgate_integrations.index import Passage, PassageIndex
from rgate_integrations.tuning.evaluation import auc, measure_drift
from rgate_integrations.tuning.report import Result, read_results, report_page
from tests.commands import printed, rgate
from tests.tuning_parts import write


@pytest.mark.model
def test_collected_data_feed_calibration_and_evaluation(smollm2, tiny, tmp_path, monkeypatch):
    lines = [{"question": f"What is {i} plus {i}?", "gold_answers": [str(2 * i)]} for i in range(1, 45)]
    write(tmp_path / "q.jsonl", *lines)
    passages = [Passage(str(i), f"The sum of {i} and {i} is {2 * i}.") for i in range(1, 45)]
    PassageIndex.build(passages).save(tmp_path / "index")
    monkeypatch.chdir(tmp_path)
    for command in (
        f"collect --questions q.jsonl --index index --out paired.jsonl --llm {tiny} --answer-tokens 6",
        "calibrate --data paired.jsonl --budget 0.9 --out g",
        "evaluate --data paired.jsonl --gate g --out r.json --latency 20 80",
    ):
        printed(*command.split())
    written = json.loads(Path("r.json").read_text())
    assert {"gate", "threshold", "sets", "pooled", "versions", "break_even"} <= set(written)
    assert len(read_results(["r.json"])[0].questions) == written["pooled"]["n"] == 44


@pytest.mark.parametrize("latency", [("nan", "300"), ("20", "-5"), ("inf", "1")])
def test_a_latency_that_is_no_time_is_refused_before_the_data_are_read(latency):
    """Regression: the result had a break-even rate of NaN."""
    error = rgate("evaluate", "--data", "none.jsonl", "--latency", *latency).exception
    assert isinstance(error, ConfigurationError)
    assert "--latency must be two finite numbers of at least 0" in error.message


def test_a_set_that_is_called_pooled_has_a_row_of_its_own(tmp_path):
    """Regression: the row of all questions took its place."""
    line = {"question": "a?", "closed_book_correct": True, "rag_correct": False}
    data = write(tmp_path / "d.jsonl", *({**line, "dataset": name} for name in ("pooled", "other")))
    rows = printed("evaluate", "--data", data, "--gate", "constant:always").splitlines()
    assert [row.split()[:2] for row in rows[1:]] == [["pooled", "1"], ["other", "1"], ["pooled", "2"]]


def test_a_share_is_rounded_once(tmp_path):
    """Regression: 225 of 279, 80.645 %, were shown as 80.7%."""
    lines = [
        {"question": f"q{i}?", "closed_book_correct": i < 225, "rag_correct": i % 2 == 0} for i in range(279)
    ]
    data = write(tmp_path / "d.jsonl", *lines)
    assert "80.6%" in printed("evaluate", "--data", data, "--gate", "constant:never").split()


# --- the report --------------------------------------------------------------------------------------------


@pytest.fixture
def result():
    rng = np.random.default_rng(0)
    questions = [
        {
            "question": "</script><script>document.title='broken'</script>",
            "dataset": f"set {number % 2}",
            "p_known": p,
            "closed_book_correct": bool(rng.random() < p),
            "rag_correct": bool(rng.random() < 0.6),
            "draft": "<b>bold</b>",
        }
        for number, p in enumerate(rng.random(60).round(3).tolist())
    ]
    return {"gate": "g", "draft": "proxy", "threshold": 0.5, "questions": questions}


def test_the_error_for_another_file_names_its_first_problem_alone(tmp_path, result):
    """Regression: pydantic's list of all problems was quoted, 209,000 characters for 300 bad questions."""
    wrong = result | {"questions": [{"p_known": "high"}] * 300}
    with pytest.raises(
        DataFormatError, match=r"r.json' cannot be read as a result of an evaluation: questions\.0\."
    ) as caught:
        read_results([write(tmp_path / "r.json", wrong)])
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"p_known": 5}, r"questions\.0\.p_known: Input should be less than or equal to 1"),
        ({"p_covered": -1}, r"questions\.0\.p_covered: Input should be greater than or equal to 0"),
        (None, "questions: Tuple should have at least 1 item"),
    ],
)
def test_a_result_that_no_evaluation_has_is_refused(tmp_path, result, change, said):
    """Regression: a page was written about it."""
    rows = [] if change is None else [result["questions"][0] | change]
    with pytest.raises(DataFormatError, match=said):
        read_results([write(tmp_path / "r.json", result | {"questions": rows})])


def test_the_page_needs_no_network_and_escapes_text(tmp_path, result):
    page = report_page(read_results([write(tmp_path / "r.json", result)]))
    assert "</script><script>document" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_the_slider_moves_every_number(browser, tmp_path, result):
    page, asked = tmp_path / "report.html", result["questions"]
    # Just above a P(known) that is rounded down.
    result["threshold"] = next(q["p_known"] for q in asked if round(q["p_known"], 2) < q["p_known"]) + 1e-4
    page.write_text(report_page([Result.model_validate(result)]), encoding="utf-8")
    browser.get(page.as_uri())
    assert browser.title == "Retrieval gate report"

    def card(name):
        return browser.find_element("css selector", f'[data-name="{name}"] b').text

    def rate(threshold):
        return f"{100 * np.mean([q['p_known'] < threshold for q in asked]):.1f} %"

    # Regression: the slider rounded the gate's own threshold to two digits.
    assert card("retrieval rate") == rate(result["threshold"])
    for threshold in (0.5, 0.2, 0.8):
        browser.execute_script(
            "const s = document.getElementById('threshold'); s.value = arguments[0];"
            "s.dispatchEvent(new Event('input'))",
            threshold,
        )
        right = [q["rag_correct" if q["p_known"] < threshold else "closed_book_correct"] for q in asked]
        assert card("retrieval rate") == rate(threshold)
        assert card("accuracy") == f"{100 * np.mean(right):.1f} %"
    area = auc([q["p_known"] for q in asked], [q["closed_book_correct"] for q in asked])
    assert card("AUC") == f"{area:.3f}"
    assert len(browser.find_elements("css selector", "#sets tr")) == 3
    assert browser.execute_script("return document.querySelectorAll('#curve path').length") == 3
    assert not browser.get_log("browser")
    browser.set_window_size(375, 800)
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth + 1")


def test_the_page_shows_what_is_covered_and_what_no_corpus_has(browser, tmp_path, result):
    page = tmp_path / "report.html"
    plain, covered = Result.model_validate(result), json.loads(json.dumps(result))
    for number, question in enumerate(covered["questions"]):
        question |= {"question": f"q{number}", "p_covered": number / 60, "corpus": "docs"}
        question["override"] = True if number >= 30 else None
    page.write_text(report_page([plain, Result.model_validate(covered)]), encoding="utf-8")
    browser.get(page.as_uri())
    gaps = browser.find_element("id", "gaps")
    assert not gaps.is_displayed()
    browser.execute_script("const w = document.getElementById('which'); w.value = 1; w.onchange()")
    assert gaps.is_displayed()
    assert len(browser.find_elements("css selector", "#coverage circle")) == 60
    asked = [q for q in covered["questions"][:30] if q["p_known"] < 0.5]
    expected = [q["question"] for q in sorted(asked, key=lambda q: q["p_known"])][:20]
    assert [item.text.split("\n")[0] for item in gaps.find_elements("tag name", "li")] == expected
    rate = browser.find_element("css selector", '[data-name="retrieval rate"] b').text
    assert rate == f"{100 * (30 + len(asked)) / 60:.1f} %", (
        "what is covered is retrieved for at any threshold"
    )
    # Regression: the page had another AUC than rgate evaluate, and its dot was not on its curve.
    p = [0.0 if q["override"] else q["p_known"] for q in covered["questions"]]
    area = auc(p, [q["closed_book_correct"] for q in covered["questions"]])
    assert browser.find_element("css selector", '[data-name="AUC"] b').text == f"{area:.3f}"
    curve = browser.find_elements("css selector", "#curve path")[-1].get_attribute("d")
    dot = browser.find_element("css selector", "#curve circle")
    assert " ".join(f"{float(dot.get_attribute(name)):.1f}" for name in ("cx", "cy")) in curve
    assert not browser.get_log("browser")


# --- drift -------------------------------------------------------------------------------------------------


LIKE = "The traffic is like the traffic at calibration."
CHANGED = "The traffic has changed: calibrate again."


def drift(rng, n, logged, shift=0.0):
    """Draw both samples from normal distributions, of which that of the log is shifted."""
    before = np.quantile(rng.normal(size=n), np.linspace(0, 1, 101))
    return measure_drift(before, n, rng.normal(shift, size=logged), 0.0)


def test_drift_is_distinguished_from_chance_for_any_number_of_questions():
    """Regression: without any change, 50 decisions and 60 questions had an index of 0.3, which alarmed."""
    rng = np.random.default_rng(0)
    for n, logged in ((60, 50), (60, 500), (300, 50), (300, 300), (1000, 1000)):
        same = [drift(rng, n, logged) for _ in range(60)]
        assert CHANGED not in [found.advice for found in same]
        assert np.mean([found.distance < found.margin for found in same]) > 0.85  # 0.95 are expected
    assert drift(rng, 300, 300).advice == LIKE
    # Of two normal distributions, one standard deviation apart, the shares differ by at most 0.383.
    found = drift(rng, 1000, 1000, 1.0)
    assert found.distance == pytest.approx(0.383, abs=found.margin)
    assert found.advice == CHANGED
    assert drift(rng, 60, 50, 0.4).advice.startswith("Too few decisions")
    with pytest.raises(DataFormatError, match="too few"):
        drift(rng, 60, 10)


def test_gates_of_few_scores_drift_too():
    """Regressions: no change was ever found; or, as scores are rounded when saved, the same traffic had changed."""
    before = np.quantile([0.2] * 165 + [0.8] * 135, np.linspace(0, 1, 101))
    assert measure_drift(before, 300, [0.2] * 110 + [0.8] * 90, 0.5).advice == LIKE
    assert measure_drift(before, 300, [0.2] * 200, 0.5).advice == CHANGED
    assert measure_drift([0.3] * 101, 300, [0.99] * 60, 0.5).advice == CHANGED
    levels = np.random.default_rng(0).random(20)
    before = np.quantile(np.repeat(levels, 10), np.linspace(0, 1, 101)).round(5)
    assert measure_drift(before, 200, np.repeat(levels, 10), 0.5).distance < 0.01
    for n in (-5, 0, 1e308):  # a calibration of unknown origin
        assert measure_drift([0.5], n, [0.5] * 50, 0.5).retrieval_rate == 0


def test_monitoring_from_the_command_line(tmp_path):
    provenance = {"scores": np.linspace(0, 1, 101).tolist()}
    save_gate(SavedGate(method="calibrated", threshold=0.5, provenance=provenance), tmp_path / "gate")
    log = tmp_path / "log.jsonl"
    monitor = ("monitor", log, "--gate", tmp_path / "gate")
    lines = [{"question": "q", "p_known": i / 100} for i in range(100)]
    # Failures and questions that a rule decided do not count. Regression: nor did those that a corpus had overridden.
    for line in lines[40:]:
        line["override"] = {"retrieve": True, "reason": "A corpus covers it."}
    ruled = [{"question": "q", "p_known": p, "override": {"retrieve": not p}} for p in (0.0, 1.0)]
    write(log, *lines, {"question": "", "error": {"type": "x"}}, *ruled * 50)
    output = printed(*monitor).replace("\n", " ")
    assert "100 decisions: P(known) below the threshold in 50.0%" in output
    assert "0.02 (95 %: ± 0.19)" in output
    assert LIKE in output
    assert "'default' is not calibrated" in rgate("monitor", log, "--gate", "default").exception.message
    write(log, *lines, {"question": "q", "p_known": 1.01})
    assert "line 101: p_known is not in [0, 1]" in rgate(*monitor).exception.message
    # Regression: the log of another gate was compared, and had "changed".
    own = [{**line, "gate": ("calibrated", "remote")[i % 2]} for i, line in enumerate(lines)]
    assert LIKE in printed("monitor", write(log, *own), "--gate", tmp_path / "gate")
    write(log, *own, {**lines[0], "gate": "heads"})
    error = rgate(*monitor).exception
    assert isinstance(error, DataFormatError)
    assert "line 101: the gate 'heads' decided, not " in error.message
    write(log, {"question": "q"})
    assert "has p_known" in rgate(*monitor).exception.message
    write(log, *lines)
    with log.open("a") as file:
        file.write('{"question": "half wri')
    assert "interrupted" in rgate(*monitor).exception.hint
