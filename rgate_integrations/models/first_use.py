"""Downloads missing models and corpora of the catalogue on first use, where that is allowed.

That is convenient at a terminal or in a notebook. But a server's clients should not have to wait for a download, and
without a network every attempt takes a while to fail.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rgate_integrations.errors import DownloadError, ModelLoadError, RGateError
from rgate_integrations.models.catalog import entry
from rgate_integrations.runtime.text import redact
from rgate_integrations.runtime.threads import ForkSafeLock

OFFLINE = ("RGATE_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Environment variables that forbid downloads on first use if set to 1, on, yes or true; the last two are
Hugging Face's."""

# The wait after a failed download. Retrying for every question would delay each one by the network's timeout.
_RETRY_SECONDS = 300.0

_log = logging.getLogger("rgate_integrations")
_serving = threading.Event()


def forbid_downloads() -> None:
    """Forbid first-use downloads of catalogue entries in this process, because a server's clients would wait.

    `rgate_integrations.models.download.download` and Hugging Face's downloads of Hub ids are still allowed.
    """
    _serving.set()


def find_download_obstacle() -> str:
    """Return why first-use downloads are forbidden, as the end of a sentence; empty if they are allowed."""
    for name in OFFLINE:
        value = os.environ.get(name, "")
        if value.strip().lower() in {"1", "on", "yes", "true"}:
            return f"{name}={value} forbids downloads"
    return "a server downloads nothing while its clients wait" if _serving.is_set() else ""


class FirstUse:
    """Downloads missing catalogue entries, each once, and remembers failures for five minutes. Thread-safe.

    Args:
        find_cached: Function that returns a catalogue entry's folder, or None if it is not in the cache.
        download: Function that downloads an entry into the cache and returns its folder.
        clock: Function that returns monotonic seconds.
    """

    def __init__(
        self,
        find_cached: Callable[[str], Path | None],
        download: Callable[[str], Path],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find_cached = find_cached
        self._download = download
        self._clock = clock
        # One lock per name, so that a caller who needs one model does not wait for another.
        self._locks: dict[str, ForkSafeLock] = {}
        self._failures: dict[str, tuple[float, RGateError]] = {}
        self._warned: set[str] = set()

    def fetch(self, name: str, what: str, target: Path) -> Path:
        """Download a missing entry and return its folder.

        Args:
            name: Name of the catalogue entry.
            what: Description for error messages, such as ``"gate's model"``.
            target: Where the download goes, for its announcement on standard error.

        Raises:
            ModelLoadError: This process may not download; see `find_download_obstacle`.
            DownloadError: The download failed, now or less than 5 minutes ago.
            MissingDependencyError: The entry's conversion needs an extra that is not installed.
        """
        if obstacle := find_download_obstacle():
            # Warn only once, because gates would repeat it for every question.
            if name not in self._warned:
                self._warned.add(name)
                _log.warning(
                    "The %s %s is not downloaded, and %s. Gates that need it retrieve for every question. "
                    "Run: rgate download %s",
                    *(what, name, obstacle, name),
                )
            raise ModelLoadError(
                f"The {what} {name!r} is not downloaded yet, and {obstacle}.",
                hint=f"Run `rgate download {name}`.",
            )
        # `setdefault` is atomic, so all threads get the same lock.
        with self._locks.setdefault(name, ForkSafeLock()):
            folder = self._find_cached(name)
            if folder is not None:  # another thread has downloaded it while this one waited for the lock
                return folder
            retry_at, failure = self._failures.get(name, (0.0, None))
            if failure is not None and self._clock() < retry_at:
                raise copy.copy(failure)  # a copy, so that each caller has its own traceback
            with suppress(AttributeError, OSError, ValueError):  # standard error is missing or closed
                sys.stderr.write(
                    f"rgate: downloading the {what} {name} ({entry(name).size}), once, to {target}\n"
                )
            try:
                return self._download(name)
            except Exception as error:  # not Ctrl-C, after which the next use continues the download
                if not isinstance(error, RGateError):
                    error = DownloadError(
                        f"{name} could not be downloaded: {error!r}", hint=f"Run `rgate download {name}`."
                    )
                # A copy, because the error itself would keep the frames of the download alive.
                self._failures[name] = (self._clock() + _RETRY_SECONDS, copy.copy(error))
                _log.warning(
                    "The %s %s could not be downloaded; next attempt after %.0f minutes: %s",
                    *(what, name, _RETRY_SECONDS / 60, redact(error.message)),
                )
                raise error
