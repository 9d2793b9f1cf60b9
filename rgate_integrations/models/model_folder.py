"""What a model folder must not bring, looked at before anything is loaded: code of its own, and pickled weights.

A name that is no folder passes: of a Hub id, transformers and sentence-transformers refuse code themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rgate_integrations.errors import ModelLoadError
from rgate_integrations.runtime.files import parsed_json

_TRUSTED = "sentence_transformers."

# Each file that is read by unpickling, and those that the loaders take in its place when they are there.
_SAFE_IN_PLACE_OF = {
    "pytorch_model.bin": ("model.safetensors",),
    "pytorch_model.bin.index.json": ("model.safetensors", "model.safetensors.index.json"),
    "adapter_model.bin": ("adapter_model.safetensors",),
}


def refuse_code(where: str) -> None:
    """Refuse the folder of an embedder that brings code, or names code outside of sentence-transformers.

    Raises:
        ModelLoadError: It has a Python file, a module of another package, or an ``auto_map``.
    """
    for found in _code(Path(where)):
        raise ModelLoadError(
            f"The model folder {where!r} brings code of its own: {found}.",
            hint="Code of model folders is never run: give a model that sentence-transformers can load without.",
        )


def refuse_pickles(where: str) -> None:
    """Refuse a folder with weights that are there as a pickle only.

    Raises:
        ModelLoadError: Weights in it end in ``.bin``, and there is no safetensors file beside them.
    """
    for found in _pickles(Path(where)):
        raise ModelLoadError(
            f"The model folder {where!r} has weights that are not safetensors: {found}.",
            hint="A pickle is never read: save the model again with save_pretrained(folder).",
        )


def _code(folder: Path) -> Iterator[str]:
    for script in sorted(folder.rglob("*.py")):
        yield str(script.relative_to(folder))
    for path in sorted([*folder.rglob("modules.json"), *folder.rglob("*config.json")]):
        name = path.relative_to(folder)
        content = _read(path)
        for module in _module_types(path.name, content):
            if not str(module).startswith(_TRUSTED):
                yield f"the module {module!r} in {name}"
        if isinstance(content, dict) and content.get("auto_map"):
            yield f"auto_map in {name}"


def _module_types(name: str, content: Any) -> list[Any]:
    """Return the classes that a ``modules.json``, or the configuration of a router module, names."""
    if name == "modules.json" and isinstance(content, list):
        return [module.get("type") for module in content if isinstance(module, dict)]
    if name in ("router_config.json", "config.json") and isinstance(content, dict):
        types = content.get("types")
        return list(types.values()) if isinstance(types, dict) else []
    return []


def _pickles(folder: Path) -> Iterator[str]:
    for pickled, safe in _SAFE_IN_PLACE_OF.items():
        for path in sorted(folder.rglob(pickled)):
            if not any((path.parent / name).is_file() for name in safe):
                yield str(path.relative_to(folder))
    # The parts of sharded weights are read by their own suffix, whatever the list of them is called.
    for path in sorted(folder.rglob("*.safetensors.index.json")):
        content = _read(path)
        parts = content.get("weight_map") if isinstance(content, dict) else None
        for part in parts.values() if isinstance(parts, dict) else ():
            if not str(part).endswith(".safetensors"):
                yield f"{part} in {path.relative_to(folder)}"
    for path in sorted(folder.rglob("config.json")):
        content = _read(path)
        named = content.get("transformers_weights") if isinstance(content, dict) else None
        if named and not str(named).endswith((".safetensors", ".safetensors.index.json")):
            yield f"{named} in {path.relative_to(folder)}"


def _read(path: Path) -> Any:
    try:
        return parsed_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"The file {str(path)!r} of a model folder cannot be read.",
            hint="Save or download the model again.",
        ) from error
