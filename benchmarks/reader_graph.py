"""Builds the reader's ONNX graph, which contains the prompt's prefix, and its smoothing factors.

    python benchmarks/reader_graph.py --data FOLDER

Writes rgate_integrations/weights/reader. Needs torch, onnx, and `rgate download smollm2-135m-instruct`. FOLDER
contains ``practical.dev.jsonl``: the smoothing uses the largest activations of 300 of its short requests, and nothing
else.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from base import OUT as KEPT
from base import argument_parser, read_records
from gguf import GGUFReader
from onnx import TensorProto, helper
from onnx_graph import MICROSOFT, Int8Builder

from rgate_integrations.models.catalog import DEFAULT_MODEL, READER, entry
from rgate_integrations.models.local import TransformersProxy
from rgate_integrations.models.onnx_model import SELF_TEST
from rgate_integrations.models.reader import GRAPH, STATES, Reader
from rgate_integrations.models.reader_file import (
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    LAYERS,
    READER_WEIGHTS,
    make_reader,
    reader_tensors,
)
from rgate_integrations.models.sources import fetch_files
from rgate_integrations.prompts import ANSWER

OUT = Path(__file__).parent.parent / "rgate_integrations" / "weights" / "reader"
ALPHA = 0.6  # on 512 questions P(known) differs from float32 by 0.011 on average (0: 0.018, 0.5: 0.012)
GROUP = HEADS // KV_HEADS
HIDDEN = HEADS * HEAD_SIZE
MASKED = -1e30
TESTED = ("What is the capital of France?", "What does our contract say about late delivery?")


def find_shared_prefix(encoder: Any) -> list[int]:
    """Return the token ids that every prompt begins with."""
    first, second = (encoder.encode(ANSWER, {"question": text}).ids for text in ("a", "1"))
    return list(os.path.commonprefix([first, second]))  # noqa: RUF071  of tokens


def calibrate(model: Any, encoder: Any, questions: list[str]) -> dict[str, np.ndarray]:
    """Return the largest activation of each input of the linear maps, shape (layers, inputs), by the map's name."""
    prefix = len(find_shared_prefix(encoder))
    largest: dict[str, list[Any]] = {name: [0.0] * LAYERS for name in ("qkv", "out", "gate_up", "down")}
    hooks: list[Any] = []

    def watch(name: str, number: int, module: torch.nn.Module) -> None:
        def look(_: Any, arguments: tuple[torch.Tensor, ...]) -> None:
            values = arguments[0][0, prefix:].abs().amax(0).numpy()
            largest[name][number] = np.maximum(largest[name][number], values)

        hooks.append(module.register_forward_pre_hook(look))

    for number, layer in enumerate(model.model.layers[:LAYERS]):
        watch("qkv", number, layer.self_attn.q_proj)
        watch("out", number, layer.self_attn.o_proj)
        watch("gate_up", number, layer.mlp.gate_proj)
        watch("down", number, layer.mlp.down_proj)
    for question in questions:
        ids = encoder.encode(ANSWER, {"question": " ".join(question.split())}).ids
        model.model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return {name: np.stack(values) for name, values in largest.items()}


