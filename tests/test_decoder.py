"""The first layers of a model, read without transformers' classes, give the states that transformers gives."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rgate_integrations.errors import ModelLoadError
from rgate_integrations.prompts import ANSWER
from rgate_integrations.proxy.base import PooledLayer
from rgate_integrations.proxy.local import LocalProxy

pytestmark = pytest.mark.model

ASKED = [
    {"question": q}
    for q in ("who wrote hamlet?", "where is the tallest tower of all, and who made it?", "why?")
]
LAYERS = (PooledLayer(0, "prompt", "mean"), PooledLayer(2, "question", "mean"), PooledLayer(3, "all", "last"))


def llama(config: dict):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**config | {"num_hidden_layers": 4, "tie_word_embeddings": False}))


def wide_heads(config: dict):
    from transformers import LlamaConfig, LlamaForCausalLM

    changes = {
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "attention_bias": True,
        "mlp_bias": True,
    }
    return LlamaForCausalLM(LlamaConfig(**config | changes))


def qwen2(config: dict):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    changes = {"num_hidden_layers": 4, "model_type": "qwen2", "max_window_layers": 4}
    return Qwen2ForCausalLM(Qwen2Config(**config | changes))


@pytest.fixture(scope="module", params=[llama, wide_heads, qwen2], ids=lambda make: make.__name__)
def folder(request, tmp_path_factory, tiny) -> str:
    """Four layers with random weights, in several files."""
    import torch
    from transformers import AutoTokenizer

    where = tmp_path_factory.mktemp(request.param.__name__)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(where)
    torch.manual_seed(1)
    config = json.loads((Path(tiny) / "config.json").read_text())
    model = request.param(config)
    for name, each in model.named_parameters():
        if "bias" in name or "norm" in name:  # as they are made, they would not be missed
            torch.nn.init.normal_(each, mean=0.5)
    model.save_pretrained(where, max_shard_size="200KB")
    assert len(list(where.glob("*.safetensors"))) > 1
    return str(where)


def states(proxy: LocalProxy, asked=ASKED) -> np.ndarray:
    return np.stack([each.states for each in proxy.hidden(ANSWER, asked, None, LAYERS)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_are_those_of_transformers(folder, dtype):
    part, whole = LocalProxy(folder, dtype=dtype), LocalProxy(folder, dtype=dtype).load()
    own, expected = states(part), states(whole)
    # In bfloat16, attention is computed with more digits than transformers does.
    assert np.abs(own - expected).mean() < (1e-6 if dtype == "float32" else 0.01) * expected.std()
    assert "loaded=False" in repr(part)
    assert part.fingerprint == whole.fingerprint


def test_a_prefix_is_read_once_and_changes_nothing(folder, monkeypatch):
    part = LocalProxy(folder, dtype="float32")
    once, again = states(part), states(part)
    (runner,) = (part._reader._runner,)
    assert len(runner.prefixes) == 1
    monkeypatch.setattr(runner, "min_prefix_tokens", 10**9)
    assert states(part) == pytest.approx(once, abs=1e-5)
    assert (once == again).all()


def test_reading_copies_no_keys_and_values_of_a_prefix(folder, monkeypatch):
    part = LocalProxy(folder, dtype="float32")
    before = states(part)
    runner = part._reader._runner
    ((_, kept),) = runner.prefixes._kept.items()
    keys = [layer.keys.clone() for layer in kept.cache.layers]
    given = []
    batch = runner.batch
    monkeypatch.setattr(runner, "batch", lambda *args: given.append(batch(*args)) or given[-1])
    assert (states(part) == before).all()
    assert given
    assert all(each.cache is kept.cache for each in given)
    assert all((layer.keys == own).all() for layer, own in zip(kept.cache.layers, keys, strict=True))


def test_in_bfloat16_the_company_of_a_question_changes_not_one_bit(folder):
    part = LocalProxy(folder, dtype="bfloat16")
    together = states(part, ASKED * 20)
    alone = np.concatenate([states(part, [each]) for each in ASKED])
    for row, each in enumerate(together):
        assert (each == alone[row % len(ASKED)]).all()


def test_reading_and_writing_in_other_float_types_judges_alike_before_and_after(folder, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    part = LocalProxy(folder)
    before = states(part)
    assert part._reader.runner.model.dtype.itemsize == 2
    part.generate(ANSWER, ASKED[:1], tokens=2)
    assert part.runner.model.dtype.itemsize == 4
    assert (states(part) == before).all()
    assert part.calls == 3


@pytest.fixture
def cpu_without_bfloat16(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False}, raising=False)


def test_a_cpu_without_bfloat16_reads_in_float32(folder, monkeypatch, cpu_without_bfloat16):
    import torch

    from rgate_integrations.proxy import linear, pretrained

    assert not pretrained.reads_bfloat16("cuda:1")  # there everything is
    assert not pretrained.reads_narrower("cuda:1")
    for module in (linear, pretrained):  # neither has it FBGEMM
        monkeypatch.setattr(module, "can_halve", lambda: False)
    part = LocalProxy(folder, device="cpu")
    assert not part._reads_apart
    once = states(part)
    assert part._reader.runner.model.dtype.itemsize == 4
    assert (once == states(LocalProxy(folder, dtype="float32"))).all()
    part.load()
    assert part._reader is None
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # as in torch before 2.11
    assert not pretrained.reads_bfloat16("cpu")


def test_a_cpu_without_bfloat16_keeps_weights_in_half_the_bytes(folder, cpu_without_bfloat16):
    from rgate_integrations.proxy.linear import can_halve

    if not can_halve():
        pytest.skip("this build of torch or this CPU has no FBGEMM")
    part = LocalProxy(folder, device="cpu")
    before = states(part)
    model = part._reader.runner.model
    assert model.dtype.itemsize == 4
    assert all(layer.qkv.halves is not None for layer in model.layers[:-1])
    exact = states(LocalProxy(folder, device="cpu", dtype="float32"))
    assert not (before == exact).all()
    assert np.abs(before - exact).mean() < 0.001 * exact.std()
    part.load()  # the whole model has all digits
    assert (states(part) == before).all()


def test_with_weights_in_float16_the_company_of_a_question_changes_not_one_bit(folder, cpu_without_bfloat16):
    part = LocalProxy(folder, device="cpu")
    together = states(part, ASKED * 20)
    alone = np.concatenate([states(part, [each]) for each in ASKED])
    for row, each in enumerate(together):
        assert (each == alone[row % len(ASKED)]).all()


def test_weights_that_are_missing_are_named(folder, tmp_path):
    for file in Path(folder).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shards = sorted(tmp_path.glob("*.safetensors"))
    shards[0].unlink()
    with pytest.raises(ModelLoadError, match="could not be loaded"):
        states(LocalProxy(str(tmp_path)))
    for shard in shards[1:]:
        shard.write_bytes(b"not safetensors")
    with pytest.raises(ModelLoadError, match="could not be loaded"):
        states(LocalProxy(str(tmp_path)))


def test_a_first_decision_imports_no_model_classes():
    """They take longer to import than everything else together."""
    code = """
import sys
from rgate_integrations import load_gate
decision = load_gate(on_error="raise").decide("Who wrote Hamlet?")
assert decision.p_known > 0.5
print([name for name in ("torch._dynamo", "transformers.modeling_utils", "scipy", "sklearn") if name in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"
