"""`LocalLLM`: a local model as an LLM, whose hidden states a gate can judge while it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.generic_utils import (
    astream_chat_response_to_completion_response,
    chat_response_to_completion_response,
    prompt_to_messages,
    stream_chat_response_to_completion_response,
)
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    LogProb,
    MessageRole,
    TextBlock,
)
from llama_index.core.llms import LLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from pydantic import ConfigDict, Field, SkipValidation

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.llama_index.answer_first import in_threads
from rgate_integrations.models.catalog import DEFAULT_MODEL
from rgate_integrations.models.local import TransformersProxy, shared_proxy
from rgate_integrations.models.streamed_answer import GenerationOptions


class LocalLLM(LLM, GenerationOptions):
    """An LLM that runs in this process on transformers, and shares its weights with gates on the same model.

    It keeps the hidden states of an answer's tokens while the answer is in use. With
    ``GatedQueryEngine.from_defaults(..., answer_first=True)``, a probe (a gate that reads such states) of the
    same model, trained with the same prompt, judges the partial answer without reading it again, and a known
    answer continues from there: no token is computed twice.

    Generation is lazy, so a closed stream costs nothing more. Other callers may use the model between two tokens.

    The other options, which a call may override, are those of
    `rgate_integrations.models.streamed_answer.GenerationOptions`.

    Attributes:
        model: Catalogue name (see ``rgate download``), local folder, or Hub id.
        proxy: A model that is loaded already, used instead of ``model``.

    Raises:
        ConfigurationError: Raised by a call: a message has content other than text, an option is unknown,
            ``layers`` names a layer that does not exist, the model has no chat template or the template rejects
            the conversation, or the prompt fills the model's context.
        RGateError: Raised by a call: the model cannot be loaded.
        pydantic.ValidationError: An option is unknown or out of range.

    Examples:
        >>> from rgate_integrations.llama_index.local_llm import LocalLLM
        >>> llm = LocalLLM(model="smollm2-135m-instruct", max_tokens=64)
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    model: str = DEFAULT_MODEL
    proxy: SkipValidation[TransformersProxy | None] = Field(default=None, exclude=True, repr=False)

    @classmethod
    def class_name(cls) -> str:
        """Return the name under which LlamaIndex saves this class."""
        return "rgate_local_llm"

    @property
    def metadata(self) -> LLMMetadata:
        """Name, context size, and maximum answer length (at most half the context size); loads the model."""
        context = self._proxy().runner.context_size
        return LLMMetadata(
            context_window=context,
            num_output=min(self.max_tokens or context, context // 2),
            is_chat_model=True,
            model_name=self._proxy().name,
        )

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        return _whole(list(self._responses(messages, kwargs)))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Stream the answer to a conversation: each response has the text so far, and in ``delta`` what is new."""
        return self._responses(messages, kwargs)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        # Token by token, so that cancelling the call stops the model.
        return _whole([response async for response in in_threads(self._responses(messages, kwargs))])

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Stream the answer to a conversation: each response has the text so far, and in ``delta`` what is new."""
        return in_threads(self._responses(messages, kwargs))

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt, which is the user's turn."""
        return chat_response_to_completion_response(_whole(list(self._responses(prompt, kwargs))))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Stream the answer to a prompt: each response has the text so far, and in ``delta`` what is new."""
        return stream_chat_response_to_completion_response(self._responses(prompt, kwargs))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt, which is the user's turn."""
        responses = in_threads(self._responses(prompt, kwargs))
        return chat_response_to_completion_response(_whole([response async for response in responses]))

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """Stream the answer to a prompt: each response has the text so far, and in ``delta`` what is new."""
        return astream_chat_response_to_completion_response(in_threads(self._responses(prompt, kwargs)))

    def _proxy(self) -> TransformersProxy:
        return self.proxy or shared_proxy(self.model)

    def _responses(self, prompt: Sequence[ChatMessage] | str, options: dict[str, Any]) -> ChatResponseGen:
        """Yield the text so far and its newest piece; the model starts when the first piece is requested."""
        messages = prompt_to_messages(prompt) if isinstance(prompt, str) else prompt
        turns = []
        for message in messages:
            if any(not isinstance(block, TextBlock) for block in message.blocks):
                raise ConfigurationError(
                    "A local model can only read text, but a message with the role "
                    f"{message.role.value!r} has other content.",
                    hint="Keep only its text blocks.",
                )
            turns.append({"role": message.role.value, "content": message.content or ""})
        call = self.for_call(options)
        answer = self._proxy().answer(turns, call)
        text = ""
        for chunk in answer.chunks():
            text += chunk.text
            logprobs = [[LogProb(token=token.text, logprob=token.logprob)] for token in chunk.tokens]
            yield ChatResponse(
                message=ChatMessage(role=MessageRole.ASSISTANT, content=text),
                delta=chunk.text,
                raw={
                    "id": answer.id,
                    "model": self._proxy().name,
                    "finish_reason": answer.finish_reason,
                    "usage": {"prompt_tokens": len(answer.prompt), "completion_tokens": len(answer.ids)},
                },
                logprobs=logprobs if call.logprobs else None,
            )


def _whole(responses: Sequence[ChatResponse]) -> ChatResponse:
    """Merge a stream's responses into one: the last, with the log-probabilities of all and no delta."""
    logprobs: list[list[LogProb]] = []
    for response in responses:
        logprobs += response.logprobs or []
    return responses[-1].model_copy(update={"delta": None, "logprobs": logprobs or None})
