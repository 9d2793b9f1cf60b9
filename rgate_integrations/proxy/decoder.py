"""The first layers of a model that is built like Llama, read from its files: all that a question is read with.

Importing transformers' own classes takes longer than reading these layers does, and more memory than they need. The
states are those that transformers computes. Models that are built otherwise are loaded by transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache

from rgate_integrations.errors import ModelLoadError
from rgate_integrations.proxy.download import resolve_model
from rgate_integrations.proxy.linear import Linear
from rgate_integrations.proxy.model_folder import refuse_pickles
from rgate_integrations.proxy.pretrained import reads_bfloat16, torch_device

_EMBEDDING = "embed_tokens.weight"


class Shape(NamedTuple):
    """What the configuration of a Llama-like model says of its layers.

    Attributes:
        heads: Attention heads.
        key_value_heads: Heads of keys and values; each serves several attention heads.
        head_size: Numbers a head.
        epsilon: Added to the variance by the norms.
        rope_theta: Base of the rotary position embedding.
        context: Longest text in tokens.
    """

    heads: int
    key_value_heads: int
    head_size: int
    epsilon: float
    rope_theta: float
    context: int


def shape_of(config: dict[str, Any]) -> Shape | None:
    """Return the shape that a ``config.json`` describes; None if it is not built like Llama, or not only."""
    rope = {"rope_theta": config.get("rope_theta", 10_000.0)}
    rope |= config.get("rope_parameters") or config.get("rope_scaling") or {}
    alike = (
        config.get("model_type") in ("llama", "qwen2", "mistral")
        and config.get("hidden_act", "silu") == "silu"
        and rope.get("rope_type", rope.get("type", "default")) == "default"
        and set(config.get("layer_types") or ()) <= {"full_attention"}
        and not (config.get("sliding_window") and config.get("use_sliding_window", True))
        and not config.get("quantization_config")
    )
    if not alike:
        return None
    heads = int(config["num_attention_heads"])
    return Shape(
        heads=heads,
        key_value_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
        epsilon=config.get("rms_norm_eps", 1e-6),
        rope_theta=rope["rope_theta"],
        context=config.get("max_position_embeddings", 2_048),
    )


class ReadOnce(NamedTuple):
    """What a pass returns, by the names of transformers.

    Attributes:
        past_key_values: Keys and values, if they were asked for.
        hidden_states: The states that go into each layer, and those behind the last, if they were asked for.
    """

    past_key_values: DynamicCache | None
    hidden_states: tuple[torch.Tensor, ...]


class Place(NamedTuple):
    """Where the tokens of a pass stand.

    Attributes:
        cosines: Of the rotary position embedding, (rows, 1, tokens, head size).
        sines: Likewise.
        masks: Which columns each token may look at, (1, 1, tokens, columns) for each row without its padding; or, of
            all rows with theirs, one of (rows, 1, tokens, columns).
        before: Keys and values of the columns before, if there are such: of each row, or of one that all rows share.
        kept: Where those of these tokens are put, if anywhere.
    """

    cosines: torch.Tensor
    sines: torch.Tensor
    masks: Sequence[torch.Tensor]
    before: DynamicCache | None
    kept: DynamicCache | None


class DecoderLayer(torch.nn.Module):
    """Attention and feed-forward block of one layer.

    Args:
        number: Which layer, from 0.
        weights: Its tensors.
        shape: How they are to be read.
    """

    def __init__(self, number: int, weights: LayerWeights, shape: Shape) -> None:
        super().__init__()
        self.number = number
        self.shape = shape
        self.norms = weights["input_layernorm.weight"], weights["post_attention_layernorm.weight"]
        self.qkv = weights.linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.out = weights.linear("self_attn.o_proj")
        self.gate_up = weights.linear("mlp.gate_proj", "mlp.up_proj")
        self.down = weights.linear("mlp.down_proj")

    def forward(self, states: torch.Tensor, place: Place) -> torch.Tensor:
        """Return the states behind this layer, (rows, tokens, hidden size)."""
        states = states + self._attention(self._normed(states, self.norms[0]), place)
        gate, up = self.gate_up(self._normed(states, self.norms[1])).chunk(2, dim=-1)
        return states + self.down(F.silu(gate) * up)

    def _attention(self, states: torch.Tensor, place: Place) -> torch.Tensor:
        heads, shared, size = self.shape.heads, self.shape.key_value_heads, self.shape.head_size
        rows, tokens, _ = states.shape
        joined = self.qkv(states).view(rows, tokens, heads + 2 * shared, size).transpose(1, 2)
        turned = _rotated(joined[:, : heads + shared], place)
        queries, keys, values = turned[:, :heads], turned[:, heads:], joined[:, heads + shared :]
        if place.before is not None:
            cached = place.before.layers[self.number]
            keys, values = (
                torch.cat([old.expand(rows, -1, -1, -1), new], dim=2)
                for old, new in ((cached.keys, keys), (cached.values, values))
            )
        elif place.kept is not None:
            place.kept.update(keys, values, self.number)
        found = [
            self._looked(queries[part], keys[part], values[part], mask)
            for part, mask in zip(_parts(rows, place.masks), place.masks, strict=True)
        ]
        whole = found[0] if len(found) == 1 else torch.cat(found)
        return self.out(whole.transpose(1, 2).reshape(rows, tokens, heads * size))

    def _looked(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Return what queries find, (rows, heads, columns, head size), without padding if the mask has none."""
        padding = queries.shape[2] - mask.shape[2]
        cached = keys.shape[2] - queries.shape[2]
        if padding:
            queries = queries[:, :, padding:]
            keys, values = (
                torch.cat([each[:, :, :cached], each[:, :, cached + padding :]], dim=2)
                for each in (keys, values)
            )
        # In float32, which costs nothing beside the products and keeps a digit.
        found = F.scaled_dot_product_attention(
            queries.float(),
            keys.float(),
            values.float(),
            attn_mask=mask,
            enable_gqa=self.shape.heads != self.shape.key_value_heads,
        )
        found = found.to(queries.dtype)
        return F.pad(found, (0, 0, padding, 0)) if padding else found

    def _normed(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        exact = states.float()
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.shape.epsilon)
        return exact.to(states.dtype) * weight


