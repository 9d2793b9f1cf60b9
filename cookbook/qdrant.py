"""Gate a LangChain Qdrant store, embedded: Qdrant runs in this process. Runs offline on the small local models.

pip install -c constraints.txt ".[local,langchain]" qdrant-client langchain-qdrant
rgate download smollm2-135m-reader smollm2-135m-instruct multilingual-e5-small encyclopedia-leads
python cookbook/qdrant.py
"""

from itertools import islice

from langchain_core.documents import Document
from langchain_qdrant import QdrantVectorStore
from local_models import SmallEmbeddings

from rgate_integrations.index import read_passages
from rgate_integrations.langchain import GatedRetriever, RetrievalGate
from rgate_integrations.models.download import corpus_path

QUESTIONS = [
    "Who wrote Hamlet?",
    "Who painted the Mona Lisa?",
    "Who painted Along the River During the Qingming Festival?",
    "To whom are the poems of the Divan-i Shams-i Tabrizi dedicated?",
    "Where were the Duino Elegies begun?",
]


def build_store(passages: int = 300) -> QdrantVectorStore:
    """Put the first passages of the demo's corpus into Qdrant; they are about art and literature."""
    documents = [
        Document(p.text, metadata={"title": p.title})
        for p in islice(read_passages(corpus_path("encyclopedia-leads")), passages)
    ]
    # path="FOLDER" keeps the store on disk; url="http://localhost:6333" is a server.
    return QdrantVectorStore.from_documents(
        documents, SmallEmbeddings(), location=":memory:", collection_name="leads"
    )


def build_retriever(store: QdrantVectorStore) -> GatedRetriever:
    retriever = store.as_retriever(search_kwargs={"k": 2})
    return RetrievalGate().guard(retriever)  # the one added line


def main() -> None:
    retriever = build_retriever(build_store())
    for question, documents in zip(QUESTIONS, retriever.batch(QUESTIONS), strict=True):
        print(f"{question}\n  {'retrieved' if documents else 'skipped retrieval'}")
        for document in documents:
            print(f"    {document.metadata['title']}: {document.page_content[:70]}…")


if __name__ == "__main__":
    main()
