"""What a message of a conversation rests on, and that it is retrieved for as that is."""

import pytest

from rgate_integrations import Request, load_gate
from rgate_integrations.gates.evidence.base import Sources
from rgate_integrations.gates.turns import join_user_turns, resolve_turns

ASKED = "When does the insurance on our delivery van expire?"
EASY = "What is the capital of Portugal?"
FAILED = "assistant: I do not know."


@pytest.mark.parametrize(
    ("history", "question", "before"),
    [
        ([], "Thanks!", ()),
        (["user: a?"], "a?\nThanks!", ()),
        (["user: a?", "assistant: b", "user: c?", "user: d"], "c?\nd\nThanks!", ("user: a?", "assistant: b")),
        (["user: a?", "assistant: b"], "Thanks!", ("user: a?", "assistant: b")),
        (["system: a?"], "Thanks!", ("system: a?",)),
    ],
)
def test_turns_of_the_user_in_a_row_are_one_request(history, question, before):
    joined = join_user_turns(Request("Thanks!", history, threshold=0.3))
    assert (joined.question, joined.history, joined.threshold) == (question, before, 0.3)


def resolved(question, *history):
    """Return what the gate reads: the request, and how many turns before it."""
    engine = load_gate()
    (request,) = resolve_turns(engine.gate, [Request(question, history)], Sources(engine.get_proxy, None, {}))
    return request.question, len(request.history)


TURNS = ("user: Hello!", "assistant: Hi!", f"user: {ASKED}", FAILED)


@pytest.mark.model
@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (("Try again.", *TURNS), (f"{ASKED}\nTry again.", 2)),
        (("No luck.", *TURNS), (f"{ASKED}\nNo luck.", 2)),
        (("再来一次", *TURNS), (f"{ASKED}\n再来一次", 2)),
        (("Once more!", *TURNS, "user: Try again.", FAILED), (f"{ASKED}\nOnce more!", 2)),
        (("Thanks!", *TURNS), ("Thanks!", 0)),
        (("Traduis ta réponse en espagnol.", *TURNS), ("Traduis ta réponse en espagnol.", 0)),
        (("Kannst du das kürzer machen?", *TURNS), ("Kannst du das kürzer machen?", 0)),
        (("Ok, dobrze wiedzieć.", *TURNS), ("Ok, dobrze wiedzieć.", 0)),
        (("语气正式一些。", *TURNS), ("语气正式一些。", 0)),
        (("Und wenn wir verlängern?", *TURNS), ("Und wenn wir verlängern?", 4)),
        (("And that on our car?", *TURNS), ("And that on our car?", 4)),
        (("Try again.", FAILED), ("Try again.", 1)),  # nothing is known of what it retries
        (
            ("Yes, that would be very kind, thank you!", "assistant: It rains. Shall I look it up?"),
            ("Shall I look it up?\nYes, that would be very kind, thank you!", 1),
        ),
        (
            ("4411-8820", "assistant: Could you give me your order number? It is in the e-mail."),
            ("Could you give me your order number?\n4411-8820", 1),
        ),
        (
            ("4411-8820", "assistant: Which order is it? You find the number at the top of the e-mail."),
            ("Which order is it?\n4411-8820", 1),
        ),
        (("Thanks!", "assistant: It is. **Shall I look it up?** 😊"), ("Shall I look it up?\nThanks!", 1)),
        (("Thanks!", "assistant: It is. If you like, I can look it up."), ("Thanks!", 0)),
        (
            ("Yes, please.", "assistant: It is. If you like, I can look it up."),
            ("If you like, I can look it up.\nYes, please.", 1),
        ),
        (
            ("ok", "assistant: It is not here. I can also search the archive."),
            ("I can also search the archive.\nok", 1),
        ),
        (("at 3 then", "assistant: Is there anything else? Just ask."), ("at 3 then", 1)),
        (("Thanks!", "assistant: Done. Anything else?"), ("Thanks!", 0)),
        (("Where is it?", "assistant: Done. How can I assist you?"), ("Where is it?", 1)),
        (
            (
                "That would be wonderful!",
                "assistant: Do you want me to search the service contract for the times?",
            ),
            ("Do you want me to search the service contract for the times?\nThat would be wonderful!", 0),
        ),
        (
            ("What did we pay the roofer in the end?", "assistant: Shall I look it up?"),
            ("What did we pay the roofer in the end?", 1),
        ),
    ],
)
def test_what_a_message_rests_on(turns, expected):
    question, *history = turns
    assert resolved(question, *history) == expected


