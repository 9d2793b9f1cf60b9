"""The playground, as the cookbook has it, with the real small model behind it."""

import pytest

from rgate_integrations import Decision, load_gate
from tests.scripted_upstream import Shelf


@pytest.fixture(scope="module")
def playground():
    """Imported for these tests alone: Gradio takes three seconds."""
    pytest.importorskip("gradio")
    import playground

    return playground


def test_the_slider_turns_the_decision(playground):
    decision = Decision(question="q", retrieve=True, p_known=0.4, threshold=0.5)
    assert playground.verdict(decision, 0.5) == {"retrieve: P(known)": 0.4}
    assert playground.verdict(decision, 0.3) == {"answer directly: P(known)": 0.4}
    assert playground.verdict(None, 0.3) is None


@pytest.mark.model
def test_a_question_shows_decision_passages_and_both_answers(playground, smollm2):
    page = playground.build(load_gate(), smollm2, Shelf())
    ask = next(f.fn for f in page.fns.values() if f.fn is not None and f.fn.__name__ == "ask")
    decision, shown, reason, *answers, passages = ask("Who wrote Hamlet?", 0.5)
    assert shown == playground.verdict(decision, 0.5)
    assert reason == decision.reason
    assert [bool(answer) for answer in answers] == [True, True]
    assert passages == [["Hamlet", "Hamlet was written by William Shakespeare.", 1.0]]
