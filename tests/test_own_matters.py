"""Requests about own matters, which no LLM knows, although the words are easy or the question is."""

import pytest

from rgate_integrations import load_gate

SOURCE = "names a source of the asker's own, which the LLM has not read."
LOCAL = "The question seems to be about an application's own matters, which the LLM does not know."
NAMED = [
    "look in my biology notes and tell me what mitosis is",
    "Please check the attached PDF: when did the Berlin Wall fall?",
    "How do you prune roses? There's a sheet on it among the garden club papers I've uploaded.",
    "Laut der angehängten PDF: Wann wurde die Bundesrepublik gegründet?",
    "Consulta el glosario interno y dime qué significa «stakeholder».",
    "附件里写的辛亥革命是哪一年?",
    "첨부한 PDF에는 임진왜란이 몇 년에 일어났다고 되어 있어?",
]


@pytest.mark.parametrize("request_text", NAMED)
def test_a_source_of_the_askers_own_retrieves(request_text):
    """Regression: the question alone is easy, so that these were skipped, at P(known) up to 0.97."""
    decision = load_gate().decide(request_text)
    assert decision.retrieve
    assert decision.override.reason.endswith(SOURCE)
    assert decision.reason.startswith(decision.override.reason)


@pytest.mark.parametrize(
    "request_text",
    [
        "got the wrong colour, can you swap it",
        "compare exhibit A and exhibit B",
        "gibts das auch in rot",
        "llegó roto",
        "le partiel de bio c'est quand",
        "dove si butta la vernice",
        "kiedy odbierają szkło",
        "когда вывозят мусор",
        "kırmızısı var mı",
        "これは防水ですか?",
        # Regression: a rule to check was skipped.
        "Lena says the limit is 100 requests per minute. Is that correct?",
        "Lena says the trial lasts 14 days. Is that right?",
        "Der Hausmeister sagt, der Keller ist bis neun offen. Stimmt das?",
    ],
)
def test_what_only_the_application_knows_retrieves(request_text):
    """Regression: without a name or "our", these looked like common knowledge or small talk, up to 1.00."""
    assert load_gate().decide(request_text).retrieve


def test_the_reason_says_that_a_request_is_about_own_matters():
    assert load_gate().decide("got the wrong colour, can you swap it").override.reason == LOCAL


STORY = (
    "We moved in on a Saturday, and it rained from morning to evening. My brother carried the sofa with two friends, "
    "and the cat sat in the bath until it was dark. On Sunday the neighbours brought soup."
)
GESCHICHTE = (
    "Am Samstag sind wir eingezogen, und es hat den ganzen Tag geregnet. Mein Bruder hat das Sofa getragen, und die "
    "Katze saß bis abends in der Badewanne."
)


@pytest.mark.parametrize(
    ("story", "asked"),
    [
        (STORY, "Please check the attached PDF: when did the Berlin Wall fall?"),
        (STORY, "According to our wiki, what is a monad?"),
        (STORY, "what time does the gate close"),
        (GESCHICHTE, "gibts das auch in rot?"),
        (GESCHICHTE, "Laut unserem Handbuch: Was ist ein Verb?"),
    ],
)
@pytest.mark.parametrize("form", ["{story} {asked}", "{asked} {story}", "{story}\n\n{asked}\n\n{story}"])
def test_own_matters_are_found_inside_a_paragraph(story, asked, form):
    """Regression: of these fifteen, most were skipped."""
    assert load_gate().decide(form.format(story=story, asked=asked)).retrieve


def test_the_reason_quotes_the_sentence_about_own_matters():
    decision = load_gate().decide(f"{STORY} When do I get my deposit back? The neighbours do not know.")
    assert decision.reason.startswith(
        "“When do I get my deposit back?” seems to be about an application's own"
    )


@pytest.mark.parametrize(
    ("told", "easy", "own"),
    [
        (
            'Our roofer wrote "replace the flashing" on his quote.',
            "What is flashing?",
            "Which tiles did he put down?",
        ),
        ("Mia from accounting says that 'data' is plural.", "Who is right?", "Which form did she file?"),
        (
            "My lecturer used the word heuristic twice today.",
            "What does it mean?",
            "Where are her slides?",
        ),
        ("Il preventivo parla di «cappotto termico».", "Che cos'è?", "Quando iniziano i lavori da noi?"),
    ],
)
def test_what_a_message_tells_does_not_decide_but_what_it_asks(told, easy, own):
    """Regression: because of what they tell, all of them retrieved."""
    decisions = load_gate().decide_batch([f"{told} {easy}", f"{told} {own}"])
    assert [decision.retrieve for decision in decisions] == [False, True]


@pytest.mark.parametrize(
    "request_text",
    [
        "what is mitosis",
        "In your own words, what is mitosis?",
        "When did the Berlin Wall fall? Please keep it short.",
        "Wann wurde die Bundesrepublik gegründet? Erklär es wie für ein Kind.",
        "wie mischt man rot",
        "por qué se rompe el vidrio",
        "что значит слово мусор",
        "too bad",
        "thanks, that's fine",
        f"{STORY} What is mitosis?",
        f"{STORY}\n\nPlease make this shorter.",
        f"{GESCHICHTE} Bitte mach das kürzer.",
        # Regression: to the head for segments alone, these looked like an application's own matters.
        "schreib mir eine kurze abwesenheitsnotiz",
    ],
)
def test_otherwise_the_question_decides(request_text):
    decision = load_gate().decide(request_text)
    assert (decision.retrieve, decision.override) == (False, None)


@pytest.mark.parametrize(
    "message",
    [
        "Hi, hope you're well, is my prescription ready, thank you so much!",
        "hi hope you're well which room is the training in thank you so much",
        "HI HOPE YOU'RE WELL WHERE IS MY ORDER THANK YOU SO MUCH",
        "Hi... hope you're well... who is on call this weekend... thanks a lot",
    ],
)
def test_a_request_between_pleasantries_is_not_small_talk(message):
    """Regression: of a sentence that is mostly small talk, all was taken for small talk, up to 0.91."""
    decision = load_gate().decide(message)
    assert decision.retrieve
    assert "seems to ask about something that the LLM does not know" in decision.override.reason


@pytest.mark.parametrize(
    "message",
    [
        "Hi, hope you're well, thank you so much, have a lovely day!",
        "sorry to bother you can you tell me a joke thank you so much you're the best",
    ],
)
def test_pleasantries_alone_need_no_passages(message):
    assert not load_gate().decide(message).retrieve
