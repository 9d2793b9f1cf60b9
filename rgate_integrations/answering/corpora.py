"""Several corpora: which of them to search, for every framework."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from rgate_integrations.decision import Decision
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.index.hybrid import fuse

_Item = TypeVar("_Item")


def chosen_corpora(decision: Decision | None, names: Sequence[str]) -> tuple[str, ...]:
    """Return which corpora to search, best first: those that the decision names, or all if it names none.

    Args:
        decision: The decision, which names none if the gate failed; None without one.
        names: The corpora that can be searched.
    """
    corpora = () if decision is None else decision.corpora
    return tuple(name for name in corpora if name in names) or tuple(names)


def check_corpora(corpora: Iterable[str], parts: Iterable[str]) -> None:
    """Check that chains, retrievers or tools have the names of the gate's corpora.

    Args:
        corpora: Names of the gate's corpora; none if they are unknown here, as on a server.
        parts: Names of the chains, retrievers or tools.

    Raises:
        ConfigurationError: There are none, or their names are not the same.
    """
    known, names = list(corpora), list(parts)
    if not names:
        raise ConfigurationError(
            "There is nothing to search.", hint='Name each corpus: {"docs": …, "hr": …}.'
        )
    if known and set(known) != set(names):
        raise ConfigurationError(
            f"The gate knows the corpora {', '.join(map(repr, known))}, but there are "
            f"{', '.join(map(repr, names))} to choose from.",
            hint='Use the same names in both: corpus={"docs": …, "hr": …}.',
        )


def fuse_corpora(
    results: Mapping[str, Sequence[Sequence[_Item]]],
    key: Callable[[_Item], Hashable],
    *,
    k: int | None = None,
) -> list[_Item]:
    """Merge the results of several corpora by reciprocal rank. In each corpus an id means another item.

    Args:
        results: The rankings of each corpus, best corpus first.
        key: Returns the id of an item.
        k: How many to return; all when None.
    """
    rankings = []
    for name, corpus_rankings in results.items():
        rankings += [[(name, item) for item in ranking] for ranking in corpus_rankings]
    return [item for _, item in fuse(rankings, key=lambda pair: (pair[0], key(pair[1])), k=k)]
