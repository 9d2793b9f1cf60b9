"""Fetches catalogue entries into the user's cache folder, and resolves model arguments.

Everything is made under a temporary name and renamed as the last step, so a name in the cache is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rgate_integrations.errors import (
    DownloadError,
    LockedError,
    ModelLoadError,
    WriteError,
    unknown_name,
)
from rgate_integrations.models.catalog import CATALOGUE, DownloadReport, Entry, entry
from rgate_integrations.models.convert import convert_gguf
from rgate_integrations.models.reader_file import make_reader
from rgate_integrations.models.sources import Source, fetch_files
from rgate_integrations.models.wheels import sha256
from rgate_integrations.runtime.files import parsed_json
from rgate_integrations.runtime.locks import HAS_LOCKS, locked

__all__ = [
    "PASSAGES",
    "cache_dir",
    "cached_path",
    "corpus_path",
    "download",
    "origin",
    "quantised",
    "resolve_model",
]


PASSAGES = "passages.jsonl"
_MANIFEST = "rgate.json"
_TEMPORARY = ".tmp-"


def cache_dir() -> Path:
    """Return the cache folder: ``RGATE_CACHE``, or the platform's cache folder for ``rgate``."""
    if own := os.environ.get("RGATE_CACHE"):
        return Path(own).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("rgate"))


def cached_path(name: str) -> Path | None:
    """Return the folder of a catalogue entry, or None when it is not in the cache or has been damaged.

    Only sizes are compared, which costs a few file look-ups; see `verify` for the contents.
    """
    path = cache_dir() / name
    try:
        files = parsed_json((path / _MANIFEST).read_bytes()).get("files", {})
        whole = all((path / file).stat().st_size == size for file, size in files.items())
    except (OSError, ValueError, AttributeError):
        return None
    return path if whole else None


@dataclass(frozen=True)
class Verified:
    """What became of an entry's files since they were downloaded.

    Attributes:
        folder: Where they are.
        changed: Files whose contents are others now, that are gone, or that were not there.
        unchecked: Files of whose contents an earlier version kept no checksum.
    """

    folder: Path
    changed: tuple[str, ...]
    unchecked: tuple[str, ...]


def verify(name: str) -> Verified | None:
    """Read all files of a catalogue entry, and compare them with the checksums of the download.

    The checksums are kept beside the files: this finds damage, and not the work of somebody who may write there and
    changes both.

    Returns:
        What was found, or None when the entry is not in the cache.
    """
    path = cached_path(name)
    if path is None:
        return None
    manifest = parsed_json((path / _MANIFEST).read_bytes())
    known = manifest.get("checksums")
    if not isinstance(known, dict):  # of an earlier version
        main = manifest.get("main_file")
        known = {str(main.get("name")): main.get("sha256")} if isinstance(main, dict) else {}
    there = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()} - {_MANIFEST}
    expected = set(manifest.get("files", {}))
    changed = {file for file in known if file not in there or sha256(path / file) != known[file]}
    changed |= there ^ expected
    return Verified(path, tuple(sorted(changed)), tuple(sorted(expected - set(known))))


def origin(name: str) -> str:
    """Return where a cached entry came from: an address on the Hub, or packages; empty if it is not known."""
    path = cached_path(name)
    return "" if path is None else str(parsed_json((path / _MANIFEST).read_bytes()).get("origin", ""))


def download(name: str, *, progress: bool = True, source: Source | None = None) -> Path:
    """Bring a catalogue entry into the cache; at once when it is there already.

    Args:
        name: Name of the entry.
        progress: Show progress on standard error.
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
    item = entry(name)
    if found := cached_path(name):
        return found
    if not progress:
        return fetch(item, source=source)
    from rgate_integrations.models.progress import shown

    with shown(item) as report:
        return fetch(item, source=source, report=report)


def fetch(item: Entry, *, source: Source | None = None, report: DownloadReport | None = None) -> Path:
    """Bring an entry into the cache, whether the catalogue has it or not; see `download`."""
    if found := cached_path(item.name):
        return found
    say = report or _say_nothing
    root = cache_dir()
    with _workshop(root, item.name, say) as scratch:
        if found := cached_path(item.name):  # made by whoever held the lock until now
            return found
        # While it is made there are a wheel, the joined file and the finished folder at the same time.
        _check_space(item, item.disk_megabytes + 2 * item.megabytes, root)
        made = scratch / "made"
        made.mkdir()
        _make(item, source, scratch, made, say)
        _publish(made, root / item.name)
    return root / item.name


@contextmanager
def _workshop(root: Path, name: str, say: DownloadReport) -> Iterator[Path]:
    """Give a folder in which to make what will be ``root / name``, whose lock is held meanwhile.

    Raises:
        DownloadError: Something could not be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        # Without locks the final rename alone decides between two downloads at once.
        with locked(root / name, waiting=partial(say, "waiting for another download of it", None)):
            _sweep(root, name)
            # The process id tells people whose it is; that the lock is free tells `_sweep` that it may go.
            prefix = f"{_TEMPORARY}{name}-{os.getpid()}-"
            with tempfile.TemporaryDirectory(prefix=prefix, dir=root, ignore_cleanup_errors=True) as scratch:
                yield Path(scratch)
    except OSError as error:
        cause = error.__cause__ if isinstance(error, WriteError) else error
        reason = getattr(cause, "strerror", None) or cause
        raise DownloadError(
            f"{name} could not be written to the cache {root}: {reason}.",
            hint="Check its space and permissions, or set RGATE_CACHE to a folder you may write to.",
        ) from error


