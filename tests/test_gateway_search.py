"""The gateway's search: whether a retriever hangs, fails or returns something else, the client gets an answer."""

import asyncio
import threading
from unittest.mock import Mock
from uuid import UUID

import pytest

from rgate_integrations.index import Passage
from rgate_integrations.index.retriever import Hit
from rgate_integrations.serving.gateway import LimitedSearch
from rgate_integrations.serving.service import DecisionService
from tests.http_servers import Words
from tests.scripted_upstream import ScriptedUpstream, Shelf
from tests.test_gateway import HAMLET, Unsure, gateway, gateway_headers

FOUND = [Hit(Passage("1", "a passage", title="T"), 1.0)]


class Returns(Shelf):
    """A retriever that returns what a test wants."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def search(self, queries, k):
        super().search(queries, k)
        return self.found(queries, k) if callable(self.found) else self.found


class Condensing(ScriptedUpstream):
    """Answers a request of the gateway's own, which has one message, with a question."""

    def __init__(self, condensed):
        super().__init__()
        self.condensed = condensed

    def answer(self, body):
        if "one question" in str(body["messages"][0]["content"]):
            return self.condensed
        return super().answer(body)


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
    "error": Mock(side_effect=OSError("index gone")),
    "speechless": Mock(side_effect=SpeechlessError()),
    "stops": Mock(side_effect=StopIteration()),
    "exits": Mock(side_effect=SystemExit(1)),
    "panics": Mock(side_effect=Panic("no index")),
    "late": Mock(side_effect=TimeoutError("no answer")),
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
            assert (headers["passages"], bool(headers["error"])) == ("0", True)
            assert between.sent == HAMLET
        assert len(between.shelf.queries) == 2
        assert gateway_headers(between.ask("known"))["decision"] == "direct"
    assert "The search failed: " in caplog.text, "it does not pass for one that found nothing"


def hits(*texts):
    return [Hit(Passage(str(number), text, "Hamlet"), 1.0) for number, text in enumerate(texts)]


PLAY = "William Shakespeare wrote Hamlet."


def endless(queries, k):
    while True:
        yield iter(hits(PLAY) * 3)


@pytest.mark.parametrize("look_first", [False, True])
@pytest.mark.parametrize(
    ("found", "sent"),
    [
        # Regression: with the ids of a database, UUIDs, no search had passages.
        ([[Hit(Passage(UUID(int=7), PLAY), 1.0)]], f"[1] {PLAY}"),
        # Some upstreams refuse the whole request.
        ([[Hit(Passage("1", f"{PLAY} \ud83d", title="\ude00"), 1.0)]], f"[1] ?: {PLAY} ?"),
        # Regression: an empty passage was inserted as "[2] ", and counted.
        ([hits(PLAY, "", " \n")], f"[1] Hamlet: {PLAY}"),
        ([hits("", " \n")], None),
        (
            [hits(*(f"{PLAY} {number}" for number in range(10_000)))],
            f"[1] Hamlet: {PLAY} 0\n\n[2] Hamlet: {PLAY} 1",
        ),
        (endless, f"[1] Hamlet: {PLAY}"),  # three times the same
    ],
    ids=[
        "an id that is hashable",
        "half of an emoji",
        "empty ones",
        "only empty ones",
        "too many",
        "an endless list",
    ],
)
def test_passages_with_text_are_read_and_no_more_than_were_asked_for(found, sent, look_first):
    with gateway(Words(), shelf=Returns(found), k=2, look_first=look_first) as between:
        count = gateway_headers(between.ask())["passages"]
        text = between.sent
    if sent is None:
        assert (count, text) == ("0", HAMLET)
    else:
        assert count == str(sent.count(PLAY))
        assert f"{sent}\n\nQuestion: {HAMLET}" in text


