"""Which messages a gate cannot understand, and what becomes of a decision to skip them."""

import pytest

from rgate_integrations import Override, Request, load_gate
from rgate_integrations.engine.follow_ups import (
    REFERS_BACK,
    UNREAD,
    is_follow_up,
    list_search_texts,
    missing_context,
)


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
        "Human: And how often?",  # as a program may write it
        "**User:** and in winter?",
    ],
)
def test_follow_ups(question):
    assert is_follow_up(question)
    assert is_follow_up(f"  {question.lower()} ")


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
        "Who is the head of IT?",
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
    assert not is_follow_up(question)


@pytest.mark.model
@pytest.mark.parametrize("label", ["Human: ", "**User:** ", "[user]: ", "Q: ", "QUESTION: "])
def test_a_message_with_a_label_is_judged_without(smollm2, label):
    """Regression: "Human: And how often?" was common knowledge, and so was "Q: And in winter?"."""
    gate = load_gate(on_error="raise")
    for message in ("And how often?", "And in winter?", "Thanks!", "What is the capital of France?"):
        bare, labelled = gate.decide_batch([message, label + message])
        assert (labelled.retrieve, labelled.p_known) == (bare.retrieve, bare.p_known)
        assert labelled.question == label + message


HISTORY = ("user: Who was Napoleon?", "assistant: An emperor.")


@pytest.mark.parametrize(
    ("question", "history", "reads", "why"),
    [
        ("How tall is he?", (), True, REFERS_BACK),
        ("How tall is he?", (), False, REFERS_BACK),
        ("How tall is he?", HISTORY, True, ""),
        ("How tall is he?", HISTORY, False, UNREAD),
        ("Who wrote Hamlet?", HISTORY, False, UNREAD),  # its words do not say that it needs no other turn
        ("Who wrote Hamlet?", None, False, ""),
    ],
)
def test_the_one_rule(question, history, reads, why):
    assert missing_context(Request(question, history), reads_history=reads) == why


@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.5])
@pytest.mark.parametrize("rules", [{}, {"never": lambda question: True}], ids=["gate", "rule"])
def test_a_decision_to_skip_what_is_not_understood_retrieves_and_says_why(call, rules, threshold):
    gate = load_gate("constant:never", **rules)
    found = call(gate, "How tall is he?", threshold=threshold)
    assert (found.retrieve, found.p_known, found.threshold) == (True, 1.0, threshold)
    assert found.override == Override(retrieve=True, reason=REFERS_BACK)
    assert found.reason.startswith(f"{REFERS_BACK} ")


def test_a_reason_to_retrieve_that_was_found_before_is_kept(call):
    gate = load_gate("constant:never", always=lambda question: True)
    assert "always=" in call(gate, "How tall is he?").override.reason


EARLIER, OFFER = "How loud is it in turbo mode?", "Shall I look up the warranty of the X200?"


@pytest.mark.parametrize(
    ("reply", "last", "searched"),
    [
        ("Yes please", f"assistant: 62 decibels. **{OFFER}**", f"{OFFER}\nYes please"),
        ("the blue one", "assistant: Which one is it?", f"{EARLIER}\nWhich one is it?\nthe blue one"),
        ("Thanks!", "assistant: 62 decibels.", f"{EARLIER}\nThanks!"),
        ("How long is the warranty?", f"assistant: 62 decibels. {OFFER}", "How long is the warranty?"),
        (
            "I would like that very much",
            f"assistant: 62 decibels. {OFFER}",
            f"{OFFER}\nI would like that very much",
        ),
        ("Ja, sehr gerne", "assistant: Nein.\n\n**Ich kann suchen.**", "Ich kann suchen.\nJa, sehr gerne"),
    ],
)
def test_a_short_reply_is_searched_for_with_the_question_that_it_answers(reply, last, searched):
    """Regression: for "Yes please" to an offer, only the question before the offer was searched for."""
    assert list_search_texts(reply, [f"user: {EARLIER}", last])[0] == searched


def test_a_reply_to_an_offer_that_nothing_precedes_is_searched_for_with_the_offer():
    assert list_search_texts("Yes please", [f"assistant: {OFFER}"]) == [f"{OFFER}\nYes please"]


@pytest.mark.parametrize(
    ("message", "last"),
    [
        ("price of the Y300", "62 decibels. Is there anything else I can help you with?"),
        ("weight of the Y300 please", f"62 decibels. {OFFER}"),
        ("No, tell me the price of the Y300", f"62 decibels. {OFFER}"),
        ("Zeig mir die Preisliste", "62 Dezibel. Kann ich sonst noch etwas tun?"),
    ],
)
def test_a_request_that_names_something_is_searched_for_as_if_nothing_was_offered(message, last):
    """Regression: a request of up to eight words was searched for with the offer only."""
    texts = list_search_texts(message, [f"user: {EARLIER}", f"assistant: {last}"])
    assert texts == [message, f"{EARLIER}\n{message}"]
    assert list_search_texts("parental leave", ["assistant: Hello! How can I help you?"]) == [
        "parental leave"
    ]


def test_a_short_request_after_an_offer_is_also_searched_for_alone():
    texts = list_search_texts("parental leave", [f"user: {EARLIER}", f"assistant: 62 decibels. {OFFER}"])
    assert texts[0] == f"{OFFER}\nparental leave"
    assert texts[-1] == "parental leave"


@pytest.mark.parametrize("last", ["62 decibels.", f"62 decibels. {OFFER}", "62 decibels. I can look it up."])
@pytest.mark.parametrize(
    "message",
    [
        "ok, list the sick leave rules",
        "Yes, the opening hours in Leeds",
        "Sure. parking permit",
        "SIM card for new colleagues",
        "Vale de comida para todos",
        "IT hotline at the weekend",
        "네, 주차권 신청 방법",
    ],
)
def test_what_is_named_after_a_yes_is_also_searched_for_alone(message, last):
    """Regression: it was searched for only together with the end of the assistant's turn, whatever that was."""
    assert message in list_search_texts(message, [f"user: {EARLIER}", f"assistant: {last}"])


@pytest.mark.parametrize(
    "message", ["행사 일정", "예약 취소", "네트워크", "行程变更", "对账单", "Simbabwe", "IT desk"]
)
def test_a_word_that_only_begins_like_a_yes_accepts_no_statement(message):
    """Regression: there were no borders between words in Chinese and Korean, and "IT" was a pronoun."""
    history = [f"user: {EARLIER}", "assistant: I can look up the warranty."]
    assert list_search_texts(message, history) == [f"{EARLIER}\n{message}"]


@pytest.mark.parametrize(
    "reply", ["好的，谢谢", "네, 부탁해요", "はいお願いします", "Да, пожалуйста!", "YES DO IT"]
)
def test_a_mere_yes_is_searched_for_with_the_offer_alone(reply):
    assert list_search_texts(reply, [f"user: {EARLIER}", f"assistant: {OFFER}"]) == [f"{OFFER}\n{reply}"]
