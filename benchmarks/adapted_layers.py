"""The encoder's last four layers in torch, with trainable low-rank matrices (LoRA, arXiv 2106.09685)."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import nn
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from rgate_integrations.models.encoder_file import BRANCH, BRANCH_LAYERS, HEADS, HIDDEN, dequantise

RANK, SCALE = 16, 2.0
MAPS = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)
NORMS = ("attention.output.LayerNorm", "output.LayerNorm")
EPSILON = 1e-12


class AdaptedMap(nn.Module):
    """A fixed linear map plus the product of two small trainable matrices.

    Args:
        weight: Shape (outputs, inputs).
        bias: Shape (outputs,).
    """

    def __init__(self, weight: np.ndarray, bias: np.ndarray) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        self.weight, self.bias = torch.tensor(weight), torch.tensor(bias)
        self.down = nn.Parameter(torch.randn(inputs, RANK) / math.sqrt(inputs))
        self.up = nn.Parameter(torch.zeros(RANK, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map states of shape (..., inputs)."""
        return linear(x, self.weight, self.bias) + (x @ self.down) @ self.up * SCALE


class AdaptedLayer(nn.Module):
    """A layer of the encoder.

    Args:
        stored: The weights, as `read_weights` returns them.
        name: The layer's name in them.
    """

    def __init__(self, stored: Mapping[str, np.ndarray], name: str) -> None:
        super().__init__()
        maps = {}
        for part in MAPS:
            bias = stored[f"{name}.{part}.bias"].astype(np.float32)
            maps[part] = AdaptedMap(dequantise(stored[f"{name}.{part}.weight"]).reshape(len(bias), -1), bias)
        self.maps = nn.ModuleList(maps.values())
        self.norms = []
        for part in NORMS:
            values = [stored[f"{name}.{part}.{kind}"].astype(np.float32) for kind in ("weight", "bias")]
            self.norms.append([torch.tensor(value) for value in values])

    def forward(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the states after the layer.

        Args:
            states: Shape (texts, tokens, 384).
            mask: False for padding, shape (texts, 1, 1, tokens), bool.
        """
        *attention, out, inner, outer = self.maps
        shape = (*states.shape[:2], HEADS, HIDDEN // HEADS)
        queries, keys, values = [project(states).view(shape).transpose(1, 2) for project in attention]
        attended = scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        attended = attended.transpose(1, 2).reshape(states.shape)
        states = self._normalise(states + out(attended), 0)
        return self._normalise(states + outer(gelu(inner(states))), 1)

    def _normalise(self, states: torch.Tensor, number: int) -> torch.Tensor:
        weight, bias = self.norms[number]
        return layer_norm(states, (HIDDEN,), weight, bias, EPSILON)


class AdaptedLayers(nn.Module):
    """Layers 9 to 12, adapted; the encoder numbers them 13 to 16.

    Args:
        stored: The weights, as `read_weights` returns them.
    """

    def __init__(self, stored: Mapping[str, np.ndarray]) -> None:
        super().__init__()
        self.names = [f"encoder.layer.{number}" for number in range(BRANCH, BRANCH + BRANCH_LAYERS)]
        self.layers = nn.ModuleList([AdaptedLayer(stored, name) for name in self.names])

    def forward(self, states: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        """Return the states after each layer, from those after layer 8; see `AdaptedLayer`."""
        outputs = []
        for layer in self.layers:
            states = layer(states, mask)
            outputs.append(states)
        return outputs

    def save(self, path: Path) -> None:
        """Write the small matrices in float16."""
        tensors = {}
        for name, layer in zip(self.names, self.layers, strict=True):
            for part, adapted in zip(MAPS, layer.maps, strict=True):
                for end, matrix in (("down", adapted.down), ("up", adapted.up * SCALE)):
                    tensors[f"{name}.{part}.{end}"] = matrix.detach().numpy().astype(np.float16)
        save_file(tensors, path)
