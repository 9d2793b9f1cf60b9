"""What an application sends with its questions, what a server takes of that, and whether its model thinks first."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.runtime.files import json_line
from rgate_integrations.runtime.flow import Flow, Step

Think: TypeAlias = Literal["off", "low", "as-is"]
"""How much an LLM thinks before it answers; ``"as-is"`` asks for nothing."""

_THINK: Mapping[Think, dict[str, Any]] = {
    # The names are those of OpenAI and Ollama, of Qwen's and GLM's templates, and of DeepSeek's and Granite's.
    "off": {
        "reasoning_effort": "none",
        "chat_template_kwargs": {"enable_thinking": False, "thinking": False},
    },
    "low": {"reasoning_effort": "low"},
    "as-is": {},
}
_MORE_EFFORT = {"none": "minimal", "minimal": "low"}  # what is asked for where less is refused
# In the order in which they are looked for in a refusal.
_OPTIONAL = (
    "max_tokens",
    "temperature",
    "logprobs",
    "reasoning_effort",
    "chat_template_kwargs",
    "seed",
    "stop",
)


@dataclass(frozen=True)
class RequestOptions:
    """How an LLM is asked: as the application asks it, or what is measured is another LLM.

    Attributes:
        think: How much it is to think before it answers.
        thinking_tokens: By how many tokens an answer of an LLM that thinks may be longer, at least 0.
        extra: More fields of the body of a request, or more arguments of a provider's chat model.

    Raises:
        ConfigurationError: A value is out of its range.
    """

    think: Think = "as-is"
    thinking_tokens: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (
            self.think not in get_args(Think)
            or self.thinking_tokens < 0
            or not isinstance(self.extra, Mapping)
        ):
            raise ConfigurationError(
                f"think={self.think!r} must be one of {', '.join(get_args(Think))}; "
                f"thinking_tokens={self.thinking_tokens!r} at least 0; extra a mapping."
            )

    @property
    def body(self) -> dict[str, Any]:
        """The fields that they add to the body of a request to a server."""
        return {**_THINK[self.think], **self.extra}

    @property
    def facts(self) -> dict[str, str]:
        """What of them decides an answer, as JSON values; of the extra fields a hash, since one may be a key."""
        extra = {name: value for name, value in self.extra.items() if name != "base_url"}
        digest = hashlib.sha256(json_line(extra).encode()).hexdigest()[:16]
        facts = {"think": self.think, "extra": digest if extra else ""}
        return {name: value for name, value in facts.items() if value not in ("as-is", "")}


class ServerHabits:
    """What a server takes, and whether its model thinks first: found out by asking, and then remembered.

    Args:
        options: How it is asked.

    Attributes:
        refused: The parameters that are not sent again, in the order in which they were refused.
        thinks: Whether the model has thought before an answer; None before it has answered.
    """

    def __init__(self, options: RequestOptions) -> None:
        self.options = options
        self.refused: list[str] = []
        self.thinks: bool | None = None

    def __str__(self) -> str:
        said = []
        if self.thinks:
            although = " although --think off was sent" if self.options.think == "off" else ""
            said.append(f"thinks before it answers{although}")
        if self.refused:
            said.append(f"does not take {', '.join(dict.fromkeys(self.refused))}")
        return " and ".join(said)

    def body(self, body: dict[str, Any], without: list[str], *, longer: bool) -> dict[str, Any]:
        """Return the body of a request as it is sent.

        Args:
            body: The body of a question.
            without: Parameters that are refused; one that is there twice was refused with two values.
            longer: Whether the model may think first.
        """
        sent = {**body, **self.options.body}
        if longer:
            sent["max_tokens"] += self.options.thinking_tokens
        for name in without:
            value = sent.pop(name, None)
            if name == "max_tokens" and value is not None:
                sent["max_completion_tokens"] = value
            elif name == "reasoning_effort" and value in _MORE_EFFORT:
                sent[name] = _MORE_EFFORT[value]
        return sent

    def find_refused(self, refusal: str, sent: Mapping[str, Any]) -> str:
        """Return the parameter that a refusal names; empty if it names none that was sent by us."""
        for name in _OPTIONAL:
            if (
                name in sent
                and name not in self.options.extra
                and re.search(rf"(?<!\w)(?:top_)?{name}\b", refusal)
            ):
                return name
        return ""

    def complete(self, ask: Callable[[bool, bool], Step]) -> Flow[Draft]:
        """Ask for an answer; again, with more tokens, if it was cut off while the model thought.

        Args:
            ask: Returns the step that asks once, from two flags: whether the model may think first, and whether the
                answer is required, or an earlier one will do.
        """
        longer = bool(self.thinks)
        draft: Draft = yield ask(longer, True)
        # Thoughts that the prompt opens show only at their end: the first answer is asked for again.
        may_be_thoughts = draft.is_cut_off or self.thinks is None
        if not longer and self.options.thinking_tokens and not draft.finished and may_be_thoughts:
            is_required = draft.is_cut_off
            try:
                again: Draft = yield ask(True, is_required)
            except Exception:  # such as a slow server, or a short context
                if is_required:
                    raise
                again = draft
            if again.thinking_tokens or is_required:
                draft, longer = again, True
        return self._read(draft, longer=longer)

    def _read(self, draft: Draft, *, longer: bool) -> Draft:
        """Note whether the model thought, and return its answer: empty if that was all thoughts."""
        # Thoughts may be neither shown nor counted: then there was no answer until it was asked for a longer one.
        self.thinks = bool(self.thinks or draft.thinking_tokens or (longer and draft.text))
        if longer and not draft.thinking_tokens and not draft.finished:
            thinking = len(draft.tokens) or len(draft.text.split()) or 1
            return draft.model_copy(
                update={"text": "", "tokens": (), "logprobs": None, "thinking_tokens": thinking}
            )
        return draft
