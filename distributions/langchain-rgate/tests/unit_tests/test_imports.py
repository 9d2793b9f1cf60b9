import langchain_rgate

import rgate_integrations.langchain


def test_every_name_is_the_one_of_rgate_integrations():
    # The middleware needs the package langchain; it is imported from where it is.
    names = set(rgate_integrations.langchain.__all__) - {"RetrievalGateMiddleware"}
    assert set(langchain_rgate.__all__) == names
    for name in names:
        assert getattr(langchain_rgate, name) is getattr(rgate_integrations.langchain, name)


def test_a_chain_is_routed():
    gate = langchain_rgate.RetrievalGate("constant:never")
    chain = gate.route(retrieve=lambda question: "rag", direct=lambda question: "direct")
    assert chain.batch(["a", "b"]) == ["direct", "direct"]
