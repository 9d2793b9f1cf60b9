"""Answer first on a real llama.cpp server: one request for a known question, and a slot that is free after a stop."""

import asyncio
import threading
import time
from pathlib import Path

import pytest
from langchain_core.output_parsers import StrOutputParser

from rgate_integrations import Decision
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.langchain import RetrievalGate
from tests.langchain_fakes import SINGLES, Judge, each

pytestmark = pytest.mark.model
httpx = pytest.importorskip("httpx", reason="the client of the server comes with the openai extra")
LONG = "Tell me a long story about a fox."
UNKNOWN = f"{LONG} Its end is unknown."


@pytest.fixture
def chat(served):
    """Makes chat models of the server, with a given number of tokens per answer."""
    return lambda tokens: served.model_copy(update={"tokens": tokens, "calls": []})


def routed(chat):
    """A router that returns its decision for unknown questions: in an arm, the gate takes what was decided."""
    gate = RetrievalGate(Judge())
    return gate.route(
        retrieve=gate,
        direct=chat | StrOutputParser(),
        answer_first=AnswerFirst(tokens=8, question_gate=None),
    )


def wait_until_freed(url):
    """Wait until the server works on nothing."""
    while any(slot["is_processing"] for slot in httpx.get(f"{url}/slots").json()):
        time.sleep(0.01)


@each({name: SINGLES[name] for name in ("invoke", "abatch", "stream", "astream")})
def test_a_known_question_costs_one_request_and_gets_the_answer_of_the_arm_alone(chat, call):
    llm = chat(16)
    answer = call(routed(llm), LONG)
    assert [(done["written"], done["whole"]) for done in llm.calls] == [(16, True)]
    assert answer == call(llm | StrOutputParser(), LONG)


@each({name: SINGLES[name] for name in ("invoke", "batch", "stream", "ainvoke", "astream")})
def test_a_stopped_answer_frees_its_slot_and_costs_what_the_server_counted(chat, call):
    """The answer would be 1,500 tokens long; it ends with a few more than were held back."""
    llm = chat(1_500)
    decision = call(routed(llm), UNKNOWN)
    assert decision.retrieve
    wait_until_freed(llm.url)
    (done,) = llm.calls
    assert not done["whole"]
    assert 8 <= done["written"] <= 8 + 8
    assert len(decision.draft.tokens) == len(decision.draft.logprobs) >= 8
    assert decision.cost.tokens_in == done["prompt"] > 20
    assert decision.cost.tokens_out == 8


def connections(url):
    """Return how many open connections this process's network has to a server."""
    port = f":{int(url.rsplit(':', 1)[1]):04X}"
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()]
    return sum(remote.endswith(port) and state == "01" for _, _, remote, state, *_ in lines)


def new_threads(before):
    """Return the threads that started since; those that others left behind may end meanwhile."""
    return set(threading.enumerate()) - before


async def test_nothing_is_left_of_awaited_calls(chat):
    """One caller leaves as soon as the server has been asked."""
    llm = chat(50)
    router, before = routed(llm), set(threading.enumerate())
    leaving = asyncio.ensure_future(router.ainvoke(LONG))
    while not llm.calls:
        await asyncio.sleep(0.001)
    leaving.cancel()
    calls = [router.ainvoke(f"{number}: {asked}") for number, asked in enumerate([LONG, UNKNOWN] * 3)]
    left, *answers = await asyncio.gather(leaving, *calls, return_exceptions=True)
    assert isinstance(left, asyncio.CancelledError)
    assert [isinstance(answer, Decision) for answer in answers] == [False, True] * 3
    await asyncio.to_thread(wait_until_freed, llm.url)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert sum(not done["whole"] for done in llm.calls) == 4
    await asyncio.get_running_loop().shutdown_default_executor()  # a loop keeps threads for its own calls
    assert (connections(llm.url), new_threads(before)) == (0, set())
