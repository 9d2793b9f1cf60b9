"""A request is split into segments, of which none hides what another asks."""

import inspect
import statistics
import textwrap
from itertools import product

import pytest

from rgate_integrations import Request, load_gate
from rgate_integrations.runtime.closings import closing_question, closing_sentences, shorten_turn
from rgate_integrations.runtime.segments import (
    count_words,
    is_question,
    layout,
    outside_code,
    segments,
    split_joined,
)

EASY = "What is 2 + 2?"
HARD = "Where was Aarno Maliniemi born?"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" \n\t", []),
        ("who wrote hamlet", ["who wrote hamlet"]),
        ("I was born in 1980. How old am I?", ["I was born in 1980.", "How old am I?"]),
        (f"{EASY} {HARD}", [EASY, HARD]),
        (f"{HARD}\n{EASY}", [HARD, EASY]),
        (f"{HARD} Hint: {EASY}", [HARD, f"Hint: {EASY}"]),
        ("Translate into German: It rains.", ["Translate into German: It rains."]),
        ("Put in the Summary: none Status: open", ["Put in the Summary: none", "Status: open"]),
        ("Is Mr. Smith in the U.S. Navy?", ["Is Mr. Smith in the U.S. Navy?"]),
        ("It is v. 2.5 now. ok", ["It is v. 2.5 now. ok"]),
        ('He said "Stop!" and left.', ['He said "Stop!"', "and left."]),
        ("word " * 130, [" ".join(["word"] * 60)] * 2 + [" ".join(["word"] * 10)]),
        (
            "Hi Anna,\n\n  the   log:\n10:21 ERROR x.y: failed (3)\tWhy? What now?! Thanks... Best,\nTom",
            [
                "Hi Anna,",
                "the log:",
                "10:21 ERROR x.y: failed (3) Why?",
                "What now?!",
                "Thanks...",
                "Best,",
                "Tom",
            ],
        ),
        # Scripts without spaces, capitals, or the marks of English.
        ("你好！我的账单什么时候到期？谢谢。", ["你好！", "我的账单什么时候到期？", "谢谢。"]),
        ("他说：“走吧。”然后他走了。好", ["他说：“走吧。”然后他走了。", "好"]),
        ("「本当？」と聞いた。はい", ["「本当？」と聞いた。", "はい"]),
        (
            "مرحبا! متى يجب أن أدفع الفاتورة؟ شكرا. إلى اللقاء",
            ["مرحبا!", "متى يجب أن أدفع الفاتورة؟", "شكرا.", "إلى اللقاء"],
        ),
        ("یہ کیا ہے؟ یہ ایک کتاب ہے۔ شکریہ", ["یہ کیا ہے؟", "یہ ایک کتاب ہے۔", "شکریہ"]),
        ("नमस्ते। कल की बैठक किस समय है? धन्यवाद।", ["नमस्ते।", "कल की बैठक किस समय है?", "धन्यवाद।"]),
        ("Llegó tarde. ¿Por qué? ¡Qué pena!", ["Llegó tarde.", "¿Por qué?", "¡Qué pena!"]),
        # Several questions in hasty typing.
        (
            "capital of peru; our rate limit;what is dns",
            ["capital of peru;", "our rate limit;", "what is dns"],
        ),
        ("什么是光合作用；我的订单在哪里", ["什么是光合作用；", "我的订单在哪里"]),
        ("ما هو الإنترنت؛ أين طلبيتي", ["ما هو الإنترنت؛", "أين طلبيتي"]),
        ("what is bmi?whats mine", ["what is bmi?", "whats mine"]),
        ("i lost my card. how do i block it", ["i lost my card.", "how do i block it"]),
        (
            "Wir waren zu viert. zahlt das (wirklich). oder",
            ["Wir waren zu viert.", "zahlt das (wirklich).", "oder"],
        ),
        ("я потеряла пропуск. кому писать", ["я потеряла пропуск.", "кому писать"]),
        ("open x.com/a?b=c or colou?r files", ["open x.com/a?b=c or colou?r files"]),
        ("1. What is dns?\n2.) Who owns it. Us?", ["1. What is dns?", "2.) Who owns it.", "Us?"]),
        ("**Q1.** What is dns? In 1931. Why?", ["**Q1.** What is dns?", "In 1931.", "Why?"]),
        ("1. what is dns 2. who owns ours", ["1. what is dns", "2. who owns ours"]),
        ("say (a) what osmosis is (b) who is on call", ["say (a) what osmosis is", "(b) who is on call"]),
        ("asked: • what is dns • where is ours", ["asked: • what is dns", "• where is ours"]),
        # Neither items nor ends of sentences.
        ("Which is largest: a) Earth b) Mars", ["Which is largest: a) Earth b) Mars"]),
        ("offen vom 1. bis zum 2. mai", ["offen vom 1. bis zum 2. mai"]),
        (
            "approx. three nights inkl. frühstück evtl. Montag",
            ["approx. three nights inkl. frühstück evtl. Montag"],
        ),
        ("the Dept. of physics, Prof. of law", ["the Dept. of physics, Prof. of law"]),
        ("well... maybe open read.me. then", ["well... maybe open read.me. then"]),
        ("what is (1 + 2) * (2 + 3)", ["what is (1 + 2) * (2 + 3)"]),
    ],
)
def test_the_segments_of_a_text(text, expected):
    assert segments(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", 0),
        ("When is  my bill due?", 5),
        ("我的账单什么时候到期？", 6),  # one run of 10 characters
        ("これは本です", 4),
        ("متى يجب أن أدفع الفاتورة؟", 5),
        ("कल की बैठक", 3),
    ],
)
def test_the_words_of_a_text(text, words):
    assert count_words(text) == words


