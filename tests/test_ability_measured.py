"""``rgate ability``: the anchors, the estimate, and a run that is killed twice."""

import os
import signal
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from typer.testing import CliRunner

from rgate_integrations import load_gate
from rgate_integrations.cli.main import app
from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, DataFormatError, ServerError
from rgate_integrations.gates.abilities.resolve import resolve_ability
from rgate_integrations.gates.ability import Ability
from rgate_integrations.models.base import HiddenStates
from rgate_integrations.runtime.text import contains_answer
from rgate_integrations.tuning import ability as measuring
from rgate_integrations.tuning.ability import (
    anchor_logits,
    estimate_ability,
    measure_ability,
    read_anchors,
)
from tests.fake_server import Fake, answer, serving
from tests.scripted_proxy import ScriptedProxy

PRIOR = Ability("m", 0.5, 1.0, "a test")
GOLD = {anchor.text: anchor.gold[0] for anchor in read_anchors()}


class Flat(ScriptedProxy):
    """States that say nothing, of the shape that the shipped heads read."""

    def hidden(self, prompt, values, drafts, layers):
        return [HiddenStates(np.zeros((len(layers), 576), np.float32), 3) for _ in values]


@pytest.fixture
def flat(monkeypatch):
    """The default gate, to which all questions are alike."""
    gate = load_gate(proxy=Flat())
    trained = gate.gate.trained
    monkeypatch.setattr(Flat, "fingerprint", trained.fingerprint, raising=False)
    monkeypatch.setattr(measuring, "load_gate", lambda: gate)
    return gate


class Knows:
    """An arm that answers easy questions rightly, and fails at some."""

    name, batch = "Llama-3.2-1B", 1

    def __init__(self, fails=()):
        self.asked = []
        self.fails = fails

    @property
    def facts(self):
        return {"llm": self.name}

    def answer(self, questions):
        (question,) = questions
        self.asked.append(question.text)
        if question.text in self.fails:
            raise TimeoutError("no answer")
        known = question.dataset in ("well-known", "middling")
        return [Draft(text=f"It is {question.gold[0]}." if known else "I do not know.")]


def test_there_are_100_anchors_of_four_kinds():
    anchors = read_anchors()
    assert Counter(anchor.dataset for anchor in anchors) == dict.fromkeys(
        ("well-known", "middling", "obscure", "multi-step"), 25
    )
    assert len({anchor.key for anchor in anchors}) == 100
    for anchor in anchors:  # none is answered by saying it again
        assert anchor.gold
        assert not any(contains_answer(anchor.text, gold) for gold in anchor.gold)
    assert len({anchor.dataset for anchor in anchors[:4]}) == 4  # in turn, so that a part stands for all


def test_without_an_answer_the_estimate_is_the_prior():
    nothing = np.array([])
    assert estimate_ability(PRIOR, nothing, 1.0, nothing) == PRIOR


def test_the_estimate_is_where_the_posterior_is_highest():
    easiness, right = np.array([1.0, -0.5, 0.0, -2.0]), np.array([1.0, 1.0, 0.0, 0.0])
    found = estimate_ability(PRIOR, easiness, 0.8, right)

    def posterior(theta):
        p = 1 / (1 + np.exp(-(easiness + 0.8 * theta)))
        return np.log(np.where(right == 1, p, 1 - p)).sum() - (theta - PRIOR.theta) ** 2 / 2

    grid = np.linspace(-4, 4, 8001)
    assert found.theta == pytest.approx(grid[np.argmax([posterior(t) for t in grid])], abs=1e-3)
    step = 1e-3
    around = [posterior(found.theta + d) for d in (-step, 0, step)]
    curvature = -(around[0] - 2 * around[1] + around[2]) / step**2
    assert found.sd == pytest.approx(curvature**-0.5, rel=1e-3)


def test_the_gate_says_how_difficult_anchors_are(flat):
    easiness, slope = anchor_logits(flat, ["a question?", "another?"])
    assert easiness.shape == (2,)
    assert easiness[0] == easiness[1]
    assert slope > 0.1
    with pytest.raises(ConfigurationError, match="difficulty"):
        anchor_logits(load_gate("constant:never"), ["a question?"])


