"""An LLM that knows the even numbers, a proxy that reads which they are, and what tunes a gate with both."""

import json

import numpy as np

from rgate_integrations.decision import Draft
from rgate_integrations.gates.artifacts import ProbeArtifact
from rgate_integrations.gates.folder import save_gate
from rgate_integrations.models.base import HiddenStates
from rgate_integrations.tuning import MaxLoss, TuneOptions, tune
from tests.fake_server import answer
from tests.scripted_proxy import ScriptedProxy

N = 60


class Reader(ScriptedProxy):
    """A proxy with states that show whether the answer is known: even numbers are."""

    num_layers = 4

    def __init__(self):
        super().__init__(fingerprint="abc")

    def hidden(self, prompt, values, drafts, layers):
        read = [float(known(value["question"])) for value in values]
        return [HiddenStates(np.full((len(layers), 4), each), 9) for each in read]


class Model(ScriptedProxy):
    """Answers with the question and, if it samples, with the seed."""

    num_layers = 30

    def __init__(self, says=lambda question, seed: "Answer.", name="one", weights="w1"):
        super().__init__(fingerprint=weights)
        self.says = says
        self.name = name
        self.asked = []

    def generate(self, prompt, values, **options):
        return [draft for (draft,) in self.sample(prompt, values, seed=0)]

    def sample(self, prompt, values, *, seed, **options):
        asked = [value["question"] for value in values]
        self.asked += asked
        return [(Draft(text=self.says(question, seed), logprobs=(-0.1,)),) for question in asked]


def number(question):
    return int(question.rstrip("?").split()[-1])


def known(question):
    return number(question) % 2 == 0


def shipped(tmp_path):
    """Save a gate that says 0.5 of everything: whatever is known afterwards was learned."""
    probe = ProbeArtifact(
        weight=np.zeros((1, 4), dtype=np.float32),
        bias=0.0,
        threshold=0.6,
        layers=((2, "question", "mean"),),
        tokens=0,
        source="proxy",
        base_model="scripted",
        llm="another LLM",
        fingerprint="abc",
        provenance={"data": []},
    )
    return str(save_gate(probe, tmp_path / "shipped"))


def questions(n=N):
    return [{"question": f"what is number {i}?", "gold_answers": [f"n{i}"]} for i in range(n)]


def says_what_it_knows(question):
    """Answer the even ones, and say so in the log-probabilities."""
    text, logprobs = (
        (f"n{number(question)}", (-0.1, -0.2)) if known(question) else ("who knows", (-2.0, -3.0))
    )
    return Draft(text=text, tokens=("a", "b"), logprobs=logprobs)


class Direct:
    """Notes what it is asked, and fails at some questions."""

    def __init__(self, fails=(), says=says_what_it_knows):
        self.asked = []
        self.fails = fails
        self.says = says

    def __call__(self, question):
        self.asked.append(question)
        if question in self.fails:
            raise RuntimeError("no answer")
        return self.says(question)


def retrieve(question):
    return f"It is n{number(question)}."


def tuned(tmp_path, prior, given=None, *, direct=None, retrieve=retrieve, options=None, **more):
    return tune(
        questions() if given is None else given,
        direct=direct or Direct(),
        retrieve=retrieve,
        out=tmp_path / "my-gate",
        options=TuneOptions(
            **{"init_from": prior, "policy": MaxLoss(0.2), "proxy": Reader(), **(options or {})}
        ),
        **more,
    )


def write(path, *lines):
    """Write objects as JSONL."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def by_number(body):
    """Answer as a server does: the number that is asked for, if it is even."""
    return answer(says_what_it_knows(body["messages"][-1]["content"].partition("?")[0]).text)
