"""The papers' pipelines on eight questions, with made-up states; resuming; intervals and verdicts."""

import dataclasses
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from rgate_integrations.index import Passage
from rgate_integrations.index.retriever import Hit

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CLOSED = [True, True, True, False, True, False, False, False]
RAG = [True, False, True, True, True, True, False, False]


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import paper_tables

    monkeypatch.setattr(paper_tables, "SAMPLES", 20)


@pytest.fixture
def six():
    """Eight questions of two sets, whose states tell whether the LLM knows."""
    from begun import CUTS, Answers
    from begun import LAYERS as ANSWER_LAYERS
    from heads import LAYERS
    from paper_data import Arms, SixSets

    rng = np.random.default_rng(0)
    closed, rag = np.array(CLOSED), np.array(RAG)
    sets = np.array(["nq"] * 4 + ["trivia"] * 4)
    told = closed[:, None, None] * 2.0
    states = (rng.normal(size=(8, len(LAYERS), 6)) + told).astype(np.float32)
    begun = (rng.normal(size=(8, len(CUTS), len(ANSWER_LAYERS), 6)) + told[..., None]).astype(np.float32)
    vectors = np.eye(8, dtype=np.float32)
    fold = np.array([0, 1, 2, 0, 1, 2, 0, 1])
    answers = Answers(begun, closed.astype(float), sets, [f"q{i}" for i in range(8)])
    return SixSets(Arms(closed, rag), sets, fold, states, answers, vectors)


def cells(table, column: str) -> dict[str, str]:
    place = table.columns.index(column)
    return {row[0]: row[place] for row in table.rows}


# --- one run a paper -----------------------------------------------------------------------------------------


def test_ik_reads_ever_more_of_the_answer(six):
    import papers_ik

    lengths = papers_ik.by_length(six)
    table = papers_ik.lengths_table(six, lengths)
    assert [row[0] for row in table.rows] == ["0", "8", "16", "32", "64"]
    assert len(papers_ik.length_claims(six, lengths)) == 5
    by_set, _ = papers_ik.sets_part(six)
    assert cells(by_set, "with") == {"nq": "75.0", "trivia": "50.0"}
    curve, (claim,) = papers_ik.curve_part(six)
    assert [row[0] for row in curve.rows] == ["6"]
    assert claim.paper == "IK"
    large, _ = papers_ik.large_curve(
        np.repeat(six.states, 2, axis=0), np.repeat(six.arms.closed, 2).astype(float)
    )
    assert [row[0] for row in large.rows] == ["13"]


def test_a_teacher_that_says_the_same_is_no_better(six):
    from papers_ik import teachers

    found, gain = teachers(six.states, six.arms.closed, six.arms.closed, six.sets)
    assert found[0] == "100.0"
    assert found[1] == found[2] == found[3]
    assert (gain.value, gain.low, gain.high) == (0.0, 0.0, 0.0)


def test_slimplm_gates_and_its_proxy_agrees(six):
    import papers_slimplm

    table, claims = papers_slimplm.gated_part(six)
    assert cells(table, "right, %")["never (vanilla chat)"] == "50.0"
    assert cells(table, "right, %")["always (direct RAG)"] == "62.5"
    assert cells(table, "right, %")["oracle"] == "75.0"
    assert cells(table, "retrieved, %")["oracle"] == "25"
    assert len(claims) == 3
    proxy = np.array([True, True, False, False, False, False, False, False])
    agreed, (claim,) = papers_slimplm.consensus([("small", "large", proxy, six.arms.closed)])
    assert agreed.rows == [["small", "large", "25.0", "50.0", "100.0", "33.3"]]
    assert "+66.7" in claim.ours


def test_claims_become_queries_and_the_known_ones_are_left_out(tmp_path, monkeypatch):
    import papers_slimplm

    rows = [
        {"id": "a", "question": "Who wrote Hamlet?", "gold_answers": ["Shakespeare"], "supporting_ids": ["1"]}
    ]
    text = "William Shakespeare wrote Hamlet in London. He was born in Stratford in 1564."
    monkeypatch.setattr(
        papers_slimplm,
        "_claims_judged",
        lambda flat, places: [0.9 if "born" in flat[i][1] else 0.1 for i in places],
    )
    claims = papers_slimplm.claims_of(rows, [text])
    every = [query for _, query in claims[0]]
    assert len(every) == 2
    kept = tmp_path / "claims.jsonl"
    assert papers_slimplm.unknown_queries(rows, claims, kept) == [[q for q in every if "born" not in q]]
    assert len(kept.read_text().splitlines()) == 2