def _say_nothing(line: str, size: int | None) -> None:
    pass


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
    files = [each.name for each in CATALOGUE.values() if each.kind == "gguf"]
    if name not in files:
        raise unknown_name("GGUF", name, files)
    item = entry(name)
    final = cache_dir() / "gguf" / f"{name}.gguf"
    if final.exists():
        return final
    from rgate_integrations.models.progress import shown

    with shown(item) as say, _workshop(final.parent, final.name, say) as scratch:
        if not final.exists():  # nobody made it until now
            _check_space(item, 2 * item.megabytes, final.parent)
            made = scratch / final.name
            fetch_files(item, source, scratch, made, report=say)
            made.replace(final)
    return final


def corpus_path(name: str) -> Path:
    """Return the JSONL file of a corpus in the cache, ``{"id", "title", "text"}`` a line.

    Raises:
        UnknownNameError: The catalogue has no corpus of that name.
        DownloadError: It is not downloaded; the hint is the command.
    """
    if name not in CATALOGUE or CATALOGUE[name].kind != "corpus":
        raise unknown_name("corpus", name, [e.name for e in CATALOGUE.values() if e.kind == "corpus"])
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
    if not name.strip() or "\0" in name or name in CATALOGUE:  # Path("") would be the current folder
        raise unknown_name(kind, name, known)
    # `os.path` says that there is nothing under a name that no file can have, where `Path` raises.
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return path
    if os.path.isfile(path):
        raise ModelLoadError(
            f"{name!r} is a file, not a model folder.", hint="Give the folder with config.json."
        )
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelLoadError(f"There is no folder {name!r}.", hint="Check the path.")
    if "/" not in name:
        raise unknown_name(kind, name, known)
    return name


def _check_space(item: Entry, megabytes: int, root: Path) -> None:
    needed = megabytes * 1_000_000
    free = shutil.disk_usage(root).free
    if free < needed:
        raise DownloadError(
            f"{item.name} needs {_bytes(needed)} while it is made; {_bytes(free)} are free in {root}.",
            hint="Free some space, or set RGATE_CACHE to a folder on another disk.",
        )


def _bytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _make(item: Entry, source: Source | None, scratch: Path, made: Path, say: DownloadReport) -> None:
    """Fetch an entry's files, and turn them into the folder ``made``."""
    fetched = made if item.kind == "embedder" else scratch / "source.gguf"
    origin = fetch_files(item, source, scratch, fetched, report=say)
    if item.kind == "gguf":
        say("converting", None)
        convert_gguf(fetched, made)
    elif item.kind == "reader":
        say("quantising", None)
        make_reader(fetched, made)
    elif item.kind == "corpus":
        _write_passages(fetched, made / PASSAGES)
        (made / "LICENCE.txt").write_text(_NOTICE.format(source=item.parts[0].requirement), encoding="utf-8")
    say("finishing", None)
    _write_manifest(item, origin, made)


def _write_manifest(item: Entry, origin: str, made: Path) -> None:
    files = sorted(path for path in made.rglob("*") if path.is_file())
    data = [path for path in files if path.suffix in (".safetensors", ".jsonl", ".bin")]
    main = max(data, key=lambda path: path.stat().st_size)
    manifest: dict[str, Any] = {
        "name": item.name,
        "kind": item.kind,
        "origin": origin,
        "sha256": item.sha256,
        "licence": item.licence,
        "files": {path.relative_to(made).as_posix(): path.stat().st_size for path in files},
        "checksums": {path.relative_to(made).as_posix(): sha256(path) for path in files},
        "main_file": {"name": main.name, "sha256": sha256(main)},
    }
    (made / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _publish(made: Path, final: Path) -> None:
    """Give a finished folder its name, as the last step."""
    usual = made.joinpath(_MANIFEST).stat().st_mode
    for path in made.rglob("*"):
        if path.is_file():
            path.chmod(usual)  # safetensors writes 0600, which shuts others out of a shared cache
            with path.open("rb") as file:  # on the disk before the name is, in case the power fails
                os.fsync(file.fileno())
    if final.exists():  # damaged, or from elsewhere: `cached_path` did not take it
        shutil.rmtree(final)
    try:
        made.rename(final)
    except OSError:
        if cached_path(final.name) is None:  # else another process was faster, without locks
            raise


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


def _sweep(root: Path, held: str) -> None:
    """Remove what killed downloads left. Whose lock can be had has no process at work (``held`` is ours)."""
    for left in root.glob(f"{_TEMPORARY}*"):
        name = left.name.removeprefix(_TEMPORARY).rsplit("-", 2)[0]  # without process id and random part
        try:
            if not HAS_LOCKS:  # what is a day old has no process at work either
                if time.time() - left.stat().st_mtime > 86_400:
                    shutil.rmtree(left, ignore_errors=True)
            elif name == held:
                shutil.rmtree(left, ignore_errors=True)
            else:
                with locked(root / name):
                    shutil.rmtree(left, ignore_errors=True)
        except (OSError, LockedError):  # somebody is at work there, or it has just gone
            continue
