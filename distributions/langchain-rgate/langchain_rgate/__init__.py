"""LangChain integration of rgate-integrations. The names are those of `rgate_integrations.langchain`."""

from rgate_integrations.langchain import (
    ClaimQueryRewriter,
    FaissVectorStore,
    GatedRetriever,
    IndexRetriever,
    RetrievalGate,
    RetrievalRouter,
    gated_rag,
)

__all__ = [
    "ClaimQueryRewriter",
    "FaissVectorStore",
    "GatedRetriever",
    "IndexRetriever",
    "RetrievalGate",
    "RetrievalRouter",
    "gated_rag",
]
