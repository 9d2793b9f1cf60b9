"""The playground, as the cookbook has it, with the real small model behind it."""

import importlib.util
from pathlib import Path

import pytest

from rgate_integrations import Decision, load_gate
from rgate_integrations.index import Passage
from rgate_integrations.index.retriever import Hit

pytest.importorskip("gradio")
PAGE = Path(__file__).parent.parent / "cookbook" / "playground.py"


class Index:
    """Finds one passage for every query."""

    def search(self, queries, k):
        return [[Hit(Passage("1", "Quimbo is the capital of Zorblat.", "Zorblat"), 0.9, q)] for q in queries]


@pytest.fixture(scope="module")
def playground():
    spec = importlib.util.spec_from_file_location("playground_page", PAGE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_slider_turns_the_decision(playground):
    decision = Decision(question="q", retrieve=True, p_known=0.4, threshold=0.5)
    assert playground.verdict(decision, 0.5) == {"retrieve: P(known)": 0.4}
    assert playground.verdict(decision, 0.3) == {"answer directly: P(known)": 0.4}
    assert playground.verdict(None, 0.3) is None


@pytest.mark.model
def test_a_question_shows_decision_passages_and_both_answers(playground, smollm2):
    page = playground.build(load_gate(), smollm2, Index())
    ask = next(f.fn for f in page.fns.values() if f.fn is not None and f.fn.__name__ == "ask")
    decision, shown, reason, alone, read, passages = ask("What is the capital of Zorblat?", 0.5)
    assert shown
    assert reason == decision.reason
    assert alone
    assert read
    assert passages == [["Zorblat", "Quimbo is the capital of Zorblat.", 0.9]]