@pytest.mark.model
def test_a_retry_and_a_turn_in_a_row_inherit_what_they_concern_and_thanks_do_not(default_gate):
    for asked, retrieve in ((ASKED, True), (EASY, False)):
        again, retry, thanks = default_gate.decide_batch(
            [
                Request("Please answer in English.", [f"user: {asked}"]),
                Request("That is not what I asked.", [f"user: {asked}", FAILED]),
                Request("Thank you so much!", [f"user: {asked}", "assistant: That is on 4 May."]),
            ]
        )
        assert (again.retrieve, retry.retrieve, thanks.retrieve) == (retrieve, retrieve, False)
        assert retry.question == "That is not what I asked."


@pytest.mark.model
def test_a_follow_up_is_as_unknown_as_what_it_follows_on(default_gate):
    unknown = ("Who is the head of the Brunnthal clinic?", "What is the dose of zorvimab?")
    for follow_up in ("How tall is she?", "And for adults?", "Tell me more about her.", "How did he die?"):
        for asked in unknown:
            assert default_gate.decide(
                follow_up, history=[f"user: {asked}", "assistant: Dr Weiss, 5 mg."]
            ).retrieve
    hamlet = ["user: Who wrote Hamlet?", "assistant: William Shakespeare."]
    known = [
        Request(question, hamlet) for question in ("When was he born?", "How did he die?", "And his wife?")
    ]
    assert [d.retrieve for d in default_gate.decide_batch(known)] == [False] * 3


@pytest.mark.model
def test_a_statement_after_common_knowledge_is_no_remark_about_it(default_gate):
    leaf = ("user: What is photosynthesis?", "assistant: Plants turn light and water into sugar and oxygen.")
    author = ("user: Who wrote Don Quixote?", "assistant: Miguel de Cervantes.")
    egg = ("user: How do I boil an egg?", "assistant: Put it into boiling water for eight minutes.")
    statements = (
        "I topped up but the app declined it",
        "I am dissatisfied, I would like to close my account.",
        "my card fell out of my wallet and i ran over it so it does not work",
        "i wish to have a 10 minute timer",
        "Meine Karte wurde am Automaten eingezogen.",
        "J'attends toujours le virement de lundi, que se passe-t-il ?",
    )
    decisions = default_gate.decide_batch([Request(each, (*leaf, *author, *egg)) for each in statements])
    assert [d.question for d in decisions if not d.retrieve] == []
    about_eggs = ("And what about the other half?", "How long does it take if I want it soft?")
    decisions = default_gate.decide_batch([Request(each, egg) for each in about_eggs])
    assert [d.question for d in decisions if d.retrieve] == []


@pytest.mark.model
def test_words_that_only_look_like_a_follow_up_are_skipped(default_gate):
    whole = ("it was nice to catch up with you", "Thanks for that!", "I love it")
    assert [d.question for d in default_gate.decide_batch(whole) if d.retrieve] == []
    follow_ups = ("How tall is he?", "What is its capital?", "Can you summarise that?")
    assert [d.question for d in default_gate.decide_batch(follow_ups) if not d.retrieve] == []


@pytest.mark.model
@pytest.mark.parametrize(
    "offer", ["How can I assist you today?", "Kann ich sonst noch helfen?", "¿Algo más?"]
)
def test_an_offer_of_nothing_in_particular_makes_nothing_needy(default_gate, offer):
    messages = (EASY, "Translate 'cheese' into German.", "No, thank you.", "Thanks, bye!", ASKED)
    requests = [Request(each, ["user: Hello", f"assistant: Hello! {offer}"]) for each in messages]
    assert [d.retrieve for d in default_gate.decide_batch(requests)] == [False] * 4 + [True]


ANSWER = "Photosynthesis turns light into energy. " + "The leaves of a plant take in carbon dioxide. " * 10


@pytest.mark.model
@pytest.mark.parametrize(
    "end",
    [
        "**{}**",
        "({})",
        "{} 😊",
        "{} Just let me know!",
        "{}\n\nI'm happy to help.",
        "If you like, I can look up what our contract with Kessler says.",
        "Να ψάξω τι λέει η σύμβασή μας με την Kessler;",
    ],
)
def test_an_accepted_offer_retrieves_whatever_is_around_it(end):
    """Regression: unless the turn ended in a question mark, "Yes, please." was skipped."""
    offer = end.format("Shall I look up what our contract with Kessler says about delays?")
    history = ["user: How does photosynthesis work?", f"assistant: {ANSWER}{offer}"]
    requests = [Request(message, history) for message in ("Yes, please.", "sure", "go ahead")]
    assert [decision.retrieve for decision in load_gate().decide_batch(requests)] == [True] * 3


@pytest.mark.model
@pytest.mark.parametrize(
    "end",
    [
        "And at night? Plants breathe like us.",
        "Who signed it? Ms Petrova did.",
        "If you like, I can look up what our contract says.",
        "**Anything else?** 😊",
    ],
)
def test_thanks_after_a_question_with_its_answer_or_a_mere_possibility_need_nothing(end):
    history = ["user: How does photosynthesis work?", f"assistant: {ANSWER}{end}"]
    requests = [
        Request(message, history) for message in ("Thanks!", "Great!", "Translate that into Italian.")
    ]
    assert [decision.retrieve for decision in load_gate().decide_batch(requests)] == [False] * 3


