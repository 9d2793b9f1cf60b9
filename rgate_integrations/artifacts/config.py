"""What a ``gate.json`` must hold. It may come from anywhere, so everything in it is checked before it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from rgate_integrations.decision import DraftSource
from rgate_integrations.errors import ModelLoadError
from rgate_integrations.models.base import Pooling, Span
from rgate_integrations.runtime.files import parsed_json

FORMAT = 1
CONFIG = "gate.json"

_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Threshold = Annotated[float, Field(allow_inf_nan=False, ge=0)]
_Count = Annotated[int, Field(ge=0, le=1_000_000)]


class _Part(BaseModel):
    """A part of the file. What else is in it, of another version or of a user's own, is kept."""

    model_config = ConfigDict(extra="allow")


class _Prompt(_Part):
    name: str
    version: int
    hash: str


class _SavedGate(_Part):
    format: int
    method: str
    threshold: _Threshold
    provenance: dict[str, Any]


class _TrainedGate(_SavedGate):
    base_model: str
    fingerprint: str = ""
    prompt: _Prompt
    weights_sha256: str


class _Adapter(_TrainedGate):
    llm: str
    parameters: dict[str, Any]


class _Evidence(_Part):
    tokens: _Count
    source: DraftSource
    blocks: list[tuple[_Count, Span, Pooling]]


class _Calibration(_Part):
    slope: _Finite
    intercept: _Finite


class _EarlyExit(_Part):
    bias: _Finite
    p_known: _Finite


class _Probe(_TrainedGate):
    llm: str
    system: str | None = None  # probes that were saved before there was one have none
    evidence: _Evidence
    bias: _Finite
    calibration: _Calibration
    early_exit: _EarlyExit | None = None


class _Kind(_Part):
    name: str
    served: str
    about: str
    bias: _Finite = 0.0


class _Segments(_Part):
    layers: list[tuple[_Count, Span, Pooling]]
    kinds: list[_Kind]


class _Heads(_TrainedGate):
    layers: list[tuple[_Count, Span, Pooling]]
    kinds: list[_Kind]
    segments: _Segments | None = None
    known_bias: _Finite
    ability_slope: _Finite
    default_llm: str
    default_ability: tuple[_Finite, _Finite]


class _Calibrated(_SavedGate):
    prompts: dict[str, str]
    config: dict[str, Any]


class _Tuned(_TrainedGate):
    layers: list[tuple[_Count, Span, Pooling]]
    tokens: _Count
    slope: _Finite
    bias: _Finite


_KINDS: dict[Any, type[_SavedGate]] = {
    "probe": _Probe,
    "heads": _Heads,
    "calibrated": _Calibrated,
    "tuned": _Tuned,
}


def parsed_config(folder: Path) -> dict[str, Any]:
    """Return what ``gate.json`` holds, checked.

    Raises:
        ModelLoadError: It is from a newer version.
        OSError: It cannot be read.
        ValueError: It is not JSON, or a part of it is missing or not what it must be.
    """
    found = parsed_json((folder / CONFIG).read_bytes())
    if not isinstance(found, dict):
        raise ValueError(f"{CONFIG} is no JSON object")
    newer = found.get("format")
    if isinstance(newer, int) and newer > FORMAT:
        raise ModelLoadError(
            f"The gate in {str(folder)!r} has format {newer}, newer than {FORMAT}.",
            hint="Upgrade rgate-integrations.",
        )
    method = found.get("method")
    kind = _KINDS.get(method, _Adapter) if isinstance(method, str) else _SavedGate
    return kind.model_validate(found).model_dump()
