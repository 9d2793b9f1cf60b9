"""Which implementation of a proxy does what, and whose states are read."""

from dataclasses import replace

import numpy as np
import pytest

from rgate_integrations import Draft, Request
from rgate_integrations.errors import EvidenceError
from rgate_integrations.gates.evidence.base import Context, Evidence, Sources, expand_specs
from rgate_integrations.gates.evidence.draft import DraftSpec
from rgate_integrations.gates.evidence.model_outputs import HiddenSpec, RequestSpec
from rgate_integrations.models.base import HasStates, HiddenStates, LanguageModel
from rgate_integrations.models.catalog import DEFAULT_MODEL
from rgate_integrations.models.local import TransformersProxy, shared_proxy
from rgate_integrations.models.pooling import PooledLayer
from rgate_integrations.models.proxies import gate_proxy, language_model, read_states, state_reader
from rgate_integrations.models.reader import ReaderProxy
from rgate_integrations.prompts import ANSWER, SHORT_ANSWER
from tests.scripted_proxy import ScriptedProxy

READABLE = (PooledLayer(14, "question", "mean"),)
OWN = Draft(text="Paris.", token_ids=(1, 2), tokens=("Paris", "."), source="proxy", model=DEFAULT_MODEL)
WHOLE = shared_proxy(DEFAULT_MODEL)


def test_a_gate_on_the_default_model_has_the_reader_and_any_other_has_its_model():
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

    with pytest.raises(EvidenceError, match="'deaf' writes and scores no text"):
        language_model(OnlyStates())
    with pytest.raises(EvidenceError, match="'blind' gives no hidden states"):
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


class Counting(ScriptedProxy):
    """Counts the passes over requests, and what was read in each."""

    def __init__(self):
        super().__init__()
        self.passes = []

    def request_states(self, prompt, texts, drafts, layers):
        self.passes.append((len(texts), drafts and [draft.text for draft in drafts]))
        return super().request_states(prompt, texts, drafts, layers)


@pytest.mark.parametrize(
    ("change", "drafts"),
    [({}, ["Rome.", "Rome."]), ({"draft": None}, None), ({"history": ("user: Hi",)}, None)],
)
def test_requests_and_given_drafts_are_read_in_one_pass(change, drafts):
    request = RequestSpec(READABLE, READABLE)
    states = HiddenSpec((PooledLayer(16, "draft", "mean"),), DraftSpec(source="recorded"))
    given = Request("Who?", draft=Draft(text="Rome."))
    proxy = Counting()
    requests = [Evidence(given), Evidence(replace(given, **change))]
    context = Context(requests, Sources(lambda: proxy, None, {}), expand_specs([request, states]))
    for spec in (request, states):
        context.find(spec)
    assert proxy.passes == [(2, drafts)]
    assert context.evidence[0][states].shape == (1, 4)
    assert context.evidence[0].cost.model_calls == (1 if drafts else 2)
