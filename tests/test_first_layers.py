"""What only reads a question loads the model's first layers; what writes loads the whole model."""

import json
from pathlib import Path

import numpy as np
import pytest

from rgate_integrations.decision import Draft
from rgate_integrations.evidence.base import Inputs
from rgate_integrations.evidence.collector import Collector, Sources
from rgate_integrations.evidence.draft import DraftSpec
from rgate_integrations.evidence.hidden import HiddenSpec
from rgate_integrations.prompts import ANSWER
from rgate_integrations.proxy.base import PooledLayer
from rgate_integrations.proxy.first_layers import can_be_read_alone, folder_fingerprint
from rgate_integrations.proxy.local import LocalProxy

pytestmark = pytest.mark.model

LAYERS = (PooledLayer(1, "question", "mean"), PooledLayer(2, "all", "last"))
ASKED = [{"question": "who wrote hamlet?"}, {"question": "where is the tallest tower of all?"}]


@pytest.fixture(scope="module")
def five(tmp_path_factory, tiny) -> str:
    """Five narrow layers with random weights."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("five")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    config = json.loads((Path(tiny) / "config.json").read_text())
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**config | {"num_hidden_layers": 5}))
    model.save_pretrained(folder)
    return str(folder)


def whole(name):
    return LocalProxy(name, dtype="float32").load()


def states(proxy, layers=LAYERS, drafts=None):
    return np.stack([each.states for each in proxy.hidden(ANSWER, ASKED, drafts, layers)])


def test_the_first_layers_see_what_the_whole_model_sees(five):
    part, all_of_it = LocalProxy(five, dtype="float32"), whole(five)
    assert states(part) == pytest.approx(states(all_of_it), abs=1e-5)
    assert "loaded=False" in repr(part)
    assert part.calls == 1
    assert part.fingerprint == all_of_it.fingerprint == folder_fingerprint(five)
    assert "loaded=False" in repr(part)


def test_what_writes_has_the_whole_model(five):
    part, all_of_it = LocalProxy(five, dtype="float32"), whole(five)
    before = states(part)
    draft, expected = (p.generate(ANSWER, ASKED[:1], tokens=4)[0] for p in (part, all_of_it))
    assert draft.token_ids == expected.token_ids
    assert "loaded=True" in repr(part)
    assert part.num_layers == 5
    assert states(part) == pytest.approx(before, abs=1e-5)
    assert part.fingerprint == all_of_it.fingerprint


def test_deeper_layers_load_more_of_it(five):
    part, all_of_it = LocalProxy(five, dtype="float32"), whole(five)
    states(part)
    deeper = (PooledLayer(3, "question", "mean"),)
    assert states(part, deeper) == pytest.approx(states(all_of_it, deeper), abs=1e-5)
    assert states(part) == pytest.approx(states(all_of_it), abs=1e-5)
    last = (PooledLayer(5, "all", "last"),)
    assert states(part, last) == pytest.approx(states(all_of_it, last), abs=1e-5)
    assert "loaded=True" in repr(part)


@pytest.mark.parametrize(
    ("changes", "alone"),
    [
        ({}, True),
        ({"rope_parameters": {"rope_theta": 10_000.0, "rope_type": "linear", "factor": 2.0}}, False),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, False),
        ({"layer_types": ["full_attention"] * 5}, True),
        ({"layer_types": ["full_attention", "sliding_attention"] * 3}, False),
        ({"model_type": "mistral", "sliding_window": 64}, False),
        ({"model_type": "mistral", "sliding_window": None}, True),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, True),
        ({"model_type": "gpt2"}, False),
        ({"hidden_act": "gelu"}, False),
        ({"quantization_config": {"bits": 4}}, False),
        ({"num_attention_heads": "many"}, False),
    ],
)
def test_models_that_are_built_otherwise_are_loaded_whole(five, tmp_path, changes, alone):
    config = json.loads((Path(five) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    assert not can_be_read_alone(str(tmp_path), 1)  # no weights
    (tmp_path / "model.safetensors").touch()
    assert can_be_read_alone(str(tmp_path), 1) == alone


def test_how_many_layers_are_enough(five):
    assert can_be_read_alone(five, 0)
    assert can_be_read_alone(five, 4)
    assert not can_be_read_alone(five, 5)  # these are all, and the final norm would be missing
    assert not can_be_read_alone("someone/on-the-hub", 1)


def test_cutting_a_text_loads_no_layer(five, monkeypatch):
    import transformers

    long = "who wrote the play about the prince of denmark and when was it first shown"
    expected = whole(five).cut(long, 6)

    def refused(*_, **__):
        raise AssertionError("A model is loaded.")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refused)
    part = LocalProxy(five)
    assert part.cut(long, 6) == expected
    assert len(expected) < len(long)
    assert part.cut("who", 6) is None


def test_a_long_first_question_loads_the_first_layers_alone(five):
    part = LocalProxy(five)
    assert part.cut("who wrote hamlet? " * 10, 4)
    states(part)
    assert "loaded=False" in repr(part)


@pytest.mark.parametrize("source", ["recorded", "llm"])
def test_a_long_draft_is_judged_by_the_first_layers_alone(five, source):
    draft = DraftSpec(tokens=4, source=source)
    states = HiddenSpec((PooledLayer(2, "draft", "mean"),), draft)
    part, all_of_it = LocalProxy(five, dtype="float32"), whole(five)
    inputs = [Inputs(each["question"], Draft(text="It was he, " * 9, source="recorded")) for each in ASKED]
    found = []
    for proxy in (part, all_of_it):
        collector = Collector(inputs, Sources(lambda proxy=proxy: proxy, None, {}), [draft, states])
        found.append(collector.context().evidence([draft, states]))
    for first, second in zip(*found, strict=True):
        assert len(first[draft].text) < 20
        assert first[states] == pytest.approx(second[states], abs=1e-5)
        assert first.made_by(states).fingerprint == all_of_it.fingerprint
    assert "loaded=False" in repr(part)
