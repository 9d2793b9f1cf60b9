"""Several corpora: which of them to search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rgate_integrations.decision import Decision
from rgate_integrations.errors import ConfigurationError


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
