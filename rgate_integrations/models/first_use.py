"""Decides whether missing models and corpora of the catalogue may be downloaded on first use.

Such downloads are convenient at a terminal or in a notebook. But a server's clients should not have to wait for one,
and without a network every attempt takes a while to fail.
"""

from __future__ import annotations

import os
import threading

OFFLINE = ("RGATE_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Environment variables that forbid downloads on first use if set to 1, on, yes or true; the last two are
Hugging Face's."""

_serving = threading.Event()


def forbid_downloads() -> None:
    """Forbid first-use downloads of catalogue entries in this process. Servers call this: their clients would wait.

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
