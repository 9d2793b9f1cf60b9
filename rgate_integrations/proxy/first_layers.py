"""A model's first layers alone: what reads a question needs neither the others nor the language model head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rgate_integrations.errors import ModelLoadError, RGateError
from rgate_integrations.proxy.download import resolve_model


def first_layers_of(name: str, wanted: int) -> int | None:
    """Return how many layers must be loaded to see the states that go into layer ``wanted``.

    None if a part of the model is no use: all layers are wanted, its folder is not here (a Hub id), or its layers are
    not all of a kind, so that it is not said how the first ones are configured.
    """
    try:
        config_file = Path(resolve_model(name)) / "config.json"
        config: dict[str, Any] = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RGateError):
        return None
    layers = config.get("num_hidden_layers", 0)
    alike = config.get("model_type") in ("llama", "qwen2", "mistral") and not config.get("layer_types")
    # The states between two layers are seen where they go into the second, so that one must be there.
    return wanted + 1 if alike and wanted + 1 < layers else None


def folder_fingerprint(name: str) -> str:
    """Return what `rgate_integrations.proxy.fingerprint.fingerprint` says of the whole model, off its files.

    Raises:
        ModelLoadError: The folder has no weights as safetensors.
    """
    import torch
    from safetensors import safe_open

    from rgate_integrations.proxy.fingerprint import VALUES, digest_of

    folder = Path(resolve_model(name))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shared = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for key in set(file.keys()) - shared:
                part = file.get_slice(key)
                # Of a matrix, rows are read; VALUES of them hold enough values however narrow they are.
                found[key] = part[:VALUES].flatten()[:VALUES]
    if not found:
        raise ModelLoadError(f"The folder of {name!r} has no safetensors.")
    return digest_of(found)
