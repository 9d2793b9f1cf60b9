"""Typed errors. The message says what is wrong with which value, and the ``hint`` what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_LIMIT_SIGNS = (
    "MemoryError",
    "out of memory",
    "bad_alloc",
    "allocate",
    "start new thread",
    "Too many open files",
)


class RGateError(Exception):
    """Base class of this package's errors.

    Attributes:
        message: What is wrong, without the hint.
        hint: What the user can do about it; may be empty.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        if not self.hint:
            return self.message
        stop = "" if self.message.endswith((".", "!", "?", ":", "…")) else "."
        return f"{self.message}{stop} Hint: {self.hint}"


class InvalidQuestionError(RGateError, ValueError):
    """A question is missing, empty or only white space, or not a string."""


class UnknownNameError(RGateError, LookupError):
    """There is no gate, model or other item with the given name."""


class ConfigurationError(RGateError, ValueError):
    """An argument, option or environment setting is invalid or unknown, or does not fit the others."""


class EvidenceError(RGateError):
    """Evidence for a gate, such as a draft, is missing, of the wrong type, or could not be computed."""


class NoAnswerError(EvidenceError):
    """An LLM gave no answer: it wrote nothing or only thoughts, refused, or called a tool."""


class RefusalError(NoAnswerError):
    """An LLM wrote that it does not know, or will not answer. No failure of a gate: the decision has no ``error``."""


class ScoreError(RGateError):
    """A gate returned a score that is not a number in [0, 1], or its model's reply gives no score."""


class ServerError(RGateError, ConnectionError):
    """A server cannot be used: it is unreachable, late or busy, rejects the key or model, or answers invalidly."""


class DecisionTimeoutError(RGateError, TimeoutError):
    """A decision took longer than the ``timeout`` of the gate or of the call."""


class MissingDependencyError(RGateError, ImportError):
    """An optional dependency is not installed, or is too old; the hint says what to install."""


class ModelLoadError(RGateError):
    """A model, gate or measured ability cannot be loaded, or a gate does not match its model or prompts."""


class DownloadError(RGateError):
    """A model or corpus could not be downloaded, converted or stored; the cache is unchanged."""


class ChecksumError(DownloadError):
    """A downloaded or assembled file does not match the pinned checksum."""


class WriteError(RGateError, OSError):
    """A file or folder could not be written (full disk, quota, permissions).

    An existing one is unchanged; an existing log keeps its complete lines.
    """


class LockedError(RGateError):
    """Another process is writing to the same file or folder."""


class IndexNotFoundError(RGateError, FileNotFoundError):
    """A folder contains no index."""


class IndexCorruptError(RGateError):
    """A file of an index is truncated, changed or unreadable."""


class IndexMismatchError(RGateError):
    """An index was built with another embedder or in another format."""


class ProfileError(RGateError, ValueError):
    """A corpus profile is missing, damaged, made for another encoder, or cannot be made."""


class DataFormatError(RGateError, ValueError):
    """Data, such as a file or list of questions, is unreadable, empty or invalid, or has too few records."""


def no_answer(what: str, *, thinking: bool = False, writer: str = "LLM") -> NoAnswerError:
    """Return the error for a reply that is not an answer.

    Args:
        what: The kind of reply, such as ``"a refusal"``.
        thinking: Whether the reply ended before the answer began, most likely while the writer was thinking.
        writer: The model that wrote the reply, ``"LLM"`` or ``"proxy"``.
    """
    if thinking:
        return NoAnswerError(
            f"The {writer} was cut off before it answered, probably while it was thinking.",
            hint=f"Turn off the {writer}'s thinking, or allow more tokens.",
        )
    if what == "a refusal":
        return RefusalError(f"The {writer} wrote that it does not know, or cannot answer.")
    return NoAnswerError(
        f"The {writer} wrote {what} instead of an answer.",
        hint=f"Turn off the {writer}'s thinking and tools, or allow more tokens.",
    )


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """Return the error for an unknown name; its hint suggests similar names, or lists all if none is similar.

    Args:
        kind: The kind of thing that is named, such as ``"gate"``.
        name: The unknown name.
        known: The known names.
    """
    names = sorted(known)
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Known names: {', '.join(names) or 'none'}."
    return UnknownNameError(f"There is no {kind} named {name!r}.", hint=hint)


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Raise a `MissingDependencyError` if an import in the ``with`` block fails.

    Args:
        extra: The extra of this package that installs the modules.
    """
    try:
        yield
    except RGateError:  # it names its own extra
        raise
    except ModuleNotFoundError as error:
        raise missing_dependency(error.name or str(error), extra) from error
    except ImportError as error:
        raise MissingDependencyError(
            f"The packages of the extra {extra!r} cannot be imported: {first_line(error)}.",
            hint=f'They may be outdated or incompatible. Run: pip install --upgrade "rgate-integrations[{extra}]"',
        ) from error


def missing_dependency(module: str, extra: str) -> MissingDependencyError:
    """Return the error for an optional module that is not installed.

    Args:
        module: Name of the missing module.
        extra: The extra of this package that installs the module.
    """
    return MissingDependencyError(
        f"The module {module!r} is needed, but not installed.",
        hint=f'Run: pip install "rgate-integrations[{extra}]"',
    )


def limit_hint(message: str) -> str:
    """Return a hint if an error's message says that memory, threads or open files ran out; otherwise empty."""
    if any(sign in message for sign in _LIMIT_SIGNS):
        return "Give the process more memory, threads or open files, as the message says, or let it do less at once."
    return ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without a hint; the name of its type if the message is empty."""
    message = error.message if isinstance(error, RGateError) else str(error)
    return (message.strip().splitlines() or [type(error).__name__])[0]
