"""A request that asks about a text which it quotes needs what the text needs; one that works on it needs nothing."""

import pytest

from rgate_integrations import CorpusProfile, load_gate
from rgate_integrations.runtime.quotations import PLACE, leave_out, split_quotation

CLAIM = "The late fee for the van is 40 euros."
MAIL = "Hi, how much is the late fee for the van? Best, Tom"
RULES = CorpusProfile.from_texts(
    [
        "Five days of leave may be carried over until March.",
        "Travel expenses are paid in May. Hotels cost at most 120 euros a night.",
        "Staff travel second class; parking at the airport is not paid.",
        "Sick notes are needed from the third day.",
    ],
    name="rules",
)


@pytest.mark.parametrize(
    ("text", "about", "quoted"),
    [
        (
            f'My boss wrote: "{CLAIM}" Is she right?',
            f"My boss wrote: {PLACE} Is she right?",
            f"{CLAIM[:-1]}?",
        ),
        (f"Please draft a reply:\n\n“{MAIL}”", f"Please draft a reply:\n\n{PLACE}", MAIL),
        (f"Please draft a reply:\n\n{MAIL}", f"Please draft a reply: {PLACE}", MAIL),
        ("Say it nicer:\nWhere is my order?", f"Say it nicer: {PLACE}", "Where is my order?"),
        (
            "上司は「有給は三十日あります。」と言いました。",
            f"上司は{PLACE}と言いました。",
            "有給は三十日あります?",
        ),
        (
            'My boss wrote: "We close at six. The van stays here." Is she right?',
            f"My boss wrote: {PLACE} Is she right?",
            "We close at six? The van stays here?",
        ),
        (
            "My boss wrote (10:30): ‘We close at six.’ Is she right?",
            f"{PLACE} Is she right?",
            "My boss wrote (10:30): ‘We close at six.’?",
        ),
        (
            'Any typos? "Dear neighbours, the water is off. The caretaker"',
            f"Any typos? {PLACE}",
            "Dear neighbours, the water is off? The caretaker",
        ),
        ("Tom says we close at six. Is that so?", f"{PLACE} Is that so?", "Tom says we close at six?"),
        (
            "Tom wrote: We close at six. Is that so?",
            f"Tom wrote: {PLACE} Is that so?",
            "We close at six? Is that so?",
        ),
        (
            '"We close at six." "No, we close at seven."',
            f"{PLACE} {PLACE}",
            "We close at six?\nNo, we close at seven?",
        ),
    ],
)
def test_a_request_is_split_into_a_quotation_and_what_it_says_about_it(text, about, quoted):
    assert split_quotation(text)[:2] == (about, quoted)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "Who wrote Hamlet?",
        '"… … … …" Is that right?',
        "Do we close at six? Is the van here? Why?",
        "What does “in lieu” mean?",
        'He said "',
        "Why?",
        f'"{CLAIM}" ' + "and so on " * 20,
        "It has rained every day since we came. School starts again on Monday. What is 17 times 23?",
        f"{CLAIM} " * 5 + "Is that so?",
        f'{{"from": "Tom Smith", "to": "Ann Reed", "text": "{CLAIM}", "label": "is it so?"}}',
    ],
)
def test_a_request_without_a_text_of_others_is_not_split(text):
    assert split_quotation(text)[:2] == ("", "")


@pytest.mark.parametrize(
    "request_text",
    [
        f'My boss wrote: "{CLAIM}" Is she right?',
        f'A customer complained: "{CLAIM}" Is that the case here?',
        'Fact-check: "the third exam attempt is free"',
        'My boss wrote: "The staff in Harlow get 31 days of leave. The van may be kept overnight." Is she right?',
        "My tutor says that part-time students may take 30 credits. Is that right?",
        "Meine Kollegin sagt: „Die Folien müssen bis Freitag beim Verlag sein.“ Stimmt das?",
        "同僚の話では「出張の宿泊費は一万円まで」だそうです。本当ですか。",
        f'Please draft a reply:\n\n"{MAIL}"',
        f'Write back with the right numbers:\n\n"{MAIL}"',
        "Ayúdame a contestar este correo: «¿Cuánto tarda la nueva tarjeta y cuánto cuesta? Un saludo, Luis»",
    ],
)
def test_what_a_quotation_needs_the_question_about_it_needs(request_text):
    """Regression: of thirty claims about an organisation's rules, in eleven such frames, about half skipped."""
    decision = load_gate().decide(request_text)
    assert decision.retrieve


@pytest.mark.parametrize(
    "request_text",
    [
        f'Translate into German: "{CLAIM}"',
        f'Is this sentence correct English? "{CLAIM}"',
        f'How many words are in "{CLAIM}"',
        'My son says "the sun is a star". Is he right?',
        'True or false: "spiders have six legs"',
        "Meine Kollegin sagt: „Wale sind Fische.“ Stimmt das?",
        "My jacket has a big coffee stain on the collar. What helps?",
        "We painted the whole kitchen yesterday. Too late to sleep there?",
        'My text for the card: "We open again on Monday." Does that sound friendly?',
        '"The old man opened the door and the cat ran out." Continue the story.',
        'Any mistakes? "The water is off between eight and twelve. The caretaker"',
        'Please draft a short reply: "Thank you for the lovely party! It was wonderful to see you. Love, Anna"',
    ],
)
def test_work_on_a_quotation_and_well_known_claims_need_no_passages(request_text):
    assert not load_gate().decide(request_text).retrieve


