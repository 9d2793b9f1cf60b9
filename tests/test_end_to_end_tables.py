"""The end-to-end table, by hand-made answers: who is compared with whom, and what is counted."""

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from rgate_integrations import Gate, load_gate
from rgate_integrations.evidence.base import Evidence
from rgate_integrations.gates import Score

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PRICES = [{"name": "dear", "input": 1_000_000.0, "output": 2_000_000.0}]


class Unsure(Gate):
    """Knows as much as it does not."""

    specs: ClassVar = ()

    def score(self, evidence: Evidence) -> Score:
        return Score(0.5, "unsure")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import end_to_end

    return end_to_end


def answered(bench: ModuleType, way: str, name: str, right: bool | None, **changed: Any) -> Any:
    found = bench.Answered(
        way=way,
        id=name,
        kind="nq",
        right=right,
        exact=None if right is None else False,
        f1=None if right is None else 0.5,
        retrieved=way == "always",
        calls=1,
        prompt=500 if way == "always" else 50,
        written=10,
        first=1.0,
        total=2.0,
        search=0.0,
        gate=0.5,
        p_known=None,
        text="",
    )
    return replace(found, **changed)


def test_an_answer_is_judged_by_its_gold_answers(bench: ModuleType) -> None:
    assert bench.judged("It was Vincent van Gogh.", ("van Gogh", "Gogh")) == (
        True,
        False,
        pytest.approx(4 / 7),
    )
    assert bench.judged("Paris", ("Paris",)) == (True, True, 1.0)
    assert bench.judged("Here is a poem.", ()) == (None, None, None)


def test_the_oracle_retrieves_only_where_that_alone_is_right(bench: ModuleType) -> None:
    cases = {(False, True): "always", (True, True): "never", (True, False): "never", (False, False): "never"}
    for (alone, read), expected in cases.items():
        never, always = answered(bench, "never", "q", alone), answered(bench, "always", "q", read)
        best = bench.oracle(never, always)
        assert best.retrieved == (expected == "always")
        assert best.way == "oracle"


def test_requests_without_one_right_answer_cost_but_are_not_judged(bench: ModuleType) -> None:
    answers = [
        answered(bench, "always", "a", True),
        answered(bench, "always", "b", None),
        answered(bench, "never", "a", False),
        answered(bench, "never", "b", None),
    ]
    always, never = bench.overview(answers, PRICES)
    assert (always["right, %"], never["right, %"]) == ("100.0", "0.0")
    assert never["points against always [95 %]"] == "-100.0 [-100.0, -100.0]"
    assert never["read"] == "50"
    assert never["$ per 1,000, dear"] == f"{1_000 * (50 + 20):.3f}"
    assert never["gate, % of time"] == "25.0"


def test_the_interval_is_paired(bench: ModuleType) -> None:
    from answer_tables import paired_interval

    right = [True, False] * 50
    assert paired_interval(right, right) == (0.0, 0.0)
    low, high = paired_interval([True] * 100, right)
    assert 0.35 < low < 0.5 < high < 0.65


def test_a_way_that_lacks_questions_is_left_out(bench: ModuleType) -> None:
    answers = [answered(bench, way, name, True) for way in ("never", "always") for name in ("a", "b")]
    assert bench.whole([*answers, answered(bench, "answer first", "a", True)]) == answers


def test_ways_that_lack_questions_are_compared_on_those_they_have(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "LEAST", 2)
    both = [answered(bench, way, name, True) for name in "abc" for way in ("never", "always")]
    asked = [answered(bench, "LLM asked", name, True) for name in "ab"]
    barely = answered(bench, "claims", "c", True)  # alone it would leave no question to compare
    common = bench.shared([*both, *asked, barely])
    assert {each.id for each in common} == {"a", "b"}
    assert {each.way for each in common} == {"never", "always", "LLM asked"}


def test_a_gate_that_costs_more_than_it_can_save_never_pays(bench: ModuleType) -> None:
    from answer_tables import calculated

    llm = {"name": "8B", "parameters": 1e9, "bytes_a_parameter": 1}
    # Reading takes 1 ms a token, writing 1 ms a token: a skipped retrieval spares 0.45 s.
    gpu = {
        "tflops": 2,
        "share_of_tflops": 1,
        "terabytes_a_second": 1,
        "share_of_bandwidth": 1,
        "dollars_an_hour": 3.6,
    }
    ways = {"never": 0.0, "always": 0.0, "quick": 0.09, "slow": 0.5}
    answers = [answered(bench, way, "q", True, gate=seconds) for way, seconds in ways.items()]
    rows = {row["way"]: row for row in calculated(answers, {"llms": [llm], "gpu": gpu, "prices": PRICES})}
    assert rows["quick"]["8B: pays above a skip rate of"] == "20 %"
    assert rows["slow"]["8B: pays above a skip rate of"] == "never"
    assert rows["always"]["8B: s a question"] == "0.51"
    assert rows["always"]["8B: $"] == "510"