def test_gold_answers_are_looked_for_in_what_was_found():
    from papers_slimplm import gold_found

    hits = [Hit(Passage("1", "Hamlet is a play by Shakespeare.", title="Hamlet"), 1.0)]
    assert gold_found(["Shakespeare"], hits) == 1.0
    assert gold_found(["Marlowe"], hits) == 0.0
    assert np.isnan(gold_found(["yes"], hits))


def test_what_the_searches_found_is_compared_question_by_question():
    from papers_slimplm import Found, filter_claim, queries_table

    gold = np.array([1.0, np.nan] * 4)
    question = Found(np.ones(8), np.full(8, 0.5), gold)
    claims = Found(np.full(8, 3.0), np.ones(8), gold)
    found = {"question": question, "claims": claims}
    table = queries_table(found, 100)
    assert table.rows[1] == ["claims", "3.0", "100.0", "+50.0 [+50.0, +50.0]", "100.0", "+0.0 [+0.0, +0.0]"]
    assert filter_claim(question, claims, "a gate").verdict == "does not hold"
    assert "1.0 instead of 3.0 queries, by a gate" in filter_claim(question, claims, "a gate").ours


def test_adapt_tells_questions_with_ret_from_those_without(six):
    import papers_adapt

    asks = np.array([False, False, False, True, False, True, True, True])
    table, claims = papers_adapt.split({"oracle of knowledge": asks}, six.arms)
    assert table.rows[-1] == ["here: oracle of knowledge", "50.0", "50.0", "0.0", "75.0", "100.0"]
    assert claims[2].verdict == "holds"
    by_set, _ = papers_adapt.sets_part(six)
    assert cells(by_set, "`<RET>` to learn") == {"nq": "1", "trivia": "3"}
    ways, _ = papers_adapt.ways_part(six)
    assert cells(ways, "right, %")["never retrieve"] == "50.0"


def test_adapt_by_popularity(six):
    import papers_adapt

    popularity = np.arange(8.0)
    asks = (popularity < 4).astype(float)
    table, (knows, fewer) = papers_adapt.bins(popularity, popularity / 8, {"own words": asks})
    assert [row[0] for row in table.rows] == ["0 to 1", "2 to 3", "4 to 5", "6 to 6", "7 to 7"]
    assert [row[3] for row in table.rows] == ["100.0", "100.0", "0.0", "0.0", "0.0"]
    assert (knows.verdict, fewer.verdict) == ("holds", "holds")
    llm = {"one": six.arms.closed}
    table, _ = papers_adapt.by_popularity(six.states, popularity, llm, {"one": six.arms.closed * 1.0})
    assert cells(table, "AUC: popularity") == {"one": "0.062"}
    assert cells(table, "own words") == {"one": "1.000"}


def test_the_empty_answer_is_the_least_sure_one():
    from papers_adapt import own_words

    answers = {"answers": {"sure": {"token_probs": [0.5, 0.5]}, "empty": {"token_probs": []}}}
    assert own_words(answers, "sure") == pytest.approx(2 * np.log(0.5))
    assert own_words(answers, "empty") < -1_000


def test_kbm_labels_effects_and_plug_in(six):
    import papers_kbm
    import papers_kbm_labels

    agreed = {"samples": ["Paris"] * 10, "gold_answers": ["Paris"]}
    halves = {"samples": ["Paris"] * 5 + ["Rome"] * 5, "gold_answers": ["Paris"]}
    empty = {"samples": [""] * 10, "gold_answers": ["Paris"]}
    assert papers_kbm_labels.soft_labels(agreed) == (1.0, 1.0, 1.0)
    assert papers_kbm_labels.soft_labels(halves) == pytest.approx((0.5, 0.0, 1 - 1 / np.log2(10)))
    assert papers_kbm_labels.soft_labels(empty) == (0.0, 0.0, 0.0)
    labels = [papers_kbm_labels.soft_labels(row) for row in (agreed, halves, empty, agreed)]
    table, _ = papers_kbm_labels.label_statistics({"all": labels})
    assert table.rows[0][:5] == ["all", "4", "0.625", "0.500", "50.0"]
    effects, claims = papers_kbm.effects(six.arms.closed * 0.9, six.arms)
    assert effects.rows[0] == ["all", "8", "25.0", "62.5", "12.5", "25.0", "0.0"]
    assert claims[1].ours.startswith("+12.5")
    gated, _ = papers_kbm.gated_part(six)
    assert cells(gated, "right, %")["RAG for all"] == "62.5"
    known = {"one": six.arms.closed, "two": six.arms.rag}
    plugged, claims = papers_kbm.plug_in(six.states, known, six.sets, {"foreign": np.array(CLOSED, float)})
    assert plugged.rows[-1][1] == "1.000"
    assert len(claims) == 2
    other, _ = papers_kbm.other_llm(np.arange(8.0), six.arms, ~six.arms.closed)
    assert cells(other, "right, %")["LLM only"] == "50.0"
    soft, _ = papers_kbm_labels.soft_labels_compared(
        "one", six.states, six.arms.closed, six.sets, np.array(labels * 2)
    )
    assert len(soft.rows) == 7


