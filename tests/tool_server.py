"""An OpenAI-compatible server on loopback that really calls tools, by rules instead of a model.

It calls ``search_docs`` for a question with "unknown" in it, if it may; after a tool it says what the tool said.
Else it writes `KNOWN` or `UNSURE`.
"""

import json
import re
from contextlib import contextmanager

from tests.begun_answers import answer_to
from tests.http_servers import listening
from tests.scripted_upstream import ScriptedUpstream


class Rules(ScriptedUpstream):
    """The server. Clients that outlive an event loop need a connection for each request."""

    own = {"connection": "close"}  # noqa: RUF012

    def answer(self, body):
        messages = body["messages"]
        tools = [tool["function"]["name"] for tool in body.get("tools") or []]
        question = [_text(message) for message in messages if message["role"] == "user"][-1]
        if messages[-1]["role"] == "tool":
            return _words(f"Read {_text(messages[-1])} .")
        if "Action Input" in _text(messages[0]):  # a ReAct agent reads calls in the text
            action = f"Thought: I need a tool.\nAction: search_docs\nAction Input: {json.dumps({'query': question})}"
            said = f"Thought: I can answer.\nAnswer: Read {question}"
            return _words(said if question.startswith("Observation") else action)
        if "unknown" in question and "search_docs" in tools:
            return _call("search_docs", {"query": question})
        return _words(answer_to(question))


@contextmanager
def tool_server():
    """Run the server; gives its URL and its `Rules`."""
    rules = Rules()
    with listening(rules.app) as url:
        yield f"{url}/v1", rules


def _words(text):
    return [
        {"role": "assistant", "content": ""},
        *({"content": word} for word in re.findall(r"\S+\s*", text)),
    ]


def _call(name, arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return [{"tool_calls": [{"index": 0, "id": "call-0", "type": "function", "function": function}]}]


def _text(message):
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)
