"""Builds ONNX graphs without weights: they refer to offsets in another file."""

from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from rgate_integrations.models.reader_file import PAGE_BYTES

MICROSOFT = "com.microsoft"


class GraphBuilder:
    """Collects the nodes and constants of a graph."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def weight(self, name: str, shape: Any, dtype: int, file: str, offset: int, length: int) -> str:
        """Refer to a weight in a file; returns its name."""
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


class Int8Builder(GraphBuilder):
    """Refers to int8 weights in one file; each weight begins on a new page.

    Args:
        weights: The arrays by name, in the order of the file.
        file: Name of the file.
    """

    def __init__(self, weights: dict[str, np.ndarray], file: str) -> None:
        super().__init__()
        end = 0
        for name, array in weights.items():
            offset = end + -end % PAGE_BYTES
            end = offset + array.nbytes
            dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
            self.weight(name, array.shape, dtype, file, offset, array.nbytes)

    def linear(self, states: str, name: str) -> str:
        """Multiply int8 activations by int8 weights; per-token scales make results independent of the batch."""
        largest = self.node("ReduceMax", self.node("Abs", states), self.ints(-1), keepdims=1)
        scale = self.node("Mul", largest, self.constant(1 / 127, np.float32))
        middle, one = self.constant(128, np.uint8), self.constant(1, np.float32)
        rounded = self.node("QuantizeLinear", self.node("Div", states, scale), one, middle)
        weights = (f"{name}.weight", one, f"{name}.scale", middle)
        product = self.node("MatMulIntegerToFloat", rounded, *weights, domain=MICROSOFT)
        return self.node("Mul", product, scale)
