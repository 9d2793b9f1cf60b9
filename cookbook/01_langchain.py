# %% [markdown]
# # Gate an existing LangChain RAG chain
#
# You end up with a RAG chain that retrieves only for questions that its LLM may not know. This takes one added
# line, and you see each decision. The notebook runs offline, once you have downloaded its models:
# `rgate download smollm2-135m-reader smollm2-135m-instruct multilingual-e5-small`.

# %%
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from local_models import SmallChat, SmallEmbeddings

from rgate_integrations.langchain import FaissVectorStore, RetrievalGate, gated_rag

# %% [markdown]
# ## The chain you have
#
# Documents, a vector store, and LangChain's usual `retriever | format | prompt | llm`.

# %%
documents = [
    "Aarno Maliniemi was a Finnish historian. He was born in Oulu in 1892.",
    "The melting point of rhenium is 3186 degrees Celsius.",
    "The Lena flows through the city of Yakutsk.",
    "Çatalhöyük was founded about 7500 BC.",
    "Our office in Graz closes at six in the evening.",
]
retriever = FaissVectorStore.from_texts(documents, SmallEmbeddings()).as_retriever(search_kwargs={"k": 1})
llm = SmallChat()
rag_chain = (
    {
        "context": retriever | (lambda docs: "\n".join(d.page_content for d in docs)),
        "question": RunnablePassthrough(),
    }
    | ChatPromptTemplate.from_template("{context}\n\nAnswer briefly: {question}")
    | llm
    | StrOutputParser()
)
llm_chain = ChatPromptTemplate.from_template("Answer briefly: {question}") | llm | StrOutputParser()

# %% [markdown]
# ## The one added line

# %%
gate = RetrievalGate()
chain = gate.route(retrieve=rag_chain, direct=llm_chain)

# %%
questions = [
    "What is the capital of France?",
    "Who wrote Romeo and Juliet?",
    "Where was the historian Aarno Maliniemi born?",
    "When does our office in Graz close?",
]
for question, decision, answer in zip(questions, gate.batch(questions), chain.batch(questions), strict=True):
    way = "retrieves" if decision.retrieve else "answers"
    print(f"{decision.p_known:.2f} {way:9}  {question}\n{'':16}{answer}")

# %% [markdown]
# The gate was called once for the batch, and each arm ran as one batch. Streaming still works:

# %%
for chunk in chain.stream(questions[0]):
    print(chunk, end="|")

# %% [markdown]
# ## Another threshold for one call
#
# The gate retrieves if `p_known < threshold`: with a threshold above 1 always, with 0 never.

# %%
always = {"configurable": {"retrieval_threshold": 1.1}}
print(gate.invoke(questions[0], always).retrieve)

# %% [markdown]
# ## Only the retriever
#
# `guard` leaves the chain unchanged: the guarded retriever returns no documents for known questions. For others it
# searches for the question, and for the claims of a draft if there is one. Each document says which query found it.

# %%
guarded = gate.guard(retriever)
print(guarded.invoke(questions[0]))
for document in guarded.invoke(questions[2]):
    print(document.metadata["rgate_query"], "found:", document.page_content)

# %% [markdown]
# ## Drafts by your own LLM
#
# The LLM's own first tokens are much stronger evidence than the question alone. With `llm=`, the chat model writes
# them as a draft, which the gate judges. The gate `token_probability` reads the draft's log-probabilities.

# %%
witness = RetrievalGate("token_probability", llm=llm, tokens=16)
decision = witness.invoke(questions[0])
print(decision.draft.source, decision.draft.text)
print(decision.reason)

# %% [markdown]
# ## From scratch, in one line

# %%
print(gated_rag(retriever, llm, gate=gate).invoke(questions[3]))

# %% [markdown]
# **Next:** the default threshold is a guess about your data. `04_calibrate` sets it with a guarantee.
