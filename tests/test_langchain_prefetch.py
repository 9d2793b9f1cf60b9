"""LangChain: searches that run while a partial answer is judged, and what happens to those that are not needed."""

import asyncio
import threading
from contextlib import nullcontext
from operator import itemgetter

import pytest
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from pydantic import Field

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.langchain import RetrievalGate
from tests.begun_answers import LOOK, nothing_left
from tests.langchain_fakes import BATCHES, INVOKES, STREAMS, Judge, Search, each, runs_named
from tests.patience import PATIENCE

PREFETCH = AnswerFirst(question_gate=None, prefetch=True)


def waiting_for(search):
    """A gate that decides only after the search began."""

    def wait():
        assert search.began.wait(PATIENCE)
        search.began.clear()

    return Judge(before=wait)


def first_of(found):
    return found[0].page_content


ASKED = RunnableLambda(itemgetter("input"))
CHAINS = {
    "after another step": lambda search: ASKED | search.with_config(tags=["a"]) | first_of,
    # The chain that `create_retrieval_chain` makes: what retrieves is assigned, and all of it is bound.
    "assigned and bound": lambda search: (
        RunnablePassthrough.assign(context=(ASKED | search).with_config(run_name="retrieve_documents"))
        .assign(answer=lambda found: first_of(found["context"]))
        .with_config(run_name="retrieval_chain")
        | itemgetter("answer")
    ),
    "in a branch": lambda search: (
        {"context": ASKED | search} | RunnableLambda(lambda found: first_of(found["context"]))
    ),
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=list(CHAINS))
@each(INVOKES)
def test_a_router_searches_while_an_answer_is_judged_wherever_its_retriever_stands(call, chain):
    search = Search()
    router = RetrievalGate(waiting_for(search)).route(
        retrieve=chain(search), direct=lambda value: f"direct {value['input']}", answer_first=PREFETCH
    )
    assert call(router, {"input": "unknown?"}) == "about unknown?"
    assert call(router, {"input": "known?"}) == "direct known?"
    assert search.queries == ["unknown?", "known?"]


@pytest.mark.parametrize("chain", CHAINS.values(), ids=list(CHAINS))
@pytest.mark.parametrize("stream", STREAMS.values(), ids=list(STREAMS))
def test_the_search_of_a_bound_chain_is_traced_once(stream, chain):
    """Regression: in a stream, a binding took the handlers of the surrounding run, too."""
    collector, search = RunCollectorCallbackHandler(), Search()
    bound = chain(search).with_config(run_name="bound")
    router = RetrievalGate(Judge()).route(retrieve=bound, direct=str, look_first=LOOK)
    stream(router, {"input": "unknown?"}, {"callbacks": [collector]})
    (run,) = runs_named("Search", collector.traced_runs)
    assert run.end_time is not None


class Held(Search):
    """Holds its search until it may end, and fails then; on an event loop it ends by being cancelled only."""

    may_end: object = Field(default_factory=threading.Event)

    def _get_relevant_documents(self, query, *, run_manager):
        self.began.set()
        assert self.may_end.wait(PATIENCE)
        raise OSError("index gone")

    async def _aget_relevant_documents(self, query, *, run_manager):
        self.began.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize("question", ["known?", "RAISE"])
@each(INVOKES)
def test_a_dropped_search_is_a_cancelled_run_and_no_error(call, question):
    collector, search = RunCollectorCallbackHandler(), Held()
    chain = {"context": search, "question": RunnablePassthrough()} | RunnableLambda(str)
    judge = waiting_for(search)
    judge.on_error = "raise"
    router = RetrievalGate(judge).route(retrieve=chain, direct=str, answer_first=PREFETCH)
    with pytest.raises(RuntimeError, match="gate down") if question == "RAISE" else nullcontext():
        call(router, question, {"callbacks": [collector]})
    search.may_end.set()
    for _ in range(PATIENCE * 1_000):  # a search in a thread cannot be stopped
        if not collector.run_map:
            break
        threading.Event().wait(0.001)
    (searched,) = runs_named("RunnableParallel<context,question>", collector.traced_runs)
    (inner,) = runs_named("Held", collector.traced_runs)
    assert (searched.error, inner.error) == (None, None)
    assert searched.outputs["cancelled"] == "by the retrieval gate: the search was not needed"


@pytest.mark.parametrize("batched", [False, True])
async def test_a_cancelled_call_leaves_no_task_behind(batched):
    search = Held()
    chain = RetrievalGate(Judge()).route(retrieve=search | str, direct=str, answer_first=PREFETCH)
    task = asyncio.ensure_future(
        chain.abatch(["unknown?", "known?"]) if batched else chain.ainvoke("unknown?")
    )
    while not search.began.is_set():
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await nothing_left()


@each(BATCHES)
def test_both_arms_run_side_by_side_within_the_limit_of_a_batch(call):
    places, together = threading.Semaphore(2), threading.Barrier(2)

    def arm(question):
        assert places.acquire(blocking=False), "more than two run"
        if question in ("known", "unknown"):
            together.wait(PATIENCE)
        places.release()
        return question

    router = RetrievalGate(Judge()).route(retrieve=arm, direct=arm)
    assert call(router, ["known", "unknown"]) == ["known", "unknown"]
    questions = [f"{kind} {number}" for number in range(4) for kind in ("known", "unknown")]
    assert call(router, questions, {"max_concurrency": 2}) == questions