def test_kbm_by_kind_of_question():
    from papers_kbm import kinds_table

    table, (claim,) = kinds_table({"news": np.zeros(8), "trivia": np.ones(8)}, 0.5)
    assert [row[2] for row in table.rows] == ["100.0 % [100.0, 100.0]", "0.0 % [0.0, 0.0]"]
    assert claim.verdict == "holds"


# --- resuming ------------------------------------------------------------------------------------------------


@pytest.fixture
def own(six):
    """The eight questions, with states and log-probabilities of the LLM that answered them."""
    from papers_self import LAYERS, Own

    rng = np.random.default_rng(1)
    told = six.arms.closed[:, None, None] * 2.0
    states = (rng.normal(size=(8, len(LAYERS), 6)) + told).astype(np.float32)
    logprobs = rng.normal(size=(8, 4)) + six.arms.closed[:, None]
    return Own(six.arms.closed, six.sets, six.fold, six.states, six.begun, states, logprobs)


def test_an_llm_judges_itself(own):
    import papers_self

    table, (claim,) = papers_self.compared(own)
    assert [row[0] for row in table.rows][2:5] == ["smollm2, its text", "own states", "own log-probabilities"]
    assert table.rows[2][2] == ""  # against itself
    assert "at most 32 tokens" in table.caption
    assert claim.verdict in ("holds", "does not hold", "not settled")


def test_what_is_fitted_has_not_seen_the_question(own):
    from papers_self import fitted

    label = own.known[:, None].astype(float)
    logits = fitted(label, own)
    assert logits[own.known].min() > logits[~own.known].max()
    others = dataclasses.replace(own, known=np.where(own.fold == 0, ~own.known, own.known))
    assert fitted(label, others)[own.fold == 0] == pytest.approx(logits[own.fold == 0])


def test_own_answers_are_written_once_with_their_states(tmp_path, monkeypatch):
    import papers_self
    from heads import Kept

    monkeypatch.setattr(papers_self, "LLM", "smollm2-135m-instruct")
    monkeypatch.setattr(papers_self, "TOKENS", 4)
    questions = ["What is the capital of France?", "Who wrote Hamlet?"]
    paths = tmp_path / "own", tmp_path / "answers.jsonl"
    drafts, states = papers_self.written(questions[:1], *paths)
    assert states.shape[:2] == (1, len(papers_self.LAYERS))
    assert len(drafts[0]["logprobs"]) == 4
    again, more = papers_self.written(questions, *paths)
    assert again[0] == drafts[0]
    assert np.array_equal(more[:1], states)
    assert len(paths[1].read_text().splitlines()) == 2
    assert len(Kept(paths[0]).vectors) == 2


def test_judgments_go_on_where_a_run_was_killed(tmp_path, monkeypatch):
    import paper_data

    monkeypatch.setattr(paper_data, "PART", 2)
    ids, asked = list("abcdefgh"), []

    def dies(places: list[int]) -> list[float]:
        if asked:
            raise KeyboardInterrupt
        asked.extend(places)
        return [float(place) for place in places]

    path = tmp_path / "kept.jsonl"
    with pytest.raises(KeyboardInterrupt):
        paper_data.judgments(path, ids, dies)
    path.write_text(path.read_text() + '["c", 0.')  # half a line of the part that was being written
    later: list[int] = []

    def lives(places: list[int]) -> list[float]:
        later.extend(places)
        return [float(place) for place in places]

    assert paper_data.judgments(path, ids, lives).tolist() == list(range(8))
    assert (asked, later) == ([0, 1], [2, 3, 4, 5, 6, 7])


