"""Passages and their index. Importing this imports neither faiss nor torch."""

from rgate_integrations.index.embedder import Embedder, SentenceEmbedder
from rgate_integrations.index.fusion import fuse
from rgate_integrations.index.passage_index import Hit, PassageIndex
from rgate_integrations.index.passages import Passage, PassageStore, read_passages

__all__ = [
    "Embedder",
    "Hit",
    "Passage",
    "PassageIndex",
    "PassageStore",
    "SentenceEmbedder",
    "fuse",
    "read_passages",
]
