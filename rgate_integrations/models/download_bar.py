"""The bar of a download, on standard error of a terminal or a notebook."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from rgate_integrations.runtime.threads import start_thread

_SECONDS = 0.2  # between two looks


class DownloadBar:
    """Shows how much of a download has come, inside a ``with`` statement; nothing in a log file.

    It looks at what lies in the folders that are written to: so it is the same for the Hub and for pip, which says
    nothing of how far it is. It hides no cursor, so a terminal is as it was however the process ends.

    Args:
        what: What is fetched.
        folders: Folders that files are fetched into, each with the size of the download in 10^6 bytes; the first one
            that is there counts.
    """

    def __init__(self, what: str, folders: Sequence[tuple[Path, int]]) -> None:
        from huggingface_hub.utils.tqdm import tqdm  # which HF_HUB_DISABLE_PROGRESS_BARS switches off

        self._folders = folders
        self._ended = threading.Event()
        self._bar = tqdm(  # type: ignore[no-untyped-call]
            desc=what,
            total=folders[-1][1] * 10**6,
            unit="B",
            unit_scale=True,
            leave=False,
            file=sys.stderr,
            disable=not _is_watched(),
        )

    def __enter__(self) -> Self:
        if not self._bar.disable:
            # Without a thread there is no bar, and the download goes on.
            with suppress(RuntimeError):
                start_thread(self._watch, "rgate-download-bar")
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._bar.close()

    def tell(self, what: str) -> None:
        """Show what is done now."""
        self._bar.set_description(what)

    def _watch(self) -> None:
        with suppress(OSError, ValueError):  # a terminal that is gone must not print a traceback
            while not self._ended.wait(_SECONDS):
                self._look()

    def _look(self) -> None:
        """Show how much is there by now."""
        for folder, megabytes in self._folders:
            if folder.is_dir():
                self._bar.total = megabytes * 10**6
                # Wheels are unpacked beside themselves: then there is more than was fetched.
                self._bar.n = min(_size(folder), self._bar.total)
                self._bar.refresh()
                return


def _size(folder: Path) -> int:
    """Return how many bytes the files of a folder have."""
    size = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it was renamed or removed meanwhile
                size += os.stat(os.path.join(path, name)).st_size
    return size


def _is_watched() -> bool:
    """Whether somebody sees a line that is written over: a terminal or a notebook."""
    stream = sys.stderr
    if stream is None or stream.closed:
        return False
    return stream.isatty() or type(stream).__module__.startswith("ipykernel.")
