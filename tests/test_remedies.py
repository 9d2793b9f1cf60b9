"""What the benchmarks calculate of other settings, by four questions made by hand."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def remedies(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import remedies

    return remedies


def facts(remedies: ModuleType, times: int = 1) -> Any:
    """Make questions of which the first two are known, and say so; reading takes 10 s, answering alone 1 s."""
    n = 4 * times

    def each(*values: float) -> np.ndarray:
        return np.tile(np.array(values), times)

    return remedies.Facts(
        questions=[f"question {number}" for number in range(n)],
        judged=np.full(n, True),
        right=(each(1, 1, 0, 0) > 0, each(1, 0, 1, 1) > 0),
        prompt=(np.full(n, 40), np.full(n, 500)),
        seconds=(np.full(n, 1.0), np.full(n, 10.0)),
        p_known=each(0.9, 0.6, 0.4, 0.1),
        gate=np.full(n, 0.1),
        search=0.02,
        p_contains_answer=each(0.0, 0.0, 1.0, 1.0),
        begun={32: remedies.Begun(each(0.9, 0.8, 0.2, 0.7), np.full(n, 0.2), np.full(n, 0.5))},
    )


def test_the_question_alone_costs_the_gate(remedies: ModuleType) -> None:
    known = facts(remedies)
    chosen = remedies.by_question(known, 0.5)
    assert chosen.retrieve.tolist() == [False, False, True, True]
    assert remedies.right(known, chosen).all()
    assert remedies.prompt(known, chosen).tolist() == [40, 40, 500, 500]
    assert remedies.seconds(known, chosen) == pytest.approx([1.1, 1.1, 10.1, 10.1])


def test_an_answer_that_is_stopped_was_paid_for(remedies: ModuleType) -> None:
    known = facts(remedies)
    chosen = remedies.answering_first(known, (32, 0.15, 0.5))
    assert chosen.retrieve.tolist() == [False, False, True, True]  # the last one by the first look
    assert remedies.prompt(known, chosen).tolist() == [40, 40, 540, 500]
    assert remedies.seconds(known, chosen) == pytest.approx([1.3, 1.3, 10.8, 10.1])


def test_a_wider_band_begins_fewer_answers(remedies: ModuleType) -> None:
    known = facts(remedies)
    chosen = remedies.answering_first(known, (32, 0.5, 0.5))
    assert chosen.retrieve.tolist() == [False, False, True, True]
    assert remedies.prompt(known, chosen).tolist() == [40, 40, 500, 500]


def test_a_look_costs_a_search_where_nothing_is_read(remedies: ModuleType) -> None:
    known = facts(remedies)
    chosen = remedies.looking_first(known, 0.0)
    assert chosen.retrieve.tolist() == [False, False, True, True]
    assert chosen.seconds == pytest.approx([0.12, 0.12, 0.1, 0.1])


def test_a_begun_answer_can_speak_against_the_look(remedies: ModuleType) -> None:
    known = replace(facts(remedies), p_known=np.array([0.9, 0.9, 0.9, 0.9]))
    assert remedies.looking_first(known, 0.0).retrieve.tolist() == [False, False, False, False]
    chosen = remedies.both_first(known, (32, 0.0))
    assert chosen.retrieve.tolist() == [False, False, True, False]
    assert remedies.prompt(known, chosen).tolist() == [40, 40, 540, 40]


def test_the_cheapest_setting_that_is_right_enough_is_chosen(remedies: ModuleType) -> None:
    known = facts(remedies)
    remedy = remedies.Remedy("", remedies.by_question, 0.5, [0.05, 0.2, 0.5, 0.95])
    everyone = np.full(4, True)
    # Always is right on three of four: by 0.2 one question is read for, and three are right.
    assert remedies.fitted(remedy, known, everyone) == 0.2
    none_enough = replace(remedy, tried=[0.05])
    assert remedies.fitted(none_enough, known, everyone) == 0.05


def test_no_question_chooses_the_setting_that_it_is_shown_on(
    remedies: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = facts(remedies, times=10)
    left_out = []

    def fitted(remedy: Any, facts: Any, rows: np.ndarray) -> float:
        left_out.append(~rows)
        return 0.5

    monkeypatch.setattr(remedies, "fitted", fitted)
    chosen, settings = remedies.cross_fitted(remedies.Remedy("", remedies.by_question, 0.5, [0.5]), known)
    assert np.sum(left_out, axis=0).tolist() == [1] * 40
    assert settings == [0.5] * 5
    assert chosen.retrieve.tolist() == remedies.by_question(known, 0.5).retrieve.tolist()


def test_a_row_says_whether_the_aim_is_reached(remedies: ModuleType) -> None:
    known = facts(remedies)
    row = remedies._row(known, "look first", "shipped", remedies.by_question(known, 0.2))
    assert row["read, % of always"] == f"{100 * (3 * 40 + 500) / 2000:.0f}"
    assert row["median time, % of always"] == "11"
    assert row["aim"] == "reached"
    everything = remedies.everything(known, True)
    assert remedies._row(known, "always", "", everything)["aim"] == ""