def test_the_layout_knows_a_question_in_any_script():
    texts = ("Why?", "我的账单什么时候到期？", "متى؟", "谢谢。", "Hi.")
    assert [bool(layout(text)[0, 4]) for text in texts] == [True] * 3 + [False] * 2


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ("Why?", True),
        ("(Why?)", True),
        ("**Shall I?**", True),
        ("_Shall I?_", True),
        ("She asks: “Why?”.", True),
        ("Why?! 😊", True),
        ("老板问：“为什么？”", True),
        ("Πού είναι;", True),
        ("(Πού είναι\u037e)", True),
        ("Πού είναι η Kessler;", True),
        ("We left; it rained;", False),
        ("Why? Because it rained.", False),
        ("😊", False),
        ("", False),
    ],
)
def test_what_is_a_question(text, asks):
    assert is_question(text) == asks


OFFER = "Shall I look up what our contract says?"


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        (f"It is blue. {OFFER}", OFFER),
        (f"It is blue.\n\n**{OFFER}**", f"**{OFFER}**"),
        (f"It is blue. {OFFER} 😊", OFFER),
        (f"{OFFER} Just let me know! I'm happy to help. 😊", OFFER),
        (f"{OFFER} It is. It was. It will be.", ""),
        (f"{OFFER} There is also a clause about what happens if a part is late.", ""),
        ("If you like, I can look it up.", "If you like, I can look it up."),
        ("Wenn Sie möchten, sehe ich nach. Gern!", "Wenn Sie möchten, sehe ich nach."),
        ("Book economy. Can you fly business? No.", ""),
        ("What if you damaged something? We deduct it.", ""),
        ("¿Y si pierde su recibo? No hay problema.", ""),
        ("Why is the sky blue? It scatters light.", ""),
        ("Get it if you can.", ""),
        ("", ""),
    ],
)
def test_the_question_that_ends_a_turn(turn, expected):
    assert closing_question(turn) == expected


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        (["assistant: It is blue. I can look."], ["I can look."]),
        (["assistant: It is blue. I can look. Just say so! 🙂\n\n---"], ["I can look.", "Just say so!"]),
        (["assistant: Happy to look."], ["Happy to look."]),
        (["assistant: It is blue.", "user: I can look."], []),
        (["assistant: "], []),
        ([], []),
    ],
)
def test_the_sentences_that_end_a_turn(history, expected):
    assert closing_sentences(history) == expected


@pytest.mark.parametrize("character", [" ", "\t", "?", ".", "(", "'", "\u00a0", "\n"])
def test_a_run_of_one_character_is_walked_once(character):
    text = "Who" + character * 1_000_000 + "wrote it?"
    assert "".join("".join(segments(text)).split()) == "".join(text.split())


LOG = "\n".join(f"10:2{i}:07 INFO web-{i} request finished in 12 ms" for i in range(6))
TRACE = """Traceback (most recent call last):
  File "/srv/app/main.py", line 12, in <module>
    run(config)
KeyError: 'name'"""
PROSE = "The Lena rises in the Baikal Mountains. It flows north for 4,400 km and ends in a wide delta in the Arctic."
TABLE = "City | Rain\nOslo | 763 mm\nCairo | 25 mm\nLima | 16 mm"
MAIL = "Dear all,\nthe lift is being repaired on Monday.\nPlease take the stairs.\nBest regards,\nOlga"
CODE = "def add(a, b):\n    # sum of two numbers\n    return a + b"
FRAMES = {"log": LOG, "trace": TRACE, "prose": PROSE, "table": TABLE, "mail": MAIL, "code": CODE}
PRIVATE = "When did our supplier in Oslo confirm the delivery?"
FRESH = "What is the price of gold today?"
ORDERS = ("{0}\n\n{1}", "{1}\n\n{0}", "{0}\n\n{1}\n\n{0}")
HIDDEN = [order.format(*each) for order in ORDERS for each in product(FRAMES.values(), (PRIVATE, FRESH))]


