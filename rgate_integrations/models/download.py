"""Downloads models and corpora into the user's cache folder, and resolves model arguments.

Everything is written under a temporary name and renamed as the last step, so whatever has its final name is complete.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
import time
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from rgate_integrations.errors import (
    ConfigurationError,
    DownloadError,
    ModelLoadError,
    first_line,
    limit_hint,
    unknown_name,
)
from rgate_integrations.models.catalog import Entry, catalogue_names, entry
from rgate_integrations.models.convert import check_converter, convert_gguf
from rgate_integrations.models.encoder_file import adapter_digest, make_encoder
from rgate_integrations.models.reader_file import make_reader
from rgate_integrations.models.sources import Source, fetch_files
from rgate_integrations.runtime.files import json_line, json_text, locked, parse_json, read_file
from rgate_integrations.runtime.text import logger, redact
from rgate_integrations.runtime.threads import ForkSafeLock

OFFLINE = ("RGATE_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Environment variables that forbid downloads on first use if set to 1, on, yes or true; the last two are
Hugging Face's."""

PASSAGES = "passages.jsonl"
_MANIFEST = "rgate.json"
_NOTICE = """\
passages.jsonl holds the lead sections of articles of the English Wikipedia, written by its contributors;
the history of each article names them. The text is licensed under the Creative Commons
Attribution-ShareAlike 4.0 International licence (CC BY-SA 4.0), creativecommons.org/licenses/by-sa/4.0/:
you may copy, change and share it if you name the source and pass it on under the same licence.

Changes: taken from the package {source}; runs of white space collapsed, all other fields dropped.
"""

# The wait after a failed download. Retrying for every question would delay each one by the network's timeout.
_RETRY_SECONDS = 300.0

# One lock per name, so that a caller who needs one model does not wait for another.
_locks: dict[str, ForkSafeLock] = {}
_failures: dict[str, tuple[float, str]] = {}  # by name: time of the next attempt, and why the last one failed
_serving = threading.Event()  # set in servers, whose clients should not wait for a download
_absolute = cache(Path.absolute)  # once per path, so that `os.chdir` does not move a relative cache


def cache_dir() -> Path:
    """Return the cache folder: the environment variable ``RGATE_CACHE``, or else the platform's cache folder.

    A relative path starts from the current folder of the first call.

    Raises:
        ConfigurationError: The user has no home folder, in which that folder would be.
    """
    import platformdirs

    try:
        folder = Path(os.environ.get("RGATE_CACHE") or platformdirs.user_cache_dir("rgate")).expanduser()
        return _absolute(folder)
    except RuntimeError as error:
        raise ConfigurationError(
            "There is no folder for models, because this user has no home folder.",
            hint="Set RGATE_CACHE to the full path of a folder.",
        ) from error


def _folder(item: Entry) -> Path:
    """Return the folder of a catalogue entry in the cache.

    The encoder includes the shipped adapter. Releases with different adapters can share a cache, because each has a
    folder of its own.
    """
    return cache_dir() / (f"{item.name}-{adapter_digest()}" if item.kind == "encoder" else item.name)


def cached_path(name: str) -> Path | None:
    """Return the cached folder of a catalogue entry; None if it is missing or damaged.

    This is fast, because it compares only file sizes. Checksums were compared when the entry was downloaded.

    Raises:
        ConfigurationError: The user has no home folder; see `cache_dir`.
        ModelLoadError: The folder cannot be read, for example by this user.
    """
    path = _folder(entry(name))
    try:
        sizes = parse_json(read_file(path / _MANIFEST)).get("files", {})
        return path if all((path / file).stat().st_size == size for file, size in sizes.items()) else None
    except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError):  # missing, or not a manifest
        return None
    except OSError as error:  # the folder may be whole, so it must not be replaced
        raise ModelLoadError(
            f"{name!r} is in a cache that cannot be read, {str(path)!r}: {error.strerror}.",
            hint=limit_hint(str(error))
            or "Check its permissions and disk, or set RGATE_CACHE to another folder.",
        ) from error


