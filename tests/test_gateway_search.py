"""The gateway's search: whether a retriever hangs, fails or returns something else, the client gets an answer."""

import asyncio
import json
import threading
from uuid import UUID

import pytest

from rgate_integrations.index import Passage
from rgate_integrations.index.retriever import Hit
from rgate_integrations.serving.app import make_app
from rgate_integrations.serving.gateway import Gateway
from rgate_integrations.serving.search_limits import LimitedSearch, SearchError
from rgate_integrations.serving.service import DecisionService
from rgate_integrations.serving.upstream import Upstream
from tests.http_servers import Words, listening
from tests.patience import Clock
from tests.scripted_upstream import ScriptedUpstream, Shelf
from tests.test_gateway import CLIENT, HAMLET, Unsure, gateway, gateway_headers

FOUND = [Hit(Passage("1", "a passage", title="T"), 1.0)]


class Returns(Shelf):
    """A retriever that returns what a test wants."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def search(self, queries, k):
        super().search(queries, k)
        return self.found(queries, k) if callable(self.found) else self.found


def raises(error):
    def search(queries, k):
        raise error

    return search


class SpeechlessError(OSError):
    def __str__(self):
        raise ValueError


class Panic(BaseException):
    """What a panic in Rust is in Python."""


WRONG = {
    "None": None,
    "one None": [None],
    "dicts": [[{"text": "a passage"}]],
    "texts": [["a passage"]],
    "text": "a passage",
    "number": 7,
    "nothing": [],
    "no text": [[Hit(Passage("1", None), 1.0)]],
    "no title": [[Hit(Passage("1", "x", title=None), 1.0)]],
    "bytes": [[Hit(Passage("1", b"x"), 1.0)]],
    "error": raises(OSError("index gone")),
    "speechless": raises(SpeechlessError()),
    "stops": raises(StopIteration()),
    "exits": raises(SystemExit(1)),
    "panics": raises(Panic("no index")),
    "late": raises(TimeoutError("no answer")),
}


@pytest.mark.parametrize("found", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("look_first", [False, True])
def test_whatever_a_retriever_returns_the_upstream_is_asked(found, look_first, caplog):
    with gateway(Words(), shelf=Returns(found), look_first=look_first) as between:
        for _ in range(2):
            response = between.ask()
            assert response.status_code == 200
            headers = gateway_headers(response)
            assert (headers["decision"], headers["p-known"]) == ("retrieve", "0.100")
            assert gateway_headers(response)["passages"] == "0"
            assert between.sent == HAMLET
        assert len(between.shelf.queries) == 2
        assert gateway_headers(between.ask("known"))["decision"] == "direct"
    assert "The search failed: " in caplog.text, "it does not pass for one that found nothing"


@pytest.mark.parametrize("look_first", [False, True])
def test_passages_without_text_are_left_out(look_first):
    """Regression: an empty passage was inserted as "[2] ", and counted."""
    texts = ("William Shakespeare wrote Hamlet.", "", " \n")
    found = [[Hit(Passage(str(number), text, "Hamlet"), 1.0) for number, text in enumerate(texts)]]
    with gateway(Words(), shelf=Returns(found), look_first=look_first) as between:
        assert gateway_headers(between.ask())["passages"] == "1"
        sent = json.dumps(between.sent)
        assert "[1] Hamlet: William Shakespeare" in sent
        assert "[2]" not in sent
    with gateway(Words(), shelf=Returns([found[0][1:]]), look_first=look_first) as between:
        assert gateway_headers(between.ask())["passages"] == "0"
        assert between.sent == HAMLET


@pytest.mark.parametrize("look_first", [False, True])
def test_no_more_passages_are_read_than_were_asked_for(look_first):
    many = [
        Hit(Passage(str(number), f"William Shakespeare wrote Hamlet {number}"), 1.0)
        for number in range(10_000)
    ]
    with gateway(Words(), shelf=Returns([many]), look_first=look_first, k=2) as between:
        assert gateway_headers(between.ask())["passages"] == "2"
        assert "Hamlet 1" in between.sent
        assert "Hamlet 2" not in between.sent


def endless(queries, k):
    while True:
        yield iter(FOUND * 3)


@pytest.mark.parametrize(
    ("found", "sent"),
    [
        # Regression: with the ids of a database, UUIDs, no search had passages.
        ([[Hit(Passage(UUID(int=7), "a passage"), 1.0)]], "a passage"),
        # Some upstreams refuse the whole request.
        ([[Hit(Passage("1", "cut \ud83d", title="\ude00"), 1.0)]], "[1] ?: cut ?"),
        (endless, "[1] T: a passage"),  # three times the same
    ],
    ids=["an id that is hashable", "half of an emoji", "an endless list"],
)
def test_a_passage_is_read_whatever_it_comes_with(found, sent):
    with gateway(Words(), shelf=Returns(found), k=2) as between:
        assert gateway_headers(between.ask())["passages"] == "1"
        assert sent in between.sent


def test_the_log_has_the_error_on_one_line_without_the_question(caplog):
    error = OSError('no answer for "WHO wrote\n2026-01-01 INFO Hamlet?" é')
    with gateway(Words(), shelf=Returns(raises(error))) as between:
        between.ask("who wrote hamlet? s3cret")
        assert 'rgate_errors_total{type="OSError"}' in between.metrics
    (line,) = [record.getMessage() for record in caplog.records if "search" in record.getMessage()]
    assert line == 'The search failed: OSError: no answer for "WHO … 2026-01-01 INFO …?" é'


def test_the_log_tells_no_word_of_a_follow_up_that_the_upstream_rewrote(caplog):
    def fails(queries, k):
        raise ValueError(f"bad query {queries[0]}")

    upstream = Condensing([{"content": "Who confirms parental leave?"}])
    with gateway(Words(), upstream, shelf=Returns(fails), condense=True) as between:
        between.ask(messages=turns(LEAVE, "28.", SIGNS))
    (line,) = [record.getMessage() for record in caplog.records if "search" in record.getMessage()]
    assert line == "The search failed: ValueError: bad query Who … … …?"


# --- searches that hang -------------------------------------------------------------------------------------------


class Hanging(Shelf):
    """A retriever that returns nothing before it may."""

    def __init__(self):
        super().__init__()
        self.may_return = threading.Event()
        self.threads = 0

    def search(self, queries, k):
        self.threads += 1
        self.may_return.wait()
        return [FOUND for _ in queries]


@pytest.fixture
def hanging():
    retriever = Hanging()
    yield retriever
    retriever.may_return.set()


@pytest.mark.parametrize(
    "options", [{}, {"look_first": True}, {"answer_first": True, "look_first": True}], ids=str
)
def test_a_search_that_hangs_is_given_up_and_the_upstream_is_asked(hanging, options, monkeypatch):
    monkeypatch.setattr("rgate_integrations.serving.search_limits.monotonic", Clock())
    upstream = ScriptedUpstream()
    service = DecisionService(Unsure() if "answer_first" in options else Words(), timeout=0.6)
    with listening(upstream.app) as behind:
        between = Gateway(service, Upstream(behind), hanging, **options)
        with listening(make_app(service, between)) as url:
            body = {"messages": [{"role": "user", "content": HAMLET}], "stream": True}
            for _ in range(20):  # more than an executor of this machine has threads
                response = CLIENT.post(f"{url}/v1/chat/completions", json=body)
                assert response.status_code == 200
            assert 'rgate_errors_total{type="SearchError"} 20.0' in CLIENT.get(f"{url}/metrics").text
    assert upstream.requests[-1]["messages"][0]["content"] == HAMLET
    assert hanging.threads == 3  # then it is paused


async def failing(search):
    with pytest.raises(SearchError) as error:
        await search.search(["?"])
    return "paused" if "paused" in str(error.value) else "late"


async def test_a_search_is_paused_after_three_late_ones_and_goes_on_when_one_is_in_time(hanging, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("rgate_integrations.serving.search_limits.monotonic", clock)
    search = LimitedSearch(hanging, k=1, timeout=0.01)
    assert [await failing(search) for _ in range(5)] == ["late"] * 3 + ["paused"] * 2
    clock.now += 9.9
    assert await failing(search) == "paused"
    clock.now += 0.1
    both = await asyncio.gather(failing(search), failing(search))
    assert sorted(both) == ["late", "paused"]  # one is tried
    assert hanging.threads == 4
    hanging.may_return.set()
    search._timeout = 60
    assert await failing(search) == "paused"
    clock.now += 10
    assert [await search.search(["?"]) for _ in range(3)] == [[FOUND]] * 3


@pytest.mark.parametrize(
    ("threads", "callers", "leaver"),
    [(2, 5, 4), (1, 2, 0)],
    ids=["one that waits leaves", "one leaves whose search goes on"],
)
async def test_no_more_threads_search_than_may_and_the_others_wait(
    hanging, monkeypatch, threads, callers, leaver
):
    monkeypatch.setattr("rgate_integrations.serving.search_limits._THREADS", threads)
    search = LimitedSearch(hanging, k=1, timeout=60)
    waiting = [asyncio.ensure_future(search.search(["?"])) for _ in range(callers)]
    while hanging.threads < threads:
        await asyncio.sleep(0)
    waiting.pop(leaver).cancel()
    for _ in range(100):
        await asyncio.sleep(0)
    assert hanging.threads == threads, "who leaves frees no thread that still searches"
    hanging.may_return.set()
    assert await asyncio.gather(*waiting) == [[FOUND]] * (callers - 1)
    assert hanging.threads == (callers - 1 if leaver else callers)


# --- other failures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["gates", "counting"])
def test_whatever_breaks_in_the_gateway_the_upstream_is_asked(part, monkeypatch):
    with gateway(Words()) as between:
        between.ask("known")
        monkeypatch.setattr(DecisionService, part, raises_any)
        response = between.ask()
    assert response.status_code == 200
    assert gateway_headers(response)["error"] == "RuntimeError"
    assert "Shakespeare" in between.sent


def raises_any(*args, **options):
    raise RuntimeError("broken")


def turns(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


LEAVE = "How many days of leave do we get?"
SIGNS = "And who signs that off?"
STORY = "It rained all day, and we stayed at home. " * 20
FILE = "These are the files of the chat.\n```\n" + "limit = 4\n" * 2_000 + "```"
"""As coding clients hand files over, in a turn of their own; the embedder would read nothing after it."""


@pytest.mark.parametrize(
    ("messages", "query"),
    [
        (turns("Who signs it?"), "Who signs it?"),
        (turns(LEAVE, "28.", SIGNS), f"{LEAVE}\n{SIGNS}"),
        (turns(LEAVE, "28.", "Thanks!", "You are welcome!", SIGNS), f"{LEAVE}\n{SIGNS}"),
        (turns(LEAVE, "No idea.", "Try again."), f"{LEAVE}\nTry again."),
        (turns("Leave?", "28.", SIGNS), f"Leave?\n{SIGNS}"),
        (turns(f"{STORY}{LEAVE} {STORY}", "28.", SIGNS), f"{LEAVE}\n{SIGNS}"),
        (turns(FILE, "Ok.", SIGNS), f"{FILE[:400]}\n{SIGNS}"),
        (turns(f"USER: {LEAVE}\nASSISTANT: 28.\nUSER: {SIGNS}\nASSISTANT:"), f"{LEAVE}\n{SIGNS}"),
    ],
)
def test_a_follow_up_is_searched_for_with_what_it_follows_on(messages, query):
    with gateway(Words()) as between:
        between.ask(messages=messages)
        assert between.shelf.queries == [query]


def test_a_question_that_may_stand_alone_is_searched_for_alone_and_after_the_earlier_turn():
    """Regression: the earlier question pushed a new one's passages out."""
    new = "Where do visitors park on Sundays?"
    with gateway(Words()) as between:
        between.ask(messages=turns(LEAVE, "28.", new))
        assert between.shelf.queries == [new, f"{LEAVE}\n{new}"]


