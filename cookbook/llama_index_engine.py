"""Gate a LlamaIndex quick-start engine: one line around it. Runs offline on the small local models.

rgate download smollm2-135m-reader smollm2-135m-instruct multilingual-e5-small
python cookbook/llama_index_engine.py
"""

from typing import Any

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import CompletionResponse, CompletionResponseGen, LLMMetadata
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_completion_callback

from rgate_integrations.index.embedder import SentenceEmbedder
from rgate_integrations.llama_index import GatedQueryEngine
from rgate_integrations.models.local import shared_proxy
from rgate_integrations.prompts import PromptTemplate

TOKENS = 48  # maximum length of an answer
PLAIN = PromptTemplate(name="plain", version=1, user="{text}")
TEXTS = [
    "Aarno Maliniemi was a Finnish historian. He was born in Oulu in 1892.",
    "Rhenium is a chemical element. Its melting point is 3186 degrees Celsius.",
    "The Lena is the river that flows through the city of Yakutsk.",
]


class SmallLLM(CustomLLM):
    """The small local model as a LlamaIndex LLM; use your own here."""

    model: str = "smollm2-135m-instruct"

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex asks of an LLM."""
        return LLMMetadata(model_name=self.model, context_window=2_048, num_output=TOKENS)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a prompt."""
        (draft,) = shared_proxy(self.model).generate(
            PLAIN, [{"text": prompt}], tokens=kwargs.get("max_tokens", TOKENS)
        )
        return CompletionResponse(text=draft.text)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Complete a prompt, in one piece."""
        yield self.complete(prompt, formatted, **kwargs)


class SmallEmbedding(BaseEmbedding):
    """The package's embedder as a LlamaIndex embedding; use your own here."""

    def _get_text_embedding(self, text: str) -> list[float]:
        return [float(v) for v in SentenceEmbedder().embed([text])[0]]

    def _get_query_embedding(self, query: str) -> list[float]:
        return [float(v) for v in SentenceEmbedder().embed_queries([query])[0]]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)


def build_engine() -> GatedQueryEngine:
    """Make the quick-start engine, and gate it."""
    llm = SmallLLM()
    documents = [Document(text=text) for text in TEXTS]
    index = VectorStoreIndex.from_documents(documents, embed_model=SmallEmbedding())
    engine = index.as_query_engine(llm=llm, similarity_top_k=1)
    return GatedQueryEngine.from_defaults(engine, llm=llm)  # the one added line


def main() -> None:
    engine = build_engine()
    for question in ("What is the capital of France?", "Where was Aarno Maliniemi born?"):
        response = engine.query(question)
        decision = response.metadata["rgate"]
        way = "with passages" if decision["retrieve"] else "from memory"
        print(f"{question}\n  {way} (p_known {decision['p_known']:.2f}): {response}")


if __name__ == "__main__":
    main()
