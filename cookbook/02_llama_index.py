# %% [markdown]
# # Gate an existing LlamaIndex engine
#
# You end up with a quick-start engine that searches only when its LLM does not know, a `RouterQueryEngine` that
# does the same, and a chat engine that never says "Empty Response". The notebook runs offline, with these models:
# `rgate download smollm2-135m-reader smollm2-135m-instruct multilingual-e5-small`.

# %%
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.query_engine import RouterQueryEngine
from llama_index.core.tools import QueryEngineTool
from llama_index_engine import SmallEmbedding, SmallLLM

from rgate_integrations.llama_index import (
    ClaimFusionRetriever,
    GatedQueryEngine,
    GatedRetriever,
    RetrievalGateSelector,
)

# %% [markdown]
# ## The engine you have

# %%
texts = [
    "Aarno Maliniemi was a Finnish historian. He was born in Oulu in 1892.",
    "Rhenium is a chemical element. Its melting point is 3186 degrees Celsius.",
    "Our office in Graz closes at six in the evening.",
]
llm = SmallLLM()
index = VectorStoreIndex.from_documents([Document(text=t) for t in texts], embed_model=SmallEmbedding())
engine = index.as_query_engine(llm=llm, similarity_top_k=1)

# %% [markdown]
# ## The one added line

# %%
gated = GatedQueryEngine.from_defaults(engine, llm=llm)
known, unknown = "What is the capital of France?", "Where was the historian Aarno Maliniemi born?"
for question in (known, unknown):
    response = gated.query(question)
    decision = response.metadata["rgate"]
    print(f"{decision['p_known']:.2f} {len(response.source_nodes)} passages  {question}\n     {response}")

# %% [markdown]
# ## In a router
#
# The selector picks one of the router's tools by name. Pass `llm=` to the router; otherwise it needs an OpenAI key.

# %%
tools = [
    QueryEngineTool.from_defaults(gated.direct, name="direct", description="Answers from memory."),
    QueryEngineTool.from_defaults(engine, name="docs", description="Answers from the documents."),
]
selector = RetrievalGateSelector(direct="direct", retrieve="docs")
router = RouterQueryEngine(selector=selector, query_engine_tools=tools, llm=llm)
for question in (known, unknown):
    print(router.query(question).metadata["selector_result"].selections[0].reason)

# %% [markdown]
# ## In a chat engine
#
# Chat engines answer "Empty Response" when a retriever finds nothing. For a known question, `GatedRetriever` returns
# a note that tells the LLM to answer from memory. The note is not a source.

# %%
chat = ContextChatEngine.from_defaults(GatedRetriever(index.as_retriever(similarity_top_k=1)), llm=llm)
answer = chat.chat(known)
print(len(answer.source_nodes), "sources:", answer)

# %% [markdown]
# ## Claims as separate queries

# %%
fusion = ClaimFusionRetriever([index.as_retriever(similarity_top_k=2)], similarity_top_k=2)
for node in fusion.retrieve(unknown):
    print(node.node.text)

# %% [markdown]
# **Next:** `from_defaults(..., tokens=32)` lets the engine's own LLM draft; `04_calibrate` sets the threshold.
