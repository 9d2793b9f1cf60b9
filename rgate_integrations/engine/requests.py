"""What callers ask, checked: the worker gets nothing that could trip it."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, EvidenceError, InvalidQuestionError
from rgate_integrations.evidence.base import Inputs


@dataclass(frozen=True)
class Request:
    """One question as a caller asks it.

    Attributes:
        inputs: The question and what came with it; or why it cannot be judged.
        threshold: What P(known) is compared with.
    """

    inputs: Inputs | Exception
    threshold: float


def checked(
    question: object,
    threshold: object,
    draft: object,
    popularity: object,
    history: object = None,
    metadata: object = None,
    *,
    default: float,
) -> Request:
    """Check what a caller gives with one question.

    Args:
        question: A string that is not empty.
        threshold: A number of at least 0, or None.
        draft: A `Draft`, a string, or None.
        popularity: A number, or None.
        history: The turns before, as lines; or None.
        metadata: A mapping, or None.
        default: The threshold where none is given.

    Raises:
        ConfigurationError: The threshold is not a number of at least 0.
    """
    compared = default if threshold is None else valid_threshold(threshold)
    try:
        inputs = Inputs(
            valid_question(question),
            _valid_draft(draft),
            _valid_popularity(popularity),
            _valid_history(history),
            _valid_metadata(metadata),
        )
    except (InvalidQuestionError, EvidenceError) as error:
        return Request(error, compared)
    return Request(inputs, compared)


def checked_batch(
    questions: Sequence[str],
    threshold: float | Sequence[float | None] | None,
    drafts: Sequence[Draft | str | None] | None,
    popularity: Sequence[float | None] | None,
    histories: Sequence[Sequence[str] | None] | None = None,
    metadata: Sequence[Mapping[str, Any] | None] | None = None,
    *,
    default: float,
) -> list[Request]:
    """Check what a caller gives with a batch of questions; see `checked`.

    Raises:
        ConfigurationError: A threshold is not a number of at least 0, or the numbers of items differ.
    """
    if isinstance(questions, str):
        raise ConfigurationError("decide_batch takes a list of questions.", hint="Use decide() for one.")
    n = len(questions)
    # A string is iterable, too, but it is one bad threshold and not several.
    thresholds: list[Any] = [threshold] * n
    if isinstance(threshold, Iterable) and not isinstance(threshold, str):
        thresholds = list(threshold)
    given: dict[str, list[Any]] = {
        "thresholds": thresholds,
        "drafts": [None] * n if drafts is None else list(drafts),
        "popularity scores": [None] * n if popularity is None else list(popularity),
        "histories": [None] * n if histories is None else list(histories),
        "mappings of metadata": [None] * n if metadata is None else list(metadata),
    }
    for name, values in given.items():
        if len(values) != n:
            raise ConfigurationError(f"{n} questions do not match {len(values)} {name}.")
    return [checked(*each, default=default) for each in zip(questions, *given.values(), strict=True)]


def valid_timeout(timeout: object) -> float | None:
    """Return a time in seconds, or None for no limit.

    Raises:
        ConfigurationError: It is not a number above 0.
    """
    if timeout is None or timeout == math.inf:
        return None
    if not isinstance(timeout, Real) or not float(timeout) > 0:  # NaN is above nothing
        raise ConfigurationError(f"A timeout must be a number of seconds above 0, not {timeout!r}.")
    return min(float(timeout), threading.TIMEOUT_MAX)


def valid_question(question: object) -> str:
    """Return a question without surrounding white space.

    Raises:
        InvalidQuestionError: It is not a string, is empty, or holds NUL bytes.
    """
    if not isinstance(question, str):
        raise InvalidQuestionError(
            f"A question must be a string, not {type(question).__name__}.",
            hint="Pass the text of the question.",
        )
    if not question.strip():
        raise InvalidQuestionError("The question is empty.", hint="Pass at least one word.")
    if "\0" in question:
        raise InvalidQuestionError(
            "The question holds NUL bytes.", hint="Is this text, and in the right encoding?"
        )
    return question.strip().encode("utf-8", errors="replace").decode()


def valid_threshold(threshold: object) -> float:
    """Return a threshold as a number.

    Raises:
        ConfigurationError: It is not a number of at least 0.
    """
    if not isinstance(threshold, Real):
        raise ConfigurationError(
            f"A threshold must be a number of at least 0, not a {type(threshold).__name__}."
        )
    value = float(threshold)
    if not math.isfinite(value) or value < 0:
        raise ConfigurationError(f"A threshold must be a number of at least 0, not {value}.")
    return value


def _valid_draft(draft: object) -> Draft | None:
    if isinstance(draft, str):
        return Draft(text=draft.strip(), source="recorded")
    if draft is None or isinstance(draft, Draft):
        return draft
    raise EvidenceError(f"A draft must be a string or a Draft, not {type(draft).__name__}.")


def _valid_popularity(popularity: object) -> float | None:
    if popularity is None:
        return None
    if not isinstance(popularity, Real):
        raise EvidenceError(f"A popularity score must be a number, not a {type(popularity).__name__}.")
    try:
        return float(popularity)
    except OverflowError as error:  # JSON has whole numbers of any length
        raise EvidenceError("A popularity score must be a number that a float can hold.") from error


def _valid_history(history: object) -> tuple[str, ...]:
    if history is None:
        return ()
    # A string is a sequence of strings, too, but its letters are no turns.
    if isinstance(history, str) or not isinstance(history, Sequence):
        raise EvidenceError(f"A history must be a list of strings, not a {type(history).__name__}.")
    turns = []
    for turn in history:
        if not isinstance(turn, str):
            raise EvidenceError(
                f"A turn of a history must be a string, not a {type(turn).__name__}.",
                hint='Write it as "user: ..." or "assistant: ...".',
            )
        if turn.strip():
            turns.append(valid_question(turn))
    return tuple(turns)


def _valid_metadata(metadata: object) -> Mapping[str, Any]:
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise EvidenceError(f"Metadata must be a mapping, not a {type(metadata).__name__}.")
    return metadata
