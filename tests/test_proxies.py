"""Which implementation of a proxy does what, and whose states are read."""

from dataclasses import replace

import numpy as np
import pytest

from rgate_integrations import Draft, load_gate
from rgate_integrations.engine import decision_engine
from rgate_integrations.errors import EvidenceError
from rgate_integrations.gates.folder import save_gate
from rgate_integrations.models.base import HasStates, HiddenStates, LanguageModel, PooledLayer
from rgate_integrations.models.catalog import DEFAULT_MODEL
from rgate_integrations.models.encoder import ENCODER, EncoderProxy
from rgate_integrations.models.local import TransformersProxy, shared_proxy
from rgate_integrations.models.proxies import gate_proxy, language_model, read_states, state_reader
from rgate_integrations.models.reader import ReaderProxy
from rgate_integrations.prompts import ANSWER, SHORT_ANSWER
from tests.saved_gates import FACTS, HEADS, PROBE
from tests.scripted_proxy import ScriptedProxy

READABLE = (PooledLayer(14, "question", "mean"),)
OWN = Draft(text="Paris.", token_ids=(1, 2), tokens=("Paris", "."), source="proxy", model=DEFAULT_MODEL)
WHOLE = shared_proxy(DEFAULT_MODEL)


def test_a_gate_on_the_default_model_has_the_reader_and_any_other_has_its_model():
    assert isinstance(gate_proxy(ENCODER), EncoderProxy)
    assert isinstance(gate_proxy(DEFAULT_MODEL), ReaderProxy)
    assert gate_proxy("some/model") is shared_proxy("some/model")
    assert language_model(gate_proxy(DEFAULT_MODEL)) is WHOLE


@pytest.mark.parametrize(
    ("prompt", "layers", "draft", "by_reader"),
    [
        (ANSWER, READABLE, None, True),
        (ANSWER, READABLE, Draft(text="Paris."), True),
        (ANSWER, READABLE, OWN.model_copy(update={"model": "another"}), True),
        (ANSWER, READABLE, OWN, False),  # the model that wrote it reads it exactly
        (SHORT_ANSWER, READABLE, None, False),
        (ANSWER, (PooledLayer(13, "question", "mean"),), None, False),
        (ANSWER, (PooledLayer(14, "prompt", "mean"),), None, False),  # the prefix has no states here
    ],
)
def test_the_reader_reads_what_it_can_and_the_whole_model_the_rest(prompt, layers, draft, by_reader):
    reader = gate_proxy(DEFAULT_MODEL)
    assert state_reader(reader, prompt, layers, draft) is (reader if by_reader else WHOLE)
    exact = TransformersProxy(DEFAULT_MODEL)
    assert state_reader(exact, prompt, layers, draft) is exact, "what a user gives is what is used"


def test_a_model_that_cannot_do_what_a_gate_needs_is_named():
    class OnlyStates(HasStates):
        name, num_layers = "deaf", 2
        hidden = truncate = None

    class OnlyText(LanguageModel):
        name = "blind"
        generate = sample = score = truncate = None

    with pytest.raises(EvidenceError, match="'deaf' is not a language model"):
        language_model(OnlyStates())
    with pytest.raises(EvidenceError, match="'blind' does not provide"):
        state_reader(OnlyText(), ANSWER, READABLE)


def test_an_own_draft_in_a_batch_does_not_change_who_reads_the_others(monkeypatch):
    class Marked(ScriptedProxy):
        def hidden(self, prompt, values, drafts, layers):
            return [HiddenStates(np.full((1, 4), 2.0, np.float32), 5) for _ in values]

    def hidden(self, prompt, values, drafts, layers):
        return [HiddenStates(np.full((1, 4), 1.0, np.float32), 5) for _ in values]

    whole = Marked()
    monkeypatch.setattr("rgate_integrations.models.local.shared_proxy", lambda name: whole)
    monkeypatch.setattr(ReaderProxy, "hidden", hidden)
    drafts = [Draft(text="a"), OWN, Draft(text="b")]
    values = [{"question": each} for each in "xyz"]
    found = read_states(gate_proxy(DEFAULT_MODEL), ANSWER, values, drafts, READABLE)
    assert [each.states[0, 0] for each in found] == [1.0, 2.0, 1.0]


class Asked(ScriptedProxy):
    """A model of a name, with states that say little; it counts what it reads."""

    def __init__(self, name):
        super().__init__()
        self.name, self.read = name, []

    def hidden(self, prompt, values, drafts, layers):
        self.read.append(drafts and drafts[0].text)
        return super().hidden(prompt, values, drafts, layers)


@pytest.mark.parametrize(("proxy", "by"), [(None, "reader"), ("another", "another"), (Asked("own"), "own")])
def test_the_question_has_a_model_of_its_own_and_proxy_names_that_of_the_begun_answer(
    tmp_path, monkeypatch, proxy, by
):
    models = {name: Asked(name) for name in ("scripted", "facts", "reader", "another")}
    monkeypatch.setattr(decision_engine, "gate_proxy", models.__getitem__)
    heads = replace(HEADS, facts=replace(FACTS, base_model="facts"))
    probe = replace(PROBE, base_model="reader", tokens=4, layers=((1, "draft", "mean"), (2, "draft", "mean")))
    folders = save_gate(heads, tmp_path / "heads"), save_gate(probe, tmp_path / "probe")
    gate = load_gate(f"answer:{folders[0]},{folders[1]}", proxy=proxy, on_error="raise")
    gate.decide("Who wrote Hamlet?", draft="Shakespeare")
    assert gate.proxy == by
    own = proxy if isinstance(proxy, Asked) else models[by]
    assert own.read == ["Shakespeare"]
    assert set(models["scripted"].read) == {None}
    assert all(not model.read for name, model in models.items() if name not in ("scripted", "facts", by))
