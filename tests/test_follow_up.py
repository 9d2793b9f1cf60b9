"""Which questions refer to something said before, and what becomes of a decision to skip them."""

import pytest

from rgate_integrations import Decision
from rgate_integrations.follow_up import REFERS_BACK, refers_back, understood


@pytest.mark.parametrize(
    "question",
    [
        "And how tall is he?",
        "how tall is he?",
        "What about Berlin?",
        "How many children does he have?",
        "What is the name of his wife?",
        "What is its capital?",
        "Who wrote it?",
        "When was it built?",
        "How does it work?",
        "How many albums did they release?",
        "Who said that?",
        "Why?",
        "Who is taller than him?",
        "How old was he when he won the Nobel Prize?",
        "Her father?",
        "What is the name of their album?",
        "Can you summarise that?",
    ],
)
def test_follow_ups(question):
    assert refers_back(question)
    assert refers_back(f"  {question.lower()} ")


@pytest.mark.parametrize(
    "question",
    [
        "",
        "   ",
        "Who wrote Hamlet?",
        "How tall is Napoleon, and when did he die?",
        'Who wrote "it" in 1986, and why did he write it?',
        "When did the king meet Napoleon and what did they say?",
        "What time is it in Tokyo?",
        "How long does it take to fly to Paris?",
        "Is it true that bees can count?",
        "Why does it rain?",
        "What language do they speak in Brazil?",
        "Do dogs know their owners?",
        "Why do people lie to their friends?",
        "What do cats eat and why do they purr?",
        "My car does not start, what can I do about it?",
        "Translate this sentence: hello",
        "What is this code doing: print(1)",
        "Why is the sky blue?",
        "What is the theory of the big bang?",
        "Who was the first man on the moon?",
        "x" * 100_000,
        "the dog saw this cat and " * 10_000,
    ],
)
def test_whole_questions(question):
    assert not refers_back(question)


def decision_for(question, **fields):
    return Decision(question=question, p_known=0.9, **fields)


def test_a_decision_to_skip_a_follow_up_retrieves_and_says_why():
    skipped = decision_for("How tall is he?", retrieve=False, warnings=("cut",), reason="known")
    found = understood("How tall is he?", skipped)
    assert found.retrieve
    assert found.p_known == 0.9
    assert found.warnings == ("cut", REFERS_BACK)
    assert "said before" in found.reason
    assert not skipped.retrieve


def test_other_decisions_stay_as_they_are():
    retrieves = decision_for("How tall is he?", retrieve=True)
    whole = decision_for("How tall is Napoleon?", retrieve=False)
    assert understood("How tall is he?", retrieves) is retrieves
    assert understood("How tall is Napoleon?", whole) is whole
