"""Records of data files, and log-probabilities as servers and files give them: checked where they are read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rgate_integrations.errors import DataFormatError
from rgate_integrations.runtime.files import read_jsonl

TokenLogprobs: TypeAlias = tuple[tuple[str, ...], tuple[float, ...]]
"""Tokens and the log-probability of each; both empty where there are none."""

_ROUNDING = 1e-3  # by which a log-probability may be above 0
_LEAST = -9_999.0  # what APIs send for "never"; JSON has no infinity


@dataclass(frozen=True)
class Record:
    """A JSON object of a data file.

    Attributes:
        where: File and line, for errors.
        number: Number of the line, from 1.
        fields: What it holds.
        hint: What a line should look like, for errors.
    """

    where: str
    number: int
    fields: dict[str, Any]
    hint: str = ""

    def wrong(self, what: str) -> DataFormatError:
        """Build the error for this record; ``what`` is wrong with it."""
        return DataFormatError(f"{self.where}: {what}.", hint=self.hint)

    def text(self, key: str) -> str:
        """Return a text without the white space around it.

        Raises:
            DataFormatError: There is none, or it is empty or no text.
        """
        value = self.fields.get(key)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(f"no {key}")
        return self._as_text(key, value).strip()

    def optional_text(self, key: str) -> str:
        """Return a text or number as text, without the white space around it; empty if it is missing or null.

        Raises:
            DataFormatError: It is something else.
        """
        value = self.fields.get(key)
        return "" if value is None else self._as_text(key, value).strip()

    def texts(self, key: str) -> tuple[str, ...]:
        """Return texts of which there may be one or several; none if it is missing or null.

        Raises:
            DataFormatError: It is neither a text nor a list of texts and numbers.
        """
        value = self.fields.get(key)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        return tuple(self._as_text(key, each) for each in values)

    def optional_number(self, key: str) -> float | None:
        """Return a finite number, or None if it is missing or null.

        Raises:
            DataFormatError: It is something else.
        """
        value = self.fields.get(key)
        return None if value is None else self._as_number(key, value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return finite numbers, at least one.

        Raises:
            DataFormatError: There is something else.
        """
        value = self.fields.get(key)
        if not isinstance(value, list) or not value:
            raise self.wrong(f"{key} is no list of numbers")
        return tuple(self._as_number(key, each) for each in value)

    def logprobs(self, key: str) -> tuple[float, ...] | None:
        """Return log-probabilities, each at most 0, or None if they are missing, null or an empty list.

        Raises:
            DataFormatError: It is something else than a list of numbers, none above 0.
        """
        value = self.fields.get(key)
        if value is None or value == []:
            return None
        if not isinstance(value, list):
            raise self.wrong(f"{key} is no list of numbers")
        try:
            return tuple(as_logprob(float(each)) for each in value)
        except (OverflowError, TypeError, ValueError) as error:
            raise self.wrong(f"{key}: {error}") from None

    def _as_text(self, key: str, value: Any) -> str:
        if not isinstance(value, str | int | float):
            raise self.wrong(f"{key} holds a {type(value).__name__}, not a text")
        text = str(value)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise self.wrong(f"{key} has half a surrogate pair, which is no character") from error
        return text

    def _as_number(self, key: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # A whole number of a thousand digits is no float.
        if not is_number or abs(value) > 1e300 or not math.isfinite(value):
            raise self.wrong(f"{key} holds something else than a finite number")
        return float(value)


def read_records(path: str | Path, *, hint: str = "") -> Iterator[Record]:
    """Read a JSONL file of objects, also gzipped.

    Args:
        path: The file.
        hint: What a line should look like, for errors.

    Raises:
        DataFormatError: The file cannot be read, or a line is no JSON object; the message names file and line.
    """
    for number, value in read_jsonl(path, hint=hint):
        where = f"{path}, line {number}"
        if not isinstance(value, dict):
            raise DataFormatError(f"{where}: not a JSON object.", hint=hint)
        yield Record(where, number, value, hint)


def as_logprob(value: float) -> float:
    """Return a natural log-probability, at most 0, and finite: "never" is -9999.

    Raises:
        ValueError: It is above 0, or infinite, or not a number. Taken for 0, it would make any answer certain.
    """
    if math.isnan(value):
        raise ValueError("a log-probability is not a number")
    if value > _ROUNDING:
        raise ValueError(f"a log-probability is at most 0, not {value}: are these probabilities?")
    return max(min(value, 0.0), _LEAST)


def read_logprobs(entries: Any) -> TokenLogprobs:
    """Read a list of what has a ``token`` and its ``logprob``, as OpenAI's API gives them.

    What cannot be read is none. Tokens without text, such as the end of the turn, are left out.
    """
    tokens: list[str] = []
    logprobs: list[float] = []
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        return (), ()
    try:
        for entry in entries:
            fields = entry if isinstance(entry, Mapping) else vars(entry)
            if fields["token"]:
                tokens.append(str(fields["token"]))
                logprobs.append(as_logprob(float(fields["logprob"])))
    except (KeyError, TypeError, ValueError):
        return (), ()
    return tuple(tokens), tuple(logprobs)


def message_logprobs(metadata: Any) -> TokenLogprobs:
    """Read the ``response_metadata`` of a message of LangChain."""
    if isinstance(metadata, Mapping):
        metadata = metadata.get("logprobs")
    if isinstance(metadata, Mapping):
        metadata = metadata.get("content")
    return read_logprobs(metadata)
