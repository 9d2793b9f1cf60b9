"""Makes the graph that the embedder's weights are read by: all-MiniLM-L6-v2 up to its normalised sentence vectors.

    python benchmarks/embedder_graph.py

Writes rgate_integrations/weights/embedder. Needs onnx, and `rgate download all-minilm-l6-v2`. The graph holds no
weights: it points to where they lie in that model's own file.
"""

import json
from pathlib import Path
from typing import Any

from onnx import TensorProto, helper
from onnx_graph import GraphBuilder

from rgate_integrations.index.embedder import GRAPH, MINILM, WEIGHTS
from rgate_integrations.models.download import resolve_model

OUT = Path(__file__).parent.parent / "rgate_integrations" / "weights" / "embedder"
LAYERS, HEADS, HIDDEN = 6, 12, 384
EPSILON = 1e-12


class EmbedderBuilder(GraphBuilder):
    """Collects the nodes of the graph, and points to the model's own file of weights."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        with (folder / WEIGHTS).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            self.places = json.loads(file.read(size))
        self.start = 8 + size

    def model_weight(self, name: str) -> str:
        """Point to a weight of the model; returns its name."""
        place = self.places[name]
        begin, end = place["data_offsets"]
        offset = self.start + begin
        return self.weight(name, place["shape"], TensorProto.FLOAT, WEIGHTS, offset, end - begin)

    def linear(self, states: str, name: str) -> str:
        """Apply a linear map to rows."""
        weight, bias = self.model_weight(f"{name}.weight"), self.model_weight(f"{name}.bias")
        return self.node("Gemm", states, weight, bias, transB=1)

    def normalised(self, states: str, name: str) -> str:
        """Apply a layer normalisation."""
        scale, bias = self.model_weight(f"{name}.weight"), self.model_weight(f"{name}.bias")
        return self.node("LayerNormalization", states, scale, bias, axis=-1, epsilon=EPSILON)

    def layer(self, states: str, shape: str, rows: str, number: int) -> str:
        """Apply a layer to states, (texts * tokens, hidden size)."""
        name = f"encoder.layer.{number}"
        parts = []
        for part in ("query", "key", "value"):
            found = self.linear(states, f"{name}.attention.self.{part}")
            parts.append(self.node("Reshape", found, shape))
        found = self.node("MultiHeadAttention", *parts, "", "mask", domain="com.microsoft", num_heads=HEADS)
        found = self.linear(self.node("Reshape", found, rows), f"{name}.attention.output.dense")
        states = self.normalised(self.node("Add", states, found), f"{name}.attention.output.LayerNorm")
        inner = self.node("Gelu", self.linear(states, f"{name}.intermediate.dense"), domain="com.microsoft")
        found = self.linear(inner, f"{name}.output.dense")
        return self.normalised(self.node("Add", states, found), f"{name}.output.LayerNorm")


def build(folder: Path) -> Any:
    """Return the graph: ids and mask, (texts, tokens), to vectors, (texts, hidden size)."""
    graph = EmbedderBuilder(folder)
    rows, zero, one = graph.ints(-1, HIDDEN), graph.ints(0), graph.ints(1)
    words = graph.node("Gather", graph.model_weight("embeddings.word_embeddings.weight"), "ids")
    width = graph.node("Slice", graph.node("Shape", "ids"), one, graph.ints(2))
    of_places = graph.model_weight("embeddings.position_embeddings.weight")
    places = graph.node("Slice", of_places, zero, width)
    kind = graph.node("Slice", graph.model_weight("embeddings.token_type_embeddings.weight"), zero, one)
    states = graph.node("Add", graph.node("Add", words, places), kind)
    shape = graph.node("Shape", states)
    states = graph.node("Reshape", graph.normalised(states, "embeddings.LayerNorm"), rows)
    for number in range(LAYERS):
        states = graph.layer(states, shape, rows, number)
    states = graph.node("Reshape", states, shape)
    # The mean over the tokens that are there, as a product with the mask.
    mask = graph.node("Unsqueeze", graph.node("Cast", "mask", to=TensorProto.FLOAT), one)
    total = graph.node("Squeeze", graph.node("MatMul", mask, states), one)
    # Its length does not matter: it is normalised.
    graph.nodes.append(helper.make_node("LpNormalization", [total], ["vectors"], axis=-1, p=2))
    texts = ["texts", "tokens"]
    inputs = [
        helper.make_tensor_value_info("ids", TensorProto.INT64, texts),
        helper.make_tensor_value_info("mask", TensorProto.INT32, texts),
    ]
    outputs = [helper.make_tensor_value_info("vectors", TensorProto.FLOAT, ["texts", HIDDEN])]
    made = helper.make_graph(graph.nodes, "all-MiniLM-L6-v2", inputs, outputs, graph.constants)
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(made, opset_imports=versions, ir_version=8)


def main() -> None:
    """Run."""
    OUT.mkdir(parents=True, exist_ok=True)
    model = build(Path(resolve_model(MINILM, kind="embedder")))
    (OUT / GRAPH).write_bytes(model.SerializeToString())
    print(f"{OUT / GRAPH}: {(OUT / GRAPH).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