def fetch_path(name: str, what: str) -> Path:
    """Return the folder of a catalogue entry, and download it first if it is missing and downloads are not forbidden.

    A line on standard error says what is downloaded, and where to. If several threads or processes need it, one
    downloads it and the others wait.

    Args:
        name: Name of the entry.
        what: What to call it in errors and in that line.

    Raises:
        ModelLoadError: It is not in the cache and may not be downloaded: a variable such as ``RGATE_OFFLINE=1`` is
            set (all are in `OFFLINE`), or this process is a server; the hint is
            the command that downloads it. Or it cannot be read.
        DownloadError: The download failed now, or it failed less than 5 minutes ago and was not tried again.
        MissingDependencyError: A GGUF must be converted, and the extra ``local`` is not installed.
        ConfigurationError: The user has no home folder; see `cache_dir`.
    """
    folder = cached_path(name)
    if folder is not None:
        return folder
    if obstacle := find_download_obstacle():
        raise ModelLoadError(
            f"The {what} {name!r} is not downloaded yet, and {obstacle}.",
            hint=f"Run `rgate download {name}`.",
        )
    check_converter(entry(name).kind)  # not a failure of the download, so the next use checks again
    # `setdefault` is atomic, so all threads get the same lock.
    with _locks.setdefault(name, ForkSafeLock()):
        folder = cached_path(name)
        if folder is not None:  # another thread has downloaded it while this one waited for the lock
            return folder
        retry_at, reason = _failures.get(name, (-math.inf, ""))
        if time.monotonic() < retry_at:
            raise DownloadError(
                f"The {what} {name!r} could not be downloaded less than 5 minutes ago: {reason}",
                hint=f"To try again now, run `rgate download {name}`.",
            )
        with suppress(AttributeError, OSError, ValueError):  # standard error is missing or closed
            size = f"{entry(name).megabytes:,} MB"
            sys.stderr.write(
                f"rgate: downloading the {what} {name} ({size}), once, to {_folder(entry(name))}\n"
            )
        try:
            return download(name)
        except Exception as error:  # not Ctrl-C, after which the next use continues the download
            _failures[name] = (time.monotonic() + _RETRY_SECONDS, first_line(error))
            logger.warning(
                "The %s %s could not be downloaded; next attempt after %.0f minutes: %s",
                *(what, name, _RETRY_SECONDS / 60, redact(error)),
            )
            raise


def download(name: str, *, source: Source | None = None) -> Path:
    """Download a catalogue entry into the cache unless it is already there.

    After Ctrl-C or a killed process, the next call uses the files that were fetched; after an error, it starts over.

    Args:
        name: Name of the entry.
        source: The Hugging Face ``"hub"`` or the package ``"index"``, which give the same model. None tries the
            index first, then the Hub.

    Returns:
        The entry's folder, which contains a plain Hugging Face model, a gate's model, or ``passages.jsonl``.

    Raises:
        UnknownNameError: The catalogue has no such entry.
        ConfigurationError: The source is unknown, or the user has no home folder (see `cache_dir`).
        DownloadError: No network, no disk space, no permission, the source lacks the entry, or a file could
            not be converted; the cache is unchanged.
        ChecksumError: A file does not match its pinned checksum; the cache is unchanged.
        ModelLoadError: The entry is in the cache, and cannot be read.
        MissingDependencyError: A GGUF must be converted, and the extra ``local`` is not installed.
    """
    item = entry(name)
    final = _folder(item)
    staging = final.with_name(f".tmp-{final.name}")  # an interrupted process leaves it
    if cached_path(name) is not None:
        return final
    check_converter(item.kind)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with locked(final, waiting=partial(logger.info, "%s: another process is downloading it", name)):
            if cached_path(name) is not None:  # another process made it while we waited for the lock
                return final
            staging.mkdir(exist_ok=True)
            try:
                folder = _make_folder(item, fetch_files(item, source, staging), staging)
                _write_manifest(item, folder)
                shutil.rmtree(final, ignore_errors=True)  # damaged: `cached_path` rejected it
                folder.rename(final)
            except Exception:  # not Ctrl-C, after which the next download continues with these files
                shutil.rmtree(staging, ignore_errors=True)
                raise
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise DownloadError(
            f"{name} could not be written to the cache {final.parent}: "
            f"{error.strerror or getattr(error, 'message', error)}".removesuffix(".")
            + ".",
            hint="Check its space and permissions, or set RGATE_CACHE to a folder you may write to.",
        ) from error
    return final


