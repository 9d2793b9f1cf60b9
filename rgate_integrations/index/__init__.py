"""Passages and their search: dense by FAISS, by words, and both fused. Importing it imports no FAISS and no torch."""

from rgate_integrations.index.hybrid import BM25Index, HybridIndex, fuse
from rgate_integrations.index.passage_index import PassageIndex
from rgate_integrations.index.passages import Passage, read_passages

__all__ = ["BM25Index", "HybridIndex", "Passage", "PassageIndex", "fuse", "read_passages"]