def test_states_are_read_once(tmp_path, monkeypatch):
    import paper_data
    from heads import LAYERS

    asked: list[str] = []

    class Proxy:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def hidden(self, prompt, values, drafts, layers):
            asked.extend(value["question"] for value in values)
            return [type("States", (), {"states": np.ones((len(LAYERS), 6))})() for _ in values]

    monkeypatch.setattr(paper_data, "LocalProxy", Proxy)
    assert paper_data.question_states(["one", "two", "one"], tmp_path).shape == (3, len(LAYERS), 6)
    assert paper_data.question_states(["two", "three"], tmp_path).shape == (2, len(LAYERS), 6)
    assert asked == ["one", "two", "three"]


# --- the command ---------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The command, with a pipeline of two parts."""
    import papers
    from paper_tables import Claim, PaperTable

    ran: list[str] = []

    def lengths(options):
        ran.append("lengths")
        table = PaperTable("lengths", "What it shows.", ["tokens", "AUC"], [["32", str(options.limit)]])
        return table, [Claim("IK", "more is better", "0.9", "+0.1", "holds")]

    def sets(options):
        ran.append("sets")
        if options.limit == 13:
            raise KeyboardInterrupt
        return PaperTable("sets", "Sets.", ["set"], [["nq"]]), []

    monkeypatch.setattr(papers.papers_ik, "PARTS", {"lengths": lengths, "sets": sets})
    papers.ran = ran
    return papers


PAGE = """Before.

<!-- lengths -->
BEFORE
<!-- /lengths -->
<!-- sets --><!-- /sets -->
<!-- claims --><!-- /claims -->
"""


def test_tables_get_into_their_places_of_a_page(command, tmp_path, capsys):
    page = tmp_path / "ik.md"
    page.write_text(PAGE)
    given = [
        "ik",
        "--data",
        str(tmp_path),
        "--out",
        str(tmp_path),
        "--limit",
        "8",
        "--markdown",
        str(tmp_path),
    ]
    command.main(given)
    assert "| 32 | 8 |" in page.read_text()
    assert page.read_text().startswith("Before.")
    assert "BEFORE" not in page.read_text()
    first = page.read_text()
    command.main(["ik", "--show", "--out", str(tmp_path), "--markdown", str(tmp_path)])
    assert page.read_text() == first
    index = tmp_path / "index.md"
    index.write_text("<!-- claims --><!-- /claims -->")
    command.main(["claims", "--out", str(tmp_path), "--markdown", str(tmp_path)])
    assert "| IK | more is better | 0.9 | +0.1 | **holds** |" in index.read_text()
    assert "more is better" in capsys.readouterr().out


def test_parts_that_are_done_are_not_run_again(command, tmp_path):
    given = ["ik", "--data", str(tmp_path), "--out", str(tmp_path), "--limit"]
    with pytest.raises(KeyboardInterrupt):
        command.main([*given, "13"])
    with pytest.raises(KeyboardInterrupt):
        command.main([*given, "13"])
    assert command.ran == ["lengths", "sets", "sets"]
    command.main([*given, "8"])
    command.main([*given, "8"])
    assert command.ran[3:] == ["lengths", "sets"]
    command.main([*given, "8", "--fresh"])
    assert command.ran[5:] == ["lengths", "sets"]


def test_a_page_without_the_place_is_an_error_and_stays_as_it_is(command, tmp_path):
    page = tmp_path / "ik.md"
    page.write_text("Nothing.")
    with pytest.raises(ValueError, match="no place for the table 'lengths'"):
        command.main(["ik", "--data", str(tmp_path), "--out", str(tmp_path), "--markdown", str(tmp_path)])
    assert page.read_text() == "Nothing."


def test_verdicts_need_the_whole_interval():
    from paper_tables import Estimate, all_agree

    assert Estimate(0.1, 0.05, 0.2).verdict() == "holds"
    assert Estimate(-0.1, -0.2, -0.05).verdict() == "does not hold"
    assert Estimate(0.1, -0.05, 0.2).verdict() == "not settled"
    assert Estimate(0.1, -0.05, 0.2).verdict(-0.1) == "holds"
    assert all_agree(["holds", "holds"]) == "holds"
    assert all_agree(["holds", "does not hold"]) == "not settled"


def test_every_page_has_a_place_for_each_table_that_is_printed_into_it():
    import papers

    folder = BENCHMARKS.parent / "docs" / "papers"
    for name, pipeline in papers.PIPELINES.items():
        text = (folder / papers.PAGES[name]).read_text(encoding="utf-8")
        places = set(re.findall(r"<!-- ([a-z-]+) -->", text))
        assert places == {*pipeline.PARTS, "claims"}
        assert all(f"<!-- /{place} -->" in text for place in places)
