"""What the folder of a saved gate holds: `SavedGate` as JSON in ``gate.json``, its arrays in a safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, TypeAlias

import numpy as np
from pydantic import ConfigDict, Field, PlainValidator
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError
from safetensors.numpy import load, save

from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.arrays import Float32Array

STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
"""Configuration of every part of ``gate.json``: it may come from anywhere, so what nobody knows is refused."""

_LONGEST_HEADER = 1 << 16


def _weights(value: Any) -> Float32Array:
    if not isinstance(value, np.ndarray) or value.dtype != np.float32:
        raise ValueError("it is no float32 array")
    if not np.isfinite(value).all():
        raise ValueError("it has numbers that are not finite")
    return value


Weights: TypeAlias = Annotated[Float32Array, PlainValidator(_weights)]
"""An array of a saved gate: float32, and finite."""

Finite: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Count: TypeAlias = Annotated[int, Field(ge=0, le=1_000_000)]


def _answer_prompt() -> dict[str, str]:
    return {ANSWER.name: ANSWER.hash}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SavedGate:
    """A gate as it is saved. Adapters and calibrated gates are one as they are; gates with weights are subclasses.

    Attributes:
        method: Name of the gate, as `load_gate` takes it.
        base_model: The proxy that it was trained with: catalogue name, folder or Hub id.
        fingerprint: `rgate_integrations.models.base.Proxy.fingerprint` of it; empty if unknown.
        llm: The LLM whose knowledge it judges.
        threshold: Default threshold.
        prompts: Hash of each prompt that it was trained under, by name: with other ones its scores mean nothing.
        parameters: Its other parameters; JSON values.
        provenance: Where it comes from: data, label, seed, recipe, metrics, versions, licence; JSON values.
    """

    method: str
    base_model: str = ""
    fingerprint: str = ""
    llm: str = ""
    threshold: Annotated[float, Field(allow_inf_nan=False, ge=0)] = 0.5
    prompts: dict[str, str] = field(default_factory=_answer_prompt)
    parameters: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def reads(self) -> str:
        """What it reads, in a few words."""
        tokens = getattr(self, "tokens", self.parameters.get("tokens", 0))
        return f"question and {tokens} tokens of a draft" if tokens else "question"


def check_shape(name: str, array: Float32Array, *wanted: int) -> None:
    """Refuse an array of another shape.

    Args:
        name: What to call it.
        array: The array.
        *wanted: The length of each axis but the last, which must not be empty.

    Raises:
        ValueError: It has another shape.
    """
    if array.shape[:-1] != wanted or not array.size:
        raise ValueError(
            f"{name} has the shape {array.shape}, not ({', '.join(map(str, wanted))}, hidden size)"
        )


def without_arrays(
    content: Mapping[str, Any], arrays: dict[str, Float32Array], prefix: str = ""
) -> dict[str, Any]:
    """Return nested values without their arrays, which are put into ``arrays`` under their dotted names."""
    rest: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, np.ndarray):
            arrays[prefix + name] = value
        elif isinstance(value, dict):
            rest[name] = without_arrays(value, arrays, f"{prefix}{name}.")
        else:
            rest[name] = value
    return rest


def put_arrays(content: dict[str, Any], arrays: Mapping[str, Float32Array]) -> None:
    """Put back what `without_arrays` took out.

    Raises:
        ValueError: An array has a name that has no place there.
    """
    for name, array in arrays.items():
        *path, last = name.split(".")
        part: Any = content
        for step in path:
            part = part.get(step) if isinstance(part, dict) else None
        if not isinstance(part, dict) or last in part:
            raise ValueError(f"the weights: there is no place for {name[:40]!r}")
        part[last] = array


def tensor_bytes(arrays: Mapping[str, Float32Array]) -> bytes:
    """Return arrays as the content of a safetensors file."""
    written: bytes = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    return written


def read_tensors(weights: bytes) -> dict[str, Float32Array]:
    """Return the arrays of a safetensors file.

    Raises:
        ValueError: It is none.
    """
    # Eight bytes say how long the list of tensors is. Ours name a few; a million of them take 20 s to be refused.
    if int.from_bytes(weights[:8], "little") > _LONGEST_HEADER:
        raise ValueError("the weights: their list of tensors is too long")
    try:
        found: dict[str, Float32Array] = load(weights)
    except (SafetensorError, TypeError, AttributeError) as error:  # the last two: a type that numpy has not
        raise ValueError(f"the weights: {error}") from error
    return found
