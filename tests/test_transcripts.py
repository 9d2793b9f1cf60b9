"""A transcript that ends in an open question is a conversation; other texts with turns stay unchanged."""

import json

import pytest

from rgate_integrations import Request, load_gate
from rgate_integrations.runtime.segments import label_turns, split_transcript
from rgate_integrations.runtime.unfolding import unfold

QUESTION = "When does our lease end?"
TURNS = QUESTION, ("user: Hello", "assistant: Hi!\nWhat can I do?")
CONVERSATIONS = {
    "labels": "USER: Hello\nASSISTANT: Hi!\nWhat can I do?\nUSER: When does our lease end?\nASSISTANT:",
    "the user spoke last": "Customer: Hello\nAgent: Hi!\nWhat can I do?\nCustomer: When does our lease end?",
    "words before it": "This is a talk between a human and an AI.\n\nHuman: Hello\nAI: Hi!\nWhat can I do?\n"
    "Human: When does our lease end?\nAI:",
    "marked": "**User:** Hello\n\n**Assistant:** Hi!\nWhat can I do?\n\n**User:** When does our lease end?",
    "headings": "### User:\nHello\n### Assistant:\nHi!\nWhat can I do?\n### User:\nWhen does our lease end?",
    "arrows": "||>User: Hello\n||>AI: Hi!\nWhat can I do?\n||>User: When does our lease end?\n||>AI:",
    "Chinese": "用户：Hello\n助手：Hi!\nWhat can I do?\n用户：When does our lease end?\n助手：",
    "ChatML": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    "Hi!\nWhat can I do?<|im_end|>\n<|im_start|>user\nWhen does our lease end?<|im_end|>\n<|im_start|>assistant\n",
    "Llama 3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|><|start_header_id|>"
    "assistant<|end_header_id|>\n\nHi!\nWhat can I do?<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
    "When does our lease end?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "Llama 2": "<s>[INST] Hello [/INST] Hi!\nWhat can I do? </s><s>[INST] When does our lease end? [/INST]",
    "Gemma": "<start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\nHi!\nWhat can I do?<end_of_turn>\n"
    "<start_of_turn>user\nWhen does our lease end?<end_of_turn>\n<start_of_turn>model\n",
    "Phi": "<|user|>\nHello<|end|>\n<|assistant|>\nHi!\nWhat can I do?<|end|>\n<|user|>\nWhen does our lease end?"
    "<|end|>\n<|assistant|>\n",
}
CHAT = "USER: When does our lease end?\nASSISTANT: In May.\nUSER: Who signed it?"
OTHERS = [
    "",
    "When does our lease end?",
    "User: When does our lease end?",  # a label, but only one speaker
    f"Write a title of five words for this chat.\n\n{CHAT}",
    f"### Task:\nSuggest tags.\n### Chat History:\n<chat_history>\n{CHAT}\nASSISTANT: Olga.\n</chat_history>",
    f"{CHAT}\nASSISTANT: Olga.",
    f"{CHAT}\nASSISTANT: Olga.\n\nSummarise this conversation.",
    "Chat history:\nHuman: Hi\nAI: Hello\nFollow-up: when?\nStandalone question:",
    f"{'word ' * 41}\n{CHAT}\nASSISTANT:",  # instructions and context
    f"Which runbook covers this?\n\n{CHAT}\nASSISTANT:",
    "user: root\npassword: x\n\nWhy does this configuration fail?",
    "The user asked: is it open? The agent: no.",
    "Assistant:",
]


@pytest.mark.parametrize("form", CONVERSATIONS)
def test_a_conversation_is_told_from_its_text(form):
    assert split_transcript(CONVERSATIONS[form]) == TURNS
    assert split_transcript("Human: When does our lease end?\n\nAssistant:") == (QUESTION, ())


HOSTILE = [  # such a text takes linear time
    pytest.param(part * times, id=part)
    for part, times in [
        ("User:", 50_000),
        ("\n", 300_000),
        ("user\n", 50_000),
        ("*", 300_000),
        ("[INST]", 50_000),
    ]
]


@pytest.mark.parametrize("text", [*OTHERS, *HOSTILE])
def test_other_texts_are_no_conversations(text):
    assert split_transcript(text) is None


