"""What callers ask, checked: the worker gets nothing that could trip it."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

from pydantic import ValidationError

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, EvidenceError, InvalidQuestionError
from rgate_integrations.gates.evidence.base import Inputs
from rgate_integrations.runtime.text import encodable


def check_requests(
    questions: Sequence[str],
    threshold: float | Sequence[float | None] | None = None,
    drafts: Sequence[Draft | str | None] | None = None,
    popularity: Sequence[float | None] | None = None,
    histories: Sequence[Sequence[str] | None] | None = None,
    metadata: Sequence[Mapping[str, Any] | None] | None = None,
) -> tuple[list[Inputs | Exception], list[float | None]]:
    """Check what a caller gives with a batch of questions.

    Returns:
        Each question with what came with it, or why it cannot be judged; and the threshold of each, None for the
        gate's own.

    Args:
        questions: Strings that are not empty.
        threshold: A number of at least 0, or one a question.
        drafts: Each a `Draft`, a string or None.
        popularity: Numbers.
        histories: The turns before each question, as lines.
        metadata: Mappings.

    Raises:
        ConfigurationError: A threshold is not a number of at least 0, or the numbers of items differ.
    """
    if isinstance(questions, str):
        raise ConfigurationError("decide_batch takes a list of questions.", hint="Use decide() for one.")
    n = len(questions)
    # A string is iterable, too, but it is one bad threshold and not several.
    if not isinstance(threshold, Iterable) or isinstance(threshold, str):
        threshold = [threshold] * n
    given = {
        "thresholds": threshold,
        "drafts": drafts,
        "popularity scores": popularity,
        "histories": histories,
        "mappings of metadata": metadata,
    }
    columns: list[list[Any]] = []
    for name, values in given.items():
        column = [None] * n if values is None else list(values)
        if len(column) != n:
            raise ConfigurationError(f"{n} questions do not match {len(column)} {name}.")
        columns.append(column)
    inputs: list[Inputs | Exception] = []
    thresholds: list[float | None] = []
    for question, own_threshold, *rest in zip(questions, *columns, strict=True):
        thresholds.append(None if own_threshold is None else valid_threshold(own_threshold))
        try:
            inputs.append(_inputs(question, *rest))
        except (InvalidQuestionError, EvidenceError) as error:
            inputs.append(error)
    return inputs, thresholds


def valid_timeout(timeout: object) -> float | None:
    """Return a time in seconds, or None for no limit.

    Raises:
        ConfigurationError: It is not a number above 0.
    """
    if timeout is None or timeout == math.inf:
        return None
    if (
        not isinstance(timeout, Real) or isinstance(timeout, bool) or not float(timeout) > 0
    ):  # NaN is above nothing
        raise ConfigurationError(f"A timeout must be a number of seconds above 0, not {timeout!r}.")
    return min(float(timeout), threading.TIMEOUT_MAX)


def valid_threshold(threshold: object) -> float:
    """Return a threshold as a number.

    Raises:
        ConfigurationError: It is not a number of at least 0.
    """
    if not isinstance(threshold, Real) or isinstance(threshold, bool):
        # Not printed: an object of the user's own may not be printable.
        raise ConfigurationError(
            f"A threshold must be a number of at least 0, not a {type(threshold).__name__}."
        )
    if not 0 <= float(threshold) < math.inf:
        raise ConfigurationError(f"A threshold must be a number of at least 0, not {float(threshold)}.")
    return float(threshold)


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
    return encodable(question.strip())


def _inputs(given: object, draft: Any, popularity: Any, history: Any, metadata: Any) -> Inputs:
    """Check one question and what came with it."""
    question = valid_question(given)
    if isinstance(draft, str):
        draft = Draft(text=draft.strip(), source="recorded")
    try:
        inputs = Inputs(
            question,
            draft=draft,
            popularity=popularity,
            history=() if history is None else history,
            metadata={} if metadata is None else metadata,
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise EvidenceError(
            f"The {first['loc'][0]} of a question cannot be read: {first['msg']}.",
            hint="A draft is a Draft or a string, popularity a number, a history a list of strings such as "
            '"user: Who wrote Hamlet?", and metadata a mapping.',
        ) from error
    return replace(inputs, history=tuple(valid_question(turn) for turn in inputs.history if turn.strip()))
