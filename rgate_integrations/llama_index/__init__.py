"""LlamaIndex: query engines, retrievers, a tool, a selector, and models. Needs ``llama-index-core``."""

from rgate_integrations.errors import needs_extra

with needs_extra("llama-index"):
    import llama_index.core  # noqa: F401

from rgate_integrations.llama_index.agents import GatedTool
from rgate_integrations.llama_index.claims import (
    ClaimFusionRetriever,
    ClaimQueryEngine,
    ClaimQueryTransform,
)
from rgate_integrations.llama_index.decider import RetrievalGateEvent
from rgate_integrations.llama_index.embeddings import RGateEmbedding
from rgate_integrations.llama_index.local_llm import LocalLLM
from rgate_integrations.llama_index.query_engine import GatedQueryEngine
from rgate_integrations.llama_index.retriever import CorpusRetriever, GatedRetriever, IndexRetriever
from rgate_integrations.llama_index.selector import RetrievalGateSelector

__all__ = [
    "ClaimFusionRetriever",
    "ClaimQueryEngine",
    "ClaimQueryTransform",
    "CorpusRetriever",
    "GatedQueryEngine",
    "GatedRetriever",
    "GatedTool",
    "IndexRetriever",
    "LocalLLM",
    "RGateEmbedding",
    "RetrievalGateEvent",
    "RetrievalGateSelector",
]
