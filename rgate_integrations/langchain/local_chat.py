"""`LocalChat`: a local model as a chat model, whose hidden states a gate can judge while it answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.chat_models import agenerate_from_stream, generate_from_stream
from langchain_core.messages import (
    AIMessageChunk,
    BaseMessage,
    BaseMessageChunk,
    ChatMessage,
    message_chunk_to_message,
)
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from pydantic import ConfigDict, Field, SkipValidation

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.models.catalog import DEFAULT_MODEL
from rgate_integrations.models.local import TransformersProxy, shared_proxy
from rgate_integrations.models.streamed_answer import GenerationOptions

_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool"}
_MEDIA = ("image", "image_url", "audio", "input_audio", "video", "media", "file", "document", "text-plain")


class LocalChat(BaseChatModel, GenerationOptions):
    """A chat model that runs in this process on transformers, and shares its weights with gates on the same model.

    It keeps the hidden states of an answer's tokens while the answer is in use. In the direct arm of
    ``route(..., answer_first=True)``, a probe (a gate that reads such states) of the same model, trained with the
    arm's prompt, judges the partial answer without reading it again, and a known answer continues from there: no
    token is computed twice.

    Generation is lazy, so a closed stream costs nothing more. Other callers may use the model between two tokens.

    The other options, which a call may override, are those of
    `rgate_integrations.models.streamed_answer.GenerationOptions`. With ``logprobs``, messages have
    ``response_metadata["logprobs"]``.

    Attributes:
        model_name: Catalogue name (see ``rgate download``), local folder, or Hub id; ``model=`` means the same.
        proxy: A model that is loaded already, used instead of ``model_name``.

    Raises:
        ConfigurationError: Raised by a call: a message has content other than text (the assistant's may have thoughts
            and tool calls), an option is unknown, the prompt fills the model's context, ``layers`` names a layer that
            does not exist, or the model's chat template is missing or rejects the messages.
        RGateError: Raised by a call: the model cannot be loaded.
        pydantic.ValidationError: An option is out of range.

    Examples:
        >>> from rgate_integrations.langchain.local_chat import LocalChat
        >>> chat = LocalChat(model="smollm2-135m-instruct", max_tokens=64)
    """

    model_config = ConfigDict(populate_by_name=True, arbitrary_types_allowed=True)

    model_name: str = Field(default=DEFAULT_MODEL, alias="model")
    proxy: SkipValidation[TransformersProxy | None] = Field(default=None, exclude=True, repr=False)

    @property
    def _llm_type(self) -> str:
        return "rgate-local"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {
            "model_name": self._model.name,
            **self.model_dump(include=set(GenerationOptions.model_fields)),
        }

    @property
    def _model(self) -> TransformersProxy:
        return self.proxy or shared_proxy(self.model_name)

    def get_token_ids(self, text: str) -> list[int]:
        """Return the token ids of a text, in this model's own vocabulary."""
        return self._model.runner.encoder.ids(text)

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
        # Token by token, so that cancelling the call stops the model.
        return await agenerate_from_stream(self._astream(messages, stop, run_manager, **kwargs))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        if stop is not None:
            kwargs["stop"] = stop
        options = self.for_call(kwargs)
        answer = self._model.answer(list(map(_turn, messages)), options)
        info: dict[str, Any] = {"model_name": self._model.name, "model_provider": "rgate"}
        # Token counts of chunks are summed, so the prompt's is in the first chunk and the answer's in the last.
        prompt_tokens = len(answer.prompt)
        for chunk in answer.chunks():
            message = AIMessageChunk(content=chunk.text, id=answer.id)
            answer_tokens = 0
            if answer.finish_reason is not None:
                answer_tokens = len(answer.ids)
                info["finish_reason"] = answer.finish_reason
                message.chunk_position = "last"
            if options.logprobs:
                entries = [  # in OpenAI's format
                    {
                        "token": token.text,
                        "logprob": token.logprob,
                        "bytes": list(token.text.encode()),
                        "top_logprobs": [],
                    }
                    for token in chunk.tokens
                ]
                info["logprobs"] = {"content": entries}
            message.usage_metadata = UsageMetadata(
                input_tokens=prompt_tokens,
                output_tokens=answer_tokens,
                total_tokens=prompt_tokens + answer_tokens,
            )
            yield ChatGenerationChunk(message=message, generation_info=info or None)
            info, prompt_tokens = {}, 0


def _turn(message: BaseMessage) -> dict[str, str]:
    """Return a message as a turn for a chat template, with ``role`` and ``content``.

    Raises:
        ConfigurationError: The message has content other than text; the assistant's may have thoughts and tool calls.
    """
    # A history may have chunks, such as the sum of an earlier stream.
    kind = message_chunk_to_message(message).type if isinstance(message, BaseMessageChunk) else message.type
    role = message.role if isinstance(message, ChatMessage) else _ROLES.get(kind, kind)
    if role == "assistant":
        # Its thoughts and tool calls are left out; for some of them `content_blocks` raises.
        has_media = any(isinstance(block, dict) and block.get("type") in _MEDIA for block in message.content)
    else:
        has_media = any(block["type"] != "text" for block in message.content_blocks)
    if has_media:
        raise ConfigurationError(
            f"A local model can only read text, but a message of type {message.type!r} has other content.",
            hint="Remove images and files.",
        )
    return {"role": role, "content": message.text}
