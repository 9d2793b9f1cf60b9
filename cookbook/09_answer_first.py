# %% [markdown]
# # Answer first
#
# You end up with a chain whose LLM begins to answer while a gate reads it. If the LLM knows, the answer continues;
# otherwise it is cancelled, and the RAG chain answers. You see what that costs in tokens, as a real server counts
# them. The notebook runs offline: `pip install xllamacpp` and `rgate download
# multilingual-e5-small smollm2-135m-reader smollm2-135m-instruct`.
# The LLM is Qwen2.5-Coder-0.5B, whose file (478 MB) is downloaded at the first run.

# %%
from contextlib import ExitStack

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from llama_server import ServedChat, gguf, serving

from rgate_integrations import AnswerFirst
from rgate_integrations.index import BM25Index, Passage
from rgate_integrations.langchain import IndexRetriever, RetrievalGate

# %% [markdown]
# ## A server, and the chains you have

# %%
running = ExitStack()
llm = ServedChat(url=running.enter_context(serving(gguf("qwen2.5-coder-0.5b-instruct"))))

passages = [
    Passage("1", "Aarno Maliniemi was a Finnish historian. He was born in Oulu in 1892."),
    Passage("2", "Rhenium is a metal. Its atomic number is 75."),
    Passage("3", "Our office in Graz closes at six in the evening."),
]
retriever = IndexRetriever(index=BM25Index(passages), k=3)
inputs = {
    "context": retriever | (lambda documents: "\n".join(document.page_content for document in documents)),
    "question": RunnablePassthrough(),
}
rag_chain = (
    inputs
    | ChatPromptTemplate.from_template("{context}\n\nAnswer in one sentence: {question}")
    | llm
    | StrOutputParser()
)
llm_chain = ChatPromptTemplate.from_template("Answer in one sentence: {question}") | llm | StrOutputParser()

# %% [markdown]
# ## The one added line

# %%
gate = RetrievalGate()
chain = gate.route(retrieve=rag_chain, direct=llm_chain, answer_first=True)

# %% [markdown]
# `calls` has, for each call, the tokens that the server read and wrote, and whether it finished. A known question
# takes one call. If the first words show that the LLM does not know, that call is cancelled, and a second one reads
# the passages. If the question alone shows that it is unknown, the chain retrieves at once; if the question alone
# shows that it is known, no words are judged.

# %%
questions = [
    "What is the capital of France?",
    "What is the atomic number of rhenium?",
    "Where was the historian Aarno Maliniemi born?",
    "When does our office in Graz close?",
]
for question in questions:
    llm.calls.clear()
    print(f"{question}\n  {chain.invoke(question).strip()}")
    for call in llm.calls:
        print(f"    read {call['prompt']}, wrote {call['written']}", "" if call["whole"] else "(stopped)")

# %% [markdown]
# ## Streaming
#
# The answer to a clearly known question streams as it is written. If an answer is judged, its first tokens arrive
# together.

# %%
for chunk in chain.stream("What is the capital of France?"):
    print(chunk, end="|")

# %% [markdown]
# ## What each decision says
#
# The event `retrieval_gate` has the times, and how many tokens were held back and dropped.


# %%
async def events(question):
    async for event in chain.astream_events(question, version="v2"):
        if event["event"] == "on_custom_event":
            print(event["data"]["retrieve"], event["data"]["partial_answer"])


await events("What is the capital of France?")
await events("What is the atomic number of rhenium?")

# %% [markdown]
# ## Fewer tokens, and a search that runs meanwhile
#
# With these options the answer is judged after 8 tokens; by then the search has finished.

# %%
options = AnswerFirst(tokens=8, retrieve_below=0.1, answer_above=0.8, prefetch=True)
early = gate.route(retrieve=rag_chain, direct=llm_chain, answer_first=options)
for question in questions:
    llm.calls.clear()
    early.invoke(question)
    print(question, [(call["written"], call["whole"]) for call in llm.calls])

# %%
running.close()
