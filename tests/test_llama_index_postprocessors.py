"""A known question is answered under every postprocessor of llama-index-core, and never with "Empty Response"."""

import importlib
import json
import pkgutil
from functools import partial

import pytest
from llama_index.core import postprocessor as core
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.llms import MockLLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.storage.docstore.utils import doc_to_json, json_to_doc

from rgate_integrations.llama_index import GatedRetriever
from tests.llama_index_parts import ScriptedGate, ask, every_style, vector_index

# The chat engines' own memory leaves an SQLite thread behind when the test's event loop closes.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class Says(MockLLM):
    """Says the same whatever it is asked; as an object, that the first document is relevant."""

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

    def structured_predict(self, output_cls, prompt, llm_kwargs=None, **arguments):
        return output_cls(documents=[{"document_number": 1, "relevance": 10}])

    async def astructured_predict(self, output_cls, prompt, llm_kwargs=None, **arguments):
        return self.structured_predict(output_cls, prompt)


STORE, EMBEDS = SimpleDocumentStore(), MockEmbedding(8)
MADE = {
    "SimilarityPostprocessor": {"similarity_cutoff": 20.0},
    "PrevNextNodePostprocessor": {"docstore": STORE, "mode": "both"},
    "AutoPrevNextNodePostprocessor": {"docstore": STORE, "llm": Says("NONE")},
    "LongContextReorder": {},
    "FixedRecencyPostprocessor": {"date_key": "published"},
    "EmbeddingRecencyPostprocessor": {"date_key": "published", "embed_model": EMBEDS},
    "TimeWeightedPostprocessor": {},
    "SentenceEmbeddingOptimizer": {
        "embed_model": EMBEDS,
        "percentile_cutoff": 0.5,
        "tokenizer_fn": lambda text: text.split(". "),
    },
    "MetadataReplacementPostProcessor": {"target_metadata_key": "window"},
    "PIINodePostprocessor": {"llm": Says("No one. Output Mapping: {}")},
    "LLMRerank": {"llm": Says("Doc: 1, Relevance: 9")},
    "StructuredLLMRerank": {"llm": Says("")},
    "RankGPTRerank": {"llm": Says("[1]")},
}
NOT_MADE = {
    "KeywordNodePostprocessor": "needs spacy",
    "NERPIINodePostprocessor": "needs a model",
    "SentenceTransformerRerank": "needs a model",
}


def of_core():
    """The postprocessors of llama-index-core, by name."""
    for module in pkgutil.iter_modules(core.__path__):
        importlib.import_module(f"{core.__name__}.{module.name}")
    waiting, found = [BaseNodePostprocessor], {}
    while waiting:
        kinds = waiting.pop().__subclasses__()
        waiting += kinds
        found |= {kind.__name__: kind for kind in kinds if kind.__module__.startswith("llama_index.core.")}
    return found


def test_every_postprocessor_of_core_is_here():
    assert set(of_core()) <= {*MADE, *NOT_MADE}


def retriever_engine(retriever, postprocessors, streaming):
    synthesizer = get_response_synthesizer(llm=MockLLM(), streaming=streaming)
    return RetrieverQueryEngine(retriever, synthesizer, postprocessors)


def chat_engine(kind, retriever, postprocessors, streaming):
    return kind.from_defaults(retriever, llm=MockLLM(), node_postprocessors=postprocessors)


every_engine = pytest.mark.parametrize(
    "make",
    [
        retriever_engine,
        partial(chat_engine, ContextChatEngine),
        partial(chat_engine, CondensePlusContextChatEngine),
    ],
    ids=["retriever", "context chat", "condense chat"],
)


@pytest.mark.parametrize("name", [name for name in MADE if name in of_core()])
@every_engine
@every_style
def test_a_known_question_is_answered_under_every_postprocessor(name, make, style):
    if "Recency" in name:
        pytest.importorskip("pandas")
    guarded = GatedRetriever(vector_index().as_retriever(), ScriptedGate())
    engine = make(guarded, [of_core()[name](**MADE[name])], style.endswith("stream"))
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
    engine = make(guarded, [], style.endswith("stream"))
    assert drops.callback_manager is guarded.callback_manager
    text, _ = ask(engine, "a thing", style)
    assert "a thing" in text
    assert "Empty Response" not in text
    assert drops.shown == []
    if make is retriever_engine:
        text, _ = ask(engine, "unknown thing", style)
        assert drops.shown == [("unknown thing", 2)]
        assert (
            "Empty Response" in text
        )  # that is LlamaIndex's answer when an index has nothing, and it stays so


def test_the_note_can_be_saved():
    (note,) = GatedRetriever(vector_index().as_retriever(), ScriptedGate()).retrieve("a thing")
    again = json_to_doc(doc_to_json(note.node))
    assert again.text == note.node.text
    said = again.metadata["rgate"]
    assert (said["retrieve"], said["p_known"], said["reason"]) == (False, 0.5, "because")
    json.dumps(note.score, allow_nan=False)
