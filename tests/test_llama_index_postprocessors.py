"""A known question is answered under every postprocessor of llama-index-core, and never with "Empty Response"."""

import importlib
import json
import pkgutil

import pytest
from llama_index.core import postprocessor as core
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.llms import MockLLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.storage.docstore.utils import doc_to_json, json_to_doc

from rgate_integrations.llama_index import GatedRetriever
from tests.llama_index_parts import ScriptedGate, ask, both_ways, every_style, vector_index

# The chat engines' own memory leaves an SQLite thread behind when the test's event loop closes.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class Says(MockLLM):
    """Says the same whatever it is asked."""

    text: str = ""

    def __init__(self, text):
        super().__init__()
        self.text = text

    def complete(self, prompt, formatted=False, **options):
        return CompletionResponse(text=self.text)

    async def acomplete(self, prompt, formatted=False, **options):
        return self.complete(prompt)

    def chat(self, messages, **options):
        return ChatResponse(message=ChatMessage(role="assistant", content=self.text))

    async def achat(self, messages, **options):
        return self.chat(messages)


class Structured(Says):
    """Finds the first document relevant, as an object."""

    def structured_predict(self, output_cls, prompt, llm_kwargs=None, **arguments):
        return output_cls(documents=[{"document_number": 1, "relevance": 10}])

    async def astructured_predict(self, output_cls, prompt, llm_kwargs=None, **arguments):
        return self.structured_predict(output_cls, prompt)


def made(name, **options):
    return getattr(core, name)(**options)


def recency(name, **options):
    pytest.importorskip("pandas")
    return made(name, date_key="published", **options)


def rank_gpt():
    from llama_index.core.postprocessor.rankGPT_rerank import RankGPTRerank

    return RankGPTRerank(llm=Says("[1]"))


def sentences(text):
    return text.split(". ")


MADE = {
    "SimilarityPostprocessor": lambda: made("SimilarityPostprocessor", similarity_cutoff=20.0),
    "PrevNextNodePostprocessor": lambda: made(
        "PrevNextNodePostprocessor", docstore=SimpleDocumentStore(), mode="both"
    ),
    "AutoPrevNextNodePostprocessor": lambda: made(
        "AutoPrevNextNodePostprocessor", docstore=SimpleDocumentStore(), llm=Says("NONE")
    ),
    "LongContextReorder": lambda: made("LongContextReorder"),
    "FixedRecencyPostprocessor": lambda: recency("FixedRecencyPostprocessor"),
    "EmbeddingRecencyPostprocessor": lambda: recency(
        "EmbeddingRecencyPostprocessor", embed_model=MockEmbedding(8)
    ),
    "TimeWeightedPostprocessor": lambda: made("TimeWeightedPostprocessor"),
    "SentenceEmbeddingOptimizer": lambda: made(
        "SentenceEmbeddingOptimizer",
        embed_model=MockEmbedding(8),
        percentile_cutoff=0.5,
        tokenizer_fn=sentences,
    ),
    "MetadataReplacementPostProcessor": lambda: made(
        "MetadataReplacementPostProcessor", target_metadata_key="window"
    ),
    "PIINodePostprocessor": lambda: made("PIINodePostprocessor", llm=Says("No one. Output Mapping: {}")),
    "LLMRerank": lambda: made("LLMRerank", llm=Says("Doc: 1, Relevance: 9")),
    "StructuredLLMRerank": lambda: made("StructuredLLMRerank", llm=Structured("")),
    "RankGPTRerank": rank_gpt,
}
NOT_MADE = {
    "KeywordNodePostprocessor": "needs spacy",
    "NERPIINodePostprocessor": "needs a model",
    "SentenceTransformerRerank": "needs a model",
}


def names_in_core():
    for module in pkgutil.iter_modules(core.__path__):
        importlib.import_module(f"{core.__name__}.{module.name}")
    waiting, names = [BaseNodePostprocessor], set()
    while waiting:
        found = waiting.pop().__subclasses__()
        names |= {each.__name__ for each in found if each.__module__.startswith("llama_index.core.")}
        waiting += found
    return names


def test_every_postprocessor_of_core_is_here():
    assert names_in_core() <= {*MADE, *NOT_MADE}


def retriever_engine(retriever, postprocessors, streaming):
    synthesizer = get_response_synthesizer(llm=MockLLM(), streaming=streaming)
    return RetrieverQueryEngine(retriever, synthesizer, postprocessors)


def context_chat(retriever, postprocessors, streaming):
    return ContextChatEngine.from_defaults(retriever, llm=MockLLM(), node_postprocessors=postprocessors)


def condense_chat(retriever, postprocessors, streaming):
    return CondensePlusContextChatEngine.from_defaults(
        retriever, llm=MockLLM(), node_postprocessors=postprocessors
    )


every_engine = pytest.mark.parametrize("make", [retriever_engine, context_chat, condense_chat])


@pytest.mark.parametrize("name", [name for name in MADE if name in names_in_core()])
@every_engine
@every_style
def test_a_known_question_is_answered_under_every_postprocessor(name, make, style):
    guarded = GatedRetriever(vector_index().as_retriever(), ScriptedGate())
    engine = make(guarded, [MADE[name]()], style.endswith("stream"))
    text, response = ask(engine, "a thing", style)
    assert "a thing" in text
    assert "Empty Response" not in text
    (note,) = response.source_nodes
    assert note.node.metadata["rgate"]["retrieve"] is False


class Drops(BaseNodePostprocessor):
    """Finds nothing good enough, and keeps what it was shown."""

    shown: list = []  # noqa: RUF012  a pydantic field

    def _postprocess_nodes(self, nodes, query_bundle=None):
        self.shown.append((query_bundle.query_str, len(nodes)))
        return []


@every_engine
@every_style
def test_postprocessors_of_the_retriever_never_see_the_note(make, style):
    drops = Drops(shown=[])
    guarded = GatedRetriever(vector_index().as_retriever(), ScriptedGate(), node_postprocessors=[drops])
    streaming = style.endswith("stream")
    text, _ = ask(make(guarded, [], streaming), "a thing", style)
    assert "a thing" in text
    assert "Empty Response" not in text
    assert drops.shown == []
    text, _ = ask(make(guarded, [], streaming), "unknown thing", style)
    assert drops.shown == [("unknown thing", 2)]
    assert "Empty Response" in text  # that is LlamaIndex's answer when an index has nothing, and it stays so


@both_ways
def test_the_passages_pass_the_postprocessors_of_the_retriever(call):
    class Found(type(vector_index().as_retriever())):
        def _retrieve(self, query_bundle):
            return [NodeWithScore(node=TextNode(text=str(score)), score=score) for score in (0.9, 0.1)]

        async def _aretrieve(self, query_bundle):
            return self._retrieve(query_bundle)

    inner = Found(vector_index(), embed_model=MockEmbedding(8))
    cutoff = MADE["SimilarityPostprocessor"]()
    cutoff.similarity_cutoff = 0.5
    guarded = GatedRetriever(inner, ScriptedGate(), node_postprocessors=[cutoff])
    assert [node.score for node in call(guarded, "retrieve", "unknown?")] == [0.9]
    assert cutoff.callback_manager is guarded.callback_manager


def test_the_note_can_be_saved():
    (note,) = GatedRetriever(vector_index().as_retriever(), ScriptedGate()).retrieve("a thing")
    again = json_to_doc(doc_to_json(note.node))
    assert again.text == note.node.text
    said = again.metadata["rgate"]
    assert (said["retrieve"], said["p_known"], said["reason"]) == (False, 0.5, "because")
    json.dumps(note.score, allow_nan=False)
