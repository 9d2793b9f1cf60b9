"""``rgate ability``: the anchors, the estimate, and what is asked again."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from rgate_integrations import load_gate
from rgate_integrations.errors import DataFormatError
from rgate_integrations.gates.ability import Ability, resolve_ability
from rgate_integrations.gates.folder import save_gate
from rgate_integrations.models.base import HiddenStates
from rgate_integrations.runtime.text import is_correct
from rgate_integrations.tuning import ability as measuring
from rgate_integrations.tuning import collect
from rgate_integrations.tuning.ability import (
    estimate_ability,
    measure_ability,
    read_anchors,
)
from rgate_integrations.tuning.arms import ModelArm, ObjectArm
from tests.commands import printed, rgate
from tests.fake_server import Fake, answer
from tests.saved_gates import FACTS, HEADS
from tests.scripted_proxy import ScriptedProxy
from tests.tuning_parts import Direct, Model

PRIOR = Ability("m", 0.5, 1.0, "a test")
KINDS = {anchor.text: anchor.dataset for anchor in read_anchors()}
GOLD = {anchor.text: anchor.gold[0] for anchor in read_anchors()}


class Flat(ScriptedProxy):
    """States of a question about a fact, of which they say nothing; those of some ask for none."""

    needless = ()

    def hidden(self, prompt, values, drafts, layers):
        states = [(9, 0, 0, 0) if each["question"] in self.needless else (0, 9, 0, 0) for each in values]
        return [HiddenStates(np.array([each], np.float32), 3) for each in states]


@pytest.fixture
def flat(monkeypatch, tmp_path):
    """A gate to which all questions are alike."""
    heads = replace(HEADS, facts=replace(FACTS, ability_slope=1.0))
    gate = load_gate(str(save_gate(heads, tmp_path / "flat")), proxy=Flat())
    monkeypatch.setattr(measuring, "load_gate", lambda: gate)


EASY = ("well-known", "middling")


def arm(fails=()):
    """What answers easy questions rightly, and no other."""
    says = {
        text: f"It is {GOLD[text]}." if kind in EASY else "I do not know." for text, kind in KINDS.items()
    }
    return ObjectArm(Direct(fails, says=says.get), "Llama-3.2-1B")


def test_there_are_100_anchors_of_four_kinds():
    assert len(GOLD) == 100
    assert set(Counter(KINDS.values()).values()) == {25}
    assert len(set(list(KINDS.values())[:4])) == 4  # in turn, so that a part stands for all
    # None is answered by saying it again.
    assert not [anchor for anchor in read_anchors() if is_correct(anchor.text, anchor.gold)]


def test_the_estimate_is_where_the_posterior_is_highest():
    easiness, right = np.array([1.0, -0.5, 0.0, -2.0]), np.array([1.0, 1.0, 0.0, 0.0])
    found = estimate_ability(PRIOR, easiness, 0.8, right)
    grid = np.linspace(-4, 4, 8001)
    p = 1 / (1 + np.exp(-(easiness + 0.8 * grid[:, None])))
    posterior = np.log(np.where(right == 1, p, 1 - p)).sum(axis=1) - (grid - PRIOR.theta) ** 2 / 2
    best = posterior.argmax()
    assert found.theta == pytest.approx(grid[best], abs=1e-3)
    curvature = -np.gradient(np.gradient(posterior, grid), grid)[best]
    assert found.sd == pytest.approx(curvature**-0.5, rel=1e-3)


def test_what_was_measured_is_what_llm_name_takes(flat, tmp_path):
    assert measure_ability(arm(fails=list(GOLD)[-3:]), tmp_path / "mine").failed == 3
    again = arm()
    measured = measure_ability(again, tmp_path / "mine")
    assert again.call.asked == list(GOLD)[-3:], "what failed is asked again, and nothing else"
    assert measured.ability.source == "measured: 50 of 100 anchor questions answered correctly"
    assert measured.prior.theta == resolve_ability("Llama-3.2-1B")[0].theta < measured.ability.theta
    assert measured.ability.sd < measured.prior.sd
    assert resolve_ability(str(measured.folder))[0].theta == pytest.approx(measured.ability.theta, abs=1e-3)
    assert load_gate(llm_name=str(measured.folder)).gate.ability.llm == "Llama-3.2-1B"


def test_questions_collected_under_the_same_name_are_no_anchors(flat, tmp_path):
    """Regression: both were kept in one file, so 10 more questions were measured, and 100 anchors collected."""
    mine = [{"question": f"What is {i}?", "gold_answers": ["4"]} for i in range(10)]
    model = Model()
    out = collect(mine, model, tmp_path / "mine.jsonl")
    assert measure_ability(ModelArm(model), tmp_path / "mine").ability.source.split()[3] == "100"
    assert len(collect(mine, model, out).read_text().splitlines()) == 10


def test_an_anchor_that_asks_for_no_fact_in_the_gates_eyes_says_nothing_of_the_ability(
    flat, tmp_path, monkeypatch
):
    whole = measure_ability(arm(), tmp_path / "whole").ability
    monkeypatch.setattr(Flat, "needless", [text for text, kind in KINDS.items() if kind == "obscure"])
    part = measure_ability(arm(), tmp_path / "part").ability
    assert part.theta > whole.theta, "a larger share of the rest is answered correctly"
    assert part.sd > whole.sd


def test_too_few_answers_measure_nothing(flat, tmp_path):
    # Of every ten calls nine fail, which is not yet a reason to give up.
    fails = [text for place, text in enumerate(GOLD) if place % 10]
    with pytest.raises(DataFormatError, match="10 of 100 questions were answered; 20 are needed"):
        measure_ability(arm(fails), tmp_path / "mine", concurrency=1)
    assert not (tmp_path / "mine").exists()


def test_the_command_measures_a_served_llm(flat, tmp_path, fake):
    def reply(body):
        (said,) = [text for text in GOLD if text in body["messages"][-1]["content"]]
        return answer(f"That is {GOLD[said]}.")

    page = printed("ability", "--llm", fake(reply).url, "--out", tmp_path / "mine", "--model", "my-model-1b")
    assert len(Fake.seen) == 100
    assert "measured: 100 of 100 anchor questions" in page
    assert "Before measuring: -1.80 ± 1.50, guessed from 1 billion parameters" in page


@pytest.mark.parametrize(
    ("llm", "said"),
    [("qwen3:4b", "judged as qwen3-4b"), ("my-assistant", "judged as Llama-3.1-8B-Instruct")],
)
def test_the_command_says_what_is_assumed_of_an_llm(llm, said):
    assert said in printed("gates", "--llm", llm)
    assert '"theta"' in printed("gates", "--llm", llm, "--json")


def test_the_command_refuses_an_empty_name():
    """Regression: it said what is assumed of "" if the shell's variable with the name was not set."""
    assert "--llm is empty" in rgate("gates", "--llm", " ").exception.message
