"""Passage search: dense with FAISS, by words with BM25, and hybrid. Importing it loads neither FAISS nor torch."""

from rgate_integrations.index.hybrid import BM25Index, HybridIndex, fuse
from rgate_integrations.index.passage_index import PassageIndex
from rgate_integrations.index.retriever import Passage, read_passages

__all__ = ["BM25Index", "HybridIndex", "Passage", "PassageIndex", "fuse", "read_passages"]
