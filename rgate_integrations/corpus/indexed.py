"""Makes profiles of indexes, and caches each in its index's folder until it is outdated."""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rgate_integrations.corpus.profile import CorpusProfile
from rgate_integrations.errors import ConfigurationError, ProfileError, WriteError

FOLDER = "profile"
"""Name of the profile's folder in the index's folder."""

_log = logging.getLogger("rgate_integrations")


def profile_index(index: Any, name: str) -> CorpusProfile:
    """Return the profile of an index: the cached one if it is up to date, otherwise a new one.

    Args:
        index: A `PassageIndex`, `HybridIndex` or `BM25Index`, or any object with ``passages``.
        name: Name of the corpus.

    Raises:
        ConfigurationError: The index has no ``passages``, or the name is not text.
        ProfileError: The index is empty.
        ModelLoadError: The encoder is missing and may not be downloaded here, or cannot be loaded.
        DownloadError: The encoder could not be downloaded.
    """
    index = getattr(index, "dense", index)
    passages = getattr(index, "passages", None)
    if passages is None:
        raise missing_passages(type(index).__name__)
    return profile_texts([passage.searchable for passage in passages], name, getattr(index, "folder", None))


def missing_passages(what: str) -> ConfigurationError:
    """Return the error for an object whose passages cannot be read; ``what`` names it, such as "a selector"."""
    return ConfigurationError(
        f"corpus=True needs one index whose passages can be read, but they cannot be read from {what}.",
        hint="Make the profile yourself: corpus=CorpusProfile.from_retriever(retriever).",
    )


def profile_texts(texts: Collection[str], name: str, folder: Path | None = None) -> CorpusProfile:
    """Return the profile of an index's passages: the cached one if it is up to date, otherwise a new one.

    A new profile is cached in the index's folder. If that fails, the failure is logged.

    Args:
        texts: The passages, each with its title.
        name: Name of the corpus.
        folder: The index's folder; None if the index is not saved.

    Raises:
        RGateError: See `profile_index`.
    """
    if folder is not None:
        with suppress(ProfileError):
            saved = CorpusProfile.load(folder / FOLDER)
            if not saved.is_outdated(texts):
                return replace(saved, name=name)
    profile = CorpusProfile.from_texts(texts, name)
    if folder is not None and folder.is_dir():  # it may have been moved
        try:
            profile.save(folder / FOLDER)
        except (WriteError, ConfigurationError) as error:
            # The cache is optional: the folder may be read-only.
            _log.warning("The profile of %r was not saved: %s", name, error)
    return profile
