"""Passages and their search: dense by FAISS, by words, and both fused.

What is less often needed is in the modules `bm25` and `embedder`. Importing this imports neither faiss nor
torch.
"""

from rgate_integrations.index.hybrid import HybridIndex, fuse
from rgate_integrations.index.passage_index import PassageIndex
from rgate_integrations.index.passages import Passage, read_passages

__all__ = ["HybridIndex", "Passage", "PassageIndex", "fuse", "read_passages"]