def test_what_was_measured_is_what_llm_name_takes(flat, tmp_path):
    arm = Knows()
    measured = measure_ability(arm, tmp_path / "mine")
    assert len(arm.asked) == 100
    known, unknown = (25, 25), (0, 25)
    kinds = {"well-known": known, "middling": known, "obscure": unknown, "multi-step": unknown}
    assert measured.right == kinds
    prior = resolve_ability("Llama-3.2-1B")[0]
    assert measured.prior.theta == prior.theta < measured.ability.theta
    assert measured.ability.sd < measured.prior.sd
    assert resolve_ability(str(measured.folder))[0].theta == pytest.approx(measured.ability.theta, abs=1e-3)
    assert load_gate(llm_name=str(measured.folder)).gate.ability.llm == "Llama-3.2-1B"
    assert measure_ability(arm, tmp_path / "mine") == measured  # nothing is asked again
    assert len(arm.asked) == 100


def test_what_failed_is_asked_again(flat, tmp_path):
    failing = Knows(fails=list(GOLD)[:3])
    assert measure_ability(failing, tmp_path / "mine").failed == 3
    again = Knows()
    assert measure_ability(again, tmp_path / "mine").failed == 0
    assert sorted(again.asked) == sorted(list(GOLD)[:3])


def test_too_few_answers_measure_nothing(flat, tmp_path):
    # Of every ten calls nine fail, which is not yet a reason to give up.
    fails = [text for place, text in enumerate(GOLD) if place % 10]
    with pytest.raises(DataFormatError, match="10 of 100 questions were answered; 20 are needed"):
        measure_ability(Knows(fails=fails), tmp_path / "mine", concurrency=1)
    with pytest.raises(ServerError, match="given up"):
        measure_ability(Knows(fails=list(GOLD)), tmp_path / "other")
    assert not (tmp_path / "mine").exists()


def test_a_folder_of_something_else_is_left_alone(flat, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    arm = Knows()
    with pytest.raises(ConfigurationError, match="something else in it"):
        measure_ability(arm, tmp_path)
    assert arm.asked == []


def test_the_command_is_killed_twice_and_goes_on(flat, tmp_path):
    children = []

    def reply(body):
        question = body["messages"][-1]["content"]
        if len(Fake.seen) in (15, 40):
            os.kill(children[-1].pid, signal.SIGKILL)
        (said,) = [text for text in GOLD if text in question]
        return answer(f"That is {GOLD[said]}.")

    with serving() as make:
        url = make(reply).url
        options = ["ability", "--llm", url, "--model", "my-model-1b", "--out", str(tmp_path / "mine")]
        for _ in range(2):
            program = "from rgate_integrations.cli import main; main()"
            command = [sys.executable, "-c", program, *options, "--concurrency", "1"]
            children.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
            assert children[-1].wait() == -signal.SIGKILL
        done = CliRunner().invoke(app, options)
        asked = Counter(body["messages"][-1]["content"] for _, body, _ in Fake.seen)
    assert done.exit_code == 0, done.output
    assert len(asked) == 100
    assert sum(asked.values()) <= 102  # the two that were under way when it was killed
    assert "measured: 100 of 100 anchor questions" in done.output
    assert "Ability +" in done.output
    assert "Before: -1.80 ± 1.50, guessed from 1 billion parameters" in done.output
    assert (tmp_path / "mine" / "ability.json").is_file()


def test_a_server_needs_the_name_of_its_model(tmp_path):
    done = CliRunner().invoke(
        app, ["ability", "--llm", "http://localhost:1/v1", "--out", str(tmp_path / "mine")]
    )
    assert done.exit_code == 1
    assert "--model" in str(done.exception)


def test_the_command_says_what_is_assumed_of_an_llm():
    done = CliRunner().invoke(app, ["gates", "--llm", "qwen3:4b"])
    assert "judged as qwen3-4b" in done.output
    assert "Why:" in done.output
    unknown = CliRunner().invoke(app, ["gates", "--llm", "my-assistant"])
    assert "judged as Llama-3.1-8B-Instruct" in unknown.output
    assert "rgate ability" in unknown.output
    as_json = CliRunner().invoke(app, ["gates", "--llm", "gpt-4o", "--json"])
    assert '"theta"' in as_json.output