HASTY = (
    "translate hello to french; synonyms for happy; when does my contract end",
    "1) synonyms for happy 2) who is on call tonight 3) when did ww2 end",
)


@pytest.mark.model
def test_neither_pasted_text_nor_an_easy_question_hides_what_is_asked(default_gate):
    asked = [*HIDDEN, f"{HARD} {EASY}", f"{EASY} {HARD}", f"{HARD} Hint: {EASY}", *HASTY]
    assert [each.question for each in default_gate.decide_batch(asked) if not each.retrieve] == []


@pytest.mark.model
def test_a_task_on_pasted_text_mostly_needs_nothing(default_gate):
    asked = [f"Translate the following into Spanish:\n\n{pasted}" for pasted in FRAMES.values()]
    assert (
        sum(each.retrieve for each in default_gate.decide_batch(asked)) <= 1
    )  # a mail looks like one of one's own


@pytest.mark.model
@pytest.mark.parametrize("order", ["PHH", "HPH", "HHP"])
def test_a_question_in_a_text_of_20_000_characters_is_read_wherever_it_stands(default_gate, order):
    parts = {"P": PRIVATE, "H": f"{LOG}\n" * 36}
    found = default_gate.decide("\n".join(parts[part] for part in order))
    assert found.retrieve
    assert "were read" in found.warnings[0]


@pytest.mark.model
def test_the_reason_names_the_segment_that_decides(default_gate):
    asked = [f"{PROSE}\n{PRIVATE}", "Guten Morgen! What is the capital of France?"]
    private, greeted = default_gate.decide_batch(asked)
    assert (PRIVATE in private.reason, "private" in private.signals) == (True, True)
    assert not greeted.retrieve, "a greeting in another language does not make a request foreign"


@pytest.mark.model
def test_a_follow_up_is_judged_in_the_light_of_the_turns_before_it(default_gate):
    private = ["user: How many customers do we have in Sweden?", "assistant: We have 144 customers there."]
    common = ["user: What is the capital of France?", "assistant: Paris."]
    found = default_gate.decide_batch([Request("And in Italy?", turns) for turns in (private, common)])
    assert [each.retrieve for each in found] == [True, False]


TWENTY = "one two three four five six seven eight nine ten " * 2
LONG = f"{TWENTY.strip()}. {'And it rained. ' * 20}"


@pytest.mark.parametrize(
    ("turn", "kept"),
    [
        ("assistant: " + "word " * 59, "assistant: " + "word " * 59),
        (f"assistant: {LONG}", f"assistant: {TWENTY.strip()}."),
        (f"assistant: Yes. {LONG}", f"assistant: Yes. {TWENTY.strip()}."),
        (f"assistant: {LONG}\nShall I go on?", f"assistant: {TWENTY.strip()}. Shall I go on?"),
        (f"assistant: {LONG}\n**Shall I go on?** 😊", f"assistant: {TWENTY.strip()}. **Shall I go on?**"),
        (f"assistant: {LONG}\nShall I go on? Say so!", f"assistant: {TWENTY.strip()}. Shall I go on?"),
        (f"assistant: {LONG}\nWhy? It rained.", f"assistant: {TWENTY.strip()}."),
        (f"user: {LONG}\nWhat is that?", f"user: {TWENTY.strip()}. What is that?"),
        (f"user: {LONG}\nSummarise that.", f"user: {TWENTY.strip()}. Summarise that."),
        ("assistant: " + "雨" * 200, "assistant: " + "雨" * 200),  # one sentence
    ],
    ids=[
        "short",
        "long",
        "a short sentence first",
        "a question",
        "an offer in bold type",
        "an offer before a short sentence",
        "a question with its answer",
        "user's question",
        "user's",
        "Chinese",
    ],
)
def test_of_a_long_turn_the_beginning_is_read_and_what_it_asks_at_its_end(turn, kept):
    assert shorten_turn(turn) == kept


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Sort 3, 1 and tell me who approved it.", ["Sort 3, 1", "tell me who approved it."]),
        ("What is DNS and where do we run ours?", ["What is DNS", "where do we run ours?"]),
        ("Was ist DNS und wo läuft unserer denn?", ["Was ist DNS", "wo läuft unserer denn?"]),
        ("¿Qué es DNS y cuándo caduca el nuestro?", ["¿Qué es DNS", "cuándo caduca el nuestro?"]),
        (
            "Qu'est-ce que le DNS et quand expire le nôtre ?",
            ["Qu'est-ce que le DNS", "quand expire le nôtre ?"],
        ),
        ("Who wrote Faust and Egmont?", ["Who wrote Faust and Egmont?"]),
        ("Who did it and how?", ["Who did it and how?"]),
        ('Correct "Come and tell me who it was".', ['Correct "Come and tell me who it was".']),
        ("Correct:\nCome and tell me who it was.", ["Correct:", "Come and tell me who it was."]),
        ("a" * 600 + " and tell me who it was", ["a" * 600 + " and tell me who it was"]),
    ],
)
def test_requests_that_a_line_joins(text, parts):
    assert split_joined(text).split("\n") == parts