@pytest.mark.model
@pytest.mark.parametrize(
    ("end", "message", "retrieves"),
    [
        ("It is not in the wiki. I can also search the legal folder.", "ok", True),
        ("I need your approval to search the archive.", "okay", True),
        ("If you like, I can look it up.", "OK", True),
        ("Ich brauche deine Freigabe, um im Archiv zu suchen.", "alles klar", True),
        ("Je peux aussi chercher dans les archives.", "d'accord", True),
        ("También puedo buscar en el archivo.", "vale", True),
        ("I can also search the legal folder.", "Thanks!", False),
        ("The delay is two days. You can find it under Settings.", "ok", False),
        ("It is two days. Let me know if you need anything else.", "ok", False),
        ("You can also search by order number.", "Okay.", False),
        ("You need your manager's approval to access the archive.", "ok", False),
        ("Le directeur doit donner son accord.", "d'accord", False),
        ("**I can also search the legal folder.** 😊", "ok", True),
        ("“I can also search the legal folder.”", "ok", True),
        ("I can trace the shipment in the portal. Just let me know!", "ok", True),
        ("Let me check the annex.", "fine", True),
        ("I can also search the legal folder.", "alright", True),
        ("I could read the old thread.", "sounds good", True),
        ("También puedo revisar el anexo.", "bien", True),
        ("Potrei cercare il numero del notaio.", "bene", True),
        ("I need your okay to read the thread.", "fine", True),
        ("The caretaker can also open the cellar.", "ok", False),
        ("You need your neighbour's consent to build a fence.", "ok", False),
        ("Please upload a photo of the meter.", "okay", False),
        ("Next, we multiply both terms.", "fine", False),
        ("Sie können auch am Empfang fragen.", "alles klar", False),
        ("También puede preguntar en recepción.", "vale", False),
        ("El anexo se firmó ayer.", "bien", False),
        ("The contract was signed by both.", "sounds good", False),
    ],
)
def test_ok_accepts_an_offer_that_is_a_statement_and_nothing_else(end, message, retrieves):
    """Regression: it was a remark unless the turn ended in a question; then, it accepted what others can do."""
    history = ["user: What penalties does our contract with Norholt contain?", f"assistant: {end}"]
    assert load_gate(llm_name="gpt-4o").decide(message, history=history).retrieve == retrieves


LIST = (
    "Find me flights from Leeds to Porto.",
    "Three options:\n\n1. 3 May, 06:40–09:20, £74\n2. 5 May, 13:15–15:55, £61",
)
BUS = ("When does the bus to Fernhill School leave?", "Bus 14 leaves the market square at 7:25.")
LASAGNE = (
    "I'm looking for the lasagne recipe.",
    "Our classic lasagne takes an hour and a half. It serves six.",
)
PLANTS = ("What is photosynthesis?", "Plants turn light, water and carbon dioxide into sugar and oxygen.")


@pytest.mark.model
@pytest.mark.parametrize(
    ("turns", "message", "retrieves"),
    [
        (LIST, "and on the 7th?", True),
        (LIST, "and for two?", True),
        (LIST, "Thanks!", False),
        (LIST, "As a table, please.", False),
        (BUS, "and on Fridays?", True),
        (BUS, "in French", False),
        (LASAGNE, "how many calories does it have according to the recipe?", True),
        (PLANTS, "And at night?", False),
        (PLANTS, "Shorter, please.", False),
    ],
)
def test_a_follow_up_needs_what_the_question_before_it_needs(turns, message, retrieves):
    """Regression: short follow-ups after a list of figures were skipped, as if they were sums."""
    asked, answer = turns
    assert (
        load_gate().decide(message, history=[f"user: {asked}", f"assistant: {answer}"]).retrieve == retrieves
    )


@pytest.mark.model
def test_whatever_the_threshold_a_follow_up_needs_what_the_question_before_it_needs():
    asked, answer = BUS
    request = Request("and on Fridays?", [f"user: {asked}", f"assistant: {answer}"], threshold=0.1)
    assert load_gate().decide(request).retrieve


@pytest.mark.model
def test_after_small_talk_a_short_statement_that_needs_passages_by_itself_retrieves():
    """Regression: only messages of at least seven words were judged without the earlier turns."""
    history = [
        "user: How do I boil an egg?",
        "assistant: Boil it for eight minutes.",
        "user: thanks",
        "assistant: You're welcome!",
    ]
    gate = load_gate(on_error="raise")
    assert gate.decide("My account was deleted.", history=history).retrieve
    assert not gate.decide("My egg is perfect now.", history=history).retrieve
