"""Tells models apart by their weights, whatever they are called and wherever they lie."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from rgate_integrations.errors import ModelLoadError

_VALUES = 8


def fingerprint(model: Any) -> str:
    """Return 16 hex digits: a hash of the first values of every parameter, rounded to bfloat16.

    So it is the same on every device and in every float type, and takes milliseconds.
    """
    import torch

    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        values = parameter.detach().flatten()[:_VALUES].to("cpu", torch.bfloat16).view(torch.int16)
        digest.update(name.encode() + values.numpy().tobytes())
    return digest.hexdigest()[:16]


def check_adapter(adapter: str, model: str, found: str) -> None:
    """Refuse an adapter that was trained on another model, if it says on which.

    Args:
        adapter: Its folder or Hub id; a folder may hold a trained gate's ``gate.json``.
        model: What the loaded model is called.
        found: The loaded model's fingerprint.

    Raises:
        ModelLoadError: It was trained on another model.
    """
    config = Path(adapter) / "gate.json"
    if not config.is_file():
        return
    trained = json.loads(config.read_text(encoding="utf-8"))
    check_base(
        adapter, trained.get("base_model", "another model"), trained.get("fingerprint", ""), model, found
    )


def check_base(gate: str, base_model: str, expected: str, model: str, found: str) -> None:
    """Refuse a trained gate whose base model is not the loaded one; an unknown fingerprint fits all.

    Raises:
        ModelLoadError: The fingerprints differ.
    """
    if expected and found and expected != found:
        raise ModelLoadError(
            f"The gate {gate!r} was trained on {base_model!r} (weights {expected}), but {model!r} has the weights "
            f"{found}.",
            hint=f"Load it with proxy={base_model!r}, or train a gate for this model.",
        )
