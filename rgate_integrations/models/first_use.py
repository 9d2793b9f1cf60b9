"""Whether a model that is missing is fetched when it is first used.

Who waits at a terminal or in a notebook wants it fetched. A client of a server does not want to wait for it, and
where there is no network every attempt takes its time to fail.
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
"""Environment variables of which one that is set forbids to fetch; the last two are those of Hugging Face."""

_PAUSE = 300.0  # seconds between two attempts to fetch the same thing
_TRUE = {"1", "on", "yes", "true"}

_log = logging.getLogger("rgate_integrations")
_serving = threading.Event()


def forbid_downloads() -> None:
    """Have this process fetch nothing on first use from now on: it is a server, whose clients would wait.

    `rgate_integrations.models.download.download` still fetches what it is told to.
    """
    _serving.set()


def find_download_obstacle() -> str:
    """Return why nothing is fetched on first use, as the end of a sentence; empty where it is."""
    for name in OFFLINE:
        value = os.environ.get(name, "")
        if value.strip().lower() in _TRUE:
            return f"{name}={value} forbids to fetch it"
    return "a server fetches nothing while its clients wait" if _serving.is_set() else ""


class FirstUse:
    """Fetches what is missing, once, or says why not. Safe for threads.

    Args:
        cached: Returns the folder of a catalogue entry, or None when it is not in the cache.
        fetch: Brings an entry into the cache, and returns its folder.
        clock: Returns seconds that only grow.
    """

    def __init__(
        self,
        cached: Callable[[str], Path | None],
        fetch: Callable[[str], Path],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cached = cached
        self._fetch = fetch
        self._clock = clock
        # One a name: who needs one model does not wait for another.
        self._locks: dict[str, ForkSafeLock] = {}
        self._failed: dict[str, tuple[float, RGateError]] = {}
        self._warned: set[str] = set()

    def fetched(self, name: str, what: str, target: Path) -> Path:
        """Return the folder of something that is missing, after fetching it.

        Args:
            name: Name of the catalogue entry.
            what: What to call it in errors, such as ``"gate's model"``.
            target: Where it will be.

        Raises:
            ModelLoadError: It may not be fetched here; see `find_download_obstacle`..
            DownloadError: It could not be fetched now, or less than 5 minutes ago.
            MissingDependencyError: Its conversion needs an extra that is not installed.
        """
        if reason := find_download_obstacle():
            self._warn_once(name, what, reason)
            message = f"The {what} {name!r} is not downloaded yet, and {reason}."
            raise ModelLoadError(message, hint=f"rgate download {name}")
        with self._locks.setdefault(name, ForkSafeLock()):
            found = self._cached(name)
            if found is not None:  # fetched by whoever held the lock until now
                return found
            again_at, failure = self._failed.get(name, (0.0, None))
            if failure is not None and self._clock() < again_at:
                raise copy.copy(failure)  # its own traceback for each caller
            item = entry(name)
            _say(f"rgate: the {what} {name} ({item.size}) is not here yet. It is fetched once, to {target}")
            try:
                return self._fetch(name)
            except Exception as error:  # but not Ctrl-C: the next use goes on with what there is
                failure = _as_ours(name, error)
                # A copy: the error itself holds on to all that was being done.
                self._failed[name] = (self._clock() + _PAUSE, copy.copy(failure))
                _log.warning(
                    "The %s %s could not be fetched, which is tried again after %.0f minutes: %s",
                    what,
                    name,
                    _PAUSE / 60,
                    redact(failure.message),
                )
                if failure is error:
                    raise
                raise failure from error

    def _warn_once(self, name: str, what: str, reason: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            _log.warning(
                "The %s %s is not downloaded, and %s. Gates that need it retrieve for every question. "
                "Run: rgate download %s",
                what,
                name,
                reason,
                name,
            )


def _as_ours(name: str, error: Exception) -> RGateError:
    """Return an error of this package for whatever was raised."""
    if isinstance(error, RGateError):
        return error
    return DownloadError(f"{name} could not be fetched: {error!r}", hint=f"rgate download {name}")


def _say(line: str) -> None:
    """Print a line on standard error; where there is none, or it is closed, the work goes on."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
