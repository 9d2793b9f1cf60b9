"""Profiles of passages that are at hand, kept beside their index for as long as that holds about the same."""

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
"""Folder of the profile in that of its index."""

_log = logging.getLogger("rgate_integrations")


def profile_index(index: Any, name: str) -> CorpusProfile:
    """Return the profile of an index: the one beside it if it is still about these passages, or else a new one.

    Args:
        index: A `PassageIndex`, `HybridIndex` or `BM25Index`, or anything else with ``passages``.
        name: Name of the corpus.

    Raises:
        ConfigurationError: It does not give its passages.
        ProfileError: There are none.
    """
    index = getattr(index, "dense", index)
    passages = getattr(index, "passages", None)
    if passages is None:
        raise no_passages(type(index).__name__)
    return profile_texts([each.searchable for each in passages], name, getattr(index, "folder", None))


def no_passages(what: str) -> ConfigurationError:
    """Build the error for something whose passages are not at hand."""
    return ConfigurationError(
        f"corpus=True needs the passages, and {what} does not have them at hand.",
        hint="corpus=CorpusProfile.from_retriever(retriever)",
    )


def profile_texts(texts: Collection[str], name: str, folder: Path | None = None) -> CorpusProfile:
    """Return the profile of texts; see `profile_index`.

    Args:
        texts: The texts.
        name: Name of the corpus.
        folder: Where the index is saved; None if it is not.
    """
    if folder is not None:
        with suppress(ProfileError):
            saved = CorpusProfile.load(folder / FOLDER)
            if not saved.is_outdated(texts):
                return replace(saved, name=name)
    profile = CorpusProfile.from_texts(texts, name)
    if folder is not None:
        try:
            profile.save(folder / FOLDER)
        except (WriteError, ConfigurationError) as error:  # it may be read-only, or something else is there
            _log.warning("The profile of %r is not kept: %s", name, error)
    return profile
