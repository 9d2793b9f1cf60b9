"""Samples a corpus's passages: in one pass and constant memory, or with a bounded number of searches."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import wait
from copy import copy
from dataclasses import dataclass, field
from threading import TIMEOUT_MAX
from typing import Any

from rgate_integrations.decision import valid_count, valid_timeout
from rgate_integrations.errors import ProfileError, first_line
from rgate_integrations.index.retriever import Retriever, SearchFunction, as_retriever
from rgate_integrations.runtime.flow import Call, Start
from rgate_integrations.runtime.segments import segments

_MAX_CHARS = 2_000  # characters of a passage; a longer text is a document, which is split
_SKETCH_SIZE = 256  # number of hashes in a sketch


@dataclass(frozen=True)
class Sample:
    """A sample of a corpus's passages.

    Attributes:
        texts: A uniform sample of the distinct passages, ordered by their hashes.
        seen: Number of passages read; one that occurs twice counts twice.
        sketch: The hashes of the first 256 texts of the sample. Two states of a corpus are compared by them.
    """

    texts: tuple[str, ...] = field(repr=False)
    seen: int
    sketch: tuple[int, ...] = field(repr=False)


def sample_texts(texts: Iterable[str], most: int) -> Sample:
    """Return a sample: the distinct passages with the smallest hashes, whatever the order of the texts.

    Args:
        texts: The passages; texts over 2,000 characters are split.
        most: Maximum sample size.

    Raises:
        ProfileError: A passage is not a string.
    """
    sampled: dict[int, str] = {}
    seen = 0
    for passage in _passages(texts):
        seen += 1
        number = int.from_bytes(hashlib.blake2b(passage.encode(errors="replace"), digest_size=6).digest())
        sampled[number] = passage
        if len(sampled) == 4 * most:  # not at every passage, because sorting takes time
            sampled = {number: sampled[number] for number in sorted(sampled)[:most]}
    numbers = sorted(sampled)[:most]
    return Sample(tuple(sampled[number] for number in numbers), seen, tuple(numbers[:_SKETCH_SIZE]))


def _passages(texts: Iterable[str]) -> Iterator[str]:
    several = hasattr(texts, "__iter__") or hasattr(texts, "__getitem__")  # `iter` could read a database
    if isinstance(texts, str | Mapping) or not several:
        raise ProfileError(
            f"The passages must be several strings, not {type(texts).__name__}.",
            hint="Use from_texts([text]) or from_texts(texts.values()); for a file, rgate profile --corpus.",
        )
    for text in texts:
        if not isinstance(text, str):
            raise ProfileError(
                f"A passage or description must be a string, not {type(text).__name__}.",
                hint="Pass each one's text: document.page_content in LangChain, node.get_content() in LlamaIndex.",
            )
        for begin in range(0, len(text), _MAX_CHARS):
            passage = text[begin : begin + _MAX_CHARS].strip()
            if passage:
                yield passage


# --- through a retriever -------------------------------------------------------------------------------------------

_TOP_K = 10  # minimum number of passages per search, if the retriever lets us set it
_FIRST_QUERIES = (
    "overview introduction",
    "how to get started",
    "error problem solution",
    "policy rules requirements",
    "price cost payment",
    "history people places",
    "example function parameter",
    "symptoms treatment",
    "law contract rights",
    "customer product service",
    "date schedule report",
    "security access account",
)
"""First queries, which suit different kinds of corpora, such as documentation, policies or medicine."""
# Single words, as some keyword indexes want every word of a query; also content words, as some ignore the others.
_COMMON_WORDS = """
the de 1 的 new price la 10 の في и der 2 en día jour preço Jahr год नई में এবং اور và tahun yang o e i 이 있 100 2025
2024 kg cm m a di prezzo van prijs och pris cena rok ve yıl na year ja że του של و از ที่ ของ மற்றும் మరియు आणि
"""
"""Queries for when these find nothing, as in a keyword index of a table, or of one of the other large languages."""
_WINDOW, _MIN_NEW_SHARE = 20, 0.05
"""Collection ends when less than ``_MIN_NEW_SHARE`` of what the last ``_WINDOW`` searches found is new."""
_MAX_QUERY_CHARS = 120  # a longer sentence is cut


def collect_passages(retriever: Any, searches: int = 100, timeout: float | None = 120.0) -> list[str]:
    """Return the distinct passages that a bounded number of searches finds.

    The first queries are shipped, and common words of many languages follow until something is found; each later
    one is a sentence of a passage found so far. Searching ends early when the results contain little that is new.

    Args:
        retriever: See `as_retriever`.
        searches: Maximum number of searches, at least 1.
        timeout: Maximum time of all searches, in seconds; None sets no limit. Passages found by then are returned.

    Raises:
        ConfigurationError: ``retriever`` cannot be searched, ``searches`` is below 1, or ``timeout`` is not above 0.
        ProfileError: A search failed, its results have no text, or no search found a passage in time.
    """
    valid_count(searches, "searches")
    # A guarded retriever is searched without its gate, which would hide what the LLM knows.
    while hasattr(retriever, "retriever") and isinstance(getattr(retriever, "known_message", 0), str | None):
        retriever = retriever.retriever
    searched = as_retriever(_widened(retriever))
    deadline = time.monotonic() + (valid_timeout(timeout) or TIMEOUT_MAX)
    passages: dict[str, None] = {}
    latest: list[tuple[int, int]] = []  # passages found and new passages, per search
    count = 0
    for query in _queries(passages, searches):
        texts = _search_in_time(searched, query, deadline)
        if texts is None:
            break
        count += 1
        before = len(passages)
        passages.update(dict.fromkeys(texts))
        latest = [*latest, (len(texts), len(passages) - before)][-_WINDOW:]
        total, new = map(sum, zip(*latest, strict=True))
        if passages and len(latest) == _WINDOW and new < _MIN_NEW_SHARE * max(total, 1):
            break
    if not passages and time.monotonic() >= deadline:
        raise ProfileError(
            f"No search found anything within {timeout:g} s.",
            hint="Check the retriever's server, or allow more seconds: CorpusProfile.from_retriever(…, timeout=…).",
        )
    if not passages:
        raise ProfileError(
            f"None of the {count} searches found anything.",
            hint="Use CorpusProfile.from_texts(texts), or a retriever without a score threshold or filter.",
        )
    return list(passages)


def _widened(retriever: Any) -> Any:
    """Return a copy of a framework's retriever that finds at least ten passages; others unchanged.

    Its other settings, such as a filter, stay.
    """
    settings = getattr(retriever, "search_kwargs", None)
    # LangChain's; one with a `k` of its own would get two.
    if isinstance(settings, dict) and hasattr(retriever, "vectorstore") and not hasattr(retriever, "k"):
        k = max(settings.get("k") or 0, _TOP_K)
        return retriever.model_copy(update={"search_kwargs": {**settings, "k": k}})
    if isinstance(getattr(retriever, "similarity_top_k", None), int):  # LlamaIndex's
        retriever = copy(retriever)
        retriever.similarity_top_k = max(retriever.similarity_top_k, _TOP_K)
    return retriever


def _queries(passages: dict[str, None], most: int) -> Iterator[str]:
    """Yield at most ``most`` distinct queries: the shipped ones, then sentences of ``passages``, which may grow."""
    asked: set[str] = set()
    for query in (*_FIRST_QUERIES, *_COMMON_WORDS.split())[:most]:
        if passages and len(asked) >= len(_FIRST_QUERIES):
            break
        asked.add(query)
        yield query
    used = 0
    while len(asked) < most and used < len(passages):
        # Newest first, because no other search has found those.
        passage = list(passages)[-1 - used]
        unused = [
            segment[:_MAX_QUERY_CHARS]
            for segment in segments(passage[:2_000])
            if segment[:_MAX_QUERY_CHARS] not in asked
        ]
        used = 0 if unused else used + 1
        if unused:
            asked.add(unused[0])
            yield unused[0]


def _search_in_time(retriever: Retriever, query: str, deadline: float) -> list[str] | None:
    """Return the texts that a search finds, or None after the deadline. A hanging search keeps its daemon thread.

    Raises:
        ProfileError: The search failed, or its results have no text.
    """
    job: Any = Start(Call(_find_texts, None, retriever, query)).run().job
    wait([job], max(deadline - time.monotonic(), 0.0))
    if not job.done():
        return None
    error = job.exception()  # a retriever may raise anything, also SystemExit
    if error is not None:
        raise ProfileError(
            f"The retriever failed while its profile was made: {type(error).__name__}: {first_line(error)}",
            hint=getattr(error, "hint", "")
            or "Check that it returns a list of strings, documents or nodes, and that its server is running.",
        ) from error
    return job.result()


def _find_texts(retriever: Retriever, query: str) -> list[str]:
    """Return the texts of all passages that a search finds. The retriever is asked for ten, but may return more."""
    if isinstance(retriever, SearchFunction):
        hits = retriever.find(query, _TOP_K)
    else:
        hits = retriever.search([query], _TOP_K)[0]
    return [hit.passage.searchable for hit in hits]
