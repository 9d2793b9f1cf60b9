"""The folder of a saved gate: ``gate.json``, a model card and perhaps weights, which are verified by checksum."""

from __future__ import annotations

import errno
import hashlib
import html
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from functools import cache, reduce
from itertools import product
from operator import getitem
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from rgate_integrations.errors import ConfigurationError, ModelLoadError, first_line
from rgate_integrations.gates.artifacts import ProbeArtifact, SavedGate, TunedArtifact
from rgate_integrations.gates.heads_artifact import HeadsArtifact
from rgate_integrations.runtime.arrays import AnyStates
from rgate_integrations.runtime.files import (
    SHIPPED,
    check_output,
    expand,
    find_folder,
    json_text,
    open_file,
    parse_json,
    read_file,
    read_folder,
    write_atomically,
    write_folder,
)
from rgate_integrations.runtime.records import first_problem

FORMAT = 1
CONFIG, CARD, WEIGHTS = "gate.json", "README.md", "weights.safetensors"
ADAPTER = "adapter_model.safetensors"
"""Name of the file of a LoRA adapter, as peft writes it."""
PRIOR, ANSWER_FIRST = "prior", "answer-first"
"""Subfolders of a tuned gate: the gate that the tuning corrects, and the gate for partial answers."""

_MAX_HEADER = 1 << 16
_MAX_WEIGHTS = 1 << 32  # bytes; the adapter of a 70B model has about 1 GiB
_WITH_WEIGHTS: dict[Any, type[SavedGate]] = {
    "heads": HeadsArtifact,
    "probe": ProbeArtifact,
    "tuned": TunedArtifact,
}


def saved_folder(name: str | Path) -> Path:
    """Return the folder of a saved gate.

    Args:
        name: A local folder, the name of a shipped gate, or a Hub id, which is downloaded.

    Raises:
        ModelLoadError: None of these exists, or the download fails.
    """
    # A local folder takes precedence, so that users can replace a shipped gate.
    for folder in (find_folder(name), SHIPPED / name):
        if os.path.isfile(folder / CONFIG):
            return folder
    # The Hub's gate of this name is somebody else's if a folder here lacks its gate, as after an incomplete copy.
    is_missing = not os.path.exists(find_folder(name))
    name = str(name)
    if is_missing and name.count("/") == 1 and not name.startswith((".", "~", "/")):
        return _from_hub(name)
    raise ModelLoadError(
        f"{name!r} is not a trained gate: neither a folder with a {CONFIG} nor a shipped gate.",
        hint="Pass a folder made by `rgate train`, `rgate tune` or `rgate calibrate` (check that you have permission "
        f"to read it), a Hub id such as OWNER/NAME, or a shipped gate: {', '.join(shipped())}.",
    )


def shipped() -> list[str]:
    """Return the names of the gates that come with the package."""
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{CONFIG}"))


def check_gate_output(folder: str | Path, *inputs: object) -> None:
    """Check that a gate can be saved to a folder, as `check_output` does, and that this would remove only a gate.

    Raises:
        ConfigurationError: An input is the folder or inside it, or the folder has other files than a saved gate, such
            as the prior and the report of a tuned one.
        WriteError: The folder's folder is not one, or may not be written to.
    """
    check_output(folder, *inputs, files=(CONFIG,))
    _, folders, files = next(os.walk(find_folder(folder)), ("", [], []))
    others = {name for name in (*folders, *files) if not name.startswith(".")} - {CARD, CONFIG, WEIGHTS}
    if others:
        raise ConfigurationError(
            f"{str(folder)!r} cannot be replaced: it contains other files, such as {min(others)!r}.",
            hint="Choose another folder.",
        )


def save_gate(gate: SavedGate, folder: str | Path) -> Path:
    """Save a gate atomically, replacing an earlier one, and return its folder.

    Raises:
        ConfigurationError: The path cannot name a folder, or is a file, or a folder with other files than a gate.
        WriteError: The gate could not be written.
    """
    check_gate_output(folder)
    # Relative to this folder, so that both can be moved together and loaded from any other folder.
    start = os.path.realpath(os.path.expanduser(folder))
    parameters = map_folders(
        gate.parameters,
        lambda name: os.path.relpath(os.path.realpath(name), start) if has_gate(name) else name,
    )
    return write_folder(folder, gate_files(replace(gate, parameters=parameters), Path(folder).name))


