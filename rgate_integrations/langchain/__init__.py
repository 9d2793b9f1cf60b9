"""LangChain: a gate as a runnable, a router, guarded retrievers, a vector store, and agent middleware.

Needs ``langchain-core``. In addition, `RetrievalGateMiddleware` needs ``langchain``, `FaissVectorStore` needs
FAISS, and `LocalChat` needs transformers.
"""

from typing import TYPE_CHECKING, Any

from rgate_integrations.errors import needs_extra

with needs_extra("langchain"):
    import langchain_core  # noqa: F401

from rgate_integrations.langchain.chains import gated_rag
from rgate_integrations.langchain.corpora import CorpusChain, CorpusRetriever
from rgate_integrations.langchain.gate import GatedRetriever, RetrievalGate
from rgate_integrations.langchain.graph import CHECKPOINT_TYPES, gate_node, route_edge
from rgate_integrations.langchain.local_chat import LocalChat
from rgate_integrations.langchain.retriever import ClaimQueryRewriter, IndexRetriever
from rgate_integrations.langchain.vectorstore import FaissVectorStore, RGateEmbeddings

if TYPE_CHECKING:
    from rgate_integrations.langchain.middleware import RetrievalGateMiddleware

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
    "RetrievalGateMiddleware",
    "gate_node",
    "gated_rag",
    "route_edge",
]


def __getattr__(name: str) -> Any:
    if name == "RetrievalGateMiddleware":
        from rgate_integrations.langchain.middleware import RetrievalGateMiddleware

        return RetrievalGateMiddleware
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