class _End(torch.nn.Module):
    """Stands behind the last layer that is read, so that the states there can be watched as before any other."""

    def forward(self, states: torch.Tensor, place: Place) -> torch.Tensor:
        return states


class Decoder(torch.nn.Module):
    """The first layers of a Llama-like model, with as much of transformers' interface as reading states needs.

    Args:
        folder: The model, with ``*.safetensors``.
        shape: What `shape_of` says of it.
        layers: How many layers.
        device: Where it runs.
        dtype: Of weights and states.
        halve: Whether a CPU may keep the linear maps' weights in float16 and compute in float32.

    Raises:
        KeyError: The files have not all weights of these layers.

    Attributes:
        layers: The layers, and an end behind them.
        device: Where it runs.
        dtype: Of weights and states.
        context: Longest text in tokens.
    """

    appends_to_cache = False

    def __init__(
        self,
        folder: Path,
        shape: Shape,
        layers: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        halve: bool = False,
    ) -> None:
        super().__init__()
        self.device = device
        self.dtype = dtype
        self.context = shape.context
        files = {key.removeprefix("model."): (path, key) for path, key in _keys(folder)}
        # On a CPU it stays in its file, of which only the tokens that occur are read.
        embedding = _mapped(*files[_EMBEDDING])
        self.embedding = embedding if device.type == "cpu" else embedding.to(device, dtype)
        self.layers = torch.nn.ModuleList()
        for number in range(layers):
            start = f"layers.{number}."
            own = {name.removeprefix(start): at for name, at in files.items() if name.startswith(start)}
            self.layers.append(DecoderLayer(number, LayerWeights(own, device, dtype, halve), shape))
        self.layers.append(_End())
        half = torch.arange(0, shape.head_size, 2, device=device).float() / shape.head_size
        self.frequencies = 1.0 / shape.rope_theta**half

    @property
    def base_model(self) -> Decoder:
        """Itself: it has no language model head."""
        return self

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        *,
        past_key_values: DynamicCache | None = None,
        use_cache: bool = False,
        output_hidden_states: bool = False,
    ) -> ReadOnce:
        """Read tokens, maybe behind others whose keys and values are there.

        Args:
            input_ids: (rows, tokens).
            attention_mask: 1 where there is a token, (rows, cached columns + tokens); by default everywhere.
            position_ids: (rows, tokens); by default the columns' numbers.
            past_key_values: Keys and values of the columns before, of each row or of one that all rows share. They
                are read alone; nothing is put in.
            use_cache: Whether keys and values of tokens with none before are returned.
            output_hidden_states: Whether the states are returned.
        """
        kept = DynamicCache() if use_cache and past_key_values is None else None
        cached = 0 if past_key_values is None else past_key_values.get_seq_length()
        columns = torch.arange(cached + input_ids.shape[1], device=self.device)
        if position_ids is None:
            position_ids = columns[None, cached:]
        angles = position_ids[..., None].float() * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        masks = _masks(columns, cached, attention_mask)
        place = Place(angles.cos().to(self.dtype), angles.sin().to(self.dtype), masks, past_key_values, kept)
        states = F.embedding(input_ids, self.embedding).to(self.dtype)
        seen = []
        for layer in self.layers:
            if output_hidden_states:
                seen.append(states)
            states = layer(states, place)
        return ReadOnce(kept, tuple(seen))


