"""Which requests the gateway decides about: where their question is, where passages go, and what passes undecided."""

import functools
import gzip
import json
import operator

import pytest

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.engine.follow_ups import list_search_texts
from rgate_integrations.serving.llm_requests import parse_turn
from rgate_integrations.serving.upstream import Upstream, UpstreamAnswer
from tests.http_servers import CLIENT, Words, listening, serving_gateway
from tests.scripted_upstream import ANSWER, ScriptedUpstream, Shelf, completion
from tests.test_gateway import HAMLET, USER, Unsure, gateway, gateway_headers

DEVELOPER = {"role": "developer", "content": "Be brief."}
SYSTEM = {"role": "system", "content": "Be brief."}
PREFILL = {"role": "assistant", "content": "It was"}
TOOL = {"role": "tool", "tool_call_id": "1", "content": "42"}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
TEXT = {"role": "user", "content": [{"type": "input_text", "text": HAMLET}]}
CALLED = [
    {"type": "function_call", "call_id": "1"},
    {"type": "function_call_output", "call_id": "1", "output": "42"},
]
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


TEXT_PART = {"type": "text", "text": HAMLET}


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        *(
            (CHAT, {"messages": [SYSTEM, USER, *after], "seed": 1}, ("messages", 1, "content"))
            for after in ([], [SYSTEM], [DEVELOPER], [PREFILL], [PREFILL, SYSTEM], [SYSTEM, SYSTEM])
        ),
        # Regression: an image in a message of its own hid the question before it, which passed without passages.
        (CHAT, {"messages": [SYSTEM, USER, IMAGE, IMAGE]}, ("messages", 1, "content")),
        *(
            (CHAT, {"messages": [{"role": "user", "content": parts}]}, ("messages", 0, "content"))
            for parts in (
                [TEXT_PART, *IMAGE["content"]],
                [*IMAGE["content"], TEXT_PART, {"type": "file", "text": 7}],
            )
        ),
        (CHAT, {"messages": [SYSTEM, {**USER, "role": "USER"}]}, ("messages", 1, "content")),
        ("/v1/responses", {"input": HAMLET, "store": False}, ("input",)),
        ("/v1/responses", {"input": [USER]}, ("input", 0, "content")),
        ("/v1/responses", {"input": [{"type": "message", **USER}, SYSTEM]}, ("input", 0, "content")),
        ("/v1/responses", {"input": [SYSTEM, TEXT]}, ("input", 1, "content")),
        ("/v1/responses", {"input": [*CALLED, TEXT]}, ("input", 2, "content")),
        ("/v1/completions", {"prompt": HAMLET, "max_tokens": 3}, ("prompt",)),
    ],
    ids=str,
)
def test_passages_go_before_the_last_question_of_the_user_and_all_else_is_as_it_was(ask, path, body, place):
    headers, sent = ask(path, body)
    assert (headers["decision"], headers["passages"]) == ("retrieve", "1")
    assert ask.shelf.queries == [HAMLET]
    *way, last = place
    parent = functools.reduce(operator.getitem, way, sent)
    if isinstance(parent[last], str):
        passages, parent[last] = parent[last].split("Question: ")
    else:
        part = parent[last].pop(0)
        passages = part["text"]
        assert part["type"] == ("text" if path == CHAT else "input_text")
    assert "Shakespeare" in passages
    assert sent == body


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
        (CHAT, {"messages": ["who?", 7, None]}, "no-question"),
        (CHAT, {"messages": [USER, {"content": HAMLET}]}, "no-question"),
        (CHAT, {"messages": [USER, PREFILL, IMAGE]}, "no-question"),
        (CHAT, {"messages": [USER, PREFILL, IMAGE, {"role": "user", "content": " "}]}, "no-question"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "no-question"),
        (CHAT, {"messages": [{"role": "user"}]}, "no-question"),
        (CHAT, {"messages": [{"role": ["user"], "content": "x"}]}, "no-question"),
        (CHAT, {"messages": [USER, {**TOOL, "role": "TOOL"}]}, "tool-result"),
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


