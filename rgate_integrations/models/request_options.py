"""Options of requests to an LLM, and what we learn about its server."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from rgate_integrations.decision import Draft, valid_choice, valid_count
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.runtime.files import json_line
from rgate_integrations.runtime.flow import Flow, Step

Think: TypeAlias = Literal["off", "low", "as-is"]
"""How much an LLM should think before it answers; ``"as-is"`` sends nothing."""

_THINK: Mapping[Think, dict[str, Any]] = {
    # These cover OpenAI and Ollama, the templates of Qwen and GLM, and those of DeepSeek and Granite.
    "off": {
        "reasoning_effort": "none",
        "chat_template_kwargs": {"enable_thinking": False, "thinking": False},
    },
    "low": {"reasoning_effort": "low"},
    "as-is": {},
}
_MORE_EFFORT = {"none": "minimal", "minimal": "low"}  # the value to try after a refused one
# Fields that may be left out, in the order in which we look for them in a refusal.
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
    """Options of requests to an LLM. Use those of your application: with others, you measure a different LLM.

    Attributes:
        think: How much the LLM should think before it answers: ``"off"``, ``"low"``, or ``"as-is"`` to send nothing.
        thinking_tokens: Additional tokens for an LLM that thinks before it answers, at least 0.
        extra: Additional fields of a request's body, or arguments of a provider's chat model.

    Raises:
        ConfigurationError: A value is out of range, or ``extra`` is not a mapping.
    """

    think: Think = "as-is"
    thinking_tokens: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        valid_count(self.thinking_tokens, "thinking_tokens", least=0)
        valid_choice(self.think, "think", get_args(Think))
        if not isinstance(self.extra, Mapping):
            raise ConfigurationError(
                f"extra must be a mapping, not {type(self.extra).__name__}.",
                hint='Use a dict, such as {"top_p": 0.9}.',
            )

    @property
    def body(self) -> dict[str, Any]:
        """The fields that these options add to the body of a request."""
        return {**_THINK[self.think], **self.extra}

    @property
    def facts(self) -> dict[str, str]:
        """Values that identify these options, by name.

        Defaults, ``thinking_tokens``, and the extra field ``base_url`` (the server's address) are left out. The other
        extra fields are hashed, because one may be a secret.
        """
        # A server may move without its answers changing.
        extra = {name: value for name, value in self.extra.items() if name != "base_url"}
        digest = hashlib.sha256(json_line(extra).encode()).hexdigest()[:16]
        facts = {"think": self.think, "extra": digest if extra else ""}
        return {name: value for name, value in facts.items() if value not in ("as-is", "")}


class ServerHabits:
    """Records which fields a server refuses, and whether its model thinks before it answers.

    Args:
        options: The options of the requests.

    Attributes:
        refused: Refused fields, in the order of their refusal; a field occurs once for each refused value.
        thinks: Whether the model has ever thought before an answer; None until its first answer.
    """

    def __init__(self, options: RequestOptions) -> None:
        self.options = options
        self.refused: list[str] = []
        self.thinks: bool | None = None

    def body(self, body: dict[str, Any], without: list[str], *, longer: bool) -> dict[str, Any]:
        """Return the body of a request as it is sent.

        Args:
            body: The body, to which the fields of `options` are added.
            without: Refused fields, to be left out or sent in another form. A field of which the server has refused
                two values occurs twice.
            longer: Whether to add tokens for thoughts.
        """
        sent = {**body, **self.options.body}
        if longer:
            sent["max_tokens"] += self.options.thinking_tokens
        for name in without:
            value = sent.pop(name, None)
            # Leave out a refused field, unless the API has another name or value for it.
            if name == "max_tokens" and value is not None:
                sent["max_completion_tokens"] = value
            elif name == "reasoning_effort" and value in _MORE_EFFORT:
                sent[name] = _MORE_EFFORT[value]
        return sent

    def find_refused(self, refusal: str, sent: Mapping[str, Any]) -> str:
        """Return a field of ``sent`` that the server's refusal mentions and that may be left out; empty if none."""
        for name in _OPTIONAL:
            if (
                name in sent
                and name not in self.options.extra
                and re.search(rf"(?<!\w)(?:top_)?{name}\b", refusal)
            ):
                return name
        return ""

    def complete(self, ask: Callable[[bool, bool], Step]) -> Flow[Draft]:
        """Return an answer. If the LLM may have been cut off while thinking, repeat the request with more tokens.

        An LLM that is known to think gets the additional tokens at once. If ``thinking_tokens`` is 0, the request is
        never repeated.

        Args:
            ask: Function that returns a step, which sends one request. Its arguments are two flags: whether to add
                tokens for thoughts, and whether the request must succeed. If the first request gave an answer, the
                second one may fail; the first answer is then kept.
        """
        longer = bool(self.thinks)
        draft: Draft = yield ask(longer, True)
        # If the prompt has the opening tag, a reply cut off in its thoughts has no tag, so repeat the first request.
        may_be_thoughts = draft.is_cut_off or self.thinks is None
        if not longer and self.options.thinking_tokens and not draft.finished and may_be_thoughts:
            is_required = draft.is_cut_off
            try:
                again: Draft = yield ask(True, is_required)
            except Exception:  # perhaps a slow server or a short context
                if is_required:
                    raise
                again = draft
            if again.thinking_tokens or is_required:
                draft, longer = again, True
        return self._read(draft, longer=longer)

    def _read(self, draft: Draft, *, longer: bool) -> Draft:
        """Record in `thinks` whether the model thought, and return the draft.

        If the reply was cut off even with additional tokens for thoughts (``longer``), and no thoughts were
        recognised in it, its text is taken for thoughts and removed.
        """
        # Thoughts may be neither shown nor counted. An answer that needed more tokens came after thoughts.
        self.thinks = bool(self.thinks or draft.thinking_tokens or (longer and draft.text))
        if longer and not draft.thinking_tokens and not draft.finished:
            thinking = len(draft.tokens) or len(draft.text.split()) or 1
            return draft.model_copy(
                update={"text": "", "tokens": (), "logprobs": None, "thinking_tokens": thinking}
            )
        return draft
