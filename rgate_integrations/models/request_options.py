"""Options of an application's requests, and what its server turns out to accept."""

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
_MORE_EFFORT = {"none": "minimal", "minimal": "low"}  # requested if less is refused
# In the order in which a refusal is searched for them.
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
    """Options of requests to an LLM. Use the application's own, or another LLM is measured.

    Attributes:
        think: How much it thinks before it answers.
        thinking_tokens: Additional tokens for the thoughts of an LLM that thinks, at least 0.
        extra: Further fields of a request's body, or further arguments of a provider's chat model.

    Raises:
        ConfigurationError: A value is out of range.
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
        """The fields that they add to the body of a request."""
        return {**_THINK[self.think], **self.extra}

    @property
    def facts(self) -> dict[str, str]:
        """What identifies them, as JSON values; of the extra fields a hash, since one may be a secret."""
        extra = {name: value for name, value in self.extra.items() if name != "base_url"}
        digest = hashlib.sha256(json_line(extra).encode()).hexdigest()[:16]
        facts = {"think": self.think, "extra": digest if extra else ""}
        return {name: value for name, value in facts.items() if value not in ("as-is", "")}


class ServerHabits:
    """Remembers which fields a server refuses, and whether its model thinks before it answers.

    Args:
        options: The options of the requests.

    Attributes:
        refused: The fields that are not sent again, in the order of their refusal.
        thinks: Whether the model has thought before an answer; None before its first answer.
    """

    def __init__(self, options: RequestOptions) -> None:
        self.options = options
        self.refused: list[str] = []
        self.thinks: bool | None = None

    def __str__(self) -> str:
        habits = []
        if self.thinks:
            although = " although --think off was sent" if self.options.think == "off" else ""
            habits.append(f"thinks before it answers{although}")
        if self.refused:
            habits.append(f"does not take {', '.join(dict.fromkeys(self.refused))}")
        return " and ".join(habits)

    def body(self, body: dict[str, Any], without: list[str], *, longer: bool) -> dict[str, Any]:
        """Return the body of a request as it is sent.

        Args:
            body: The body of a question.
            without: Refused fields; one that occurs twice was refused with two values.
            longer: Whether to add the tokens for thoughts.
        """
        sent = {**body, **self.options.body}
        if longer:
            sent["max_tokens"] += self.options.thinking_tokens
        for name in without:
            value = sent.pop(name, None)
            # A refused field is left out, unless the API has another name or value for it.
            if name == "max_tokens" and value is not None:
                sent["max_completion_tokens"] = value
            elif name == "reasoning_effort" and value in _MORE_EFFORT:
                sent[name] = _MORE_EFFORT[value]
        return sent

    def find_refused(self, refusal: str, sent: Mapping[str, Any]) -> str:
        """Return the optional field that a refusal names; empty if it names none."""
        for name in _OPTIONAL:
            if (
                name in sent
                and name not in self.options.extra
                and re.search(rf"(?<!\w)(?:top_)?{name}\b", refusal)
            ):
                return name
        return ""

    def complete(self, ask: Callable[[bool, bool], Step]) -> Flow[Draft]:
        """Request an answer, and repeat the request with more tokens if it was cut off during thoughts.

        Args:
            ask: Returns the step of one request, from two flags: whether to add the tokens for thoughts, and whether
                the answer is required or an earlier one is good enough.
        """
        longer = bool(self.thinks)
        draft: Draft = yield ask(longer, True)
        # If the prompt opens the thoughts, only their end shows; so the first cut-off answer is requested again.
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
        """Remember whether the model thought, and return its answer, without text if it was all thoughts."""
        # Thoughts may be neither shown nor counted: an answer that came only with more tokens follows thoughts.
        self.thinks = bool(self.thinks or draft.thinking_tokens or (longer and draft.text))
        if longer and not draft.thinking_tokens and not draft.finished:
            thinking = len(draft.tokens) or len(draft.text.split()) or 1
            return draft.model_copy(
                update={"text": "", "tokens": (), "logprobs": None, "thinking_tokens": thinking}
            )
        return draft
