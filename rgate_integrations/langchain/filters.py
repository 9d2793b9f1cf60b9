"""Metadata filters of `FaissVectorStore`: mappings of conditions, compiled to functions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from langchain_core.documents import Document

from rgate_integrations.errors import ConfigurationError

Filter: TypeAlias = Mapping[str, Any] | Callable[[Document], bool]
"""Conditions on the metadata, all of which must hold, or a function of the document; see `as_predicate`."""

_Condition: TypeAlias = Callable[[Any], bool]

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "$eq": operator.eq,
    "$ne": operator.ne,
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
    "$in": lambda value, operand: value in list(operand),
    "$nin": lambda value, operand: value not in list(operand),
}
_MISSING = object()  # the value of a key that a document does not have


def as_predicate(filter: Filter | None) -> Callable[[Document], bool]:
    """Return a function that tests whether a document passes a filter.

    A function is returned unchanged, and None passes every document. Any other filter maps keys of the
    metadata to conditions, all of which must hold. A condition is a value that the key must have, a list that
    must contain the key's value, or a mapping of operators or nested keys. The operators are
    ``$eq $ne $gt $gte $lt $lte $in $nin``; ``$not``, which takes a condition or a whole filter; and ``$and`` and
    ``$or``, which take a list of these. If a document lacks the key, or its value cannot be compared with the
    operand, the comparison is false, except that ``$ne`` and ``$nin`` are true.

    Raises:
        ConfigurationError: The filter is neither a mapping nor a function, an operator is unknown or has an
            invalid operand, or an operator such as ``$eq`` is not under a key. The returned function
            raises it for a key such as ``"a.b"`` that means ``{"a": {"b": …}}``.

    Examples:
        >>> passes = as_predicate({"year": {"$gte": 1990}, "tag": ["a", "b"]})
        >>> passes(Document(page_content="", metadata={"year": 1995, "tag": "b"}))
        True
    """
    if callable(filter):
        return filter
    if not isinstance(filter, Mapping | None):
        raise ConfigurationError(
            f"A filter must be a mapping or a function of the document, not {type(filter).__name__}.",
            hint='Pass a mapping such as {"year": {"$gte": 1990}}.',
        )
    condition = _compile(filter or {}, has_key=False)
    return lambda document: condition(document.metadata)


def _compile(condition: Any, *, has_key: bool) -> _Condition:
    """Return a function that tests whether a value meets a condition.

    Args:
        condition: A value to equal, a list of such values, or a mapping of operators and keys.
        has_key: Whether the condition tests the value of a key; if not, it tests the metadata as a whole.

    Raises:
        ConfigurationError: See `as_predicate`.
    """
    if isinstance(condition, list | tuple | set):
        condition = {"$in": condition}
    elif not isinstance(condition, Mapping):
        condition = {"$eq": condition}
    parts = [_compile_part(name, operand, has_key) for name, operand in condition.items()]
    # A list, not a generator: all parts are evaluated, so a key with a dot raises wherever it is in the filter.
    return lambda value: all([part(value) for part in parts])


def _compile_part(name: Any, operand: Any, has_key: bool) -> _Condition:
    """Return the test for one entry of a mapping: an operator with its operand, or a key with its condition.

    Raises:
        ConfigurationError: See `as_predicate`.
    """
    if name in ("$in", "$nin", "$and", "$or") and not isinstance(operand, list | tuple | set):
        raise ConfigurationError(
            f"The filter operator {name} takes a list, not {operand!r}.",
            hint=f'Use {{"{name}": [{operand!r}]}}.',
        )
    if name in ("$and", "$or"):
        parts = [_compile(part, has_key=has_key) for part in operand]
        combine = all if name == "$and" else any
        return lambda value: combine([part(value) for part in parts])
    if name == "$not":
        condition = _compile(operand, has_key=has_key)
        return lambda value: not condition(value)
    if name in _COMPARISONS:
        if not has_key:
            raise ConfigurationError(
                f'The filter condition {{"{name}": {operand!r}}} does not say which key of the metadata it tests.',
                hint=f'Put it under that key, as in {{"year": {{"{name}": …}}}}.',
            )
        return lambda value: _compare(_COMPARISONS[name], value, operand)
    if str(name).startswith("$"):
        raise ConfigurationError(
            f"Unknown filter operator {name!r}.",
            hint=f"Use one of {', '.join([*_COMPARISONS, '$not', '$and', '$or'])}.",
        )
    condition = _compile(operand, has_key=True)
    return lambda value: condition(_get(value, name))


def _compare(comparison: Callable[[Any, Any], Any], value: Any, operand: Any) -> bool:
    try:
        return bool(comparison(value, operand))
    except TypeError:  # values of different types, or a missing one, cannot be ordered
        return False


def _get(value: Any, key: Any) -> Any:
    if not isinstance(value, Mapping):
        return _MISSING
    outer, dot, rest = str(key).partition(".")
    if key not in value and dot and isinstance(value.get(outer), Mapping):
        raise ConfigurationError(
            f"The metadata has no key {key!r}, and filters do not accept dotted paths.",
            hint=f"Use {{{outer!r}: {{{rest!r}: …}}}}.",
        )
    return value.get(key, _MISSING)
