"""LangChain: one request is decided once and drafted once, and what it carries is in nobody's way."""

import json

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import RunnableLambda, RunnablePassthrough

from rgate_integrations.langchain import ClaimQueryRewriter, RetrievalGate, RetrievalRouter
from tests.langchain_fakes import BATCHES, INVOKES, SINGLES, STREAMS, Chat, Judge, Search, each


def texts(documents):
    return [document.page_content for document in documents]


ARMS = {
    "the guard": lambda guarded: guarded | texts,
    "a step of a chain": lambda guarded: RunnablePassthrough() | guarded | texts,
    "a branch": lambda guarded: (
        {"context": guarded, "question": RunnablePassthrough()}
        | RunnableLambda(lambda found: texts(found["context"]))
    ),
    "called by a function": lambda guarded: RunnableLambda(lambda question: texts(guarded.invoke(question))),
    "with fallbacks": lambda guarded: guarded.with_fallbacks([Search()]) | texts,
    "with a name": lambda guarded: guarded.with_config(run_name="guard") | texts,
}


@pytest.mark.parametrize("llm", [False, True], ids=["gate alone", "with llm"])
@pytest.mark.parametrize("arm", ARMS.values(), ids=list(ARMS))
@each(SINGLES)
def test_a_router_before_a_guard_decides_and_drafts_once(call, arm, llm):
    judge, chat = Judge(), Chat()
    gate = RetrievalGate(judge, llm=chat if llm else None, tokens=2)
    chain = gate.route(retrieve=arm(gate.guard(Search())), direct=lambda _: [])
    assert "about unknown?" in call(chain, "unknown?")
    assert judge.calls == [["unknown?"]]
    assert len(chat.seen) == llm


@each(BATCHES)
def test_each_question_of_a_batch_carries_its_own_decision(call):
    judge, chat = Judge(), Chat()
    gate = RetrievalGate(judge, llm=chat, tokens=2)
    chain = gate.route(retrieve=gate.guard(Search()) | texts, direct=lambda _: ["direct"])
    found = call(chain, ["unknown a?", "known?", "unknown b?"])
    assert "about unknown a?" in found[0]
    assert found[1] == ["direct"]
    assert "about unknown b?" in found[2]
    assert judge.calls == [["unknown a?", "known?", "unknown b?"]]
    assert len(chat.seen) == 3


@pytest.mark.parametrize("llm", [False, True], ids=["gate alone", "with llm"])
@each(SINGLES)
def test_a_router_before_a_rewriter_decides_and_drafts_once(call, llm):
    judge, chat = Judge(), Chat()
    gate = RetrievalGate(judge, llm=chat if llm else None, tokens=2)
    rewriter = ClaimQueryRewriter(gate)
    chain = gate.route(retrieve=rewriter, direct=lambda _: [])
    assert call(chain, {"question": "unknown?"})[0] == "unknown?"
    assert judge.calls == [["unknown?"]]
    assert len(chat.seen) == llm


@each(INVOKES)
def test_a_failure_is_carried_too(call):
    judge = Judge()
    gate = RetrievalGate(judge)
    chain = gate.route(retrieve=gate.guard(Search()) | texts, direct=lambda _: [])
    assert call(chain, "RAISE")[0] == "about RAISE"
    assert len(judge.calls) == 1


@each(INVOKES)
def test_another_gate_decides_for_itself(call):
    first, second = Judge(), Judge()
    inner = RetrievalGate(second).route(retrieve=lambda _: "a", direct=lambda _: "b")
    chain = RetrievalGate(first).route(retrieve=inner, direct=inner)
    assert call(chain, "known?") == "b"
    assert (first.calls, second.calls) == ([["known?"]], [["known?"]])


@each(INVOKES)
def test_another_question_and_another_threshold_are_decided(call):
    judge = Judge()
    gate = RetrievalGate(judge)
    again = RunnableLambda(lambda question: f"{question} really") | gate
    assert call(gate.route(retrieve=again, direct=again), "known?").question == "known? really"
    stricter = gate.with_config(configurable={"retrieval_threshold": 0.9})
    assert call(gate.route(retrieve=stricter, direct=stricter), "known?").retrieve is True
    assert judge.questions == ["known?", "known? really", "known?", "known?"]


@each(INVOKES)
def test_a_wrapped_gate_carries_its_decisions(call):
    judge = Judge()
    gate = RetrievalGate(judge)
    wrapped = RunnablePassthrough() | gate.with_config(tags=["mine"]).with_retry()
    chain = RetrievalRouter(wrapped.with_config(tags=["too"]), retrieve=gate, direct=gate)
    assert call(chain, "known?").retrieve is False
    assert len(judge.calls) == 1


# --- metadata ----------------------------------------------------------------------------------------------------


class Metadata(BaseCallbackHandler):
    """Remembers the metadata of every run."""

    def __init__(self):
        self.seen = []

    def on_chain_start(self, serialized, inputs, *, metadata=None, **kwargs):
        self.seen.append(metadata)


@each(INVOKES | STREAMS)
def test_the_users_metadata_is_kept_and_ours_is_named(call):
    mine = {"retrieve": "mine", "p_known": "mine", "draft": "mine", "question": "mine"}
    seen, handler = {}, Metadata()

    def direct(question, config):
        seen.update(config["metadata"])
        return "direct"

    chain = RetrievalGate(Judge(), llm=Chat(), tokens=2).route(retrieve=lambda _: "rag", direct=direct)
    call(chain, "known?", {"metadata": mine, "callbacks": [handler]})
    ours = {"rgate_retrieve": False, "rgate_p_known": 0.8, "rgate_draft": "It is"}
    assert {key: seen[key] for key in mine | ours} == mine | ours
    assert handler.seen
    for metadata in handler.seen:
        json.dumps(metadata)  # traces get plain values only
