"""Gate an existing LangChain RAG chain: the chain does not change, and the gate decides which questions reach it."""

from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from rgate_integrations import DecisionEngine
from rgate_integrations.index import PassageIndex
from rgate_integrations.langchain import IndexRetriever, RetrievalGate
from rgate_integrations.models.base import LanguageModel
from rgate_integrations.prompts import PromptTemplate

PLAIN = PromptTemplate(name="plain", version=1, user="{text}")


def wrap_llm(llm: LanguageModel) -> Runnable:
    """Wrap the demo's local model as a runnable; use your own chat model here."""

    def complete(prompts: list[str]) -> list[str]:
        return [d.text for d in llm.generate(PLAIN, [{"text": p} for p in prompts], tokens=48)]

    return RunnableLambda(lambda prompt: complete([prompt.to_string().removeprefix("Human: ")])[0])


def build_chain(gate: DecisionEngine, index: PassageIndex, model: LanguageModel) -> Runnable:
    llm = wrap_llm(model)
    retriever = IndexRetriever(index=index, k=2)

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
    return RetrievalGate(gate).route(retrieve=rag_chain, direct=llm_chain)
