"""Gate an existing LangChain RAG chain: the chain stays as it is, the gate decides who gets it."""

from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from rgate_integrations.answering.pipeline import Pipeline
from rgate_integrations.langchain import IndexRetriever, RetrievalGate
from rgate_integrations.prompts import PromptTemplate

PLAIN = PromptTemplate(name="plain", version=1, user="{text}")


def local_llm(pipeline: Pipeline) -> Runnable:
    """Wrap the demo's local model as a runnable; use your own chat model here."""

    def complete(prompts: list[str]) -> list[str]:
        return [d.text for d in pipeline.llm.generate(PLAIN, [{"text": p} for p in prompts], tokens=48)]

    return RunnableLambda(lambda prompt: complete([prompt.to_string().removeprefix("Human: ")])[0])


def build_chain(pipeline: Pipeline) -> Runnable:
    llm = local_llm(pipeline)
    retriever = IndexRetriever(index=pipeline.index, k=2)

    # An ordinary RAG chain, and the same LLM without retrieval.
    rag_chain = (
        {
            "context": retriever | (lambda docs: "\n".join(d.page_content for d in docs)),
            "question": RunnablePassthrough(),
        }
        | ChatPromptTemplate.from_template("{context}\n\nAnswer briefly: {question}")
        | llm
    )
    llm_chain = ChatPromptTemplate.from_template("Answer briefly: {question}") | llm

    # The one added line.
    return RetrievalGate(pipeline.gate).route(retrieve=rag_chain, direct=llm_chain)
