"""Typed errors. Each says what was wrong and carries a ``hint``: what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RGateError(Exception):
    """Base of every error of this package.

    Attributes:
        hint: What the reader can do about it, in one sentence; may be empty.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} Hint: {self.hint}" if self.hint else self.message


class InvalidQuestionError(RGateError, ValueError):
    """A question is empty, only white space, or not a string."""


class UnknownNameError(RGateError, LookupError):
    """No gate, model or corpus has that name."""


class ConfigurationError(RGateError, ValueError):
    """A parameter of a gate, a model or an index has a value that cannot work."""


class EvidenceError(RGateError):
    """A piece of evidence that a gate needs could not be computed or was not given."""


class NoAnswerError(EvidenceError):
    """What an LLM wrote is no answer: nothing, thoughts alone, a refusal, or a call of a tool."""


class ScoreError(RGateError):
    """A gate produced a score that is not a number in [0, 1]."""


class ServerError(RGateError, ConnectionError):
    """A server could not be reached: no connection, a wrong key or path, or it stayed busy."""


class DecisionTimeoutError(RGateError, TimeoutError):
    """The time for a decision, the `timeout` of the gate or of the call, was up."""


class MissingDependencyError(RGateError, ImportError):
    """An optional dependency is not installed; the hint is the pip line."""


class ModelLoadError(RGateError):
    """A model folder or Hub id could not be loaded."""


class DownloadError(RGateError):
    """A download failed; nothing was changed in the cache."""


class ChecksumError(DownloadError):
    """A downloaded or assembled file does not match the pinned checksum."""


class WriteError(RGateError, OSError):
    """A file could not be written: a full disk, a quota, no permission. What was there is as it was."""


class LockedError(RGateError):
    """Another process is writing there."""


class IndexNotFoundError(RGateError, FileNotFoundError):
    """There is no index in that folder."""


class IndexCorruptError(RGateError):
    """A file of an index is truncated, changed or unreadable."""


class IndexMismatchError(RGateError):
    """An index was built with another embedder or another format than the one it is opened with."""


class ProfileError(RGateError, ValueError):
    """The profile of a corpus is missing, damaged, of another encoder, or there is nothing to make it of."""


class DataFormatError(RGateError, ValueError):
    """A data file has a line that cannot be used; the message names file and line."""


def no_answer(what: str, *, thinking: bool = False) -> NoAnswerError:
    """Build the error for what an LLM wrote instead of an answer.

    Args:
        what: What that is, such as ``"a refusal"``.
        thinking: Whether it was cut off before the answer, while it thought.
    """
    if thinking:
        return NoAnswerError(
            "The LLM was cut off while it thought, before it answered.",
            hint="Switch its thinking off, or let it write more tokens.",
        )
    return NoAnswerError(f"What the LLM wrote is {what}, and no answer.")


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """Build the error for a name that is not known, suggesting the nearest ones.

    Args:
        kind: What the name should have named, such as ``"gate"``.
        name: The name that was given.
        known: The names that exist.
    """
    names = sorted(known)
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    hint = f"Known names: {', '.join(names)}."
    if near:
        hint = f"Did you mean {' or '.join(near)}?"
    return UnknownNameError(f"There is no {kind} named {name!r}.", hint=hint)


def missing_dependency(module: str, extra: str) -> MissingDependencyError:
    """Build the error for an optional module that is not installed.

    Args:
        module: The module that could not be imported.
        extra: The extra of this package that brings it.
    """
    return MissingDependencyError(
        f"This needs the module {module!r}, which is not installed.",
        hint=f'pip install "rgate-integrations[{extra}]"',
    )
