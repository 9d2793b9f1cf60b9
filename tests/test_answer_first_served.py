"""Answer first on a real llama.cpp server: one request for a known question, and a slot that is free after a stop."""

import asyncio
import threading
from pathlib import Path

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda

from rgate_integrations import Decision
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.langchain.questions import DECISION_KEY
from tests.langchain_fakes import SINGLES, STREAMS, each
from tests.patience import PATIENCE

pytestmark = pytest.mark.model
httpx = pytest.importorskip("httpx", reason="the client of the server comes with the served extra")
LONG = "Tell me a long story about a fox."


class Script:
    """A gate that retrieves for questions with "unknown" in them."""

    def decide_batch(self, questions, *, drafts=None):
        assert all(draft is not None for draft in drafts)
        assert all(len(draft.tokens) == len(draft.logprobs) >= 8 for draft in drafts)
        known = ["unknown" not in question for question in questions]
        return [
            Decision(question=q, retrieve=not k, p_known=float(k))
            for q, k in zip(questions, known, strict=True)
        ]

    async def adecide_batch(self, questions, **options):
        return self.decide_batch(questions, **options)


@pytest.fixture
def chat(served):
    served.calls.clear()
    return served


def routed(chat, **options):
    return RetrievalGate(Script()).route(
        retrieve=RunnableLambda(lambda question: f"read about {question}"),
        direct=chat | StrOutputParser(),
        answer_first=AnswerFirst(tokens=8, question_gate=None, **options),
    )


@each({name: SINGLES[name] for name in ("invoke", "abatch", "stream")})
def test_a_known_question_costs_one_request(chat, call):
    assert call(routed(chat), LONG)
    assert [(done["written"], done["whole"]) for done in chat.calls] == [(16, True)]


@each({name: STREAMS[name] for name in ("stream", "astream")})
def test_the_chunks_are_those_of_the_arm_alone(chat, call):
    assert call(routed(chat), LONG) == call(chat | StrOutputParser(), LONG)


def is_free(url):
    return not any(slot["is_processing"] for slot in httpx.get(f"{url}/slots").json())


def freed(url):
    """Wait until the server works on nothing; True if that happens."""
    for _ in range(PATIENCE * 100):
        if is_free(url):
            return True
        threading.Event().wait(0.01)
    return False


@each({name: SINGLES[name] for name in ("invoke", "batch", "stream", "ainvoke", "astream")})
def test_a_stopped_answer_frees_its_slot(chat, call):
    """The answer would be 1,500 tokens long; it ends with a few more than were held back."""
    long = chat.model_copy(update={"tokens": 1_500, "calls": []})
    question = f"{LONG} Its end is unknown."
    assert call(routed(long), question) == f"read about {question}"
    assert freed(chat.url)
    (done,) = long.calls
    assert not done["whole"]
    assert 8 <= done["written"] <= 8 + 8


async def test_callers_who_leave_free_the_server(chat):
    long = chat.model_copy(update={"tokens": 1_500, "calls": []})
    router = routed(long)
    tasks = [asyncio.ensure_future(router.ainvoke(LONG)) for _ in range(6)]
    while len(long.calls) < 6:
        await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each_, asyncio.CancelledError) for each_ in found)
    assert await asyncio.to_thread(freed, chat.url)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not any(call["whole"] for call in long.calls)


def test_what_a_stopped_answer_cost_is_what_the_server_counted(chat):
    decisions = []

    def reading(question, config):
        decisions.append(config["configurable"][DECISION_KEY].decision)
        return "read"

    long = chat.model_copy(update={"tokens": 1_500, "calls": []})
    RetrievalGate(Script()).route(
        retrieve=RunnableLambda(reading),
        direct=long | StrOutputParser(),
        answer_first=AnswerFirst(tokens=8, question_gate=None),
    ).invoke(f"{LONG} Its end is unknown.")
    assert freed(chat.url)
    (done,), (decision,) = long.calls, decisions
    assert decision.cost.tokens_in == done["prompt"] > 20
    assert decision.cost.tokens_out == 8
    # What the server has of that conversation is its prompt and all that it has written, sent or not.
    slots = httpx.get(f"{chat.url}/slots").json()
    (slot,) = [slot for slot in slots if slot.get("n_prompt_tokens", 0) > done["prompt"]]
    assert slot["n_prompt_tokens"] - done["prompt"] <= 8 + 8


def connections(url):
    """Return how many open connections this process's network has to a server."""
    port = f":{int(url.rsplit(':', 1)[1]):04X}"
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return sum(remote.endswith(port) and state == "01" for _, _, remote, state, *_ in fields)


def threads():
    """Return the names of the threads, without those that a loop keeps for its own calls."""
    return sorted(t.name for t in threading.enumerate() if not t.name.startswith("asyncio_"))


QUESTIONS = [10, pytest.param(100, marks=pytest.mark.slow)]


@pytest.mark.parametrize("questions", QUESTIONS)
async def test_nothing_is_left_of_awaited_calls(chat, questions):
    """Every other question is unknown, and every fifth caller leaves as soon as it has been asked."""
    own = chat.model_copy(update={"tokens": 24, "calls": []})
    router, limit = routed(own), asyncio.Semaphore(4)
    before = threads()

    async def asked(number):
        async with limit:
            return await router.ainvoke(
                f"{LONG} Its end is {'unknown' if number % 2 else 'known'}: {number}."
            )

    tasks = [asyncio.ensure_future(asked(number)) for number in range(questions)]
    for number in range(0, questions, 5):
        while len(own.calls) <= number and not tasks[number].done():
            await asyncio.sleep(0.001)
        tasks[number].cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    for number, answer in enumerate(found):
        if not isinstance(answer, asyncio.CancelledError):
            assert answer.startswith("read about") == bool(number % 2)
    left = sum(isinstance(answer, asyncio.CancelledError) for answer in found)
    assert 0 < left <= len(range(0, questions, 5))
    assert await asyncio.to_thread(freed, chat.url)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert sum(not done["whole"] for done in own.calls) >= questions // 2 - left
    assert connections(chat.url) == 0
    assert threads() == before


@pytest.mark.parametrize("questions", QUESTIONS)
def test_nothing_is_left_of_blocking_calls(chat, questions):
    own = chat.model_copy(update={"tokens": 24, "calls": []})
    router, before = routed(own), threads()
    for number in range(questions):
        question = f"{LONG} Its end is {'unknown' if number % 2 else 'known'}: {number}."
        chunks = router.stream(question)
        if number % 5 == 0:
            next(chunks)
            chunks.close()
            continue
        assert "".join(chunks).startswith("read about") == bool(number % 2)
    assert freed(chat.url)
    assert len(own.calls) == questions
    assert connections(chat.url) == 0
    assert threads() == before
