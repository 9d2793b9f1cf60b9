"""`LocalChat`: a local model as a chat model, whose hidden states a gate can judge while it answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.chat_models import agenerate_from_stream, generate_from_stream
from langchain_core.messages import AIMessageChunk, BaseMessage, ChatMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from pydantic import ConfigDict, Field, SkipValidation

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.models.generated import GeneratedToken, GenerationOptions
from rgate_integrations.models.local import DEFAULT_MODEL, LocalProxy, shared_proxy

_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool"}
_OPTIONS = ("temperature", "max_tokens", "seed", "logprobs", "top_logprobs")
_OF_LANGCHAIN = ("stream", "ls_structured_output_format")  # it may pass these to any model


class LocalChat(BaseChatModel):
    """A chat model that runs here, on transformers; one copy of its weights is shared with gates of its name.

    As the direct arm of ``route(..., answer_first=True)`` it keeps the hidden states of what it writes. A probe of
    the same model, trained under the arm's prompt, then judges the begun answer without reading it again, and a known
    answer goes on where it was held: no token is computed twice.

    Nothing is written ahead of what is asked for, so a stream that is closed costs nothing more. Between two tokens
    others may use the model.

    Attributes:
        model_name: Catalogue name (see ``rgate download``), local folder, or Hub id; ``model=`` for short.
        proxy: The model itself, in place of its name.
        temperature: 0 is greedy; above that, tokens are drawn.
        max_tokens: Maximum number of tokens of an answer; None is as many as the model's context holds.
        stop: Texts that end an answer.
        seed: Of the draw; None draws another answer each time.
        logprobs: Whether messages carry ``response_metadata["logprobs"]``, as OpenAI's do. Answer first asks for them
            if it is None.
        top_logprobs: How many of the likeliest tokens they hold in each place.
        layers: Layers whose hidden states are kept while an answer is streamed; by default those that
            ``rgate train`` reads. ``()`` keeps none.

    Example:
        >>> from rgate_integrations.langchain.local_chat import LocalChat
        >>> chat = LocalChat(model="smollm2-135m-instruct", max_tokens=64)
    """

    model_config = ConfigDict(populate_by_name=True, arbitrary_types_allowed=True)

    model_name: str = Field(default=DEFAULT_MODEL, alias="model")
    proxy: SkipValidation[LocalProxy | None] = Field(default=None, exclude=True, repr=False)
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    max_tokens: int | None = Field(default=512, ge=1)
    stop: list[str] | str | None = Field(default=None, alias="stop_sequences")
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    layers: tuple[int, ...] | None = None

    @property
    def _llm_type(self) -> str:
        return "rgate-local"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model_name": self._name({}), **{name: getattr(self, name) for name in (*_OPTIONS, "stop")}}

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, run_manager, **kwargs))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        # Token by token: who is cancelled writes no more.
        chunks: AsyncIterator[ChatGenerationChunk] = self._astream(messages, stop, run_manager, **kwargs)
        return await agenerate_from_stream(chunks)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        name = self._name(kwargs)
        asked = self._asked(kwargs)
        proxy = self.proxy if self.proxy is not None and name == self.proxy.name else shared_proxy(name)
        ends = self.stop if stop is None else stop
        options = GenerationOptions(
            tokens=asked["max_tokens"],
            stop=(ends,) if isinstance(ends, str) else tuple(ends or ()),
            temperature=asked["temperature"],
            seed=asked["seed"],
            top_logprobs=asked["top_logprobs"] or 0,
            layers=proxy.probed_layers if self.layers is None else self.layers,
        )
        answer = proxy.answer([_turn(message) for message in messages], options)
        told: dict[str, Any] = {"model_name": name, "model_provider": "rgate"}
        read = len(answer.prompt)  # told with the first chunk, and what was written with the last
        for chunk in answer.chunks():
            last = answer.finish_reason is not None
            if last:
                told["finish_reason"] = answer.finish_reason
            if asked["logprobs"]:
                told["logprobs"] = {"content": [_logprob_entry(token) for token in chunk.tokens]}
            wrote = len(answer.ids) if last else 0
            usage = UsageMetadata(input_tokens=read, output_tokens=wrote, total_tokens=read + wrote)
            message = AIMessageChunk(
                content=chunk.text,
                id=answer.id,
                usage_metadata=usage if read or wrote else None,
                chunk_position="last" if last else None,
            )
            yield ChatGenerationChunk(message=message, generation_info=told or None)
            told, read = {}, 0

    def _name(self, options: dict[str, Any]) -> str:
        own = self.model_name if self.proxy is None else self.proxy.name
        return str(options.get("model") or own)

    def _asked(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a call, the model's own where it gives none."""
        for name in options:
            if name not in (*_OPTIONS, *_OF_LANGCHAIN, "model"):
                raise ConfigurationError(
                    f"LocalChat got an unexpected keyword argument {name!r}.",
                    hint=f"It takes {', '.join(_OPTIONS)} and stop.",
                )
        return {name: options.get(name, getattr(self, name)) for name in _OPTIONS}


def _logprob_entry(token: GeneratedToken) -> dict[str, Any]:
    """Return a token with its log-probability in the form of OpenAI's API."""
    listed = []
    for text, logprob in ((token.text, token.logprob), *token.likeliest):
        listed.append({"token": text, "logprob": logprob, "bytes": list(text.encode())})
    return listed[0] | {"top_logprobs": listed[1:]}


def _turn(message: BaseMessage) -> dict[str, str]:
    """Return a message as a turn of a chat template."""
    role = message.role if isinstance(message, ChatMessage) else _ROLES.get(message.type)
    if role is None:
        raise ConfigurationError(f"A local model takes no message of the type {message.type!r}.")
    if role != "assistant" and any(block["type"] != "text" for block in message.content_blocks):
        raise ConfigurationError("A local model reads text only.", hint="Leave images and files out.")
    return {"role": role, "content": message.text}
