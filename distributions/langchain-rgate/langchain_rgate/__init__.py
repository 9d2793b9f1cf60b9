"""LangChain integration of rgate-integrations. The names are those of `rgate_integrations.langchain`."""

from rgate_integrations.langchain import (
    CHECKPOINT_TYPES,
    ClaimQueryRewriter,
    CorpusChain,
    CorpusRetriever,
    FaissVectorStore,
    GatedRetriever,
    IndexRetriever,
    LocalChat,
    RetrievalGate,
    RGateEmbeddings,
    gate_node,
    gated_rag,
    route_edge,
)

__all__ = [
    "CHECKPOINT_TYPES",
    "ClaimQueryRewriter",
    "CorpusChain",
    "CorpusRetriever",
    "FaissVectorStore",
    "GatedRetriever",
    "IndexRetriever",
    "LocalChat",
    "RGateEmbeddings",
    "RetrievalGate",
    "gate_node",
    "gated_rag",
    "route_edge",
]