def _masks(columns: torch.Tensor, cached: int, mask: torch.Tensor | None) -> list[torch.Tensor]:
    """Return `Place.masks`.

    On a CPU each row is looked at alone, without padding: so the rows beside it change not one bit of it. That costs
    little there, and much on a GPU.

    Args:
        columns: Numbers of all columns, the cached ones first.
        cached: How many are cached.
        mask: 1 where there is a token, 0 for padding behind the cached columns, (rows, columns).
    """
    own = columns[cached:]
    allowed = (columns <= own[:, None])[None, None]
    if mask is None:
        return [allowed]
    if mask.device.type == "cpu":
        paddings = (mask == 0).sum(-1).tolist()
        return [allowed[:, :, : len(own) - padding, : len(columns) - padding] for padding in paddings]
    # Padding looks at itself: a token that may look nowhere would have no number.
    return [allowed & mask[:, None, None].bool() | (columns == own[:, None])]


def _parts(rows: int, masks: Sequence[torch.Tensor]) -> list[slice]:
    """Return which rows each mask is for."""
    return [slice(0, rows)] if len(masks) == 1 else [slice(row, row + 1) for row in range(rows)]


def _rotated(heads: torch.Tensor, place: Place) -> torch.Tensor:
    """Return queries or keys with their positions turned in, (rows, heads, tokens, head size)."""
    first, second = heads.chunk(2, dim=-1)
    return heads * place.cosines + torch.cat([-second, first], dim=-1) * place.sines


class LayerWeights:
    """The tensors of one layer, by the names that follow ``layers.N.``, read from their files when asked for.

    Args:
        files: File and key of each.
        device: Where they go.
        dtype: What they become.
        halve: Whether linear maps may keep them in float16; see `Linear.packed`.
    """

    def __init__(
        self, files: Mapping[str, tuple[Path, str]], device: torch.device, dtype: torch.dtype, halve: bool
    ) -> None:
        self.files = files
        self.device = device
        self.dtype = dtype
        self.halve = halve

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._joined([name])

    def linear(self, *names: str) -> Linear:
        """Return linear maps of the same input as one, their outputs one after the other."""
        weight = self._joined([f"{name}.weight" for name in names])
        biased = f"{names[0]}.bias" in self.files
        bias = self._joined([f"{name}.bias" for name in names]) if biased else None
        return Linear.packed(weight, bias, halve=self.halve)

    def _joined(self, names: Sequence[str]) -> torch.Tensor:
        """Copy tensors out of their files one below the other, with nothing in between to be freed."""
        parts = [_mapped(*self.files[name]) for name in names]
        lengths = [len(part) for part in parts]
        whole = torch.empty(sum(lengths), *parts[0].shape[1:], dtype=self.dtype, device=self.device)
        for rows, part in zip(torch.split(whole, lengths), parts, strict=True):
            rows.copy_(part)
        return whole


def _mapped(path: Path, key: str) -> torch.Tensor:
    """Return a tensor that lies in its file: what is not looked at is not read."""
    with safe_open(str(path), framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(key)
    return tensor


def _keys(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield each file of weights with each of its keys."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                yield path, key


def load_decoder(name: str, layers: int, device: str, dtype: str) -> Decoder:
    """Load the first layers of a model that `can_be_read_alone` says yes to.

    Args:
        name: Catalogue name or local folder.
        layers: How many.
        device: A torch device, or ``"auto"``: CUDA when there is one.
        dtype: ``"float32"`` or ``"bfloat16"``, or ``"auto"``: bfloat16 on CUDA and on CPUs that multiply it,
            and on other CPUs float32 with weights that are kept in float16.

    Raises:
        ModelLoadError: The files do not hold what the configuration says.
    """
    folder = Path(resolve_model(name))
    refuse_pickles(str(folder))
    target = torch_device(device)
    halve = dtype == "auto"
    if dtype == "auto":
        dtype = "bfloat16" if target.type == "cuda" or reads_bfloat16(device) else "float32"
    try:
        shape = shape_of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        if shape is None:
            raise ValueError("its configuration is not one of a Llama-like model")
        decoder = Decoder(folder, shape, layers, device=target, dtype=getattr(torch, dtype), halve=halve)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelLoadError(
            f"The model {name!r} could not be loaded: {str(error).splitlines()[0]}",
            hint="Give a folder or Hub id of a causal language model, or a name from `rgate download`.",
        ) from error
    return decoder.eval()
