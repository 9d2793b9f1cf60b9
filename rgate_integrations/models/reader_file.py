"""Makes the files of `Reader`, int8 weights and a tokenizer, from the default model's GGUF, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.files import SHIPPED

READER_WEIGHTS, TOKENIZER = "reader.bin", "tokenizer.json"
LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 22, 9, 3, 64
PAGE_BYTES = 4_096  # arrays start at a page boundary, because the operating system maps whole pages
_BLOCK = 32  # values per scale in the file's embedding (Q8_0)
_CONTROL = 3  # GGUF's token type for control tokens


def make_reader(source: Path, target: Path) -> None:
    """Write the files of a `Reader`, its weights and its tokenizer, into a folder.

    Args:
        source: SmolLM2-135M-Instruct as a GGUF file, with an embedding in Q8_0.
        target: The folder to write to; it must exist.
    """
    from gguf import GGUFReader

    file = GGUFReader(source)
    write_tensors(target / READER_WEIGHTS, reader_tensors(file))
    (target / TOKENIZER).write_text(_tokenizer_json(file), encoding="utf-8")


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write arrays to a file in their order, each starting at a multiple of `PAGE_BYTES`."""
    with path.open("wb") as out:
        for array in tensors.values():
            # Zeros up to the next page.
            out.write(b"\0" * (-out.tell() % PAGE_BYTES))
            out.write(array.tobytes())


def reader_tensors(file: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the weights of a `Reader` by name, in the order in which its graph expects them in the file.

    A linear map has int8 weights of shape (inputs, outputs), with one scale per output. Before the weights are
    quantised, they take over outliers of the activations (SmoothQuant, arXiv 2211.10438): a map's inputs are divided
    by the factors in ``smoothing.npz``, which has one row per layer, and its weights are multiplied by these factors.

    Args:
        file: An open GGUF file.
    """
    from gguf import dequantize

    stored = {tensor.name: tensor for tensor in file.tensors}

    def weight(name: str) -> Float32Array:
        tensor = stored[f"{name}.weight"]
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)

    blocks = stored["token_embd.weight"].data.reshape(-1, HEADS * HEAD_SIZE // _BLOCK, 2 + _BLOCK)
    # The order matters, because the graph refers to offsets in the file. The embedding stays in Q8_0: int8 with
    # float16 scales.
    tensors: dict[str, np.ndarray[Any, Any]] = {
        "embedding.weight": np.ascontiguousarray(blocks[..., 2:]).view(np.int8),
        "embedding.scale": np.ascontiguousarray(blocks[..., :2]).view(np.float16),
    }
    with np.load(SHIPPED / "reader" / "smoothing.npz", allow_pickle=False) as arrays:
        smoothing = {name: arrays[name].astype(np.float32) for name in arrays.files}
    for number in range(LAYERS):
        block = f"blk.{number}"
        factor = {name: factors[number] for name, factors in smoothing.items()}
        # Attention divides its scores by the square root of the head size. Doing that here costs nothing at run time.
        queries = _unpermuted(weight(f"{block}.attn_q"), HEADS) / np.float32(HEAD_SIZE**0.5)
        keys = _unpermuted(weight(f"{block}.attn_k"), KV_HEADS)
        values = weight(f"{block}.attn_v") / factor["out"][:, None]
        # Several attention heads share a head of values.
        shared = np.repeat(factor["out"].reshape(KV_HEADS, 1, HEAD_SIZE), HEADS // KV_HEADS, axis=1)
        gate, up = weight(f"{block}.ffn_gate"), weight(f"{block}.ffn_up") / factor["down"][:, None]
        maps = {
            "qkv": np.concatenate([queries, keys, values]) * factor["qkv"],
            "out": weight(f"{block}.attn_output") * shared.reshape(-1),
            "gate_up": np.concatenate([gate, up]) * factor["gate_up"],
            "down": weight(f"{block}.ffn_down") * factor["down"],
        }
        tensors[f"{number}.norm_1"] = weight(f"{block}.attn_norm") / factor["qkv"]
        tensors[f"{number}.norm_2"] = weight(f"{block}.ffn_norm") / factor["gate_up"]
        for name, full in maps.items():
            tensors[f"{number}.{name}.weight"], tensors[f"{number}.{name}.scale"] = quantise(full)
    return tensors


def quantise(weight: Float32Array) -> tuple[np.ndarray[Any, Any], Float32Array]:
    """Return int8 weights, shape (inputs, outputs), and their scales, shape (outputs,).

    CPUs without VNNI multiply 8-bit activations (at most 255) and weights with an instruction that sums two
    neighbouring products in 16 bits, and saturates. So the sum of two weights of the same sign must not exceed 128
    (255 * 128 is below 2**15). Then every CPU computes the same integers.

    Args:
        weight: Shape (outputs, inputs).
    """
    pairs = weight.reshape(len(weight), -1, 2)
    same_sign = pairs[..., 0] * pairs[..., 1] > 0
    largest_pair = (np.abs(pairs.sum(-1)) * same_sign).max(axis=1)
    largest = np.maximum(np.abs(weight).max(axis=1), largest_pair)
    # 127 instead of 128, because rounding may add 1 to the sum of a pair.
    scale = (np.maximum(largest, np.float32(1e-12)) / np.float32(127)).astype(np.float32)
    rounded = np.rint(weight / scale[:, None]).astype(np.int8)
    return np.ascontiguousarray(rounded.T), scale


def _unpermuted(weight: Float32Array, heads: int) -> Float32Array:
    """Return the weights of queries or keys with their rows in the graph's order.

    Rotary embeddings turn pairs of rows. In a GGUF file, the two rows of a pair are neighbours. For the graph, one is
    in the first half of its attention head, and the other in the second.
    """
    return weight.reshape(heads, HEAD_SIZE // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _tokenizer_json(file: Any) -> str:
    """Return the tokenizer of a GGUF file (byte-level BPE) in the format of `tokenizers`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = file.fields["tokenizer.ggml.tokens"].contents()
    kinds = file.fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(pair.split(" ")) for pair in file.fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False)
