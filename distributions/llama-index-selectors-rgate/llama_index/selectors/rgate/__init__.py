"""LlamaIndex integration of rgate-integrations. The names are those of `rgate_integrations.llama_index`."""

from rgate_integrations.llama_index import (
    ClaimFusionRetriever,
    ClaimQueryEngine,
    ClaimQueryTransform,
    CorpusRetriever,
    GatedQueryEngine,
    GatedRetriever,
    GatedTool,
    IndexRetriever,
    LocalLLM,
    RetrievalGateEvent,
    RetrievalGateSelector,
    RGateEmbedding,
)

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