def test_behind_an_api_a_way_must_skip_enough_to_pay_for_what_it_began(bench: ModuleType) -> None:
    from answer_tables import calculated

    begun = {"prompt": 550, "written": 35, "retrieved": True}  # 50 read and 25 written for nothing
    answers = [
        *[answered(bench, way, "q", True) for way in ("never", "always", "gate, question alone")],
        answered(bench, "answer first", "q", True, **begun),
    ]
    prices = {"llms": [], "gpu": {}, "prices": PRICES}
    rows = {row["way"]: row for row in calculated(answers, prices)}
    # Always reads 500 for 500 dollars and writes 10 for 20; never reads 50. 450 dollars are spared, 100 wasted.
    assert rows["never"]["dear: $ saved"] == f"{450e6:,.0f}"
    assert rows["answer first"]["dear: $ saved"] == f"{-100e6:,.0f}"
    assert rows["answer first"]["dear: pays above a skip rate of"] == f"{100 * 100 / 550:.0f} %"
    assert rows["gate, question alone"]["dear: pays above a skip rate of"] == "0 %"


def test_every_question_about_the_ten_documents_has_its_answer_in_one(bench: ModuleType) -> None:
    import other_fields

    from rgate_integrations.runtime.text import contains_answer

    field = other_fields.ten_documents()
    assert len({passage.title for passage in field.passages}) == 10
    kinds = [question.kind for question in field.questions]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"documents": 40, "common": 20, "task": 20}
    texts = [passage.searchable for passage in field.passages]
    for question in field.questions:
        told = any(contains_answer(text, gold) for text in texts for gold in question.gold_answers)
        assert told or question.kind != "documents", question.question


def test_other_fields_are_compared_with_always_on_the_same_questions(bench: ModuleType) -> None:
    import other_fields

    rights = {"always": [True, True, False, False], "look first": [True, True, True, False]}
    answers = [
        answered(bench, way, f"q{number}", right)
        for way, of_way in rights.items()
        for number, right in enumerate(of_way)
    ]
    always, look = other_fields.rows(answers)
    assert always["tokens read, of always, %"] == "100"
    assert look["right, %"] == "75.0"
    assert look["points against always [95 %]"].startswith("+25.0 [")
    assert look["tokens read, of always, %"] == "10"


def test_p_known_is_fitted_to_what_the_llm_knew_of_other_questions(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import other_fields

    asked = [{"id": f"q{n}", "question": f"what is {n}", "gold_answers": [f"n{n}"]} for n in range(8)]
    asked.append({"id": "open", "question": "thanks", "gold_answers": []})
    calls = [
        {"meta": {"id": q["id"], "arm": arm}, "text": "n0 n1 n2 n3" if arm == "direct" else "who knows"}
        for q in asked
        for arm in ("direct", "passages")
    ]
    for name, records in (("questions.test.jsonl", asked), ("small.jsonl", calls)):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.setattr(other_fields, "load_gate", lambda **options: load_gate(Unsure()))
    here = [other_fields._question("f", "k", q["id"], q) for q in asked[:2]]
    gate = other_fields.fitted_gate(tmp_path, "small", other_fields.Field("f", [], here))
    # Of eight questions it knew the first four; the field asks two of these.
    assert gate.decide("what is love").p_known == pytest.approx(2 / 6, abs=0.001)


def test_an_llm_is_asked_only_where_looking_first_does_not_read_what_always_reads(bench: ModuleType) -> None:
    import other_fields
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.runnables import RunnableLambda

    class Answering(other_fields.RecordedChat):  # type: ignore[misc,name-defined]
        prompts: list[str] = []  # noqa: RUF012

        def call(self, messages: Any, tokens: int) -> dict[str, Any]:
            self.prompts.append(messages[0]["content"])
            text = "blue" if "passages" in self.prompts[-1] else "red"
            chunks, told = [(0.1, text, 1)], [{"token": text, "logprob": 0.0, "top": []}]
            return {"chunks": chunks, "tokens": told, "prompt_tokens": 3, "finish_reason": "stop"}

    class OneWay:
        def chains(self, chat: Any) -> dict[str, Any]:
            def chain(reads: Any) -> Any:
                asked = RunnableLambda(lambda q: f"{q}, by passages" if reads(q) else str(q))
                return asked | chat | StrOutputParser()

            return {"always": chain(lambda q: True), "look first": chain(lambda q: q != "2")}

    def questions(*gold: str) -> list[Any]:
        return [
            other_fields._question("f", "k", str(n), {"question": str(n), "gold_answers": [g]})  # type: ignore[dict-item]
            for n, g in enumerate(gold)
        ]

    chat = Answering(record=None)
    (row,) = other_fields.apart(OneWay(), chat, questions("blue", "red", "red", "blue"))
    assert sorted(chat.prompts) == ["2", "2, by passages"]
    assert (row["asked apart"], row["right there"], row["always is right there"]) == ("1 of 4", "1", "0")
    assert row["points against always [95 %]"].startswith("+25.0 [")
    assert row["of them"] == "k 1"