class Condensing(ScriptedUpstream):
    """Answers a request of the gateway's own, which has one message, with a question."""

    def __init__(self, condensed):
        super().__init__()
        self.condensed = condensed

    def answer(self, body):
        if "one question" in str(body["messages"][0]["content"]):
            return self.condensed
        return super().answer(body)


@pytest.mark.parametrize(
    ("condensed", "query"),
    [
        ([{"content": " Who signs off leave? "}], "Who signs off leave?"),
        ([{"content": " "}], f"{LEAVE}\n{SIGNS}"),
        ([{"content": "<think>Leave?</think>\n\nWho signs off leave?"}], "Who signs off leave?"),
        ([{"content": "<think>Leave? Or"}], f"{LEAVE}\n{SIGNS}"),
    ],
)
def test_the_upstream_condenses_follow_ups(condensed, query):
    upstream = Condensing(condensed)
    with gateway(Words(), upstream, condense=True) as between:
        assert "42." in between.ask(messages=turns(LEAVE, "28.", SIGNS)).text
        between.ask("Who signs it?")
        assert between.shelf.queries == [query, "Who signs it?"]
    assert len(upstream.requests) == 3, "what follows on nothing is not condensed"
    own, sent, _ = upstream.requests
    assert (own["model"], f"assistant: 28.\nuser: {SIGNS}" in own["messages"][0]["content"]) == ("m", True)
    assert sent["messages"][-1]["content"].endswith(f"Question: {SIGNS}")
