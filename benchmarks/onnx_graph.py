"""Builds ONNX graphs that hold no weights: they point to where these lie in another file."""

from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper


class GraphBuilder:
    """Collects the nodes and constants of a graph."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def weight(self, name: str, shape: Any, dtype: int, file: str, offset: int, length: int) -> str:
        """Point to a weight in a file; returns its name."""
        tensor = TensorProto(name=name, dims=shape, data_type=dtype)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", file), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        self.constants.append(tensor)
        return name

    def constant(self, value: Any, dtype: Any = None) -> str:
        """Add a constant; returns its name."""
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value, dtype), name))
        return name

    def ints(self, *values: int) -> str:
        """Add a vector of integers."""
        return self.constant(values, np.int64)

    def node(self, kind: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Add a node; returns the name of its output."""
        return self.several(kind, 1, *inputs, domain=domain, **attributes)[0]

    def several(self, kind: str, count: int, *inputs: str, domain: str = "", **attributes: Any) -> list[str]:
        """Add a node with several outputs; returns their names."""
        names = [f"{kind}_{len(self.nodes)}_{number}" for number in range(count)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, domain=domain, **attributes))
        return names
