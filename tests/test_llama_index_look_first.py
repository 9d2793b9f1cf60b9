"""LlamaIndex: engines that look first, alone or beside a begun answer, in two steps, and what they refuse."""

import pytest
from llama_index.core.base.response.schema import Response
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import CustomQueryEngine
from llama_index.core.schema import TextNode

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.llama_index import GatedQueryEngine
from tests.begun_answers import LOOK, TEXT
from tests.llama_index_parts import ScriptedGate, both_ways
from tests.llama_index_writers import Rag


@both_ways
@pytest.mark.parametrize("found", [TEXT, TextNode(text=TEXT)], ids=type)
def test_what_is_not_quite_a_node_is_judged_by_its_text(call, found):
    class Odd(CustomQueryEngine):
        retriever: object = "there is one"

        def custom_query(self, query_str):
            return "read"

        def retrieve(self, query_bundle):
            return [found, None, 3]

        def synthesize(self, query_bundle, nodes, additional_source_nodes=None):
            return Response(f"read {len(nodes)}")

        async def asynthesize(self, query_bundle, nodes, additional_source_nodes=None):
            return self.synthesize(query_bundle, nodes)

    engine = GatedQueryEngine.from_defaults(Odd(), ScriptedGate(), llm=MockLLM(), look_first=LOOK)
    assert str(call(engine, "query", "who wrote the Zorba quartet")) == "read 3"
    assert "what is the weather" in str(call(engine, "query", "what is the weather"))


@pytest.mark.parametrize("options", [{"look_first": True}, {"answer_first": AnswerFirst(prefetch=True)}])
def test_an_engine_of_one_step_is_refused(options):
    with pytest.raises(ConfigurationError, match="two steps"):
        GatedQueryEngine.from_defaults(Rag(), llm=MockLLM(), **options)
