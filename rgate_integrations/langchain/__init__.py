"""LangChain: a gate as a Runnable, a router, and a guarded retriever. Needs ``langchain-core``."""

from rgate_integrations.errors import missing_dependency

try:
    import langchain_core  # noqa: F401
except ImportError as error:
    raise missing_dependency("langchain_core", "langchain") from error

from rgate_integrations.langchain.gate import RetrievalGate
from rgate_integrations.langchain.retriever import GatedRetriever, IndexRetriever
from rgate_integrations.langchain.router import RetrievalRouter

__all__ = ["GatedRetriever", "IndexRetriever", "RetrievalGate", "RetrievalRouter"]
