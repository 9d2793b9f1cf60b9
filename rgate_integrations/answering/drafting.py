"""What the adapters' drafters share: what a model is asked for, and which errors may change that.

A draft is best with log-probabilities and a token limit. Some models know neither. Only an error that *says so*
means that: a refused request, an unknown argument, a typed "unsupported". A timeout, a full queue or a broken
connection says nothing about what the model can do, so the next call asks for everything again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rgate_integrations.runtime.threads import ForkSafeLock

_REFUSED = frozenset({400, 404, 405, 415, 422, 501})
_UNSUPPORTED = ("unsupported", "notsupported", "notimplemented", "badrequest", "unprocessable")
_WORDS = ("logprob", "max_tokens", "unsupported", "not supported", "unexpected keyword", "unknown parameter")


class DraftRequest:
    """The arguments of a drafting call: all at first, and fewer once the model has refused some.

    Safe for threads: callers that learn of a refusal at the same time agree on what is left.

    Args:
        tokens: Maximum number of tokens of a draft.
        options: Whether the model takes options at all; a plain function does not.
    """

    def __init__(self, tokens: int, *, options: bool = True) -> None:
        limited = {"max_tokens": tokens, "logprobs": True}
        self._forms: Sequence[Mapping[str, Any]] = (limited, {"max_tokens": tokens}, {}) if options else ({},)
        self._first = 0
        self._lock = ForkSafeLock()

    @property
    def forms(self) -> list[dict[str, Any]]:
        """The arguments to try, in order: each form asks for less than the one before it."""
        return [dict(form) for form in self._forms[self._first :]]

    def worked(self, form: Mapping[str, Any]) -> None:
        """Remember the first form that a model took after it had refused the ones before it."""
        with self._lock:
            self._first = max(self._first, list(self._forms).index(form))


def says_unsupported(error: BaseException) -> bool:
    """Return whether an error says that the model does not take what it was asked with.

    That is a status such as 400, a `TypeError` about an argument, a `NotImplementedError`, an error of a type that
    says so, or a `ValueError` that names what was asked for. Providers raise errors of their own classes, so they are
    told apart by what they carry.
    """
    status = _status(error)
    if status is not None:
        return status in _REFUSED
    text = str(error).lower()
    if isinstance(error, TypeError):
        return "argument" in text
    if isinstance(error, NotImplementedError):
        return True
    if any(word in type(error).__name__.lower() for word in _UNSUPPORTED):
        return True
    return isinstance(error, ValueError) and any(word in text for word in _WORDS)


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that an error carries, wherever its library keeps it."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "http_status", "status", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return int(value)
    return None
