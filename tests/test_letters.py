"""Whatever letters a request is written in, it is read as a person reads it, or retrieved for."""

import base64
import unicodedata

import pytest

from rgate_integrations.runtime.text import detect_encoding, plain_text


def bold(text):
    return "".join(
        unicodedata.lookup(f"MATHEMATICAL BOLD {unicodedata.name(each)[6:].replace(' LETTER', '')}")
        if each.isascii() and each.isalpha()
        else each
        for each in text
    )


def full_width(text):
    return "".join(chr(ord(each) + 0xFEE0) if "!" <= each <= "~" else each for each in text)


LETTERS = {
    "full width": full_width,
    "bold": bold,
    "zero width": "\u200b".join,
    "joiners": "\u200d".join,
    "soft hyphens": "\u00ad".join,
    "emoji behind": lambda text: f"{text} {'😀🎉' * 15}",
    "emoji by name": lambda text: f":wave: {text} :thinking_face: :+1:",
    "mention of a bot": lambda text: f"<@U02AB3CD4> {text}",
    "entities": lambda text: text.replace(" ", "&nbsp;").replace("'", "&#39;"),
    "emoji joined": lambda text: text + "🔥" * 30,
}
ENCODINGS = {
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64, URL-safe": lambda text: base64.urlsafe_b64encode(text.encode()).decode().rstrip("="),
    "HTML entities": lambda text: "".join(f"&#{ord(each)};" for each in text),
    "HTML entities, hexadecimal": lambda text: "".join(f"&#x{ord(each):x};" for each in text),
    "percent escapes": lambda text: "".join(f"%{each:02X}" for each in text.encode()),
    "backslash escapes": lambda text: "".join(f"\\u{ord(each):04x}" for each in text),
    "backslash escapes of bytes": lambda text: "".join(f"\\x{each:02x}" for each in text.encode()),
}
NEEDY = [
    "When does the lease on our Leeds office run out?",
    "Who approved my holiday request?",
    "What did Priya write in the hand-over note?",
    "How many laptops did we order in March?",
    "What is the wifi password of the guest house?",
    "Which clause of our contract covers late delivery?",
    "How much did the roof repair cost us?",
    "What did the dentist say about my wisdom tooth?",
    "Where did I park the van yesterday?",
    "What is on the agenda for our Thursday call?",
    "Who won the match last night?",
    "What is the share price of Nestlé right now?",
    "Is the M25 closed this morning?",
    "Which films are in the cinema this week?",
    "What did the central bank decide today?",
    "Who leads the Tour de France at the moment?",
    "How high is the river Rhine at Cologne today?",
    "What is the latest version of the Linux kernel?",
    "Are there strikes at the airport tomorrow?",
    "Which party is ahead in the newest polls?",
]
EASY = [
    "Hello! 👋",
    "Thanks 🙏",
    "Good morning ☀️",
    "ok 👍",
    "👍",
    "Merci beaucoup 😊",
    "¡Hola! 👋",
    "नमस्ते 🙏",
    "谢谢 😊",
    "🎉🎉🎉 Happy birthday 🎉🎉🎉",
    "Write a haiku about autumn leaves 🍂",
    "Translate 'good night' into French 🌙",
    "What is 12 times 7? 🤔",
    "Fix this: caf&eacute; &amp; bar",
    r"Write a regex that matches \d+\s\w",
    r"What does print('a\nb\tc') show in Python?",
]
SCRIPTS = [
    "قبض برق من کی می\u200cآید؟",
    "می\u200cخواهم یک نامه بنویسم، کمکم کن.",
    "क्\u200dषेत्र का अर्थ बताइए",
    "আমার বিদ্যুৎ বিল কবে?",
    "র\u200d্যাম কী?",
    "我的电费账单什么时候到期？",
    "「吾輩は猫である」の作者は誰ですか？",
    "私の電気料金の支払い期限は…いつですか？",
    "내 전기 요금 납부일은 언제야?",
    "متى موعد دفع فاتورتي؟",
]
ASCII = "What is 2 + 2?"


@pytest.mark.parametrize("form", LETTERS)
def test_a_question_in_other_letters_is_the_same_question(form):
    for question in [*NEEDY, "When is my bill due?"]:
        assert plain_text(LETTERS[form](question)).replace("？", "?") == plain_text(question)


NAMES = [  # of more than an emoji or the bot
    "<@U02AB3CD4>",
    ":wave:",
    "What does <@U02AB3CD4> say?",
    "at 10:32:11 or 9:15",
    "a ::b:: c",
    "x&nbsp",
    "&#87;",
]


@pytest.mark.parametrize(
    "text", [*SCRIPTS, *NAMES, "", ASCII, "👍", "🎉🎉🎉🎉", "\u200b\u200b", "Hi 🙂", "Vive la 🇫🇷"]
)
def test_what_other_scripts_need_and_what_names_more_than_an_emoji_stays(text):
    assert plain_text(text) == text


@pytest.mark.parametrize("form", ENCODINGS)
@pytest.mark.parametrize("framed", ["{}", "Please answer this as well as you can: {}", "Note:\n{}\nThanks!"])
def test_encoded_text_is_found(form, framed):
    for question in NEEDY:
        assert (
            detect_encoding(framed.format(ENCODINGS[form](question)))
            == form.partition(",")[0].partition(" of")[0]
        )


@pytest.mark.parametrize(
    "text",
    [
        *NEEDY,
        *EASY,
        *SCRIPTS,
        "internationalization/pneumonoultramicroscopicsilicovolcanoconiosis-NullPointerException",
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk",  # a picture
        "See https://ru.wikipedia.org/wiki/%D0%9F%D1%83%D1%88%D0%BA%D0%B8%D0%BD%D0%90%D0%BB%D0%B5%D0%BA",
        r"b'\x89\x50\x4e\x47\x0d\x0a\x1a\x0a\x00\x00\x00\x0d\x49\x48\x44\x52'",
        "&nbsp;" * 20,
        "%20" * 20,
    ],
)
def test_what_is_not_encoded_text(text):
    assert detect_encoding(text) == ""


@pytest.mark.parametrize(
    "text", ["&#8" * 100_000, "%4" * 100_000, "a" * 300_000, r"\u00" * 100_000, "&" * 300_000]
)
def test_hostile_text_takes_linear_time(text):
    assert detect_encoding(text) == ""
    assert plain_text(f"{text}é").startswith(text[:9])


@pytest.mark.parametrize(
    "text", [":a" * 100_000, ":" * 300_000, "<@" * 100_000, " " * 300_000 + "<@", "&lt" * 100_000]
)
def test_hostile_names_take_linear_time(text):
    assert plain_text(f"x{text}x") == f"x{text}x"
    assert plain_text(text) == text.strip() or not text.strip()


@pytest.mark.model
def test_needy_questions_are_retrieved_for_in_every_form(default_gate):
    asked = [form(question) for form in (LETTERS | ENCODINGS).values() for question in NEEDY]
    decisions = default_gate.decide_batch(asked)
    assert [d.question for d in decisions if not d.retrieve] == []
    assert "Contains text in base64" in decisions[len(LETTERS) * len(NEEDY)].reason


@pytest.mark.model
def test_what_needs_nothing_is_skipped_with_an_emoji_too(default_gate):
    assert [d.question for d in default_gate.decide_batch(EASY) if d.retrieve] == []


@pytest.mark.model
def test_the_reason_quotes_what_the_user_wrote(default_gate):
    asked = full_width("When is my electricity bill due?")
    assert asked.replace("\u3000", " ") in default_gate.decide(f"Hello! {asked} Thanks.").reason
