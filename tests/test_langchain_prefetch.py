"""LangChain: searches that run while a begun answer is judged, and what becomes of those that nobody needs."""

import asyncio
import logging
import threading

import pytest
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tracers.base import BaseTracer
from pydantic import Field

from rgate_integrations import load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.langchain import RetrievalGate
from tests.langchain_fakes import BATCHES, INVOKES, SINGLES, Judge, Search, each
from tests.patience import PATIENCE
from tests.scripted_proxy import ScriptedProxy


class Logged(logging.Handler):
    """Waits for a log line."""

    def __init__(self, text):
        super().__init__(logging.INFO)
        self.text = text
        self.found = threading.Event()

    def emit(self, record):
        if self.text in record.getMessage():
            self.found.set()


@pytest.fixture
def failure_noted():
    """Set once the log says that a search which was not needed has failed."""
    log = logging.getLogger("rgate_integrations")
    handler, level = Logged("not needed failed: OSError: index gone"), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler.found
    log.removeHandler(handler)
    log.setLevel(level)


def read(found):
    return f"{found['question']} {found['context'][0].page_content}"


PREFETCH = AnswerFirst(question_gate=None, prefetch=True)


def searching_router(search):
    """A router that searches ahead, and whose gate decides only after the search began."""
    return RetrievalGate(waiting_for(search)).route(
        retrieve={"context": search, "question": lambda q: q} | RunnableLambda(read),
        direct=lambda q: f"direct {q}",
        answer_first=PREFETCH,
    )


def waiting_for(search):
    def wait():
        assert search.began.wait(PATIENCE)

    return Judge(before=wait)


@each(SINGLES)
def test_a_router_searches_while_an_answer_is_judged(call):
    search = Search()
    router = searching_router(search)
    assert call(router, "unknown?") == "unknown? about unknown?"
    assert search.queries == ["unknown?"]
    search.began.clear()
    assert call(router, "known?") == "direct known?"
    search.began.clear()
    assert call(router, "broken, but known?") == "direct broken, but known?"
    search.began.clear()
    with pytest.raises(OSError, match="index gone"):
        call(router, "broken and unknown?")


def with_context(search):
    """The chain that `create_retrieval_chain` makes: what retrieves is assigned, and all of it is bound."""
    found = (lambda asked: asked["input"]) | search
    assigned = RunnablePassthrough.assign(context=found.with_config(run_name="retrieve_documents"))
    return assigned.assign(answer=read_input).with_config(run_name="retrieval_chain")


def read_input(found):
    return f"{found['input']} {found['context'][0].page_content}"


CHAINS = {
    "assigned and bound": (with_context, lambda answer: answer["answer"]),
    "after another step": (
        lambda search: RunnableLambda(lambda asked: asked["input"]) | search | RunnableLambda(str),
        lambda answer: "unknown? about unknown?" if "about unknown?" in answer else answer,
    ),
    "first": (
        lambda search: (lambda asked: asked["input"]) | search.with_config(tags=["a"]) | RunnableLambda(str),
        lambda answer: "unknown? about unknown?" if "about unknown?" in answer else answer,
    ),
}


@each(SINGLES)
@pytest.mark.parametrize("kind", CHAINS)
def test_the_retriever_is_found_wherever_it_stands(call, kind):
    search = Search()
    chain, answer_of = CHAINS[kind]
    router = RetrievalGate(waiting_for(search)).route(
        retrieve=chain(search),
        direct=lambda asked: {"answer": f"direct {asked['input']}"},
        answer_first=PREFETCH,
    )
    assert answer_of(call(router, {"input": "unknown?"})) == "unknown? about unknown?"
    assert search.queries == ["unknown?"]
    search.began.clear()
    assert call(router, {"input": "known?"}) == {"answer": "direct known?"}


@each(SINGLES)
def test_a_retriever_alone_can_be_the_retrieve_arm(call):
    search = Search()
    router = RetrievalGate(waiting_for(search)).route(retrieve=search, direct=str, answer_first=PREFETCH)
    assert [d.page_content for d in call(router, "unknown?")] == ["about unknown?", "shared"]
    assert search.queries == ["unknown?"]


@each(BATCHES)
def test_a_batch_of_several_searches_for_the_unknown_questions_only(call):
    search, judge = Search(), Judge()
    router = RetrievalGate(judge).route(
        retrieve=search | RunnableLambda(lambda found: found[0].page_content),
        direct=str,
        answer_first=PREFETCH,
    )
    asked = ["unknown 1", "known 2", "broken unknown 3", "unknown 4"]
    found = call(router, asked, return_exceptions=True)
    assert found[:2] == ["about unknown 1", "known 2"]
    assert isinstance(found[2], OSError)
    assert found[3] == "about unknown 4"
    assert sorted(search.queries) == ["broken unknown 3", "unknown 1", "unknown 4"]
    assert judge.calls == [asked]


