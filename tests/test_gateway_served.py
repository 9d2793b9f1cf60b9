"""The gateway before a real llama.cpp server, asked by the client that most applications have, alone or inside."""

import json

import httpx
import pytest

from rgate_integrations import load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.index import Passage, PassageIndex
from tests.commands import printed
from tests.http_servers import Words, serving_gateway
from tests.scripted_upstream import Shelf

pytestmark = pytest.mark.model
openai = pytest.importorskip("openai", reason="comes with the dev extra")
KNOWN = "Tell me a known story about a fox."
SHORT = {"temperature": 0, "max_tokens": 12, "seed": 1}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def client_of(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)


def chat(url, question, **more):
    messages = [{"role": "user", "content": question}]
    return client_of(url).chat.completions.create(model="smollm2", messages=messages, **{**SHORT, **more})


def said(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@pytest.mark.parametrize("answer_first", [False, AnswerFirst(tokens=4)])
def test_openai_gets_the_same_answer_for_what_is_known(served, answer_first):
    alone = said(chat(served.url, KNOWN, stream=True))
    with serving_gateway(Words(), served.url, Shelf(), answer_first=answer_first) as url:
        assert said(chat(url, KNOWN, stream=True)) == alone
        assert chat(url, KNOWN).choices[0].message.content == alone
        assert [model.id for model in client_of(url).models.list()]
        with_tools = chat(url, KNOWN, tools=[ADD])
    assert with_tools.choices == chat(served.url, KNOWN, tools=[ADD]).choices


@pytest.mark.slow
def test_from_a_shadow_to_a_tuned_gate(served, embedder_model, tmp_path):
    """The loop of docs/guides/gateway.md: log decisions, tune a gate with the log, serve with it."""
    index, log, tuned = tmp_path / "index", tmp_path / "shadow.jsonl", tmp_path / "gate"
    towns = ["Paris", "London", "Rome", "Berlin", "Madrid", "Lisbon", "Vienna", "Prague", "Athens", "Dublin"]
    PassageIndex.build([Passage(town, f"{town} is a town.", title=town) for town in towns]).save(index)
    kinds = ("country", "continent", "valley", "state")
    asked = {f"In which {kind} is {town}?" for town in towns for kind in kinds}
    with serving_gateway(load_gate(), served.url, shadow=log) as url:
        for question in asked:
            chat(url, question, max_tokens=1)
        while log.read_text().count("\n") < len(asked):
            pass
    assert {json.loads(line)["question"] for line in log.read_text().splitlines()} == asked
    options = f"--llm {served.url}/v1 --model smollm2 --labels agreement --budget 0.9 -k 1 --answer-tokens 8"
    printed("tune", "--yes", *options.split(), "--questions", log, "--index", index, "--out", tuned)
    gate, question = load_gate(str(tuned)), min(asked)
    body = {"model": "smollm2", "messages": [{"role": "user", "content": question}], "max_tokens": 1}
    with serving_gateway(gate, served.url, PassageIndex.load(index)) as url:
        headers = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600).headers
    assert headers["x-rgate-p-known"] == f"{gate.decide(question).p_known:.3f}"
