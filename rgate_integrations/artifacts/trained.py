"""Weights as safetensors, and the reading of a trained gate: its configuration and weights, both checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from rgate_integrations.artifacts.config import parsed_config
from rgate_integrations.artifacts.folder import check_prompt, checked_weights, saved_folder, unreadable
from rgate_integrations.errors import missing_dependency
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.arrays import Float32Array

_Artifact = TypeVar("_Artifact")
Tensors: TypeAlias = Mapping[str, Float32Array]
_LONGEST_HEADER = 1 << 16


def tensor_bytes(tensors: Tensors) -> bytes:
    """Return float32 arrays as the contents of a safetensors file."""
    try:
        from safetensors.numpy import save
    except ImportError as error:
        raise missing_dependency("safetensors", "local") from error
    written: bytes = save({name: np.ascontiguousarray(each, np.float32) for name, each in tensors.items()})
    return written


def read_trained(
    name: str | Path, method: str, make: Callable[[dict[str, Any], Tensors], _Artifact]
) -> _Artifact:
    """Read and check a trained gate; every call does so anew.

    Args:
        name: A local folder, the name of a shipped gate, or a Hub id.
        method: The method that its configuration must name.
        make: Makes the artefact of configuration and tensors. A ``ValueError`` means that they do not fit each other.

    Raises:
        ModelLoadError: There is none, a file is damaged, or it was trained with another prompt or format.
    """
    folder = saved_folder(name)
    try:
        config = parsed_config(folder)
        if config["method"] != method:
            raise ValueError(f"its method is {config['method'][:40]!r}, not {method!r}")
        weights = checked_weights(folder, config)
        check_prompt(folder, config["prompt"], ANSWER)
        return make(config, _tensors(weights))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise unreadable(folder, error) from error


def _tensors(weights: bytes) -> Tensors:
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load
    except ImportError as error:
        raise missing_dependency("safetensors", "local") from error
    # Eight bytes say how long the list of tensors is. Ours name a few; a million of them take 20 s to be refused.
    if int.from_bytes(weights[:8], "little") > _LONGEST_HEADER:
        raise ValueError("the weights: their list of tensors is too long")
    try:
        found: Tensors = load(weights)
    except (SafetensorError, TypeError, AttributeError) as error:  # the last two: a type that numpy has not
        raise ValueError(f"the weights: {error}") from error
    return found
