"""Metadata filters: a mapping in the query language that LangChain's stores share, made into a function once.

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

_Test: TypeAlias = Callable[[Mapping[str, Any]], bool]
_MISSING = object()
_DEEPEST = 64


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
    if _is_deep(given, _DEEPEST):
        raise ConfigurationError(f"A filter is nested more than {_DEEPEST} deep.")
    test = _of_mapping(given)
    return lambda document: test(document.metadata)


def _is_deep(given: Any, levels: int) -> bool:
    """Whether mappings and lists are nested in more than so many levels."""
    if not isinstance(given, Mapping | list | tuple):
        return False
    inner = given.values() if isinstance(given, Mapping) else given
    return levels == 0 or any(_is_deep(each, levels - 1) for each in inner)


def _of_mapping(given: Any) -> _Test:
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"A filter is a mapping or a function of the document, not {type(given).__name__}.",
            hint='Give, for example, {"year": {"$gte": 1990}}.',
        )
    return _all([_of_entry(key, value) for key, value in given.items()])


def _of_entry(key: Any, value: Any) -> _Test:
    if not isinstance(key, str):
        raise ConfigurationError(f"A filter's key is text, not {key!r}.")
    if key in ("$and", "$or"):
        if not isinstance(value, list | tuple) or not value:
            raise ConfigurationError(f"{key} takes a list of filters, not {value!r}.")
        tests = [_of_mapping(each) for each in value]
        return _all(tests) if key == "$and" else _any(tests)
    if key == "$not":
        return _not(_of_mapping(value))
    if key.startswith("$"):
        raise _unknown(key, ("$and", "$or", "$not"))
    return _of_value(key, value)


def _of_value(key: str, wanted: Any) -> _Test:
    """Return the test of one key of the metadata."""
    if isinstance(wanted, list | tuple | set | frozenset):
        return _compared(key, "$in", wanted)
    if not isinstance(wanted, Mapping) or not any(str(name).startswith("$") for name in wanted):
        return _compared(key, "$eq", wanted)
    tests = []
    for name, operand in wanted.items():
        if name == "$not":
            if not isinstance(operand, Mapping):
                raise ConfigurationError(f"$not takes a mapping of operators, not {operand!r}.")
            tests.append(_not(_of_value(key, operand)))
        else:
            tests.append(_compared(key, name, operand))
    return _all(tests)


def _compared(key: str, name: Any, operand: Any) -> _Test:
    if name not in _COMPARISONS:
        raise _unknown(name, (*_COMPARISONS, "$not"))
    if name in ("$in", "$nin"):
        if not isinstance(operand, list | tuple | set | frozenset):
            raise ConfigurationError(f"{name} takes a list, not {operand!r}.")
        operand = list(operand)
    compare = _COMPARISONS[name]

    def test(metadata: Mapping[str, Any]) -> bool:
        try:
            return compare(metadata.get(key, _MISSING), operand)
        except TypeError:  # a number is neither more nor less than a text, or than what is not there
            return False

    return test


def _equal(held: Any, wanted: Any) -> bool:
    return held is not _MISSING and bool(held == wanted)


def _differ(held: Any, wanted: Any) -> bool:
    return not _equal(held, wanted)


def _is_in(held: Any, wanted: list[Any]) -> bool:
    return held in wanted


def _is_not_in(held: Any, wanted: list[Any]) -> bool:
    return held not in wanted


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "$eq": _equal,
    "$ne": _differ,
    "$neq": _differ,  # as langchain_community's store has it
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
    "$in": _is_in,
    "$nin": _is_not_in,
}


def _all(tests: list[_Test]) -> _Test:
    return lambda metadata: all(test(metadata) for test in tests)


def _any(tests: list[_Test]) -> _Test:
    return lambda metadata: any(test(metadata) for test in tests)


def _not(test: _Test) -> _Test:
    return lambda metadata: not test(metadata)


def _unknown(name: object, known: tuple[str, ...]) -> ConfigurationError:
    return ConfigurationError(
        f"There is no operator {name!r} in filters.", hint=f"Here there can be {', '.join(known)}."
    )
