"""Passages and their search: dense by FAISS, by words, and both fused.

Importing this imports neither faiss nor torch.
"""

from rgate_integrations.index.bm25 import BM25Index
from rgate_integrations.index.building import build_resumable
from rgate_integrations.index.embedder import Embedder, SentenceEmbedder
from rgate_integrations.index.fusion import fuse
from rgate_integrations.index.hybrid import CrossEncoderReranker, HybridIndex, slimplm_search
from rgate_integrations.index.passage_index import Hit, PassageIndex, Searches
from rgate_integrations.index.passages import Passage, PassageStore, read_passages

__all__ = [
    "BM25Index",
    "CrossEncoderReranker",
    "Embedder",
    "Hit",
    "HybridIndex",
    "Passage",
    "PassageIndex",
    "PassageStore",
    "Searches",
    "SentenceEmbedder",
    "build_resumable",
    "fuse",
    "read_passages",
    "slimplm_search",
]
