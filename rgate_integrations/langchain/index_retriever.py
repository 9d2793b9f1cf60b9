"""`IndexRetriever`: an index of this package as a LangChain retriever."""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, Field, SkipValidation

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.index.retriever import Retriever
from rgate_integrations.runtime.flow import Call, Flow, arun, run


class IndexRetriever(BaseRetriever):
    """An index of this package as a LangChain retriever.

    Args:
        index: Anything with ``search(queries, k)``: a `PassageIndex`, `BM25Index`, `HybridIndex`, or your own.

    Attributes:
        k: Documents a query, 4 unless given; ``invoke(..., k=)`` overrides it.

    Raises:
        ConfigurationError: The index has no such method.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    index: SkipValidation[Retriever]
    k: int = Field(default=4, ge=1)

    def __init__(self, *, index: Retriever, **fields: Any) -> None:
        # Not in a validator: pydantic would turn the error into one of its own.
        if not callable(getattr(index, "search", None)):
            raise ConfigurationError(
                f"An index needs the method search(queries, k); {type(index).__name__} has none.",
                hint="Pass a PassageIndex, BM25Index or HybridIndex, or an object with that method.",
            )
        fields["index"] = index
        super().__init__(**fields)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        return run(self._searching(query, k))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        return await arun(self._searching(query, k))

    def _searching(self, query: str, k: int | None) -> Flow[list[Document]]:
        (hits,) = yield Call(self.index.search, None, [query], self.k if k is None else k)
        documents = []
        for hit in hits:
            # The passage's own metadata last: what it says of itself is not overwritten.
            metadata = {"title": hit.passage.title, "rgate_score": hit.score, **hit.passage.metadata}
            documents.append(Document(id=hit.passage.id, page_content=hit.passage.text, metadata=metadata))
        return documents
