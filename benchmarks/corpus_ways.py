"""Profiles from more or fewer passages, from a retriever, or from a description. Printed by corpora.py."""

from collections.abc import Sequence

import numpy as np
from base import print_table
from corpus_domains import DOCSTRINGS, Domain, Judged, embed, judge
from langchain_core.embeddings import Embeddings
from langchain_qdrant import QdrantVectorStore
from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.schema import TextNode

from rgate_integrations import CorpusProfile
from rgate_integrations.index import BM25Index, Passage
from rgate_integrations.langchain import FaissVectorStore
from rgate_integrations.models.encoder import EncoderProxy
from rgate_integrations.tuning.evaluation import auc

COUNTS = (20, 100, 500, 2_000)
SEARCHES = 100
DESCRIPTIONS = {
    "health_plan": "Health plans and employee benefits of the company Contoso: Northwind Health Plus and Standard.",
    "medicine": "Diseases and conditions: symptoms, causes, inheritance, diagnosis and treatment.",
    "library_docs": "API documentation of Ray, a library for distributed Python: tasks, actors, Serve, Tune.",
    "papers": "Research papers on large language models: BERT, LLaMA, GPT, their training and evaluation.",
}


class StoreEmbeddings(Embeddings):
    """The encoder as LangChain's embeddings."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Embed passages."""
        vectors: list[list[float]] = (
            EncoderProxy().encoder.vectors([t[:300] for t in texts], "passage: ").tolist()
        )
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """Embed a query."""
        vector: list[float] = embed([text])[0].tolist()
        return vector


class IndexEmbedding(BaseEmbedding):
    """The encoder as LlamaIndex's embedding."""

    def _get_text_embedding(self, text: str) -> list[float]:
        return StoreEmbeddings().embed_documents([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return StoreEmbeddings().embed_query(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)


def make_retrievers(passages: Sequence[str]) -> dict[str, object]:
    """Return four retrievers over the same passages."""
    texts, nodes = list(passages), [TextNode(text=text) for text in passages]
    index = VectorStoreIndex(nodes, embed_model=IndexEmbedding(embed_batch_size=64))
    return {
        "FAISS": FaissVectorStore.from_texts(texts, StoreEmbeddings()).as_retriever(search_kwargs={"k": 10}),
        "BM25": BM25Index([Passage(str(number), text) for number, text in enumerate(texts)]),
        "Qdrant": QdrantVectorStore.from_texts(texts, StoreEmbeddings(), location=":memory:"),
        "LlamaIndex": index.as_retriever(similarity_top_k=10),
    }


def show_ways(domains: Sequence[Domain], needless: Sequence[str]) -> None:
    """Print AUC and decisions for each domain and source of the profile."""
    columns: dict[str, list[str]] = {}
    for domain in domains:
        passages, questions = domain.halves[0]
        elsewhere = [question for other in domains if other is not domain for question in other.questions]
        profiles = {str(count): CorpusProfile.from_texts(passages[:count]) for count in COUNTS}
        for name, retriever in make_retrievers(passages[:DOCSTRINGS]).items():
            profiles[name] = CorpusProfile.from_retriever(retriever, searches=SEARCHES)
        profiles["sentence"] = CorpusProfile.from_description(DESCRIPTIONS[domain.name])
        for name, profile in profiles.items():
            column = columns.setdefault(name, [])
            if name.isdecimal() and len(passages) <= int(name) // 5:
                column.append("")  # no more passages than in the column before
                continue
            covered, uncovered = judge(profile, questions), judge(profile, [*elsewhere, *needless])
            column.append(_describe(profile, covered, uncovered))
    rows = [[name, *column] for name, column in columns.items()]
    print_table(("from", *(domain.name for domain in domains)), rows)
    print("AUC; own questions covered, others not covered, per cent; passages seen")


def _describe(profile: CorpusProfile, judged: Judged, judged_others: Judged) -> str:
    scores = np.concatenate([judged.logits(1, 0), judged_others.logits(1, 0)])
    area = auc(scores, np.repeat([True, False], [len(judged.z), len(judged_others.z)]))
    covered, uncovered = (judged.decide().mean(), 1 - judged_others.decide().mean())
    return f"{area:.3f}; {100 * covered:.0f}, {100 * uncovered:.0f}; {profile.seen}"
