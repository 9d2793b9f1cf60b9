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


def ask(client, **more):
    messages = [{"role": "user", "content": KNOWN}]
    return client.chat.completions.create(model="smollm2", messages=messages, **SHORT, **more)


def streamed(client):
    chunks = ask(client, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@pytest.mark.parametrize("answer_first", [False, AnswerFirst(tokens=4)])
def test_openai_gets_the_same_answer_for_what_is_known(served, answer_first):
    with serving_gateway(Words(), served.url, Shelf(), answer_first=answer_first) as url:
        alone, through = client_of(served.url), client_of(url)
        assert streamed(through) == streamed(alone) == ask(through).choices[0].message.content
        assert [model.id for model in through.models.list()]
        assert ask(through, tools=[ADD]).choices == ask(alone, tools=[ADD]).choices
