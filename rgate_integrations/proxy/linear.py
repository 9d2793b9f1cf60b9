"""Linear maps on a CPU, with weights in the order in which they are multiplied.

torch orders a weight in bfloat16 anew for each product, which takes a third of the time of a short text, and leaves
float32 to a library that is slow on some CPUs. Weights that are packed once are multiplied by oneDNN.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

_PACKED_TYPES = (torch.float32, torch.bfloat16)


class Linear(NamedTuple):
    """A linear map, or several of the same input in one: small products cost as much as their number.

    Attributes:
        weight: (numbers out, numbers in), maybe packed.
        bias: (numbers out,), or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def packed(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Return the map with a packed weight; with the given one where it cannot be packed, as on a GPU.

        Args:
            weight: The weight.
            bias: The bias.
        """
        if weight.device.type != "cpu":
            return cls(weight, bias)
        if _can_pack(weight.dtype):
            weight = _operators()._reorder_linear_weight(weight)
        return cls(weight, bias)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Return the products, (..., numbers out), of states (..., numbers in)."""
        if states.device.type != "cpu" or (states.dtype != torch.bfloat16 and not self.weight.is_mkldnn):
            return F.linear(states, self.weight, self.bias)
        # oneDNN compiles code for each number of rows that it meets, 0.6 MB a matrix, and keeps up to a thousand. So
        # there are few numbers; padding and cutting change no result.
        flat = states.flatten(0, -2)
        rows = flat.shape[0]
        sizes = _sizes(max(1, rows))
        padding = sum(sizes) - rows
        if padding:
            flat = F.pad(flat, (0, 0, 0, padding))
        if len(sizes) == 1:
            whole = self._product(flat)
        else:
            whole = torch.cat([self._product(part) for part in torch.split(flat, list(sizes))])
        return (whole[:rows] if padding else whole).view(*states.shape[:-1], whole.shape[-1])

    def _product(self, part: torch.Tensor) -> torch.Tensor:
        if not self.weight.is_mkldnn:
            return F.linear(part, self.weight, self.bias)
        found: torch.Tensor = _operators()._linear_pointwise(part, self.weight, self.bias, "none", [], "")
        return found


class PackedLinear(torch.nn.Module):
    """A layer of somebody's model, packed; it cannot be trained any more.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        bias = None if layer.bias is None else layer.bias.detach()
        self._map = Linear.packed(layer.weight.detach(), bias)
        self.weight = self._map.weight  # some models ask a layer for its float type
        self.bias = self._map.bias

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the products, (..., numbers out), of states (..., numbers in)."""
        return self._map(states)


def pack(model: torch.nn.Module) -> None:
    """Pack the linear layers of a model that is only read from here on, where they can be."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            # Not what is derived of it: that may use its weight in its own way.
            if type(child) is torch.nn.Linear and child.weight.device.type == "cpu":
                setattr(module, name, PackedLinear(child))


@lru_cache(maxsize=len(_PACKED_TYPES))
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch has the operators, and this CPU the instructions. ``torch.compile`` uses them."""
    if dtype not in _PACKED_TYPES:
        return False
    one = torch.ones(8, 8, dtype=dtype)
    try:
        packed = _operators()._reorder_linear_weight(one)
        found = _operators()._linear_pointwise(one, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return bool(packed.is_mkldnn and torch.equal(found, one * 8))


def _operators() -> Any:
    return torch.ops.mkldnn


@lru_cache(maxsize=1024)
def _sizes(rows: int) -> tuple[int, ...]:
    """Return in what pieces so many rows are multiplied: large ones, and a last one of a multiple of eight."""
    sizes = [512] * (rows // 512) + [size for size in (256, 128) if rows & size]
    rest = rows % 128
    return (*sizes, rest + -rest % 8) if rest else tuple(sizes)
