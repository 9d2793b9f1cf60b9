"""Sets a context variable for a block of code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

_T = TypeVar("_T")


@contextmanager
def variable_set(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Set a context variable in the ``with`` block, and restore its earlier value afterwards."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
