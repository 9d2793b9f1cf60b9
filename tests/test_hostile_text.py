"""Hostile text of a megabyte through every public entrance: a decision, or a typed error, and a free event loop."""

import asyncio
import json
import time

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda
from llama_index.core.base.base_selector import SelectorResult
from llama_index.core.schema import QueryBundle
from llama_index.core.tools import ToolMetadata
from typer.testing import CliRunner, Result

from rgate_integrations import Decision, QueryPlan, load_gate, plan_queries
from rgate_integrations.cli import app
from rgate_integrations.decision import Draft
from rgate_integrations.engine.loading import WARM_UP
from rgate_integrations.errors import RGateError
from rgate_integrations.gates.ability import Ability, resolve_ability
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.llama_index import RetrievalGateSelector

MEGABYTE = 1_000_000
DEADLINE = 60.0  # seconds for a decision, of which an idle machine needs about one
BLOCKED = 0.05  # seconds of the processor that one callback on the event loop may take
UNITS = {
    "spaces": " ",
    "questions": "Who wrote Hamlet? ",
    "addresses": "://",
    "tags": "<Claim> <Query> <|im_start|>system\n",
    "numbers": "1,1.1-",
    "emoji": "\N{GRINNING FACE}\u200d",
    "right to left": "\u202e\u05d0",
    "half pairs": "\ud800",
    "a table": "| a | b |\n|---|",
}
FEW = ["spaces", "questions", "tags"]


def hostile(name):
    """The text, with a letter at its beginning: white space alone would be refused at once."""
    unit = UNITS[name]
    return "q" + unit * (MEGABYTE // len(unit))


ENTRANCES = {
    "decide": lambda text: load_gate(timeout=DEADLINE).decide(text),
    "history": lambda text: load_gate(timeout=DEADLINE).decide("And he?", history=[f"user: {text}"]),
    "draft": lambda text: load_gate("answer:default,default-answer", timeout=DEADLINE).decide(
        "Who wrote Hamlet?", draft=text
    ),
    "rules": lambda text: load_gate("constant:never", always=["Who is our landlord?"]).decide(text),
    "claims": lambda text: plan_queries(
        [Decision(question="Who?", retrieve=True, p_known=0.1, draft=Draft(text=text))]
    ),
    "ability": resolve_ability,
    "langchain": lambda text: RetrievalGate(load_gate(timeout=DEADLINE)).invoke([HumanMessage(text)]),
    "router": lambda text: (
        RetrievalGate(load_gate(timeout=DEADLINE))
        .route(retrieve=RunnableLambda(lambda _: "passages"), direct=RunnableLambda(lambda _: "alone"))
        .invoke(text)
    ),
    "llama-index": lambda text: RetrievalGateSelector(direct="direct", retrieve="docs").select(
        [ToolMetadata(name="direct", description="d"), ToolMetadata(name="docs", description="d")],
        QueryBundle(text),
    ),
    "command line": lambda text: CliRunner().invoke(
        app, ["decide", "--json"], input=json.dumps({"question": text}) + "\n", catch_exceptions=False
    ),
}


def is_sound(found):
    """Return whether an entrance gave what it gives for any text."""
    match found:
        case RGateError():
            return found.hint != ""
        case Decision():  # what failed is never skipped
            return found.retrieve if found.error else 0 <= found.p_known <= 1
        case [QueryPlan(queries=queries)]:
            return all(query.text.strip() for query in queries)
        case Result():  # of the command line
            return found.exit_code == 0 and Decision.model_validate_json(found.stdout).question != ""
        case SelectorResult():
            return found.ind in (0, 1)
        case (Ability(), warning):  # no LLM has such a name
            return warning != ""
        case str():
            return found in ("passages", "alone")
    return False


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("text", FEW)
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_a_megabyte_is_decided_or_refused(entrance, text):
    try:
        found = ENTRANCES[entrance](hostile(text))
    except RGateError as error:
        found = error
    assert is_sound(found)


@pytest.mark.slow
@pytest.mark.model
def test_megabytes_of_all_kinds_are_decided_in_one_batch():
    decisions = load_gate(on_error="raise").decide_batch([hostile(text) for text in UNITS])
    assert len(decisions) == len(UNITS)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("text", FEW)
def test_a_megabyte_does_not_block_the_event_loop(text):
    """Measured in time of the processor, which other work on the machine does not lengthen."""
    gate = load_gate(timeout=DEADLINE)
    gate.decide(WARM_UP)  # loads the models
    assert asyncio.run(_longest_callback(gate, hostile(text))) < BLOCKED


async def _longest_callback(gate, text):
    """The longest time that this thread worked between two turns of the event loop."""
    decision = asyncio.ensure_future(gate.adecide(text))
    longest, last = 0.0, time.thread_time()
    while not decision.done():
        await asyncio.sleep(0.001)
        now = time.thread_time()
        longest, last = max(longest, now - last), now
    await decision
    return longest
