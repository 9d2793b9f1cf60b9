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
_MAX_DEPTH = 64  # of conditions inside each other; Python cannot follow many more


def as_predicate(filter: Filter | None) -> Callable[[Document], bool]:
    """Return a function that says whether a document passes.

    A key with a value holds if the metadata has that value, with a list if it has one of the list's, and with a
    mapping if all its conditions hold: operators on the value, or keys inside it. The operators are
    ``$eq $ne $gt $gte $lt $lte $in $nin``, and ``$not``, ``$and``, ``$or`` around conditions and whole filters. A
    comparison with a missing key, or a value of another type, does not hold; so ``$ne``, ``$nin`` and ``$not`` do.

    Raises:
        ConfigurationError: An operator is unknown or has a wrong operand, a condition has no key, or the filter is
            nested too deeply. The function raises it for a key such as ``"a.b"`` that means a key inside ``"a"``.

    Example:
        >>> passes = as_predicate({"year": {"$gte": 1990}, "tag": ["a", "b"]})
        >>> passes(Document(page_content="", metadata={"year": 1995, "tag": "b"}))
        True
    """
    if callable(filter):
        return filter
    if not isinstance(filter, Mapping | None):
        raise ConfigurationError(
            f"A filter is a mapping or a function of the document, not {type(filter).__name__}.",
            hint='For example, {"year": {"$gte": 1990}}.',
        )
    condition = _compile(filter or {}, has_key=False, depth=_MAX_DEPTH)
    return lambda document: condition(document.metadata)


def _compile(condition: Any, *, has_key: bool, depth: int) -> _Condition:
    """Compile a value, a list of values, or a mapping of operators and keys.

    Args:
        condition: The condition.
        has_key: Whether it is about the value of a key, and not about the metadata as a whole.
        depth: How many conditions may be nested in it.
    """
    if depth == 0:
        raise ConfigurationError(
            f"The filter is nested more than {_MAX_DEPTH} deep.", hint="Put conditions beside each other."
        )
    if isinstance(condition, list | tuple | set):
        condition = {"$in": condition}
    elif not isinstance(condition, Mapping):
        condition = {"$eq": condition}
    parts = [_compile_part(name, operand, has_key, depth - 1) for name, operand in condition.items()]
    # A list: all parts are evaluated, so that a key with a dot raises wherever it stands in the filter.
    return lambda value: all([part(value) for part in parts])


def _compile_part(name: Any, operand: Any, has_key: bool, depth: int) -> _Condition:
    """Compile an operator, or the conditions of a key."""
    if name in ("$in", "$nin", "$and", "$or") and not isinstance(operand, list | tuple | set):
        raise ConfigurationError(f"{name} takes a list, not {operand!r}.")
    if name in ("$and", "$or"):
        parts = [_compile(part, has_key=has_key, depth=depth) for part in operand]
        combine = all if name == "$and" else any
        return lambda value: combine([part(value) for part in parts])
    if name == "$not":
        condition = _compile(operand, has_key=has_key, depth=depth)
        return lambda value: not condition(value)
    if name in _COMPARISONS:
        if not has_key:
            raise ConfigurationError(
                f"{operand!r} has to stand under a key of the metadata.", hint='For example, {"year": 1990}.'
            )
        return lambda value: _compare(_COMPARISONS[name], value, operand)
    if str(name).startswith("$"):
        raise ConfigurationError(
            f"Unknown filter operator {name!r}.",
            hint=f"Use one of {', '.join([*_COMPARISONS, '$not', '$and', '$or'])}.",
        )
    condition = _compile(operand, has_key=True, depth=depth)
    return lambda value: condition(_get(value, name))


def _compare(comparison: Callable[[Any, Any], Any], value: Any, operand: Any) -> bool:
    try:
        return bool(comparison(value, operand))
    except TypeError:  # a number is neither more nor less than a text, or than a missing value
        return False


def _get(value: Any, key: Any) -> Any:
    if not isinstance(value, Mapping):
        return _MISSING
    outer, dot, rest = str(key).partition(".")
    if key not in value and dot and isinstance(value.get(outer), Mapping):
        raise ConfigurationError(
            f"{key!r} is not a path into the metadata.", hint=f"Use {{{outer!r}: {{{rest!r}: …}}}}."
        )
    return value.get(key, _MISSING)