PACKED = gzip.compress(json.dumps({"messages": [USER]}).encode(), mtime=0)


@pytest.mark.parametrize(
    ("body", "encoding", "why"),
    [
        (PACKED, "gzip", "content-encoding"),
        (b'{"seed": %s}' % (b"9" * 5_000), "identity", "not-json"),
        *(
            (body, "identity", "not-json")
            for body in (b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000)
        ),
    ],
    ids=lambda value: str(value[:9]),
)
def test_what_is_not_a_plain_json_object_passes_as_it_was_and_is_counted(servers, body, encoding, why):
    url, upstream, _ = servers
    headers = {"content-type": "application/json", "content-encoding": encoding}
    response = CLIENT.post(f"{url}/chat/completions", content=body, headers=headers)
    assert gateway_headers(response) == {"undecided": why}
    assert upstream.requests[-1][2] == body
    metrics = CLIENT.get(f"{url}/metrics").text
    assert f'rgate_gateway_undecided_total{{reason="{why}"}}' in metrics
    assert 'rgate_gateway_requests_total{way="undecided"}' in metrics


def test_a_body_nested_to_the_limit_of_the_parser_is_answered(servers):
    url, headers = servers[0], {"content-type": "application/json"}
    for depth in range(400, 1_100, 20):
        nested = b"[" * depth + b"]" * depth
        content = json.dumps({"messages": [USER]}).encode()[:-1] + b', "metadata": ' + nested + b"}"
        response = CLIENT.post(f"{url}/chat/completions", content=content, headers=headers)
        assert response.status_code == 203


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


@pytest.mark.parametrize("known", [True, False])
def test_events_are_judged_in_another_spelling(known):
    upstream = Spelling(lambda event: f": ping\ndata: {''.join(event.splitlines())}\n\n")
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


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_events_are_read_however_they_are_cut(end):
    events = [{"delta": {"content": text}} for text in "abc"]
    data = [f"data: {json.dumps({'choices': [event]})}{end}" for event in events]
    stream = end.join([": ping", *data, "id: 1", "data", "data:[DONE]", ""]).encode()
    for size in range(1, len(stream) + 1):
        answer = UpstreamAnswer(Upstream("http://x"), None, b"")
        for start in range(0, len(stream), size):
            assert answer.read(stream[start : start + size])
        assert (answer.partial.pieces, answer.partial.has_end) == (["a", "b", "c"], True)


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
def test_of_a_very_long_earlier_turn_the_ends_are_read_and_a_very_long_transcript_is_searched_as_it_is(
    earlier, searched
):
    """Regression: splitting 12 MB into turns kept all other clients of the gateway waiting for two seconds."""
    history = (f"user: {earlier}", "assistant: On Monday.")
    assert list_search_texts("And for adults?", history) == [f"{searched}\nAnd for adults?"]
    transcript = f"User: Who?\nAI: {earlier}\nUser: And when is it due?"
    assert list_search_texts(transcript) == [transcript]


def test_of_very_many_messages_the_last_thousand_are_read():
    messages = [{"role": "user", "content": str(number)} for number in range(1_200)]
    turn = parse_turn(messages, 1_199)
    assert turn.history == tuple(f"user: {number}" for number in range(199, 1_199))


RESULTS = {
    "chat completions": {"role": "tool", "tool_call_id": "1", "content": "On Monday."},
    "responses": {"type": "function_call_output", "call_id": "1", "output": "On Monday."},
}


@pytest.mark.parametrize("result", RESULTS.values(), ids=list(RESULTS))
def test_a_tools_result_before_the_users_next_message_is_the_answer(result):
    """Regression: without an answer between them, the user's messages were one request."""
    asked, thanks = ({"role": "user", "content": text} for text in ("When is it due?", "Thanks!"))
    called = {"role": "assistant", "content": None}
    turn = parse_turn([asked, called, result, called, result, thanks], 5)
    assert turn.history == ("user: When is it due?", "assistant: On Monday.")
