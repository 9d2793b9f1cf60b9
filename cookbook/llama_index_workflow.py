"""A gated LlamaIndex workflow in four steps: gate, retrieve, synthesize, or answer. Runs offline on the small models.

rgate download smollm2-135m-reader smollm2-135m-instruct multilingual-e5-small
python cookbook/llama_index_workflow.py
"""

import asyncio

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.llms import LLM
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore
from llama_index.core.workflow import Context, Event, StartEvent, StopEvent, Workflow, step
from llama_index_engine import TEXTS, SmallEmbedding, SmallLLM

from rgate_integrations import DecisionEngine, QueryPlan, load_gate, plan_queries
from rgate_integrations.index import fuse


class Known(Event):
    """The LLM knows the answer."""

    question: str


class Unknown(Event):
    """Passages are needed; the plan says what to search."""

    question: str
    plan: QueryPlan


class Found(Event):
    """Passages were found."""

    question: str
    nodes: list[NodeWithScore]


class GatedWorkflow(Workflow):
    """Start it with ``run(question=...)``; the result is the answer."""

    def __init__(self, gate: DecisionEngine, retriever: BaseRetriever, llm: LLM) -> None:
        super().__init__(timeout=120)
        self.gate, self.retriever, self.llm = gate, retriever, llm

    @step
    async def decide(self, ctx: Context, ev: StartEvent) -> Known | Unknown:
        """Ask the gate; what is unknown is searched by the claims of the draft."""
        decision = await self.gate.adecide(ev.question)
        await ctx.store.set("decision", decision.model_dump(mode="json"))
        if not decision.retrieve:
            return Known(question=ev.question)
        (plan,) = plan_queries([decision])
        return Unknown(question=ev.question, plan=plan)

    @step
    async def retrieve(self, ev: Unknown) -> Found:
        """Search all queries side by side and fuse what they find."""
        rankings = await asyncio.gather(*(self.retriever.aretrieve(q.text) for q in ev.plan.queries))
        return Found(question=ev.question, nodes=fuse(rankings, key=lambda n: n.node.node_id, k=2))

    @step
    async def synthesize(self, ev: Found) -> StopEvent:
        """Answer from the passages."""
        response = await get_response_synthesizer(llm=self.llm).asynthesize(ev.question, ev.nodes)
        return StopEvent(result=str(response))

    @step
    async def answer(self, ev: Known) -> StopEvent:
        """Answer from memory."""
        return StopEvent(result=(await self.llm.acomplete(f"Answer briefly: {ev.question}")).text)


async def main() -> None:
    """Ask one question of each kind."""
    documents = [Document(text=text) for text in TEXTS]
    index = VectorStoreIndex.from_documents(documents, embed_model=SmallEmbedding())
    workflow = GatedWorkflow(load_gate(), index.as_retriever(similarity_top_k=1), SmallLLM())
    for question in ("What is the capital of France?", "Where was Aarno Maliniemi born?"):
        handler = workflow.run(question=question)
        answer = await handler
        decision = await handler.ctx.store.get("decision")
        way = "with passages" if decision["retrieve"] else "from memory"
        print(f"{question}\n  {way} (p_known {decision['p_known']:.2f}): {answer}")


if __name__ == "__main__":
    asyncio.run(main())