@pytest.mark.parametrize(
    "request_text",
    [
        'My boss wrote: "You need a sick note on the first day." Is she right?',
        'True or false: "hotels may cost 150 euros"',
    ],
)
def test_a_question_about_a_quotation_is_about_the_corpus_that_covers_it(request_text):
    """Regression: with P(covered) of 0.98, such requests skipped, because none of their sentences seemed to ask."""
    decision = load_gate(corpus=RULES).decide(request_text)
    assert (decision.retrieve, decision.corpora) == (True, ("rules",))


@pytest.mark.parametrize("corpus", [None, RULES], ids=["no corpus", "covered"])
@pytest.mark.parametrize(
    "request_text",
    [
        'Translate "Are hotels over 120 euros paid?" into Polish.',
        'How would you say "When are travel expenses paid?" in Greek',
        'Correct the grammar: "Where has I to send the sick note?"',
        "Rewrite this more politely:\nWho pays the parking at the airport?",
        "Übersetze „Wer hat gestern Abend gewonnen?“ ins Englische.",
        "Comment dit-on « Quand ferme notre bureau ? » en anglais",
        "把“谁赢了昨晚的比赛？”翻译成英语",
    ],
)
def test_work_on_the_words_of_a_question_needs_no_passages(request_text, corpus):
    """Regression: 52 of 80 such requests retrieved, because the question in them does."""
    decision = load_gate(corpus=corpus).decide(request_text)
    assert (decision.retrieve, decision.override) == (False, None)


@pytest.mark.parametrize(
    "request_text",
    [
        'Translate "Are hotels over 120 euros paid?" into Polish and answer it.',
        'Translate "Are hotels over 120 euros paid?" into Polish. What is the limit in our rules?',
        'What is the limit in our rules? Translate "Are hotels paid?" into Polish.',
        'Translate "Are hotels over 120 euros paid?" as in our glossary.',
        'Who of us asked "Are hotels over 120 euros paid?" last week?',
        'Reply in Polish to "Are hotels over 120 euros paid?"',
        'Translate our answer to "When are travel expenses paid?" into Polish.',
        'Write a help article called "When are travel expenses paid?"',
        '{"type": "message", "text": "When are travel expenses paid?"}',
        "Beantworte „Wer hat gestern Abend gewonnen?“ auf Englisch.",
    ],
)
def test_what_stands_around_a_question_may_still_need_passages(request_text):
    assert load_gate().decide(request_text).retrieve


@pytest.mark.parametrize(
    ("text", "indices", "rest"),
    [
        ("Who wrote it?", [0], ""),
        ("Is it spam?\n\nWhen do you close?", [1], f"Is it spam?\n{PLACE}"),
        ("Is it spam? Message: When do you close?", [1], f"Is it spam? Message: {PLACE}"),
        ("Is it spam?\n<message>When do you close?</message>", [1], f"Is it spam?\n<message>{PLACE}"),
        ("Message: When do you close?\nIs it spam?", [0], f"Message: {PLACE}\nIs it spam?"),
        (
            "Label it.\nHi! When do you close? I ask for Ann. Is she in?",
            [2, 4],
            f"Label it.\nHi! {PLACE}",
        ),
        ('Translate "When do you close today?" into Dutch.', [0], f"Translate {PLACE} into Dutch."),
        ('Translate "Hi. When do you close today?" into Dutch.', [1], f"Translate {PLACE} into Dutch."),
        ('Translate "When do you close today?" into Dutch. Is Ann in?', [0, 2], ""),
        ('Is it "a lead"?\nMessage: When do you close?', [1], f'Is it "a lead"?\nMessage: {PLACE}'),
        ('When do you close? Translate "see you" into Dutch.', [0], ""),
        ('Who said "do you close at six?"', [], f"Who said {PLACE}"),
        ('Who said "we close at six today"?', [0], ""),
        ("The pump shows E14. How can I correct this?", [0], ""),
        ("Is it spam?", [], ""),
        ("5.\nWhen do you close?", [1], ""),
    ],
)
def test_the_text_is_left_out_of_a_request(text, indices, rest):
    assert leave_out(text, indices) == rest


ASKED = ["Where is my order 4411?", "Who approved the March budget?", "How do I reset the Kestrel 200?"]


@pytest.mark.parametrize(
    "prompt",
    [
        "Classify the sentiment of the text as positive, negative or neutral.\nText: {}\nSentiment:",
        "Rewrite the question so that it can be understood without the chat.\n\nQuestion: {}\nNew question:",
        "Is the following message spam? Answer yes or no.\n\n{}",
        "Which department should handle this? Options: Sales, Support, HR, IT.\n{}",
        "Message: {}\n\nRate the urgency of this request from 1 to 5. Only print the number.",
        "In welcher Sprache ist diese Nachricht?\nNachricht: {}",
    ],
)
def test_a_program_that_works_on_a_question_needs_no_passages(prompt):
    """Regression: around questions that need passages, 131 of 180 such prompts retrieved."""
    decisions = load_gate().decide_batch([prompt.format(question) for question in ASKED])
    assert not any(decision.retrieve for decision in decisions)


@pytest.mark.parametrize(
    "prompt",
    [
        "Please answer the following question in one sentence.\n\nQuestion: {}\nAnswer:",
        "Rewrite the question, then answer it.\n\nQuestion: {}",
        "Classify the message, then reply to the customer.\nMessage: {}",
        "Write a haiku about autumn.\n\n{}",
        "{}\nIt is urgent.",
        "{} Also, translate “good morning” into French.",
        "Übersetze „bis bald“ ins Englische. {}",
        "Reply in German.\n{}",
        "Use the context to answer.\n\nContext:\n\nQuestion: {}",
        "Classify the message as in our handbook.\nMessage: {}",
    ],
)
def test_a_program_that_wants_the_answer_needs_passages(prompt):
    decisions = load_gate().decide_batch([prompt.format(question) for question in ASKED])
    assert all(decision.retrieve for decision in decisions)
