"""A provider's LLM, such as ``openai:gpt-5``, by LangChain's chat models: their keys, retries and rate limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from langchain_core.language_models import BaseChatModel

from rgate_integrations.answering.drafting import read_message, says_unsupported
from rgate_integrations.decision import Draft
from rgate_integrations.errors import (
    ConfigurationError,
    EvidenceError,
    MissingDependencyError,
    ServerError,
    missing_dependency,
)
from rgate_integrations.langchain.chat_models import length_field
from rgate_integrations.models.base import LanguageModel, TargetScores, Values
from rgate_integrations.models.request_options import RequestOptions, ServerHabits, Think
from rgate_integrations.prompts import PromptTemplate

_THINK: dict[str, dict[Think, dict[str, Any]]] = {
    "openai": {"off": {"reasoning_effort": "none"}, "low": {"reasoning_effort": "low"}},
    "anthropic": {"off": {"thinking": {"type": "disabled"}}},
    "google_genai": {"off": {"thinking_budget": 0}},
    "ollama": {"off": {"reasoning": False}, "low": {"reasoning": "low"}},
}
_UNUSABLE = (401, 403, 404)
_QUOTED = 300  # characters of a provider's words in an error


class ProviderModel(LanguageModel):
    """The LLM of a provider that LangChain's ``init_chat_model`` knows. It writes, and gives no scores.

    Args:
        provider: The provider, such as ``"openai"``; its package, such as langchain-openai, must be installed.
        name: Name of the LLM.
        options: How it is asked; what they have more are arguments of the chat model.

    Raises:
        MissingDependencyError: LangChain or the provider's package is not installed.
        ConfigurationError: The provider, or an argument, is not known, or its key is missing.
    """

    is_remote: ClassVar[bool] = True
    habits: ServerHabits

    def __init__(
        self,
        provider: str,
        name: str,
        options: RequestOptions = RequestOptions(),  # noqa: B008  it is frozen
    ) -> None:
        try:
            from langchain.chat_models import init_chat_model
        except ImportError as error:
            raise missing_dependency("langchain", "langchain-agents") from error
        thinking = _THINK.get(provider, {}).get(options.think, {})
        if options.think != "as-is" and not thinking:
            raise ConfigurationError(
                f"How to ask {provider!r} for thinking {options.think!r} is not known.",
                hint="Give the chat model's own argument: --extra-body JSON.",
            )
        self.name = name
        self.options = options
        self.habits = ServerHabits(options)
        try:
            self._chat = init_chat_model(name, model_provider=provider, **{**thinking, **options.extra})
        except ImportError as error:
            raise MissingDependencyError(str(error)) from error
        except Exception as error:  # each provider raises its own
            said = str(error)[:_QUOTED]
            raise ConfigurationError(f"{provider}:{name} cannot be asked: {said}") from error
        fields = set(type(self._chat).model_fields)
        self._length = length_field(self._chat)
        self._settable = [
            field for field in ("logprobs", "temperature") if field in fields - set(options.extra)
        ]

    def generate(
        self, prompt: PromptTemplate, values: Sequence[Values], *, tokens: int, adapter: str | None = None
    ) -> list[Draft]:
        """Answer prompts; see `Generates.generate`."""
        return [self._answer(prompt.messages(**each), tokens, 0.0) for each in values]

    def sample(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        *,
        n: int,
        tokens: int,
        temperature: float,
        seed: int,
    ) -> list[tuple[Draft, ...]]:
        """Sample answers; see `Generates.sample`. The seed is not sent: few providers have one."""
        sampled = []
        for each in values:
            messages = prompt.messages(**each)
            sampled.append(tuple(self._answer(messages, tokens, temperature) for _ in range(n)))
        return sampled

    def score(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        targets: Sequence[str],
        *,
        adapter: str | None = None,
    ) -> list[TargetScores]:
        """Raise an `EvidenceError`: chat models score no text."""
        raise EvidenceError(
            f"{self.name} is asked by LangChain, which scores no text.", hint="ServedProxy does."
        )

    def truncate(self, text: str, tokens: int) -> str | None:
        """Return ``text`` cut to a number of words, or None when it is not longer."""
        words = text.split(" ")
        return " ".join(words[:tokens]) if len(words) > tokens else None

    def _answer(self, messages: list[dict[str, str]], tokens: int, temperature: float) -> Draft:
        """Ask once; again, with more tokens, if the answer was cut off while the LLM thought."""
        longer = bool(self.habits.thinks)
        draft = self._ask(messages, tokens, temperature, longer=longer)
        if self.habits.is_cut_off(draft, longer=longer):
            try:
                again = self._ask(messages, tokens, temperature, longer=True)
            except Exception:  # each provider raises its own, such as of too large a limit
                if draft.is_cut_off:
                    raise
                again = draft
            if again.thinking_tokens or draft.is_cut_off:
                draft, longer = again, True
        return self.habits.read(draft, longer=longer).head(tokens)

    def _ask(self, messages: list[dict[str, str]], tokens: int, temperature: float, *, longer: bool) -> Draft:
        """Ask with all that the chat model can be asked for, and with less where the provider refuses it.

        Raises:
            ServerError: The provider refuses the key, or has no such LLM.
        """
        values = {"logprobs": True, "temperature": temperature}
        remaining = [field for field in self._settable if field not in self.habits.refused]
        refused: list[str] = []
        while True:
            fields = {field: values[field] for field in remaining}
            if self._length is not None:
                fields[self._length] = tokens + self.options.thinking_tokens * longer
            chat: BaseChatModel = self._chat.model_copy(update=fields)
            try:
                draft: Draft = read_message(chat.invoke(messages))
                break
            except Exception as error:  # each provider raises its own
                if getattr(error, "status_code", None) in _UNUSABLE:
                    raise ServerError(f"{self.name} cannot be asked: {str(error)[:_QUOTED]}") from error
                if not remaining or not says_unsupported(error):
                    raise
                # What it names, or else what fewest take.
                named = [field for field in remaining if field.removesuffix("s") in str(error)]
                refused.append((named or remaining)[0])
                remaining.remove(refused[-1])
        self.habits.refused += [field for field in refused if field not in self.habits.refused]
        return draft
