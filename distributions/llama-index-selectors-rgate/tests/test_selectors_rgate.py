from llama_index.core.base.base_selector import BaseSelector
from llama_index.core.indices.empty import EmptyIndex
from llama_index.core.llms import MockLLM
from llama_index.selectors import rgate

import rgate_integrations.llama_index


def test_every_name_is_the_one_of_rgate_integrations():
    assert set(rgate.__all__) == set(rgate_integrations.llama_index.__all__)
    for name in rgate.__all__:
        assert getattr(rgate, name) is getattr(rgate_integrations.llama_index, name)


def test_class():
    # LlamaIndex's own integrations are tested so.
    names_of_base_classes = [base.__name__ for base in rgate.RetrievalGateSelector.__mro__]
    assert BaseSelector.__name__ in names_of_base_classes


def test_an_engine_is_gated():
    llm = MockLLM()
    engine = rgate.GatedQueryEngine.from_defaults(
        EmptyIndex().as_query_engine(llm=llm), "constant:never", llm=llm
    )
    assert "who?" in str(engine.query("who?"))