def _make_folder(item: Entry, fetched: Path, staging: Path) -> Path:
    """Make an entry's folder from its fetched files, inside ``staging``, and return its path."""
    # The name has the process id, because the converter of a killed process may still be writing.
    folder = staging / f"made-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if item.kind == "embedder":
        shutil.copytree(fetched, folder, ignore=shutil.ignore_patterns(".cache"), dirs_exist_ok=True)
    elif item.kind == "corpus":
        _make_corpus(item, fetched, folder)
    else:
        make = {"gguf": convert_gguf, "reader": make_reader, "encoder": make_encoder}[item.kind]
        make(fetched, folder)
    return folder


def _write_manifest(item: Entry, folder: Path) -> None:
    """Write a folder's manifest: the licence, and what `cached_path` compares. Make its files readable for all."""
    sizes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            path.chmod(0o644)  # safetensors writes 0600, which shuts others out of a shared cache
            sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
    manifest = json_text({"licence": item.licence, "files": sizes})
    (folder / _MANIFEST).write_text(manifest, encoding="utf-8")


def _make_corpus(item: Entry, fetched: Path, folder: Path) -> None:
    """Write a corpus's passages, taken from the fetched JSON, and its licence."""
    summaries = json.loads(fetched.read_text(encoding="utf-8"))
    with (folder / PASSAGES).open("w", encoding="utf-8") as out:
        for number, record in enumerate(summaries.values()):
            text = " ".join(str(record.get("extract") or "").split())
            if text:
                out.write(json_line({"id": f"lead-{number}", "title": record["title"], "text": text}))
    (folder / "LICENCE.txt").write_text(_NOTICE.format(source=item.parts[0].requirement), encoding="utf-8")


def corpus_path(name: str) -> Path:
    """Return a corpus's JSONL file, downloading it if missing; each line has ``{"id", "title", "text"}``.

    Raises:
        UnknownNameError: The catalogue has no corpus of that name.
        ModelLoadError: It is missing and must not be downloaded; see `fetch_path`. Or it cannot be read.
        DownloadError: It could not be downloaded.
        ConfigurationError: The user has no home folder; see `cache_dir`.
    """
    return fetch_path(entry(name, "corpus").name, "corpus") / PASSAGES


def resolve_model(name: str | os.PathLike[str], *, kind: str = "model") -> str:
    """Return the folder or Hub id that a model argument stands for. A missing catalogue entry is downloaded first.

    Args:
        name: Catalogue name (not the reader's or a corpus's), local folder, or Hub id (``owner/name``).
        kind: What to call it in errors.

    Raises:
        ModelLoadError: The catalogue entry is missing and may not be downloaded, cannot be read, or the
            path is not a folder.
        DownloadError: The catalogue entry could not be downloaded; see `fetch_path`.
        MissingDependencyError: A GGUF must be converted, and the extra ``local`` is not installed.
        UnknownNameError: The name is neither a catalogue name, nor a folder, nor a Hub id.
        ConfigurationError: The user has no home folder; see `cache_dir`.
    """
    name = os.fspath(name)
    known = catalogue_names("gguf", "embedder", "encoder")
    if name in known:
        return str(fetch_path(name, kind))
    # `os.path` returns False for a name that no file can have, where `Path` raises.
    path = os.path.expanduser(name)
    if os.path.isdir(path):  # False for "", which `Path` would take for the current folder
        return path
    if os.path.isfile(path) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        problem = "is a file" if os.path.isfile(path) else "does not exist"
        raise ModelLoadError(
            f"The model folder {name!r} {problem}.",
            hint="Give the path of a folder with config.json, or a Hub id such as owner/name.",
        )
    if "/" not in name or "\0" in name:
        unknown = unknown_name(kind, name, known)
        unknown.hint += f" If {name!r} is a folder, give its full path; a gate takes it as proxy= (--proxy)."
        raise unknown
    return name


def forbid_downloads() -> None:
    """Forbid first-use downloads of models in this process. Servers call this: their clients would wait.

    `rgate_integrations.models.download.download` and downloads of gates by their Hub ids are still allowed.
    """
    _serving.set()


def find_download_obstacle() -> str:
    """Return why first-use downloads are forbidden, as the end of a sentence; empty if they are allowed."""
    for name in OFFLINE:
        value = os.environ.get(name, "")
        if value.strip().lower() in {"1", "on", "yes", "true"}:
            return f"{name}={value} forbids downloads"
    return "a server downloads nothing while its clients wait" if _serving.is_set() else ""
