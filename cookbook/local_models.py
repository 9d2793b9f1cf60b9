"""The small local models as LangChain models. Use your own instead."""

from typing import Any

from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from rgate_integrations.index.embedder import SentenceEmbedder
from rgate_integrations.models.local import shared_proxy
from rgate_integrations.prompts import PromptTemplate

PLAIN = PromptTemplate(name="plain", version=1, user="{text}")


class SmallChat(BaseChatModel):
    """SmolLM2-135M as a LangChain chat model, with log-probabilities in OpenAI's style."""

    model: str = "smollm2-135m-instruct"
    tokens: int = 48

    @property
    def _llm_type(self) -> str:
        return self.model

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        text = "\n".join(m.text for m in messages)
        limit = kwargs.get("max_tokens", self.tokens)
        (draft,) = shared_proxy(self.model).generate(PLAIN, [{"text": text}], tokens=limit)
        content = [
            {"token": t, "logprob": p} for t, p in zip(draft.tokens, draft.logprobs or (), strict=False)
        ]
        metadata = {"model_name": self.model, "finish_reason": "stop" if draft.finished else "length"}
        if kwargs.get("logprobs"):
            metadata["logprobs"] = {"content": content}
        return ChatResult(
            generations=[ChatGeneration(message=AIMessage(draft.text, response_metadata=metadata))]
        )


class SmallEmbeddings(Embeddings):
    """The package's embedder as LangChain embeddings."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Embed texts."""
        return SentenceEmbedder().embed(texts).tolist()

    def embed_query(self, text: str) -> list[float]:
        """Embed a query; a gate that has embedded it shares the vector."""
        return SentenceEmbedder().embed_queries([text])[0].tolist()
