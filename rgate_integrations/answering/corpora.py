"""Several corpora: which of them to search, whatever stands for each in a framework."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from rgate_integrations.decision import Decision
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.index.hybrid import fuse

_Item = TypeVar("_Item")


def chosen_corpora(decision: Decision | None, names: Sequence[str]) -> tuple[str, ...]:
    """Return which of some corpora to search, best first: those that a decision names, or else all.

    A decision names none where the gate failed.

    Args:
        decision: The decision; None if there is none.
        names: The corpora that can be searched.
    """
    named = () if decision is None else decision.corpora
    return tuple(name for name in named if name in names) or tuple(names)


def check_corpora(corpora: Iterable[str], given: Iterable[str]) -> None:
    """Refuse chains, retrievers or tools whose names are not those of the gate's corpora.

    Args:
        corpora: Names of the gate's corpora; none where they are not known, as on a server.
        given: Names of what stands for them.

    Raises:
        ConfigurationError: There is nothing, or a corpus has nothing that stands for it, or the other way round.
    """
    known, names = list(corpora), list(given)
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
    found: Mapping[str, Sequence[Sequence[_Item]]], key: Callable[[_Item], Hashable], *, k: int | None = None
) -> list[_Item]:
    """Merge what was found in several corpora by reciprocal rank. An id stands for another item in each of them.

    Args:
        found: The rankings of each corpus, which come best first.
        key: Tells which items of a corpus are the same.
        k: How many to return; all when None.
    """
    rankings = []
    for name, of_corpus in found.items():
        rankings += [[(name, item) for item in ranking] for ranking in of_corpus]
    return [item for _, item in fuse(rankings, key=lambda named: (named[0], key(named[1])), k=k)]
