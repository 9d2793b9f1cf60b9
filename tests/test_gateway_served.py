"""The gateway before a real llama.cpp server, asked by the clients that most applications have."""

import json
import subprocess
import sys
from contextlib import contextmanager

import httpx
import pytest
from llama_index.core.llms import ChatMessage

from rgate_integrations import load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.index import Passage, PassageIndex
from rgate_integrations.runtime.files import JsonlLog
from rgate_integrations.serving.app import make_app
from rgate_integrations.serving.gateway import Gateway, GatewayOptions
from rgate_integrations.serving.gateway_call import PassageSearch
from rgate_integrations.serving.service import DecisionService, Metrics
from rgate_integrations.serving.upstream import Upstream
from tests.http_servers import Words, listening
from tests.scripted_upstream import Shelf

pytestmark = pytest.mark.model
openai = pytest.importorskip("openai", reason="comes with the dev extra")
langchain_openai = pytest.importorskip("langchain_openai", reason="comes with the dev extra")
openai_like = pytest.importorskip("llama_index.llms.openai_like", reason="comes with the dev extra")
KNOWN, UNKNOWN = "Tell me a known story about a fox.", "Which of these authors wrote Hamlet?"
SHORT = {"temperature": 0, "max_tokens": 12, "seed": 1}


@contextmanager
def gateway(served, gate, shelf=None, **options):
    service = DecisionService(gate, Metrics(), timeout=600.0)
    search = None if shelf is None else PassageSearch(shelf, 2)
    between = Gateway(service, Upstream(served.url), search, GatewayOptions(**options))
    with listening(make_app(service, between)) as url:
        yield url


def client_of(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)


def said(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def chat(url, question, **more):
    messages = [{"role": "user", "content": question}]
    return client_of(url).chat.completions.create(model="smollm2", messages=messages, **{**SHORT, **more})


@pytest.mark.parametrize("answer_first", [None, AnswerFirst(tokens=4)])
def test_openai_gets_the_same_answer_for_what_is_known(served, answer_first):
    alone = said(chat(served.url, KNOWN, stream=True))
    with gateway(served, Words(), Shelf(), answer_first=answer_first) as url:
        assert said(chat(url, KNOWN, stream=True)) == alone
        assert chat(url, KNOWN).choices[0].message.content == alone
        assert [model.id for model in client_of(url).models.list()]


def test_openai_gets_an_answer_from_passages_for_what_is_unknown(served):
    shelf = Shelf()
    with gateway(served, Words(), shelf) as url:
        plain = chat(served.url, UNKNOWN).usage.prompt_tokens
        assert chat(url, UNKNOWN).usage.prompt_tokens > plain + 20
        assert said(chat(url, UNKNOWN, stream=True))
    assert shelf.queries == [UNKNOWN, UNKNOWN]


def is_idle(served):
    return not any(slot["is_processing"] for slot in httpx.get(f"{served.url}/slots").json())


def test_openai_cancels_in_the_middle(served):
    with gateway(served, Words()) as url:
        # It would write for minutes: nothing but the cancellation makes the slot free.
        endless = chat(url, KNOWN, stream=True, max_tokens=100_000, extra_body={"ignore_eos": True})
        next(iter(endless))
        assert not is_idle(served)
        endless.close()
        while not is_idle(served):
            pass


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def test_a_request_with_tools_is_answered_as_without_a_gateway(served):
    alone = chat(served.url, KNOWN, tools=[ADD])
    with gateway(served, Words(), Shelf()) as url:
        through = chat(url, KNOWN, tools=[ADD])
    assert through.choices == alone.choices
    assert through.usage.prompt_tokens == alone.usage.prompt_tokens


def chat_openai(url, **options):
    return langchain_openai.ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model="smollm2", temperature=0, max_tokens=12, seed=1, **options
    )


async def test_chat_openai_streams_and_binds_tools(served):
    alone = chat_openai(served.url).invoke(KNOWN).content
    with gateway(served, Words(), Shelf()) as url:
        llm = chat_openai(url)
        assert llm.invoke(KNOWN).content == alone
        assert "".join([chunk.content async for chunk in llm.astream(KNOWN)]) == alone
        assert llm.bind_tools([ADD]).invoke(KNOWN).usage_metadata["input_tokens"] > 0
        assert llm.invoke(UNKNOWN).content


def test_openai_like_streams(served):
    def llm(url):
        return openai_like.OpenAILike(
            api_base=f"{url}/v1",
            api_key="none",
            model="smollm2",
            temperature=0,
            max_tokens=12,
            is_chat_model=True,
        )

    message = ChatMessage(role="user", content=KNOWN)
    alone = llm(served.url).chat([message]).message.content
    with gateway(served, Words(), Shelf()) as url:
        assert llm(url).chat([message]).message.content == alone
        assert "".join(each.delta or "" for each in llm(url).stream_chat([message])) == alone


def test_from_a_shadow_to_a_tuned_gate(served, minilm, tmp_path):
    """The loop of docs/guides/gateway.md: log decisions, tune a gate with the log, serve with it."""
    index, log, tuned = tmp_path / "index", tmp_path / "shadow.jsonl", tmp_path / "gate"
    towns = ["Paris", "London", "Rome", "Berlin", "Madrid", "Lisbon", "Vienna", "Prague", "Athens", "Dublin"]
    PassageIndex.build([Passage(town, f"{town} is a town.", title=town) for town in towns]).save(index)
    asked = [
        f"In which {what} is {town}?"
        for town in towns
        for what in ("country", "continent", "valley", "state")
    ]
    default = load_gate()
    with gateway(served, default, shadow=JsonlLog(log)) as url:
        for question in asked:
            chat(url, question, max_tokens=1)
        while log.read_text().count("\n") < len(asked):
            pass
    code = "from rgate_integrations.cli import main; main()"
    options = [
        "--questions",
        log,
        "--llm",
        f"{served.url}/v1",
        "--model",
        "smollm2",
        "--index",
        index,
        "-k",
        "1",
    ]
    options += ["--labels", "agreement", "--budget", "0.9", "--answer-tokens", "8", "--out", tuned, "--yes"]
    subprocess.run([sys.executable, "-c", code, "tune", *map(str, options)], check=True)
    gate = load_gate(str(tuned))
    with gateway(served, gate, PassageIndex.load(index)) as url:
        body = {"model": "smollm2", "messages": [{"role": "user", "content": asked[0]}], "max_tokens": 1}
        headers = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600).headers
    assert headers["x-rgate-p-known"] == f"{gate.decide(asked[0]).p_known:.3f}"
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    assert {each["question"] for each in logged} == set(asked)
