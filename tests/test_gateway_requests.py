"""Which requests the gateway decides about: where their question is, where passages go, and what passes undecided."""

import gzip
import json

import httpx
import pytest

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.engine.follow_ups import list_search_texts
from rgate_integrations.serving.llm_requests import parse_turn
from rgate_integrations.serving.upstream import EventReader
from tests.http_servers import Words, listening, serving_gateway
from tests.scripted_upstream import ANSWER, ScriptedUpstream, Shelf, completion
from tests.test_gateway import HAMLET, Unsure, gateway, gateway_headers

CLIENT = httpx.Client(timeout=60)
USER = {"role": "user", "content": HAMLET}
DEVELOPER = {"role": "developer", "content": "Be brief."}
SYSTEM = {"role": "system", "content": "Be brief."}
PREFILL = {"role": "assistant", "content": "It was"}
TOOL = {"role": "tool", "tool_call_id": "1", "content": "42"}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
TEXT = {"role": "user", "content": [{"type": "input_text", "text": HAMLET}]}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def servers():
    upstream, shelf = ScriptedUpstream(), Shelf()
    with listening(upstream.app) as behind, serving_gateway(Words(), behind, shelf) as url:
        yield url, upstream, shelf


@pytest.fixture
def ask(servers):
    """A function that posts a body; gives the gateway's own headers, and the body that the upstream got."""
    url, upstream, shelf = servers

    def post(path, body, **headers):
        shelf.queries.clear()
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **headers}
        response = CLIENT.post(url + path, content=content, headers=headers)
        sent = upstream.requests[-1]
        return gateway_headers(response), json.loads(sent[2]) if isinstance(sent, tuple) else sent

    post.shelf = shelf
    return post


# --- what is decided ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "after", [[SYSTEM], [DEVELOPER], [PREFILL], [PREFILL, SYSTEM], [SYSTEM, SYSTEM]], ids=str
)
def test_the_last_turn_of_the_user_is_judged_whatever_follows_it(ask, after):
    headers, sent = ask(CHAT, {"messages": [SYSTEM, USER, *after]})
    assert (headers["decision"], headers["passages"]) == ("retrieve", "1")
    first, question, *rest = sent["messages"]
    assert "Shakespeare" in question["content"]
    assert question["content"].endswith(f"Question: {HAMLET}")
    assert [first, *rest] == [SYSTEM, *after]


@pytest.mark.parametrize(
    ("path", "field", "parts"),
    [
        (CHAT, "messages", [{"type": "text", "text": HAMLET}, *IMAGE["content"]]),
        (
            CHAT,
            "messages",
            [*IMAGE["content"], {"type": "text", "text": HAMLET}, {"type": "file", "text": 7}],
        ),
        ("/v1/responses", "input", [*TEXT["content"], {"type": "input_image", "image_url": "data:,"}]),
    ],
)
def test_the_text_beside_an_image_is_the_question(ask, path, field, parts):
    headers, sent = ask(path, {field: [{"role": "user", "content": parts}]})
    assert (headers["decision"], headers["passages"]) == ("retrieve", "1")
    assert ask.shelf.queries == [HAMLET]
    passages, *rest = sent[field][0]["content"]
    assert "Shakespeare" in passages["text"]
    assert rest == parts
    turns = [{"role": "user", "content": parts}, PREFILL, {"role": "user", "content": "And how old was he?"}]
    ask(path, {field: turns})
    assert ask.shelf.queries == [f"{HAMLET}\nAnd how old was he?"]


@pytest.mark.parametrize(
    "path",
    [
        "/chat/completions",
        "//v1//chat//completions",
        "/v1/chat/completions/",
        "/v1/chat/completions//",
        "/openai/deployments/gpt-4o/chat/completions?api-version=2024-10-21",
        "/openai/v1/chat/completions",
        "/api/v1/chat%2Fcompletions",
    ],
)
def test_other_spellings_of_the_path_are_decided_too(ask, path):
    headers, sent = ask(path, {"messages": [USER]})
    assert headers["decision"] == "retrieve"
    assert "Shakespeare" in sent["messages"][0]["content"]


CALLED = [
    {"type": "function_call", "call_id": "1"},
    {"type": "function_call_output", "call_id": "1", "output": "42"},
]


@pytest.mark.parametrize(
    ("given", "where"),
    [
        (HAMLET, lambda value: value),
        ([USER], lambda value: value[0]["content"]),
        ([{"type": "message", **USER}, SYSTEM], lambda value: value[0]["content"]),
        ([SYSTEM, TEXT], lambda value: value[1]["content"][0]["text"]),
        ([*CALLED, TEXT], lambda value: value[2]["content"][0]["text"]),
    ],
    ids=["text", "message", "typed", "parts", "after a tool"],
)
def test_responses_are_decided(ask, given, where):
    headers, sent = ask("/v1/responses", {"model": "m", "input": given, "store": False})
    assert headers["decision"] == "retrieve"
    assert "Shakespeare" in where(sent["input"])
    assert HAMLET in json.dumps(sent["input"])
    assert {name: sent[name] for name in ("model", "store")} == {"model": "m", "store": False}
    if given == [SYSTEM, TEXT]:
        assert sent["input"][1]["content"][0]["type"] == "input_text"
        assert sent["input"][1]["content"][1:] == TEXT["content"]


