"""Metadata filters: a mapping in the query language that LangChain's stores share.

>>> passes = as_predicate({"year": {"$gte": 1990}, "tag": ["a", "b"]})
>>> passes(Document(page_content="", metadata={"year": 1995, "tag": "b"}))
True
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from langchain_core.documents import Document

from rgate_integrations.errors import ConfigurationError

Filter: TypeAlias = Mapping[str, Any] | Callable[[Document], bool]
"""Conditions on the metadata, all of which must hold, or a function of the document."""

_MISSING = object()
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "$eq": operator.eq,
    "$ne": operator.ne,
    "$neq": operator.ne,  # as langchain_community's store has it
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
    "$in": lambda held, wanted: held in list(wanted),
    "$nin": lambda held, wanted: held not in list(wanted),
}


def as_predicate(given: Filter | None) -> Callable[[Document], bool] | None:
    """Return a function that says whether a document passes; None if there is no filter.

    A key with a value holds if the metadata has that value, with a list if it has one of the list's, and with a
    mapping of operators if all of them hold: ``$eq $ne $gt $gte $lt $lte $in $nin $not``. ``$and``, ``$or`` (lists)
    and ``$not`` combine whole filters. What is compared with a missing key, or a value of another type, does not
    hold; so ``$ne``, ``$nin`` and ``$not`` do.

    Raises:
        ConfigurationError: An operator is not known, or is given what it cannot take, or it is nested too deeply.
    """
    if given is None or callable(given):
        return given
    try:
        _holds(given, {})  # a wrong filter is an error now, also where there is nothing to search
    except RecursionError as error:
        raise ConfigurationError("The filter is nested too deeply.") from error
    return lambda document: _holds(given, document.metadata)


# All conditions are looked at, also behind one that does not hold: one look finds whatever is wrong with a filter.


def _holds(given: Any, metadata: Mapping[str, Any]) -> bool:
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"A filter is a mapping or a function of the document, not {type(given).__name__}.",
            hint='Give, for example, {"year": {"$gte": 1990}}.',
        )
    holds = True
    for key, wanted in given.items():
        holds &= _condition_holds(key, wanted, metadata)
    return holds


def _condition_holds(key: Any, wanted: Any, metadata: Mapping[str, Any]) -> bool:
    if key in ("$and", "$or"):
        if not isinstance(wanted, list | tuple) or not wanted:
            raise ConfigurationError(f"{key} takes a list of filters, not {wanted!r}.")
        parts = [_holds(each, metadata) for each in wanted]
        return all(parts) if key == "$and" else any(parts)
    if key == "$not":
        return not _holds(wanted, metadata)
    if not isinstance(key, str) or key.startswith("$"):
        raise ConfigurationError(f"A filter has no key {key!r}.", hint="Use a text, $and, $or or $not.")
    return _value_passes(metadata.get(key, _MISSING), wanted)


def _value_passes(held: Any, wanted: Any) -> bool:
    """Whether a value of the metadata is the wanted one, one of a list, or passes every operator."""
    if isinstance(wanted, list | tuple | set | frozenset):
        return _compare(held, "$in", wanted)
    if not isinstance(wanted, Mapping) or not any(str(name).startswith("$") for name in wanted):
        return _compare(held, "$eq", wanted)
    passes = True
    for name, operand in wanted.items():
        passes &= _compare(held, name, operand)
    return passes


def _compare(held: Any, name: Any, operand: Any) -> bool:
    if name == "$not":
        if not isinstance(operand, Mapping):
            raise ConfigurationError(f"$not takes a mapping of operators, not {operand!r}.")
        return not _value_passes(held, operand)
    if name not in _COMPARISONS:
        known = ", ".join([*_COMPARISONS, "$not"])
        raise ConfigurationError(f"There is no operator {name!r} in filters.", hint=f"Use one of {known}.")
    if name in ("$in", "$nin") and not isinstance(operand, list | tuple | set | frozenset):
        raise ConfigurationError(f"{name} takes a list, not {operand!r}.")
    try:
        return bool(_COMPARISONS[name](held, operand))
    except TypeError:  # a number is neither more nor less than a text, or than what is not there
        return False