@pytest.mark.parametrize(
    ("lines", "history"),
    [
        (("user: a?", "assistant: AI: b"), ("user: a?", "assistant: AI: b")),
        (
            ("Human: a?", "AI: b", "human:c?", "Ai: d"),
            ("user: a?", "assistant: b", "user: c?", "assistant: d"),
        ),
        (("**User:** a?", "### Assistant:\nb"), ("user: a?", "assistant: b")),
        (("用户：a?", "助手：b"), ("user: a?", "assistant: b")),
        (("system: Be brief.", "User: a?"), ("system: Be brief.", "user: a?")),
        (
            ("User: a?", "in May", "Bot: b", "c", "AI:"),
            ("user: a?", "user: in May", "assistant: b", "assistant: c"),
        ),
        (("a?", "b"), ("user: a?", "assistant: b")),
        (("a", "b?", "c"), ("assistant: a", "user: b?", "assistant: c")),
    ],
)
def test_every_turn_of_a_history_has_one_of_two_labels(lines, history):
    """Regression: a gate did not know who had said ``Human: a?``, nor that it is the user's question."""
    request = Request("And when?", lines)
    assert request.history == history
    assert Request.coerce(request, history=history).history == history


@pytest.mark.model
@pytest.mark.parametrize("labels", [("Human: ", "AI: "), ("USER: ", "Bot: "), ("", "")])
def test_a_follow_up_is_as_unknown_however_its_history_is_labelled(labels):
    history = [f"{labels[0]}How many employees do we have?", f"{labels[1]}About 500."]
    messages = ["Tell me more.", "Continue.", "Try again.", "Explain."]
    decisions = load_gate(llm_name="gpt-4o").decide_batch([Request(each, history) for each in messages])
    assert [decision.question for decision in decisions if not decision.retrieve] == []