def has_gate(folder: str) -> bool:
    """Return whether a local folder of this name has a gate or adapter; False for a shipped gate or a Hub id."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in (CONFIG, ADAPTER))


def map_folders(config: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return a gate's config with ``change`` applied to each name of a saved gate or adapter, at any depth."""
    changed: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            value = map_folders(value, change)
        elif name in ("artifact", "adapter") and isinstance(value, str):
            value = change(value)
        changed[name] = value
    return changed


def save_adapter(gate: SavedGate, folder: str | Path) -> Path:
    """Write ``gate.json`` and a model card into the folder of a LoRA adapter, and return the folder.

    After that, `load_gate` can load the folder.

    Raises:
        OSError: The adapter's file cannot be read, or the folder cannot be written.
    """
    root = expand(folder)
    files = gate_files(gate, root.name, read_file(root / ADAPTER, _MAX_WEIGHTS))
    for name in (CARD, CONFIG):  # the config comes last, because it makes the folder a gate
        write_atomically(root / name, files[name])
    return root


def gate_files(gate: SavedGate, name: str, adapter: bytes = b"") -> dict[str, bytes | str]:
    """Return the contents of the files of a saved gate's folder, by name.

    Args:
        gate: The gate.
        name: The gate's name on its card.
        adapter: Content of the gate's adapter file, for the checksum; empty for none. The file itself is not
            returned, because it is in the folder already.
    """
    content = asdict(gate)
    arrays = dict(_take_arrays(content))
    weights = save(arrays) if arrays else adapter
    digest = hashlib.sha256(weights).hexdigest() if weights else ""
    config = json_text({"format": FORMAT, **content, "weights_sha256": digest})
    files: dict[str, bytes | str] = {CARD: model_card(gate, name), CONFIG: config}
    if arrays:
        files[WEIGHTS] = weights
    return files


def _take_arrays(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, AnyStates]]:
    """Take the arrays out of a gate's fields and their parts, and yield them with their dotted names."""
    for field, value in list(content.items()):
        if isinstance(value, dict):
            yield from _take_arrays(value, f"{prefix}{field}.")
        elif isinstance(value, np.ndarray):
            yield prefix + field, np.ascontiguousarray(content.pop(field))


def tuned_files(gate: TunedArtifact, prior: str | Path) -> dict[str, bytes | str]:
    """Return the contents of the files of a tuned gate's folder, by name.

    They include a copy of the prior, the gate to correct, because the original may change.

    Args:
        gate: The correction.
        prior: The gate to correct: a folder, a Hub id, or the name of a shipped gate.

    Raises:
        ModelLoadError: The prior does not exist or is unsuitable; see `read_prior`.
    """
    read_prior(prior)
    files = gate_files(gate, "tuned")
    for file in sorted(saved_folder(prior).iterdir()):
        if file.is_file():
            files[f"{PRIOR}/{file.name}"] = read_file(file, _MAX_WEIGHTS)
    return files


def read_gate(name: str | Path) -> SavedGate:
    """Read and validate a saved gate, without caching. Another process may replace it meanwhile.

    Args:
        name: A local folder, the name of a shipped gate, or a Hub id.

    Raises:
        ModelLoadError: The gate does not exist or cannot be downloaded, a file is damaged or missing, or the
            gate is from a newer version of the package.
    """
    return read_folder(name, lambda: _read_gate(saved_folder(name)))


def _read_gate(folder: Path) -> SavedGate:
    try:
        content = dict(parse_json(read_file(folder / CONFIG)))
        version, digest = content.pop("format", None), content.pop("weights_sha256", "")
        if type(version) is not int or version < 1:
            raise ValueError(f"format is {version!r:.40}, not a whole number of at least 1")
        if version > FORMAT:
            raise ModelLoadError(
                f"The gate in {str(folder)!r} has format {version}, but this version reads formats up to {FORMAT}.",
                hint="Upgrade rgate-integrations.",
            )
        kind = _WITH_WEIGHTS.get(content.get("method"), SavedGate)
        file = folder / (ADAPTER if kind is SavedGate else WEIGHTS)
        if digest or os.path.isfile(file):
            with open_file(file, _MAX_WEIGHTS) as weights:
                if hashlib.file_digest(weights, "sha256").hexdigest() != digest:
                    raise ModelLoadError(
                        f"{file.name} in {str(folder)!r} is damaged or was replaced: it does not match the "
                        f"checksum in {CONFIG}.",
                        hint="Copy the whole folder again.",
                    )
                if kind is not SavedGate:
                    _put_arrays(content, file, weights)
        gate = kind(**content)
        # `gate_files` writes every field, so a default would not be the gate that was saved.
        missing = [field.name for field in fields(kind) if field.name not in content]
        if missing:
            raise ValueError(f"{missing[0]} is missing")
        return gate
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise unreadable(folder, error) from error