@pytest.mark.model
@pytest.mark.parametrize(
    ("question", "retrieves"),
    [
        ("Sort these numbers: 3, 1, 2, and tell me who approved invoice 8812.", True),
        ("How many days are in a leap year and how many vacation days do I get?", True),
        ("Wie heißt die Hauptstadt von Peru, und wie lautet unsere WLAN-Kennung?", True),
        ("What is the capital of France and how many people live there?", False),
        ("Sort these numbers: 3, 1, 2, and tell me which one is the largest.", False),
    ],
)
def test_of_requests_that_a_line_joins_each_counts(question, retrieves):
    """Regression: beside a task or common knowledge, a private request in the same sentence was skipped."""
    decision = load_gate(llm_name="gpt-4o").decide(question)
    assert decision.retrieve == retrieves
    assert (decision.override is not None) <= ("needs passages by itself" in decision.reason)


CODE = (
    'def double(x):\n    """Return twice a number, or raise an error.\n\n    It must not be a string, which would be '
    'repeated; a list would grow.\n    """\n    y = x + x\n    return y'
)


@pytest.mark.parametrize(
    ("text", "outside"),
    [
        (f"{CODE}\n\nWhich team owns it these days?", "Which team owns it these days?"),
        (f"Which team owns it these days?\n\n{CODE}", "Which team owns it these days?"),
        (f"Look here.\n```python\n{CODE}\n```\nWhich team owns this?", "Look here.\nWhich team owns this?"),
        (f"{CODE}\n\nWhy?", ""),
        (CODE, ""),
        ("Dear Ann,\nit rained.\nWhich team won?\nYours, Ben", ""),
        ("", ""),
    ],
)
def test_what_is_outside_code(text, outside):
    assert outside_code(text) == outside


@pytest.mark.model
@pytest.mark.parametrize("code", [textwrap.dedent, statistics.quantiles], ids=["dedent", "quantiles"])
@pytest.mark.parametrize(
    ("question", "retrieves"),
    [
        ("What does PROJ-4821 say about the rollback plan?", True),
        ("Which service owns the /v2/refunds endpoint?", True),
        ("Explain what this function does in two sentences.", False),
        ("Write a unit test for the function above, please.", False),
    ],
)
def test_a_question_below_code_with_docstrings_is_judged_by_itself(code, question, retrieves):
    """Regression: the encoder took it for text to work on, like the docstring."""
    assert load_gate().decide(f"{inspect.getsource(code)}\n\n{question}").retrieve == retrieves


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Was geschah am 3. Oktober 1990 in Berlin?", 1),
        ("Wer regierte Kornbach im 19. Jahrhundert?", 1),
        ("Wann wurde der 1. FC Kornbach gegründet?", 1),
        ("Das Amt ist in der Lindenstr. 12, ca. 3 km von hier.", 1),
        ("Vive en la Avda. América 4 o en EE. UU. desde 1990.", 1),
        ("Siedziba jest przy ul. Mickiewicza 5.", 1),
        ("Lo dirige il dott. Rossi dal 1990.", 1),
        ("डॉ. शर्मा कब मिलेंगे?", 1),
        ("ما رقم د. أحمد", 1),
        ("I am 30. What pension plan fits me?", 2),
        ("Er kam 1990. Das war gut.", 2),
        ("Das Wetter ist gut. Morgen regnet es.", 2),
    ],
)
def test_ordinals_and_abbreviations_of_other_languages_end_no_sentence(text, number):
    assert len(segments(text)) == number
