"""Answer first on a real llama.cpp server: one request for a known question, and a slot that is free after a stop."""

import asyncio
import threading
import time
from pathlib import Path

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.langchain.questions import DECISION_KEY
from tests.http_servers import Words
from tests.langchain_fakes import SINGLES, each

pytestmark = pytest.mark.model
httpx = pytest.importorskip("httpx", reason="the client of the server comes with the served extra")
LONG = "Tell me a long story about a known fox."
UNKNOWN = f"{LONG} Its end is unknown."


@pytest.fixture
def chat(served):
    """Makes chat models of the server that answer with so many tokens."""
    return lambda tokens: served.model_copy(update={"tokens": tokens, "calls": []})


def routed(chat, read=lambda question: f"read about {question}", judge=None):
    return RetrievalGate(judge or Words()).route(
        retrieve=RunnableLambda(read),
        direct=chat | StrOutputParser(),
        answer_first=AnswerFirst(tokens=8, question_gate=None),
    )


def wait_until_free(url):
    """Wait until the server works on nothing."""
    while any(slot["is_processing"] for slot in httpx.get(f"{url}/slots").json()):
        time.sleep(0.01)


@each({name: SINGLES[name] for name in ("invoke", "abatch", "stream", "astream")})
def test_a_known_question_costs_one_request_and_gets_the_answer_of_the_arm_alone(chat, call):
    llm = chat(16)
    judge = Words()
    answer = call(routed(llm, judge=judge), LONG)
    ((_, (draft,), _),) = judge.asked
    assert len(draft.tokens) == len(draft.logprobs) >= 8
    assert [(done["written"], done["whole"]) for done in llm.calls] == [(16, True)]
    assert answer == call(llm | StrOutputParser(), LONG)


@each({name: SINGLES[name] for name in ("invoke", "batch", "stream", "ainvoke", "astream")})
def test_a_stopped_answer_frees_its_slot_and_costs_what_the_server_counted(chat, call):
    """The answer would be 1,500 tokens long; it ends with a few more than were held back."""
    llm, decisions = chat(1_500), []

    def read(question, config):
        decisions.append(config["configurable"][DECISION_KEY].decision)
        return f"read about {question}"

    assert call(routed(llm, read), UNKNOWN) == f"read about {UNKNOWN}"
    wait_until_free(llm.url)
    (done,), (decision,) = llm.calls, decisions
    assert not done["whole"]
    assert 8 <= done["written"] <= 8 + 8
    assert decision.cost.tokens_in == done["prompt"] > 20
    assert decision.cost.tokens_out == 8


def connections(url):
    """Return how many open connections this process's network has to a server."""
    port = f":{int(url.rsplit(':', 1)[1]):04X}"
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return sum(remote.endswith(port) and state == "01" for _, _, remote, state, *_ in fields)


def threads():
    """Return the names of the threads, without those that a loop keeps for its own calls."""
    return sorted(t.name for t in threading.enumerate() if not t.name.startswith("asyncio_"))


async def test_nothing_is_left_of_awaited_calls(chat):
    """Every other question is unknown, and every fifth caller leaves as soon as it has been asked."""
    llm = chat(200)
    router, limit, before = routed(llm), asyncio.Semaphore(4), threads()

    async def asked(number):
        async with limit:
            return await router.ainvoke(f"{number}: {UNKNOWN if number % 2 else LONG}")

    tasks = [asyncio.ensure_future(asked(number)) for number in range(10)]
    for number in range(0, 10, 5):
        while len(llm.calls) <= number and not tasks[number].done():
            await asyncio.sleep(0.001)
        tasks[number].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    left = {number for number, answer in enumerate(answers) if isinstance(answer, asyncio.CancelledError)}
    assert left
    assert left <= {0, 5}
    for number in set(range(10)) - left:
        assert answers[number].startswith("read about") == bool(number % 2)
    await asyncio.to_thread(wait_until_free, llm.url)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert sum(not done["whole"] for done in llm.calls) >= 5
    assert (connections(llm.url), threads()) == (0, before)


def test_nothing_is_left_of_blocking_calls(chat):
    llm = chat(24)
    router, before = routed(llm), threads()
    for number in range(10):
        chunks = router.stream(f"{number}: {UNKNOWN if number % 2 else LONG}")
        if number % 5 == 0:
            next(chunks)
            chunks.close()
        else:
            assert "".join(chunks).startswith("read about") == bool(number % 2)
    wait_until_free(llm.url)
    assert len(llm.calls) == 10
    assert (connections(llm.url), threads()) == (0, before)
