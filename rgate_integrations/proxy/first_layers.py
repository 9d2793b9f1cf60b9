"""A model's first layers alone: what reads a question needs neither the others nor the language model head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rgate_integrations.errors import ModelLoadError, RGateError
from rgate_integrations.proxy.download import resolve_model


def can_be_read_alone(name: str, layers: int) -> bool:
    """Return whether the first layers of a model can be loaded without the rest.

    Not if its folder is not here (a Hub id), if it is not built like Llama, or if these are all layers: the states
    behind the last one are counted after the final norm.
    """
    from rgate_integrations.proxy.decoder import shape_of

    try:
        folder = Path(resolve_model(name))
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        has_shape = shape_of(config) is not None
    except (OSError, ValueError, KeyError, TypeError, RGateError):
        return False
    return has_shape and layers < config.get("num_hidden_layers", 0) and any(folder.glob("*.safetensors"))


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
