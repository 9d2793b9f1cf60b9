"""A LangChain chat model as a LlamaIndex LLM, for what asks an LLM a single question."""

from typing import Any

from llama_index.core.base.llms.types import CompletionResponse, CompletionResponseGen, LLMMetadata
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_completion_callback


class ChatLLM(CustomLLM):
    """Sends each prompt as a user's message.

    Attributes:
        answering: The chat model.
    """

    answering: Any

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex asks of an LLM."""
        return LLMMetadata(model_name="chat", context_window=4_096, num_output=64)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a prompt."""
        return CompletionResponse(text=self.answering.invoke([("user", prompt)]).text)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Complete a prompt, in one piece."""
        yield self.complete(prompt, formatted, **kwargs)