@cache
def read_shipped(folder: Path) -> SavedGate:
    """Return a shipped gate, read once: it takes 13 MB, and some applications load a gate for each request."""
    return read_gate(folder)


def read_prior(name: str | Path) -> SavedGate:
    """Read the gate that a tuned gate corrects, its prior.

    A prior cannot be another tuned gate, because the folders of such gates could nest endlessly.

    Raises:
        ModelLoadError: The gate cannot be read, or its method is neither ``heads`` nor ``probe``.
    """
    prior = read_gate(name)
    if prior.method not in ("heads", "probe"):
        raise ModelLoadError(
            f"A tuned gate cannot start from {str(name)!r}: its method in {CONFIG} is {prior.method[:40]!r}, "
            "not 'heads' or 'probe'.",
            hint="Start from the default gate (--init-from default), or from one made by `rgate train --gate probe`.",
        )
    return prior


def _put_arrays(content: dict[str, Any], path: Path, file: BinaryIO) -> None:
    """Put the arrays of a safetensors file into the content of ``gate.json``.

    Args:
        content: The content of ``gate.json``.
        path: The safetensors file.
        file: The same file, open.

    Raises:
        OSError: The file was replaced since it was opened.
        ValueError: The file is damaged, or has too many tensors.
        LookupError | TypeError: The content has no place for an array of this name.
    """
    # The first eight bytes are the length of the list of tensors. A gate has few, and parsing a million takes 20 s.
    file.seek(0)
    if int.from_bytes(file.read(8), "little") > _MAX_HEADER:
        raise ValueError(f"the header of its weights is longer than {_MAX_HEADER:,} bytes")
    before = os.fstat(file.fileno())
    try:
        # By its path, not as bytes: after so large an object is freed, glibc keeps later ones (10 MB in the end).
        arrays = load_file(path)
    except (SafetensorError, AttributeError) as error:  # AttributeError: a type that NumPy lacks
        raise ValueError(f"the weights cannot be read: {error}") from error
    after = os.stat(path)
    if (before.st_ino, before.st_mtime_ns) != (after.st_ino, after.st_mtime_ns):
        raise OSError(errno.ESTALE, f"{path.name} was replaced while it was read")
    for name, array in arrays.items():
        *parts, field = name.split(".")
        reduce(getitem, parts, content)[field] = array


def unreadable(folder: Path, error: Exception) -> ModelLoadError:
    """Return the error for a gate with a missing, unreadable or invalid file."""
    reason = f"{type(error).__name__}: {getattr(error, 'message', error)}".removesuffix(".")
    if isinstance(error, ValidationError):
        reason = first_problem(error)
    return ModelLoadError(
        f"The gate in {str(folder)!r} cannot be read: {reason}.",
        hint="Check the folder's permissions, copy it again, or make the gate again.",
    )


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import

    files = (CONFIG, CARD, WEIGHTS, ADAPTER, "adapter_config.json")
    folders = ("", f"{PRIOR}/", f"{ANSWER_FIRST}/", f"{ANSWER_FIRST}/{PRIOR}/")
    patterns = [folder + file for folder, file in product(folders, files)]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the Hub client raises errors from several libraries
        raise ModelLoadError(
            f"There is no local folder {name!r} with a {CONFIG}, and no such gate could be fetched from the Hub: "
            f"{first_line(error)}",
            hint="For a folder, check the path; for a Hub id, the name and the network.",
        ) from error


def model_card(gate: SavedGate, name: str) -> str:
    """Return the model card of a saved gate (``README.md``), which says what it is and how it was made."""
    provenance = json_text(gate.provenance).strip().replace("`", "'")  # so that it cannot end the code block
    return f"""# {plain(name)}

A retrieval gate of `rgate-integrations`: P(the LLM answers correctly without retrieval).

- **Method**: `{gate.method}`.
- **Base model**: {plain(gate.base_model) or "none"}.
- **Judges**: {plain(gate.llm) or "any LLM"}.
- **Default threshold**: {gate.threshold:.3f}.
- **Licence of the weights**: {plain(str(gate.provenance.get("licence", "that of the training data")))}.

Use it as `load_gate("{plain(name)}")`. Scores for another LLM are a guess: calibrate on your own data.

## How it was made

```json
{provenance}
```
"""


def plain(name: str) -> str:
    """Return a name for Markdown: as one line, with HTML escaped, so that no web page runs it."""
    return html.escape(" ".join(name.split()), quote=False)