@pytest.mark.parametrize("condense", [False, True])
def test_the_log_has_the_error_on_one_line_without_the_question_or_its_condensed_form(condense, caplog):
    def fail(queries, k):
        raise OSError(f'no answer for "WHO wrote\n2026-01-01 INFO Hamlet?" é {queries}')

    upstream = Condensing([{"content": "Who confirms parental leave?"}])
    with gateway(Words(), upstream, shelf=Returns(fail), condense=condense) as between:
        between.ask(messages=turns(HAMLET, "Him.", SIGNS))
        assert 'rgate_errors_total{type="OSError"}' in between.metrics
    (line,) = [record.getMessage() for record in caplog.records if "search" in record.getMessage()]
    assert line.startswith('The search failed: OSError: no answer for "WHO … 2026-01-01 INFO …?" é')
    assert [word for word in ("confirms", "parental", "leave", "signs") if word in line] == []


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
def test_a_search_that_hangs_is_given_up_and_the_upstream_is_asked(hanging, options):
    gate = Unsure() if "answer_first" in options else Words()
    with gateway(gate, shelf=hanging, timeout=0.6, **options) as between:
        for _ in range(2):
            assert between.ask(stream=True).status_code == 200
            assert between.sent == HAMLET
        assert 'rgate_errors_total{type="SearchError"} 2.0' in between.metrics


@pytest.mark.parametrize(
    ("threads", "callers", "leaver"),
    [(2, 5, 4), (1, 2, 0)],
    ids=["one that waits leaves", "one leaves whose search goes on"],
)
async def test_no_more_threads_search_than_may_and_the_others_wait(
    hanging, monkeypatch, threads, callers, leaver
):
    monkeypatch.setattr("rgate_integrations.serving.gateway._THREADS", threads)
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
        monkeypatch.setattr(DecisionService, part, Mock(side_effect=RuntimeError("broken")))
        response = between.ask()
    assert response.status_code == 200
    assert gateway_headers(response)["error"] == "RuntimeError"
    assert "Shakespeare" in between.sent


def turns(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


LEAVE = "How many days of leave do we get?"
SIGNS = "And who signs that off?"
STORY = "It rained all day, and we stayed at home. " * 20
FILE = "These are the files of the chat.\n```\n" + "limit = 4\n" * 2_000 + "```"
"""As coding clients hand files over, in a turn of their own; the embedder would read nothing after it."""


NEW = "Where do visitors park on Sundays?"
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("messages", "queries"),
    [
        (turns("Who signs it?"), ["Who signs it?"]),
        (turns(LEAVE, "28.", SIGNS), [f"{LEAVE}\n{SIGNS}"]),
        (turns([{"type": "text", "text": LEAVE}, IMAGE], "28.", SIGNS), [f"{LEAVE}\n{SIGNS}"]),
        (turns(LEAVE, "28.", "Thanks!", "You are welcome!", SIGNS), [f"{LEAVE}\n{SIGNS}"]),
        (turns(LEAVE, "No idea.", "Try again."), [f"{LEAVE}\nTry again."]),
        (turns("Leave?", "28.", SIGNS), [f"Leave?\n{SIGNS}"]),
        (turns(f"{STORY}{LEAVE} {STORY}", "28.", SIGNS), [f"{LEAVE}\n{SIGNS}"]),
        (turns(FILE, "Ok.", SIGNS), [f"{FILE[:400]}\n{SIGNS}"]),
        (turns(f"USER: {LEAVE}\nASSISTANT: 28.\nUSER: {SIGNS}\nASSISTANT:"), [f"{LEAVE}\n{SIGNS}"]),
        # Regression: the earlier question pushed the passages of a new one out.
        (turns(LEAVE, "28.", NEW), [NEW, f"{LEAVE}\n{NEW}"]),
    ],
)
def test_a_follow_up_is_searched_for_with_what_it_follows_on(messages, queries):
    with gateway(Words()) as between:
        between.ask(messages=messages)
        assert between.shelf.queries == queries


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
