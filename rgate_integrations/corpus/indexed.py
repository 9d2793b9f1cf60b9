"""Profiles of passages that are at hand, kept beside their index for as long as that holds about the same."""

from __future__ import annotations

import hashlib
import heapq
import logging
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rgate_integrations.corpus.profile import CorpusProfile
from rgate_integrations.errors import ConfigurationError, ProfileError, WriteError

FOLDER = "profile"
"""Folder of the profile in that of its index."""
SAME = 0.8
"""An index whose passages overlap less than so much with those of its profile gets a new one."""
_HASHES = 128

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
    sketch = sketch_texts(texts)
    if folder is not None:
        with suppress(ProfileError):
            saved = CorpusProfile.load(folder / FOLDER)
            if overlap(saved.sketch, sketch) >= SAME:
                return replace(saved, name=name)
    profile = replace(CorpusProfile.from_texts(texts, name), sketch=sketch)
    if folder is not None:
        try:
            profile.save(folder / FOLDER)
        except (WriteError, ConfigurationError) as error:  # it may be read-only, or something else is there
            _log.warning("The profile of %r is not kept: %s", name, error)
    return profile


def sketch_texts(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the smallest hashes of texts, at most 128: a random sample that does not depend on their order."""
    hashes = {hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16] for text in texts}
    return tuple(heapq.nsmallest(_HASHES, hashes))


def overlap(one: Collection[str], other: Collection[str]) -> float:
    """Return about which share of two sets of texts is in both, in [0, 1], from their sketches (Broder 1997)."""
    sample = heapq.nsmallest(_HASHES, {*one, *other})
    return sum(each in one and each in other for each in sample) / max(len(sample), 1)
