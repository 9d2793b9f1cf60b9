"""A provider's LLM, such as ``openai:gpt-5``, through LangChain's chat model, which handles the key and retries."""

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
    needs_extra,
)
from rgate_integrations.langchain.chat_models import length_field
from rgate_integrations.models.base import LanguageModel, TargetScores, Values
from rgate_integrations.models.bounded_http import MAX_QUOTED
from rgate_integrations.models.request_options import RequestOptions, ServerHabits, Think
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.flow import Call, run

# Arguments that set the thinking of each provider's chat model. For other providers, users pass their own.
_THINK: dict[str, dict[Think, dict[str, Any]]] = {
    "openai": {"off": {"reasoning_effort": "none"}, "low": {"reasoning_effort": "low"}},
    "anthropic": {"off": {"thinking": {"type": "disabled"}}},
    "google_genai": {"off": {"thinking_budget": 0}},
    "ollama": {"off": {"reasoning": False}, "low": {"reasoning": "low"}},
}
_UNUSABLE = (401, 403, 404)  # statuses after which every other question would fail, too


class ProviderModel(LanguageModel):
    """An LLM of any provider that LangChain's ``init_chat_model`` supports. It generates text but cannot score it.

    Args:
        provider: The provider, such as ``"openai"``; its package, such as langchain-openai, must be installed.
        name: Name of the LLM.
        options: Options of each request; ``extra`` has arguments for the chat model.

    Raises:
        MissingDependencyError: LangChain or the provider's package is not installed.
        ConfigurationError: The provider is unknown, its chat model rejects an argument, ``options.think`` cannot be
            set for the provider, or the key is missing.
    """

    is_remote: ClassVar[bool] = True

    def __init__(
        self,
        provider: str,
        name: str,
        options: RequestOptions = RequestOptions(),  # noqa: B008  it is frozen
    ) -> None:
        with needs_extra("langchain-agents"):
            from langchain.chat_models import init_chat_model
        thinking = _THINK.get(provider, {}).get(options.think, {})
        if options.think != "as-is" and not thinking:
            raise ConfigurationError(
                f"Cannot set thinking to {options.think!r} for provider {provider!r}: "
                "this package does not know which argument does that.",
                hint="Leave out think= (--think), and pass the chat model's own argument in extra= (--extra-body).",
            )
        self.name = name
        self.options = options
        self.habits = ServerHabits(options)
        try:
            self._chat = init_chat_model(name, model_provider=provider, **{**thinking, **options.extra})
        except ImportError as error:
            raise MissingDependencyError(
                f"The provider {provider!r} cannot be used: {error}",
                hint=f"Install or upgrade LangChain's package for {provider!r}.",
            ) from error
        except Exception as error:  # each provider raises its own exceptions
            raise ConfigurationError(
                f"Cannot create the chat model {provider}:{name}: {str(error)[:MAX_QUOTED]}",
                hint="Check the provider, its API key, and the fields of extra= (--extra-body).",
            ) from error
        self._length_field = length_field(self._chat)
        # Fields that the user has set are kept, and a field that the class lacks would be an error.
        fields = type(self._chat).model_fields.keys() - options.extra.keys()
        self._settable = [field for field in ("logprobs", "temperature") if field in fields]

    def generate(
        self, prompt: PromptTemplate, values: Sequence[Values], *, tokens: int, adapter: str | None = None
    ) -> list[Draft]:
        """Return an answer per prompt; see `LanguageModel.generate`. ``adapter`` is ignored."""
        return [self._answer(prompt.messages(**fields), tokens, 0.0) for fields in values]

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
        """Return ``n`` answers per prompt; see `LanguageModel.sample`. No seed is sent: few providers take one."""
        samples = []
        for fields in values:
            messages = prompt.messages(**fields)
            samples.append(tuple(self._answer(messages, tokens, temperature) for _ in range(n)))
        return samples

    def score(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        targets: Sequence[str],
        *,
        adapter: str | None = None,
    ) -> list[TargetScores]:
        """Raise an `EvidenceError`: chat models cannot score text."""
        raise EvidenceError(
            f"{self.name}: LangChain's chat models cannot give the probability of a text.",
            hint="Use a model that can, such as RemoteModel(URL, MODEL) for a model server.",
        )

    def truncate(self, text: str, tokens: int) -> str | None:
        """Return ``text`` cut to ``tokens`` words, or None if it is not longer. The LLM's own tokens are unknown."""
        words = text.split(" ")
        return " ".join(words[:tokens]) if len(words) > tokens else None

    def _answer(self, messages: list[dict[str, str]], tokens: int, temperature: float) -> Draft:
        def ask(longer: bool, is_required: bool) -> Call:
            limit = tokens + self.options.thinking_tokens * longer
            return Call(self._ask, None, messages, limit, {"logprobs": True, "temperature": temperature})

        return run(self.habits.complete(ask)).head(tokens)

    def _ask(self, messages: list[dict[str, str]], limit: int, values: dict[str, Any]) -> Draft:
        """Return the LLM's reply. Fields of ``values`` that the LLM refuses are left out, now and in later requests.

        Args:
            messages: The prompt.
            limit: Maximum number of tokens of the reply.
            values: Values of the fields ``logprobs`` and ``temperature``, for chat models that have them.

        Raises:
            ServerError: The provider rejects the key, or has no such LLM.
            Exception: The request failed otherwise; the provider's package raised it.
        """
        names = [name for name in self._settable if name not in self.habits.refused]
        while True:
            fields = {name: values[name] for name in names}
            if self._length_field is not None:
                fields[self._length_field] = limit
            chat: BaseChatModel = self._chat.model_copy(update=fields)
            try:
                draft: Draft = read_message(chat.invoke(messages))
                break
            except Exception as error:  # each provider raises its own exceptions
                if getattr(error, "status_code", None) in _UNUSABLE:
                    raise ServerError(
                        f"The provider of {self.name} rejected the request: {str(error)[:MAX_QUOTED]}",
                        hint="Check the API key and the name of the LLM.",
                    ) from error
                if not names or not says_unsupported(error):
                    raise
                # Drop the field that the error names, or else the first, which the fewest models accept.
                mentioned = [name for name in names if name.removesuffix("s") in str(error)]
                names.remove((mentioned or names)[0])
        # Remember refused fields only after an answer, in case the error was about something else.
        self.habits.refused += [name for name in self._settable if name not in (*names, *self.habits.refused)]
        return draft
