"""Makes the graph that the embedder's weights are read by: all-MiniLM-L6-v2 up to its normalised sentence vectors.

    python benchmarks/embedder_graph.py

Writes rgate_integrations/weights/embedder. Needs onnx, and `rgate download all-minilm-l6-v2`. The graph holds no
weights: it points to where they lie in that model's own file.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from rgate_integrations.index.embedder import DEFAULT_EMBEDDER, GRAPH, WEIGHTS
from rgate_integrations.models.download import resolve_model

OUT = Path(__file__).parent.parent / "rgate_integrations" / "weights" / "embedder"
LAYERS, HEADS, HIDDEN = 6, 12, 384
EPSILON = 1e-12


class Builder:
    """Collects the nodes of the graph, and where its weights lie."""

    def __init__(self, folder: Path) -> None:
        with (folder / WEIGHTS).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            self.places = json.loads(file.read(size))
        self.start = 8 + size
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}

    def weight(self, name: str) -> str:
        """Point to a weight in the model's file; returns its name."""
        place = self.places[name]
        begin, end = place["data_offsets"]
        tensor = TensorProto(name=name, dims=place["shape"], data_type=TensorProto.FLOAT)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", WEIGHTS), ("offset", self.start + begin), ("length", end - begin)):
            tensor.external_data.add(key=key, value=str(value))
        self.constants[name] = tensor
        return name

    def constant(self, name: str, value: Any, dtype: Any) -> str:
        """Add a constant; returns its name."""
        self.constants[name] = numpy_helper.from_array(np.array(value, dtype), name)
        return name

    def node(self, kind: str, *inputs: str, domain: str = "", output: str = "", **attributes: Any) -> str:
        """Add a node; returns the name of its output."""
        output = output or f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], domain=domain, **attributes))
        return output

    def linear(self, states: str, name: str) -> str:
        """Apply a linear map to rows."""
        return self.node("Gemm", states, self.weight(f"{name}.weight"), self.weight(f"{name}.bias"), transB=1)

    def normalised(self, states: str, name: str) -> str:
        """Apply a layer normalisation."""
        scale, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        return self.node("LayerNormalization", states, scale, bias, axis=-1, epsilon=EPSILON)

    def layer(self, states: str, shape: str, rows: str, number: int) -> str:
        """Apply a layer to states, (texts * tokens, hidden size)."""
        name = f"encoder.layer.{number}"
        parts = [
            self.node("Reshape", self.linear(states, f"{name}.attention.self.{part}"), shape)
            for part in ("query", "key", "value")
        ]
        found = self.node("MultiHeadAttention", *parts, "", "mask", domain="com.microsoft", num_heads=HEADS)
        found = self.linear(self.node("Reshape", found, rows), f"{name}.attention.output.dense")
        states = self.normalised(self.node("Add", states, found), f"{name}.attention.output.LayerNorm")
        inner = self.node("Gelu", self.linear(states, f"{name}.intermediate.dense"), domain="com.microsoft")
        found = self.linear(inner, f"{name}.output.dense")
        return self.normalised(self.node("Add", states, found), f"{name}.output.LayerNorm")


def build(folder: Path) -> Any:
    """Return the graph: ids and mask, (texts, tokens), to vectors, (texts, hidden size)."""
    graph = Builder(folder)
    rows = graph.constant("rows", [-1, HIDDEN], np.int64)
    words = graph.node("Gather", graph.weight("embeddings.word_embeddings.weight"), "ids")
    width = graph.node(
        "Slice",
        graph.node("Shape", "ids"),
        *(graph.constant(name, [value], np.int64) for name, value in (("from", 1), ("to", 2))),
    )
    zero = graph.constant("zero", [0], np.int64)
    places = graph.node("Slice", graph.weight("embeddings.position_embeddings.weight"), zero, width)
    kind = graph.node("Slice", graph.weight("embeddings.token_type_embeddings.weight"), zero, "from")
    states = graph.node("Add", graph.node("Add", words, places), kind)
    shape = graph.node("Shape", states)
    states = graph.node("Reshape", graph.normalised(states, "embeddings.LayerNorm"), rows)
    for number in range(LAYERS):
        states = graph.layer(states, shape, rows, number)
    states = graph.node("Reshape", states, shape)
    # The mean over the tokens that are there, as a product with the mask.
    mask = graph.node("Unsqueeze", graph.node("Cast", "mask", to=TensorProto.FLOAT), "from")
    total = graph.node("Squeeze", graph.node("MatMul", mask, states), "from")
    # Its length does not matter: it is normalised.
    graph.node("LpNormalization", total, axis=-1, p=2, output="vectors")
    texts = ["texts", "tokens"]
    inputs = [
        helper.make_tensor_value_info("ids", TensorProto.INT64, texts),
        helper.make_tensor_value_info("mask", TensorProto.INT32, texts),
    ]
    outputs = [helper.make_tensor_value_info("vectors", TensorProto.FLOAT, ["texts", HIDDEN])]
    constants = list(graph.constants.values())
    made = helper.make_graph(graph.nodes, "all-MiniLM-L6-v2", inputs, outputs, constants)
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(made, opset_imports=versions, ir_version=8)


def main() -> None:
    """Run."""
    OUT.mkdir(parents=True, exist_ok=True)
    model = build(Path(resolve_model(DEFAULT_EMBEDDER, kind="embedder")))
    (OUT / GRAPH).write_bytes(model.SerializeToString())
    print(f"{OUT / GRAPH}: {(OUT / GRAPH).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