def compute_smoothing(model: Any, largest: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return SmoothQuant's factors, shape (layers, inputs), by the map's name; a layer's geometric mean is 1."""
    factors_by_map: dict[str, list[np.ndarray]] = {name: [] for name in largest}
    for number, layer in enumerate(model.model.layers[:LAYERS]):
        attention, feed_forward = layer.self_attn, layer.mlp
        weights = {
            "qkv": [attention.q_proj, attention.k_proj, attention.v_proj],
            "out": [attention.o_proj],
            "gate_up": [feed_forward.gate_proj, feed_forward.up_proj],
            "down": [feed_forward.down_proj],
        }
        for name, maps in weights.items():
            weight = torch.cat([linear.weight for linear in maps]).abs().amax(0).numpy()
            activation = largest[name][number]
            if name == "out":  # a head of values serves several attention heads
                weight = weight.reshape(KV_HEADS, GROUP, HEAD_SIZE).max(1).reshape(-1)
                activation = activation.reshape(KV_HEADS, GROUP, HEAD_SIZE).max(1).reshape(-1)
            factor = np.maximum(activation, 1e-5) ** ALPHA / np.maximum(weight, 1e-5) ** (1 - ALPHA)
            factors_by_map[name].append(factor / np.exp(np.log(factor).mean()))
    return {name: np.stack(factors).astype(np.float16) for name, factors in factors_by_map.items()}


class ReaderGraph:
    """A graph with tokens in and the input states of each layer of `STATES` out.

    Rows are the tokens of all texts, one text after the other; only attention reshapes to one text a row.

    Args:
        weights: The tensors of the weights file, by name.
        prefix: Keys and values of the prompt's prefix, each of shape (heads, tokens, head size), by layer.
    """

    def __init__(self, weights: dict[str, np.ndarray], prefix: list[tuple[np.ndarray, np.ndarray]]) -> None:
        self.builder = b = Int8Builder(weights, READER_WEIGHTS)
        self.prefix = prefix
        before = prefix[0][0].shape[1]
        cast = {"to": TensorProto.FLOAT}
        pieces = [
            b.node("Cast", b.node("Gather", f"embedding.{n}", "ids"), **cast) for n in ("weight", "scale")
        ]
        self.states = b.node("Reshape", b.node("Mul", *pieces), b.ints(-1, HIDDEN))

        rows, tokens = (b.node("Slice", b.node("Shape", "rows"), b.ints(n), b.ints(n + 1)) for n in (0, 1))
        zero, one, length = b.constant(0, np.int64), b.constant(1, np.int64), b.node("Squeeze", tokens)
        token_positions = b.node("Unsqueeze", b.node("Range", zero, length, one), b.ints(1))
        columns = b.node("Range", b.constant(-before, np.int64), length, one)
        visible = b.node("LessOrEqual", b.node("Unsqueeze", columns, b.ints(0)), token_positions)
        self.mask = b.node("Where", visible, b.constant(0, np.float32), b.constant(MASKED, np.float32))

        frequencies = 1 / 100_000 ** (np.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
        positions = b.node("Unsqueeze", b.node("Cast", "positions", **cast), b.ints(1))
        angles = b.node("Mul", positions, b.constant(frequencies, np.float32))
        self.turns = b.node("Cos", angles), b.node("Sin", angles)
        count = b.node("Squeeze", b.node("Shape", "ids"))
        self.token_indices = b.node("Unsqueeze", b.node("Range", zero, count, one), b.ints(0))

        grouped = b.node("Mul", tokens, b.ints(GROUP))
        heads, last = b.ints(KV_HEADS), b.ints(HEAD_SIZE)
        self.shapes = {
            "queries": b.node("Concat", rows, tokens, b.ints(KV_HEADS, GROUP, HEAD_SIZE), axis=0),
            "keys": b.node("Concat", rows, tokens, b.ints(KV_HEADS, HEAD_SIZE), axis=0),
            "flat": b.node("Concat", rows, heads, grouped, last, axis=0),
            "flat scores": b.node("Concat", rows, heads, grouped, b.ints(-1), axis=0),
            "scores": b.node("Concat", rows, b.ints(KV_HEADS, GROUP), tokens, b.ints(-1), axis=0),
            "attended": b.node("Concat", b.node("Mul", rows, tokens), b.ints(HIDDEN), axis=0),
            "expanded": b.node("Concat", rows, b.ints(1, 1, 1), axis=0),
        }

    def rotate(self, part: str, heads: int) -> str:
        """Apply rotary embeddings to queries or keys, and put each text into a row."""
        b = self.builder
        turned = b.node(
            "RotaryEmbedding",
            b.node("Unsqueeze", part, b.ints(0)),
            self.token_indices,
            *self.turns,
            domain=MICROSOFT,
            num_heads=heads,
            rotary_embedding_dim=HEAD_SIZE,
        )
        return b.node("Gather", b.node("Squeeze", turned, b.ints(0)), "rows")

    def attention(self, number: int, normed: str) -> str:
        """Add a layer's attention, which also sees the prefix; returns its output projection."""
        b, shapes = self.builder, self.shapes
        widths = b.ints(HIDDEN, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE)
        parts = b.several("Split", 3, b.linear(normed, f"{number}.qkv"), widths, axis=-1)
        queries = b.node("Reshape", self.rotate(parts[0], HEADS), shapes["queries"])
        queries = b.node("Reshape", b.node("Transpose", queries, perm=[0, 2, 3, 1, 4]), shapes["flat"])
        keys = b.node("Reshape", self.rotate(parts[1], KV_HEADS), shapes["keys"])
        values = b.node("Reshape", b.node("Gather", parts[2], "rows"), shapes["keys"])
        keys = b.node("Transpose", keys, perm=[0, 2, 3, 1])
        values = b.node("Transpose", values, perm=[0, 2, 1, 3])
        # A column of ones beside the values sums the weights, in column order. The padding of a shorter text has the
        # weights 0, so it changes no bit of the result.
        values = b.node("Pad", values, b.ints(0, 0, 0, 0, 0, 0, 0, 1), b.constant(1, np.float32))
        old_keys, old_values = self.prefix[number]
        old_values = np.concatenate([old_values, np.ones_like(old_values[..., :1])], axis=-1)
        prefix_values = b.constant(old_keys.transpose(0, 2, 1)[None]), b.constant(old_values[None])
        keys = b.node("Concat", b.node("Expand", prefix_values[0], shapes["expanded"]), keys, axis=3)
        values = b.node("Concat", b.node("Expand", prefix_values[1], shapes["expanded"]), values, axis=2)
        scores = b.node("Reshape", b.node("MatMul", queries, keys), shapes["scores"])
        scores = b.node("Add", scores, self.mask)
        highest = b.node("ReduceMax", scores, b.ints(-1), keepdims=1)
        shares = b.node("Reshape", b.node("Exp", b.node("Sub", scores, highest)), shapes["flat scores"])
        sums = b.several("Split", 2, b.node("MatMul", shares, values), b.ints(HEAD_SIZE, 1), axis=-1)
        attended = b.node("Reshape", b.node("Div", *sums), shapes["scores"])
        attended = b.node("Reshape", b.node("Transpose", attended, perm=[0, 3, 1, 2, 4]), shapes["attended"])
        return b.linear(b.node("Gather", attended, "tokens"), f"{number}.out")

    def layer(self, number: int) -> None:
        """Add attention and feed-forward of a layer."""
        b, norm = self.builder, {"epsilon": 1e-5}
        normed = b.node(
            "SimplifiedLayerNormalization", self.states, f"{number}.norm_1", axis=-1, stash_type=1, **norm
        )
        attended = self.attention(number, normed)
        inputs = (self.states, attended, f"{number}.norm_2")
        normed, _, _, states = b.several(
            "SkipSimplifiedLayerNormalization", 4, *inputs, domain=MICROSOFT, **norm
        )
        half = b.ints(1_536, 1_536)
        gate, up = b.several("Split", 2, b.linear(normed, f"{number}.gate_up"), half, axis=-1)
        silu = b.node("QuickGelu", gate, domain=MICROSOFT, alpha=1.0)
        self.states = b.node("Add", states, b.linear(b.node("Mul", silu, up), f"{number}.down"))

    def build(self) -> Any:
        """Add all layers; returns the model."""
        b, outputs = self.builder, {}
        for number in range(LAYERS):
            if number in STATES:
                outputs[f"layer_{number}"] = self.states
            self.layer(number)
        outputs[f"layer_{LAYERS}"] = self.states
        for name, states in outputs.items():
            b.nodes.append(helper.make_node("Identity", [states], [name]))
        integers, floats = TensorProto.INT64, TensorProto.FLOAT
        shapes = {"ids": ["n"], "positions": ["n"], "rows": ["texts", "longest"], "tokens": ["n"]}
        graph = helper.make_graph(
            b.nodes,
            "reader",
            [helper.make_tensor_value_info(name, integers, shape) for name, shape in shapes.items()],
            [helper.make_tensor_value_info(name, floats, ["n", HIDDEN]) for name in outputs],
            b.constants,
        )
        versions = [helper.make_opsetid("", 20), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=versions, ir_version=10)


@torch.no_grad()
def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    data = parser.parse_args().data
    proxy = TransformersProxy(DEFAULT_MODEL, dtype="float32")
    model, encoder = proxy.runner.model, proxy.runner.encoder

    licensed = []
    for record in read_records(data / "practical.dev.jsonl"):
        if record["source"].startswith(("written", "clinc")):
            licensed.append(record["question"])
    factors = compute_smoothing(model, calibrate(model, encoder, licensed[::2][:300]))
    OUT.mkdir(exist_ok=True)
    np.savez_compressed(OUT / "smoothing.npz", **factors)

    ids = find_shared_prefix(encoder)
    cache = model.model(torch.tensor([ids]), use_cache=True).past_key_values
    prefix = []
    for number, layer in enumerate(cache.layers[:LAYERS]):
        factor = factors["out"][number].astype(np.float32).reshape(KV_HEADS, 1, HEAD_SIZE)
        prefix.append((layer.keys[0].numpy(), layer.values[0].numpy() / factor))
    source = fetch_files(entry(READER), None, KEPT / "gguf")
    graph = ReaderGraph(reader_tensors(GGUFReader(source)), prefix).build()
    (OUT / GRAPH).write_bytes(graph.SerializeToString())

    folder = KEPT / "reader"
    folder.mkdir(parents=True, exist_ok=True)
    make_reader(source, folder)
    reader = Reader(folder, self_test=False)
    expected = {}
    for question in TESTED:
        (states,) = reader.states([reader.encode(question).ids], STATES)
        expected[question] = states[max(STATES)][-1][:16].astype(float).round(3).tolist()
    (OUT / SELF_TEST).write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