@pytest.mark.parametrize("line", ["a", ""])
def test_millions_of_lines_without_a_label_take_linear_time(line):
    """Regression: each looked through all of them for a label; a request of 16 MiB stopped a server for days."""
    turns = label_turns([line] * 2_000_000)
    assert turns == [("user", "a"), ("assistant", "a")] * (len(turns) // 2)
    assert len(turns) == 2_000_000 * len(line)


@pytest.mark.model
def test_a_transcript_is_decided_as_its_last_turn_is():
    gate = load_gate(on_error="raise")
    assert all(decision.retrieve for decision in gate.decide_batch(list(CONVERSATIONS.values())))
    easy = [text.replace("When does our lease end?", "What is 7 times 8?") for text in CONVERSATIONS.values()]
    assert not any(decision.retrieve for decision in gate.decide_batch(easy))


PAYLOADS = {
    "settings": lambda text: json.dumps(
        {"locale": "en-US", "user": {"id": 481, "tier": "pro"}, "text": text, "max_tokens": 300}
    ),
    "message": lambda text: json.dumps(
        {"type": "message", "channel": "C02AB", "ts": "1718.01", "text": text}
    ),
    "examples": lambda text: json.dumps(
        {
            "rules": ["one paragraph", "no emoji"],
            "few_shot": [{"in": "what's 7 times 8", "out": "56."}],
            "in": text,
            "out": "",
        }
    ),
    "messages": lambda text: json.dumps(
        [
            {"role": "user", "content": "Hi!"},
            {"role": "assistant", "content": "Hello, how can I help?"},
            {"role": "user", "content": text},
        ]
    ),
    "XML": lambda text: (
        f"<request>\n  <session>a81f-22</session>\n  <locale>en-US</locale>\n  <text>{text}</text>\n"
        "  <max_tokens>300</max_tokens>\n</request>"
    ),
    "fenced JSON": lambda text: f"```json\n{json.dumps({'query': text, 'top_k': 5}, indent=2)}\n```",
    "JSON after a label": lambda text: f"Input: {json.dumps({'query': text, 'top_k': 5, 'lang': 'en'})}",
    "JSON before a label": lambda text: f"{json.dumps({'query': text, 'lang': 'en'})}\nOutput:",
    "printed dict": lambda text: repr({"query": text, "top_k": 5, "stream": False}),
    "printed object": lambda text: f"HumanMessage(content={text!r}, additional_kwargs={{}})",
    "call": lambda text: f'search(query="{text}", limit=5)',
    "pasted twice": lambda text: f"{text} {text}",
    "pasted three times": lambda text: "\n\n".join([text] * 3),
    "CSV": lambda text: f'48213,2026-11-30,web,"{text}",en',
    "XML with attributes": lambda text: (
        f'<?xml version="1.0"?>\n<message id="48213" lang="en"><text>{text}</text></message>'
    ),
    "HTML with attributes": lambda text: f'<div dir="ltr"><p class="MsoNormal">{text}</p></div>',
    "mail": lambda text: f"<div>Hi there,</div><div><br></div><div>{text}</div><div>Best,<br>Ana</div>",
}


@pytest.mark.model
@pytest.mark.parametrize("form", PAYLOADS)
def test_a_request_in_another_form_is_decided_as_it_is_alone(form):
    """Regression: settings made requests retrieve that need nothing; private ones were skipped after examples."""
    gate = load_gate(on_error="raise")
    needy = [
        "What's my check-in time for Monday?",
        "我们的租约什么时候到期？",
        "Which ticket covers the login bug?",
    ]
    easy = ["What is 7 times 8?", "Translate good morning into French.", "写一首关于雨的短诗。"]
    decisions = gate.decide_batch([PAYLOADS[form](text) for text in needy + easy])
    assert [decision.retrieve for decision in decisions] == [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('{"q": "When is it due?", "q": "And to whom?"}', "When is it due?\nAnd to whom?"),
        ('{"When is it due?": null}', "null\nWhen is it due?"),
        ('["a", {"b": true}]', "a, b: true"),
        ('[{"role": "user", "content": "a b"}]', "user: a b"),
        ('{"role": "user", "content": [{"text": "a b"}]}', "role: user\na b"),
        ('{"text": "\\u4ec0\\u4e48\\u65f6\\u5019"}', "什么时候"),
        ("<r><lang>en</lang><q>When is it due?</q></r>", "lang: en\nWhen is it due?"),
        ("<p>Hi all,</p>\n<p>is <b>it</b> in&nbsp;stock?</p>", "Hi all,\nis  it  in\xa0stock?"),
        ('<q><i at="When?"/><v>ok thanks</v></q>', "at: When?\nok thanks"),
        ('<q><i at="Who did?"/><v>ok thanks</v></q>', '<i at="Who did?"/>\nok thanks'),
        ('<div dir="ltr"><p style="margin: 0">is it due?</p></div>', "is it due?"),
        ('<?xml version="1.0" encoding="UTF-8"?>\n<a id="A&amp;7">is it due?</a>', "id: A&7\nis it due?"),
        ("<a " + 'style="b" ' * 20_000 + "</a>",) * 2,
        ("<a" + " " * 90_000 + "</a>",) * 2,
        ("<context>\na b\nc\n</context>\n<q>When?</q>", "<context>\na b\nc\n</context>\n<q>When?</q>"),
        ("<user> a <assistant> b", "<user> a <assistant> b"),
        ("<b>When?</b>", "<b>When?</b>"),
        ("<a>" * 30_000 + "</a>", "<a>" * 30_000 + "</a>"),
        ("{}", "{}"),
        ('{"a": ""}', '{"a": ""}'),
        ("{when is it due?}", "{when is it due?}"),
        ('Input: {"q": "When is it due?"}\n\nOutput:', "Input:\nWhen is it due?\nOutput:"),
        ('{"q": "When is it?"}\n{"q": "a", "b": 1}', "When is it?\nq: a, b: 1"),
        ('Name this talk.\n[{"a": "When is it?"}]', 'Name this talk.\n[{"a": "When is it?"}]'),
        ("{'q': \"What's due?\", 'n': 5}", "{'q': \nWhat's due?\n, 'n': 5}"),
        ('f(q="Is \\"it\\" due?", n=1)', 'f(q=\nIs "it" due?\n, n=1)'),
        ('Cited as ("people also ask"), "she said" and: "is it due?"',) * 2,
        ('{"a":' * 15_000,) * 2,
        ("{[]" * 30_000,) * 2,
        ("[" * 900 + "[]," * 30_000 + "[]" + "]" * 900,) * 2,
        ('="\\' * 30_000,) * 2,
        ("[1] Who wrote Hamlet?", "[1] Who wrote Hamlet?"),
        ("[" * 50_000 + "]" * 50_000, "[" * 50_000 + "]" * 50_000),
        (f'{{"a": {"9" * 5_000}}}', f'{{"a": {"9" * 5_000}}}'),
    ],
)
def test_json_and_markup_are_unfolded_without_losing_a_text(text, lines):
    assert unfold(text) == lines
