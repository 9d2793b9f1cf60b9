"""A saved calibrated gate: another gate's parameters with a threshold and a probability map; no weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rgate_integrations.artifacts.config import CONFIG, FORMAT
from rgate_integrations.runtime.files import json_text, write_folder


def save_calibrated(
    config: Mapping[str, Any],
    prompts: Mapping[str, str],
    threshold: float,
    provenance: Mapping[str, Any],
    folder: str | Path,
) -> Path:
    """Save a calibrated gate; the folder appears whole or not at all, and replaces one that was there.

    Args:
        config: The gate's parameters, as its ``config()`` returns them; JSON values.
        prompts: Hash of each prompt that it reads under, by name: with other ones its threshold means nothing.
        threshold: Its threshold.
        provenance: How it came about: data, policy, promise; JSON values.
        folder: Where to.

    Returns:
        The folder.
    """
    content = {
        "format": FORMAT,
        "method": "calibrated",
        "threshold": threshold,
        "prompts": dict(prompts),
        "config": dict(config),
        "provenance": dict(provenance),
    }
    return write_folder(folder, {CONFIG: json_text(content)})
