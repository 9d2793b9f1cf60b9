"""Reads and validates records of data files, and log-probabilities from servers and files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)

from rgate_integrations.errors import DataFormatError, first_line
from rgate_integrations.runtime.jsonl import read_jsonl
from rgate_integrations.runtime.replies import get_field

_T = TypeVar("_T")

TokenLogprobs: TypeAlias = tuple[tuple[str, ...], tuple[float, ...]]
"""Tokens and their log-probabilities; both empty if unknown."""

_ROUNDING = 1e-3  # how far rounding may lift a log-probability above 0
_IMPOSSIBLE = -9_999.0  # APIs send this for a probability of 0, because JSON has no infinity


@dataclass(frozen=True)
class Record:
    """A JSON object, such as a line of a data file.

    Attributes:
        where: Where it comes from, such as file and line, for errors.
        fields: Its values by key.
        hint: Hint for errors, such as what a line should look like.
    """

    where: str
    fields: dict[str, Any]
    hint: str = ""

    def error(self, what: str) -> DataFormatError:
        """Return the error for this record; ``what`` describes the problem."""
        return DataFormatError(f"{self.where}: {what}.", hint=self.hint)

    def text(self, key: str) -> str:
        """Return the string under a key, without white space around it.

        Raises:
            DataFormatError: The value is missing, empty, or not a string.
        """
        return self._read(key, _TEXT, problem=f"{key} is empty or not a string")

    def optional_text(self, key: str) -> str:
        """Return the string or number under a key, as a stripped string; empty if missing or null.

        Raises:
            DataFormatError: The value is neither a string nor a finite number.
        """
        return self._read(key, _OPTIONAL_TEXT, problem=f"{key} is not a string or finite number") or ""

    def texts(self, key: str) -> tuple[str, ...]:
        """Return the string or number under a key, or a list of them, as stripped strings; empty if missing or null.

        Raises:
            DataFormatError: A value is neither a string nor a finite number.
        """
        return self._read(key, _TEXTS, problem=f"{key} is neither a string nor a list of strings")

    def optional_number(self, key: str) -> float | None:
        """Return the finite number under a key; None if missing or null.

        Raises:
            DataFormatError: The value is not a finite number.
        """
        return self._read(key, _OPTIONAL_NUMBER, problem=f"{key} is not a finite number")

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return the list under a key: one or more finite numbers.

        Raises:
            DataFormatError: The value is missing, empty, or not a list of finite numbers.
        """
        return self._read(key, _NUMBERS, problem=f"{key} is not a list of one or more finite numbers")

    def logprobs(self, key: str) -> tuple[float, ...] | None:
        """Return the log-probabilities under a key, each in [-9999, 0]; None if missing, null or an empty list.

        Raises:
            DataFormatError: The value is not a list of log-probabilities, see `check_logprob`.
        """
        return self._read(key, _LOGPROBS, problem=f"{key} is not a list of log-probabilities") or None

    def _read(self, key: str, kind: TypeAdapter[_T], *, problem: str) -> _T:
        try:
            return kind.validate_python(self.fields.get(key))
        except ValidationError as error:
            if key not in self.fields:
                raise self.error(f"{key} is missing") from None
            # Not chained, because pydantic's message is a page long.
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise self.error(f"{problem} ({reason})") from None


def first_problem(error: Exception) -> str:
    """Return the first line of an error's message; for a pydantic error, its first problem, as ``field: message``."""
    if not isinstance(error, ValidationError):
        return first_line(error).removesuffix(".")
    problem = error.errors(include_url=False)[0]
    # Errors of our own validators are whole sentences, and may have hints.
    message = problem["msg"].removeprefix("Value error, ").partition(" Hint: ")[0].removesuffix(".")
    return f"{'.'.join(map(str, problem['loc']))}: {message}".removeprefix(": ")


def read_records(path: str | Path, *, hint: str = "") -> Iterator[Record]:
    """Yield a record for each line of a JSONL file of objects, plain or gzipped.

    Args:
        path: The file.
        hint: What a line should look like, for errors.

    Raises:
        DataFormatError: The file cannot be read, or a line is not a JSON object; the message names file and line.
    """
    for number, value in read_jsonl(path, hint=hint):
        where = f"{path}, line {number}"
        if not isinstance(value, dict):
            raise DataFormatError(f"{where}: not a JSON object.", hint=hint)
        yield Record(where, value, hint)


def check_logprob(value: float) -> float:
    """Check a natural log-probability, and return it clipped to [-9999, 0].

    Raises:
        ValueError: The value is NaN, or above 0 by more than rounding (0.001). Such a value may be a
            probability; clipped to 0, it would make any answer look certain.
    """
    if math.isnan(value):
        raise ValueError("a log-probability is NaN")
    if value > _ROUNDING:
        raise ValueError(f"a log-probability must be at most 0, not {value}: are these probabilities?")
    return max(min(value, 0.0), _IMPOSSIBLE)


def read_logprobs(entries: Any) -> TokenLogprobs:
    """Return tokens and log-probabilities of a list of objects with ``token`` and ``logprob``, as in OpenAI's API.

    Both tuples are empty if ``entries`` is not such a list, or if any entry is invalid. Tokens without text, such as
    the end of the turn, are left out.
    """
    tokens: list[str] = []
    logprobs: list[float] = []
    try:
        for entry in entries:
            fields = entry if isinstance(entry, Mapping) else vars(entry)
            if fields["token"]:
                tokens.append(str(fields["token"]))
                logprobs.append(check_logprob(float(fields["logprob"])))
    except (KeyError, TypeError, ValueError):
        return (), ()
    return tuple(tokens), tuple(logprobs)


def read_choice_logprobs(choice: Any) -> TokenLogprobs:
    """Return the tokens and log-probabilities of a choice (one answer) of OpenAI's API; see `read_logprobs`.

    The choice is JSON, or an object of OpenAI's client.
    """
    logprobs = get_field(choice, "logprobs")
    entries = get_field(logprobs, "content") or logprobs
    columns = [get_field(logprobs, name) for name in ("tokens", "token_logprobs")]
    if all(columns):  # completions have parallel lists, in which a text's first token has no probability
        entries = [{"token": token, "logprob": value or 0.0} for token, value in zip(*columns, strict=False)]
    return read_logprobs(entries)


def _write_number(value: Any) -> Any:
    """Return a finite number as text; anything else unchanged, such as NaN (a missing value in pandas)."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_whole or (isinstance(value, float) and math.isfinite(value)) else value


def _as_list(value: Any) -> list[Any]:
    """Return a list unchanged, a single value as a list of one, and null as an empty list."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


_Text = Annotated[str, BeforeValidator(_write_number), StringConstraints(strip_whitespace=True)]
_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_TEXT = TypeAdapter(Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)])
_OPTIONAL_TEXT = TypeAdapter(_Text | None)
_TEXTS = TypeAdapter(Annotated[tuple[_Text, ...], BeforeValidator(_as_list)])
_OPTIONAL_NUMBER = TypeAdapter(_Number | None)
_NUMBERS = TypeAdapter(Annotated[tuple[_Number, ...], Field(min_length=1)])
_LOGPROBS = TypeAdapter(tuple[Annotated[float, AfterValidator(check_logprob)], ...] | None)