def test_a_router_needs_a_first_step_to_run_early():
    with pytest.raises(ConfigurationError, match="several steps"):
        RetrievalGate(Judge()).route(retrieve=str, direct=str, answer_first=PREFETCH)


def failing_after(search):
    """A gate of this package that fails, and says so, after a search began."""

    class Waits(ScriptedProxy):
        def _called(self, name, values):
            assert search.began.wait(PATIENCE)
            super()._called(name, values)

    return load_gate("ik", proxy=Waits(), on_error="raise")


class Held(Search):
    """Holds its first search until it may end, and fails then; on an event loop it ends by being cancelled only."""

    may_end: object = Field(default_factory=threading.Event)
    cancelled: object = Field(default_factory=threading.Event)

    def _get_relevant_documents(self, query, *, run_manager):
        self.began.set()
        assert self.may_end.wait(PATIENCE)
        raise OSError("index gone")

    async def _aget_relevant_documents(self, query, *, run_manager):
        self.began.set()
        try:
            await asyncio.wait_for(asyncio.Event().wait(), PATIENCE)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@pytest.mark.parametrize("question", ["known", "RAISE"])
@each(INVOKES)
def test_a_search_that_nobody_needs_is_dropped(call, question, failure_noted):
    search = Held()
    gate = RetrievalGate(waiting_for(search) if question == "known" else failing_after(search))
    chain = gate.route(retrieve=search | RunnableLambda(str), direct=str, answer_first=PREFETCH)
    if question == "known":
        assert call(chain, question) == "known"
    else:
        with pytest.raises(RuntimeError, match="scripted failure"):
            call(chain, question)
    search.may_end.set()
    # A search in a thread cannot be stopped: its failure is noted, so somebody has taken care of it.
    dropped = search.cancelled if call is INVOKES["ainvoke"] else failure_noted
    assert dropped.wait(PATIENCE)


@pytest.mark.parametrize("phase", ["deciding", "searching"])
@pytest.mark.parametrize("kind", ["router", "batch"])
async def test_a_cancelled_call_leaves_no_task_behind(kind, phase):
    began = asyncio.Event()

    class Forever(Search):
        async def _aget_relevant_documents(self, query, *, run_manager):
            if phase == "searching":
                began.set()
            await asyncio.Event().wait()

    class Slow(Judge):
        async def adecide_batch(self, questions, **options):
            if phase == "deciding":
                began.set()
                await asyncio.Event().wait()
            return self.decide_batch(questions, **options)

    gate = RetrievalGate(Slow())
    chain = gate.route(retrieve=Forever() | str, direct=str, answer_first=PREFETCH)
    call = chain.abatch(["unknown?", "known?"]) if kind == "batch" else chain.ainvoke("unknown?")
    task = asyncio.ensure_future(call)
    await began.wait()
    for _ in range(20):  # let it go on until both sides wait
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others or not (await asyncio.wait(others, timeout=PATIENCE))[1]


class Runs(BaseTracer):
    """Every run that ended."""

    def __init__(self):
        super().__init__()
        self.ended = []

    def _persist_run(self, run):
        self.open = dict(self.run_map)

    def _end_trace(self, run):
        self.ended.append(run)
        super()._end_trace(run)


@each(INVOKES)
def test_a_dropped_search_is_a_cancelled_run_and_no_error(call):
    runs, search = Runs(), Held()
    chain = {"context": search, "question": RunnablePassthrough()} | RunnableLambda(str)
    router = RetrievalGate(waiting_for(search)).route(retrieve=chain, direct=str, answer_first=PREFETCH)
    assert call(router, "known?", {"callbacks": [runs]}) == "known?"
    search.may_end.set()
    for _ in range(PATIENCE * 1_000):
        if {"Held", "RunnableParallel<context,question>"} <= {run.name for run in runs.ended}:
            break
        threading.Event().wait(0.001)
    assert not [run.name for run in runs.ended if run.error is not None]
    (searched,) = [run for run in runs.ended if run.name.startswith("RunnableParallel")]
    assert searched.outputs["cancelled"] == "by the retrieval gate: the search was not needed"
    assert not [run.name for run in runs.run_map.values()]


@each(BATCHES)
def test_the_limit_of_a_batch_holds_for_both_arms_together(call):
    lock, running, most = threading.Lock(), [], []

    def arm(question):
        with lock:
            running.append(question)
            most.append(len(running))
        threading.Event().wait(0.001)
        with lock:
            running.remove(question)
        return question

    router = RetrievalGate(Judge()).route(retrieve=arm, direct=arm)
    asked = [f"{kind} {number}" for number in range(4) for kind in ("known", "unknown")]
    assert call(router, asked, {"max_concurrency": 2}) == asked
    assert max(most) <= 2


@each(BATCHES)
def test_without_a_limit_both_arms_run_side_by_side(call):
    together = threading.Barrier(2)

    def arm(question):
        together.wait(PATIENCE)
        return question

    router = RetrievalGate(Judge()).route(retrieve=arm, direct=arm)
    assert call(router, ["known", "unknown"]) == ["known", "unknown"]
