"""The application of docs/guides/web.md, asked over HTTP by many clients at once."""

import asyncio
import json

import httpx
import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda

from rgate_integrations.errors import EvidenceError
from tests.test_docs import WITH_CODE

ANSWER = "The capital of France is Paris."


@pytest.fixture
def names(smollm2):
    """What the guide's code defines."""
    names = {
        "rag_chain": RunnableLambda(lambda question: f"with passages: {question}"),
        "llm_chain": FakeListChatModel(responses=[ANSWER]) | StrOutputParser(),
    }
    guide = "\n".join(WITH_CODE["docs/guides/web.md"])
    exec(guide.replace("timeout=2.0", "timeout=300.0"), names)  # noqa: S102  the machine may be busy
    return names


def client_of(names):
    return httpx.AsyncClient(transport=httpx.ASGITransport(names["app"]), base_url="http://app")


async def ask(client, question):
    response = await client.get("/ask", params={"question": question})
    return "".join(json.loads(line[6:]) for line in response.text.splitlines() if line)


@pytest.mark.model
async def test_many_clients_get_their_answers_and_are_counted(names):
    questions = ["What is the capital of France?", "What does our contract say about delays?"] * 8
    async with client_of(names) as client:
        async with names["lifespan"](names["app"]):
            answers = await asyncio.gather(*(ask(client, question) for question in questions))
        counts = (await client.get("/counts")).json()
    assert answers == [ANSWER, f"with passages: {questions[1]}"] * 8
    assert counts == {"skipped": 8, "retrieved": 8}


@pytest.mark.model
async def test_a_gate_that_fails_is_counted_and_the_question_is_retrieved_for(names, monkeypatch):
    def fail(requests):
        return [EvidenceError("broken", hint="none") for _ in requests]
        yield  # a flow

    monkeypatch.setattr(names["gate"].gate, "judge", fail)
    async with client_of(names) as client:
        answer = await ask(client, "What is the capital of France?")
        counts = (await client.get("/counts")).json()
    assert answer.startswith("with passages")
    assert counts == {"failed": 1}
