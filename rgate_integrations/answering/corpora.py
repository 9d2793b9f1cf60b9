"""Several corpora: which of them to search, and how to fuse their results."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from rgate_integrations.decision import Decision
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.index.hybrid import fuse

_Item = TypeVar("_Item")


def chosen_corpora(decision: Decision | None, names: Sequence[str]) -> tuple[str, ...]:
    """Return the corpora to search: those of ``names`` that the decision names, best first, or else all.

    Args:
        decision: The decision, which names no corpora if the gate failed; None without a decision.
        names: Names of the corpora that can be searched.
    """
    corpora = () if decision is None else decision.corpora
    # Searching all is the safe choice if the gate failed or names unknown corpora.
    return tuple(name for name in corpora if name in names) or tuple(names)


def check_corpora(corpora: Iterable[str], parts: Iterable[str]) -> None:
    """Check that chains, retrievers or tools have the names of the gate's corpora.

    Args:
        corpora: Names of the gate's corpora; empty if they are unknown here, for example because they are on a
            server.
        parts: Names of the chains, retrievers or tools.

    Raises:
        ConfigurationError: ``parts`` is empty, or the names differ.
    """
    known, names = list(corpora), list(parts)
    if not names:
        raise ConfigurationError(
            "There is nothing to search: the mapping of chains, retrievers or tools is empty.",
            hint='Pass at least one, under the name of its corpus: {"docs": …, "hr": …}.',
        )
    if known and set(known) != set(names):
        raise ConfigurationError(
            f"The gate has the corpora {', '.join(map(repr, known))}, but the chains, retrievers or tools are named "
            f"{', '.join(map(repr, names))}.",
            hint='Use the same names in both: corpus={"docs": …, "hr": …}.',
        )


def unknown_corpus(name: str, parts: Iterable[str]) -> ConfigurationError:
    """Return the error for a corpus to search for which there is no chain or node; ``parts`` are those there are."""
    return ConfigurationError(
        f"The decision says to search the corpus {name!r}, for which retrieve= has no chain or node.",
        hint=f"Add it to retrieve=, which has: {', '.join(map(repr, parts))}.",
    )


def fuse_corpora(
    results: Mapping[str, Sequence[Sequence[_Item]]],
    key: Callable[[_Item], Hashable],
    *,
    k: int | None = None,
) -> list[_Item]:
    """Return the results of several corpora, fused by reciprocal rank. The same id in two corpora means two items.

    Args:
        results: For each corpus, the results of its searches: one list of items per search, best first. Of equally
            good items, those of the first corpus come first.
        key: Function that returns the id of an item.
        k: Maximum number of items to return; all when None.
    """
    rankings = []
    for name, corpus_rankings in results.items():
        rankings += [[(name, item) for item in ranking] for ranking in corpus_rankings]
    return [item for _, item in fuse(rankings, key=lambda pair: (pair[0], key(pair[1])), k=k)]