@pytest.mark.parametrize("prompt", [HAMLET, [HAMLET]])
def test_completions_are_decided(ask, prompt):
    headers, sent = ask("/v1/completions", {"prompt": prompt, "max_tokens": 3})
    assert (headers["decision"], sent["max_tokens"]) == ("retrieve", 3)
    assert "Shakespeare" in sent["prompt"]
    assert sent["prompt"].endswith(f"Question: {HAMLET}")


CUT = "unknown \ud83d no: who wrote hamlet?"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": CUT}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": CUT}]}]}),
        ("/v1/responses", {"input": CUT}),
        ("/v1/completions", {"prompt": [CUT]}),
    ],
)
def test_half_an_emoji_reaches_neither_gate_nor_search_and_the_upstream_as_it_was(ask, path, body):
    headers, sent = ask(path, body)
    assert (headers["decision"], headers["passages"]) == ("retrieve", "1")
    assert ask.shelf.queries == ["unknown ? no: who wrote hamlet?"]
    assert json.dumps(CUT)[1:-1] in json.dumps(sent)


# --- what is not --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        (CHAT, {"messages": []}, "no-question"),
        (CHAT, {"messages": None}, "no-question"),
        (CHAT, {"messages": "who wrote hamlet?"}, "no-question"),
        (CHAT, {"messages": {"role": "user"}}, "no-question"),
        (CHAT, {"messages": ["who?", 7, None]}, "tool-result"),
        (CHAT, {"messages": [USER, IMAGE]}, "no-question"),
        (CHAT, {"messages": [USER, {"role": "user", "content": " "}]}, "no-question"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "no-question"),
        (CHAT, {"messages": [{"role": "user"}]}, "no-question"),
        (CHAT, {"messages": [{"role": ["user"], "content": "x"}]}, "tool-result"),
        (CHAT, {"messages": [SYSTEM]}, "no-question"),
        (CHAT, {"messages": [SYSTEM, PREFILL]}, "no-question"),
        (CHAT, {"messages": [USER, TOOL]}, "tool-result"),
        (CHAT, {"messages": [USER, TOOL, PREFILL]}, "tool-result"),
        (CHAT, {"prompt": HAMLET}, "no-question"),
        ("/v1/responses", {"input": [TEXT, *CALLED]}, "tool-result"),
        ("/v1/responses", {"input": " "}, "no-question"),
        ("/v1/responses", {"input": 7}, "no-question"),
        ("/v1/completions", {"prompt": [HAMLET, HAMLET]}, "no-question"),
        ("/v1/completions", {"prompt": [1, 2, 3]}, "no-question"),
        ("/v1/completions", {"prompt": [7]}, "no-question"),
        ("/v1/completions", {"prompt": "def f(", "suffix": "return"}, "no-question"),
        ("/v1/embeddings", {"input": HAMLET}, "route"),
        ("/v1/responses/resp_1/cancel", {"input": HAMLET}, "route"),
    ],
)
def test_what_is_no_question_passes_as_it_is_and_says_so(ask, path, body, why):
    assert ask(path, body) == ({"undecided": why}, body)
    assert ask.shelf.queries == []


@pytest.mark.parametrize(
    "body",
    [
        b'{"seed": %s}' % (b"9" * 5_000),
        *(b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000),
    ],
    ids=lambda body: f"{body[:9]}{body[-12:]}",
)
def test_what_is_not_a_json_object_passes_as_it_was(servers, body):
    url, upstream, _ = servers
    headers = {"content-type": "application/json"}
    response = CLIENT.post(f"{url}/chat/completions", content=body, headers=headers)
    assert gateway_headers(response) == {"undecided": "not-json"}
    assert upstream.requests[-1][2] == body


def test_a_body_nested_to_the_limit_of_the_parser_is_answered(servers):
    url, _upstream, _ = servers
    for depth in range(400, 1_100, 20):
        content = (
            json.dumps({"messages": [USER]}).encode()[:-1]
            + b', "metadata": '
            + b"[" * depth
            + b"]" * depth
            + b"}"
        )
        response = CLIENT.post(
            f"{url}/chat/completions", content=content, headers={"content-type": "application/json"}
        )
        assert response.status_code == 203


