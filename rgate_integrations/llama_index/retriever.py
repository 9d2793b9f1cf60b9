"""`GatedRetriever`, for engines that take a retriever, and a `PassageIndex` as a retriever."""

from __future__ import annotations

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.llms import LLM
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from rgate_integrations.decision import Decision
from rgate_integrations.gates.calling import DecidesBatches
from rgate_integrations.index import Retriever
from rgate_integrations.llama_index.deciding import Decider

KNOWN = "No passages were needed for this question: answer it from what you know."


class IndexRetriever(BaseRetriever):
    """A `PassageIndex` or `HybridIndex` as a LlamaIndex retriever; scores are cosines for a `PassageIndex`.

    Args:
        index: The index.
        similarity_top_k: Greatest number of nodes.
    """

    def __init__(self, index: Retriever, *, similarity_top_k: int = 5) -> None:
        self.index = index
        self.similarity_top_k = similarity_top_k
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        hits = self.index.search([query_bundle.query_str], self.similarity_top_k)[0]
        return [
            NodeWithScore(
                node=TextNode(
                    id_=hit.passage.id,
                    text=hit.passage.text,
                    metadata={
                        **hit.passage.metadata,
                        **({"title": hit.passage.title} if hit.passage.title else {}),
                    },
                ),
                score=hit.score,
            )
            for hit in hits
        ]


class GatedRetriever(BaseRetriever):
    """Guards a retriever, for engines that cannot be wrapped: chat engines, retriever query engines.

    LlamaIndex's engines answer "Empty Response" when a retriever finds nothing. So for a known question this one
    finds a single note that tells the LLM to answer from what it knows (score 0, ``metadata["rgate"]``). Where an
    engine can be wrapped, `GatedQueryEngine` is better: its direct arm has a prompt of its own.

    Args:
        retriever: The guarded retriever.
        gate: A gate, or what `load_gate` takes; the default gate when None.
        llm: Your own LLM: it writes its first tokens, and the gate judges them.
        tokens: How many tokens it writes.
        note: Text of the note; None finds nothing instead.
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        gate: DecidesBatches | str | None = None,
        *,
        llm: LLM | None = None,
        tokens: int = 32,
        note: str | None = KNOWN,
    ) -> None:
        self.retriever = retriever
        self.decide = Decider(gate, llm, tokens)
        self.note = note
        super().__init__(callback_manager=retriever.callback_manager)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        decision = self.decide(query_bundle.query_str)
        return self.retriever.retrieve(fresh(query_bundle)) if decision.retrieve else self._known(decision)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        decision = await self.decide.decide(query_bundle.query_str)
        if decision.retrieve:
            return await self.retriever.aretrieve(fresh(query_bundle))
        return self._known(decision)

    def _known(self, decision: Decision) -> list[NodeWithScore]:
        if self.note is None:
            return []
        facts = {"retrieve": False, "p_known": decision.p_known, "reason": decision.reason}
        node = TextNode(
            text=self.note,
            metadata={"rgate": facts},
            excluded_llm_metadata_keys=["rgate"],
            excluded_embed_metadata_keys=["rgate"],
        )
        return [NodeWithScore(node=node, score=0.0)]


def fresh(bundle: QueryBundle) -> QueryBundle:
    """Copy a bundle: LlamaIndex's vector retriever writes the embedding into the one it is given."""
    return QueryBundle(
        query_str=bundle.query_str,
        image_path=bundle.image_path,
        custom_embedding_strs=bundle.custom_embedding_strs,
        embedding=bundle.embedding,
    )
