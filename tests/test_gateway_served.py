"""The gateway before a real llama.cpp server, asked by the client that most applications have, alone or inside."""

import pytest

from rgate_integrations.answering.answer_first import AnswerFirst
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
