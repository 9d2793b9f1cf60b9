"""What a model folder must not bring, looked at before anything is loaded: code of its own, and pickled weights.

A name that is no folder passes: of a Hub id, transformers and sentence-transformers refuse code themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rgate_integrations.errors import ModelLoadError
from rgate_integrations.runtime.files import parse_json

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
    folder = Path(where)
    found = []
    for script in sorted(folder.rglob("*.py")):
        found.append(str(script.relative_to(folder)))
    for path in [*folder.rglob("modules.json"), *folder.rglob("*config.json")]:
        name, content = path.relative_to(folder), _read(path)
        modules: list[Any] = []
        if isinstance(content, dict):
            if content.get("auto_map"):
                found.append(f"auto_map in {name}")
            types = content.get("types")  # in the configuration of a router module
            if isinstance(types, dict):
                modules += types.values()
        elif isinstance(content, list) and path.name == "modules.json":
            modules += [each.get("type") for each in content if isinstance(each, dict)]
        for module in modules:
            if not str(module).startswith(_TRUSTED):
                found.append(f"the module {module!r} in {name}")
    if found:
        raise ModelLoadError(
            f"The model folder {where!r} brings code of its own: {found[0]}.",
            hint="Code of model folders is never run: give a model that sentence-transformers can load without.",
        )


def refuse_pickles(where: str) -> None:
    """Refuse a folder with weights that are there as a pickle only.

    Raises:
        ModelLoadError: Weights in it end in ``.bin``, and there is no safetensors file beside them.
    """
    folder, found = Path(where), []
    for pickled, safe in _SAFE_IN_PLACE_OF.items():
        for path in folder.rglob(pickled):
            if not any((path.parent / name).is_file() for name in safe):
                found.append(str(path.relative_to(folder)))
    # What these name is read by its own suffix, whatever the file that names it is called.
    for path in [*folder.rglob("*.safetensors.index.json"), *folder.rglob("config.json")]:
        content = _read(path)
        if isinstance(content, dict):
            named = [str(content.get("transformers_weights") or ".safetensors").removesuffix(".index.json")]
            parts = content.get("weight_map")
            if isinstance(parts, dict):
                named += parts.values()
            for part in named:
                if not str(part).endswith(".safetensors"):
                    found.append(f"{part} in {path.relative_to(folder)}")
    if found:
        raise ModelLoadError(
            f"The model folder {where!r} has weights that are not safetensors: {min(found)}.",
            hint="A pickle is never read: save the model again with save_pretrained(folder).",
        )


def _read(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"The file {str(path)!r} of a model folder cannot be read.",
            hint="Save or download the model again.",
        ) from error


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Silence transformers' progress bars and advice while loading."""
    logging_module = transformers.utils.logging
    verbosity, bars = logging_module.get_verbosity(), logging_module.is_progress_bar_enabled()
    logging_module.set_verbosity_error()
    logging_module.disable_progress_bar()
    try:
        yield
    finally:
        logging_module.set_verbosity(verbosity)
        if bars:
            logging_module.enable_progress_bar()