def test_a_compressed_body_passes_as_it_was_and_is_counted(servers):
    url, upstream, shelf = servers
    shelf.queries.clear()
    body = gzip.compress(json.dumps({"messages": [USER]}).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = CLIENT.post(f"{url}/chat/completions", content=body, headers=headers)
    assert gateway_headers(response) == {"undecided": "content-encoding"}
    assert (upstream.requests[-1][2], shelf.queries) == (body, [])
    metrics = CLIENT.get(f"{url}/metrics").text
    assert 'rgate_gateway_undecided_total{reason="content-encoding"} 1.0' in metrics
    assert 'rgate_gateway_requests_total{way="undecided"}' in metrics


def test_a_wish_that_is_none_is_refused(ask, servers):
    url, upstream, _ = servers
    before = len(upstream.requests)
    response = CLIENT.post(url + CHAT, json={"messages": [USER]}, headers={"x-rgate": "maybe"})
    assert response.status_code == 400
    assert "off, retrieve or direct" in response.json()["error"]["message"]
    assert len(upstream.requests) == before
    assert ask(CHAT, {"messages": [USER]}, **{"x-rgate": "OFF"})[0] == {}


# --- partial answers ----------------------------------------------------------------------------------------------

FIRST_TOKENS = AnswerFirst(tokens=3)


class Spelling(ScriptedUpstream):
    """Streams events in another spelling."""

    def __init__(self, spell):
        super().__init__()
        self.spell = spell

    async def stream(self, deltas):
        for delta in [*deltas, None]:
            choice = {"delta": delta or {}, "finish_reason": None if delta else "stop"}
            yield self.spell(json.dumps(completion("chat.completion.chunk", **choice), indent=1)).encode()


SPELLINGS = {
    "LF": lambda event: f": ping\ndata: {''.join(event.splitlines())}\n\n",
    "lines": lambda event: "".join(f"data: {line}\r\n" for line in event.splitlines()) + "\r\n",
}


@pytest.mark.parametrize("spell", SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.parametrize("known", [True, False])
def test_events_are_judged_in_every_spelling(spell, known):
    upstream = Spelling(spell)
    if not known:
        upstream.deltas = [{"content": "Perhaps "}] * 4
    with gateway(Unsure(), upstream, answer_first=AnswerFirst(tokens=4)) as between:
        alone, through = between.both(stream=True)
        assert gateway_headers(through)["decision"] == ("direct" if known else "retrieve")
        assert ("Shakespeare" in between.sent) != known
        assert through.content == alone.content


JSON_MODE = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    "more",
    [{"n": 2}, {"messages": [USER, PREFILL]}, JSON_MODE, {"guided_choice": ["yes", "no"]}],
    ids=["n", "prefill", "structured output", "vLLM"],
)
def test_of_what_is_not_one_answer_in_text_from_its_beginning_the_question_decides(more):
    upstream = ScriptedUpstream([{"content": "Perhaps "}] * 4)
    with gateway(Unsure(), upstream, answer_first=FIRST_TOKENS) as between:
        headers = gateway_headers(between.ask(stream=True, **more))
        assert (headers["decision"], headers["p-known"]) == ("direct", "0.500")
        assert len(upstream.requests) == 1


def test_an_endless_answer_without_text_is_not_held():
    upstream = Spelling(lambda _: ": " + "x" * (1 << 20) + "\n\n")
    upstream.deltas = ANSWER * 6
    with gateway(Unsure(), upstream, answer_first=FIRST_TOKENS) as between:
        response = between.ask(stream=True)
        assert gateway_headers(response)["decision"] == "direct"
        assert len(response.content) == 25 * ((1 << 20) + 4)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_events_are_read_however_they_are_cut(end):
    stream = end.join(
        [
            b": ping",
            b"data: a",
            b"data:b",
            b"",
            b"id: 1",
            b"data:  c ",
            b"",
            b"",
            b"data",
            b"data: [DONE]",
            b"",
            b"",
        ]
    )
    for size in range(1, len(stream) + 1):
        reader = EventReader()
        events = []
        for start in range(0, len(stream), size):
            events += reader.read(stream[start : start + size])
        assert events == [b"a\nb", b"c", b"[DONE]"]


# --- long requests: the gateway's other clients wait while they are read -----------------------------------------

FILLER = "Lines of a file.\n" * 10_000


@pytest.mark.parametrize(
    ("earlier", "searched"),
    [
        (f"When is it due?\n{FILLER}", "When is it due?"),
        (f"{FILLER}When is it due?", "When is it due?"),
        (f"{FILLER}When is it due?\n{FILLER}", FILLER[:400]),
    ],
    ids=["at the beginning", "at the end", "in the middle"],
)
def test_of_a_very_long_earlier_turn_the_ends_are_read(earlier, searched):
    history = (f"user: {earlier}", "assistant: On Monday.")
    assert list_search_texts("And for adults?", history) == [f"{searched}\nAnd for adults?"]


def test_a_very_long_transcript_is_searched_as_it_is():
    """Regression: splitting 12 MB into turns kept all other clients of the gateway waiting for two seconds."""
    short, long = (f"User: Who?\nAI: {words}\nUser: And when is it due?" for words in ("He.", FILLER))
    assert list_search_texts(short) == ["Who?\nAnd when is it due?"]
    assert list_search_texts(long) == [long]


def test_of_very_many_messages_the_last_thousand_are_read():
    messages = [{"role": "user", "content": str(number)} for number in range(1_200)]
    turn = parse_turn(messages, 1_199)
    assert turn.history == tuple(f"user: {number}" for number in range(199, 1_199))
