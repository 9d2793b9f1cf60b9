"""Ways of `traffic` that ask an LLM, and what all ways achieve with it: right answers, tokens, seconds.

The LLM answers every request twice, alone and with the passages of a search. A way gets the answer of the arm that it
chose, and costs what that arm cost and what choosing cost. The server counts the tokens. If a way dropped a partial
answer, its prompt counts as that of the whole answer alone.
"""

import importlib.util
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from base import CONSOLE, mean_interval, print_table
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    convert_to_openai_messages,
)
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableLambda
from pydantic import Field, PrivateAttr
from traffic_requests import Choice, Choices, Decide, K, LabelledRequest, count_skipped, share_cell

from rgate_integrations import AnswerFirst, load_gate
from rgate_integrations.engine.loading import DEFAULT_GATES
from rgate_integrations.index import BM25Index, Passage
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.prompts import ANSWER, ANSWER_WITH_PASSAGES
from rgate_integrations.runtime.text import is_correct

TOKENS, WORDS, BEGUN = 96, 120, 32
RETRIEVE = "retrieve"
CLASSIFY = """Given the user question below, classify it as either needing `Documents` of the {application}, \
or `Direct` if an answer needs none.

Do not respond with more than one word.

<question>
{question}
</question>

Classification:"""
"""The router prompt of LangChain's documentation, with other classes."""
DIRECT_TOOL = "Useful for greetings, tasks, common knowledge, and anything else that needs no documents."
DOCUMENTS_TOOL = "Useful for questions that need the documents of the {application}."
DIRECT_UTTERANCES = (
    "hello, how are you doing today?",
    "thanks a lot for helping me out",
    "write a short text for me",
    "translate this sentence",
    "shorten your last answer",
    "what is the capital of a country",
    "how do I do this in Excel or in Python",
    "give this conversation a title",
)
UTTERANCES = {
    "library": (
        "which function computes this measure of a graph",
        "what does this parameter default to",
        "which exception is raised when there is no path",
        "how do I read a graph from a file",
        "what does this function of the library return",
        "which version introduced this feature",
    ),
    "helpdesk": (
        "how much leave am I entitled to",
        "who approves this expense",
        "what is our rule for working from home",
        "my badge does not open the door",
        "what may I promise the customer",
        "where do I report a lost device",
    ),
    "encyclopedia": (
        "how many people live in that city",
        "in which year was that dynasty founded",
        "who wrote that book",
        "how many species does the family have",
        "what is the area of that desert",
        "what happened in the news today",
    ),
}
"""For semantic-router: utterances that a developer might list in ten minutes. None is a request of the day."""


class Chat(BaseChatModel):
    """A chat model on an OpenAI-compatible server, which streams and counts.

    Attributes:
        url: The server, without ``/v1``.
        model: The LLM's name there.
        tokens: Maximum number of tokens of an answer.
        logprobs: Whether to ask for log-probabilities.
        calls: The ``prompt`` tokens (0 until the server counts them) and ``written`` tokens of each call.
    """

    url: str
    model: str
    tokens: int = TOKENS
    logprobs: bool | None = None
    calls: list[dict[str, int]] = Field(default_factory=list)
    _client: Any = PrivateAttr(default=None)

    @property
    def _llm_type(self) -> str:
        return "openai-compatible"

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, **kwargs))

    def _stream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        if self._client is None:
            # A llama.cpp server closes idle connections at any time, perhaps just when one is used again.
            headers = {"Connection": "close"}
            if key := os.environ.get("OPENAI_API_KEY"):
                headers["Authorization"] = f"Bearer {key}"
            self._client = httpx.Client(timeout=600, headers=headers)
        body = {
            "model": self.model,
            "messages": convert_to_openai_messages(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": kwargs.get("max_tokens", self.tokens),
        }
        if kwargs.get("logprobs", self.logprobs):
            body["logprobs"] = True
        call = {"prompt": 0, "written": 0}
        self.calls.append(call)
        address = f"{self.url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
        with self._client.stream("POST", address, json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield from _read_event(json.loads(line.removeprefix("data: ")), call)


def _read_event(event: dict[str, Any], call: dict[str, int]) -> Iterator[ChatGenerationChunk]:
    for choice in event.get("choices") or []:
        text = choice["delta"].get("content") or ""
        call["written"] += bool(text)  # one token an event, until the server counts them
        information = {name: choice[name] for name in ("logprobs", "finish_reason") if choice.get(name)}
        yield ChatGenerationChunk(message=AIMessageChunk(text), generation_info=information or None)
    usage = event.get("usage")
    if usage:
        call.update(prompt=usage["prompt_tokens"], written=usage["completion_tokens"])


@dataclass(frozen=True)
class Answer:
    """What one arm answered to one request.

    Attributes:
        right: Whether it contains a gold answer; NaN without gold answers.
        prompt: Tokens read.
        written: Tokens written.
        seconds: Time, the search included.
    """

    right: float
    prompt: int
    written: int
    seconds: float


Arms = tuple[list[Answer], list[Answer]]
"""Answers alone and with passages, in the order of the requests."""


def as_messages(labelled: LabelledRequest) -> list[BaseMessage]:
    """Return the earlier turns of a request."""
    turns: list[BaseMessage] = []
    for line in labelled.request.history:
        role, text = line.split(": ", 1)
        turns.append(HumanMessage(text) if role == "user" else AIMessage(text))
    return turns


def answer_all(chat: Chat, passages: Sequence[Passage], requests: Sequence[LabelledRequest]) -> Arms:
    """Answer all requests, alone and with the passages that a search finds."""
    index = BM25Index(passages)
    alone, informed = [], []
    for labelled in requests:
        question = labelled.request.question
        head = [SystemMessage(ANSWER.system), *as_messages(labelled)]
        alone.append(_answer(chat, [*head, HumanMessage(question)], labelled, time.perf_counter()))
        start = time.perf_counter()
        hits = index.search([labelled.query], K)[0]
        context = "\n\n".join(" ".join(hit.passage.searchable.split()[:WORDS]) for hit in hits)
        head = [SystemMessage(ANSWER_WITH_PASSAGES.system), *as_messages(labelled)]
        user = ANSWER_WITH_PASSAGES.user.format(passages=context, question=question)
        informed.append(_answer(chat, [*head, HumanMessage(user)], labelled, start))
    return alone, informed


def _answer(chat: Chat, messages: list[BaseMessage], labelled: LabelledRequest, start: float) -> Answer:
    text = str(chat.invoke(messages).content)
    right = float(is_correct(text, labelled.gold_answers)) if labelled.gold_answers else math.nan
    return Answer(right, **chat.calls[-1], seconds=time.perf_counter() - start)


def llm_ways(chat: Chat, application: str) -> dict[str, Decide]:
    """Return the ways that ask the LLM, by name."""
    gate = load_gate(llm_name=chat.model, on_error="raise")
    ways: dict[str, Decide] = {}
    ways["gate, the LLM's name"] = counted(chat, lambda labelled: gate.decide(labelled.request).retrieve)
    ways["router prompt (LangChain)"] = counted(chat, lambda labelled: classify(chat, application, labelled))
    ways["LLMSingleSelector (LlamaIndex)"] = counted(chat, selector(chat, application))
    ways["answer first"] = counted(chat, answer_first(chat))
    return ways


def counted(chat: Chat, retrieves: Any) -> Decide:
    """Return a way that counts its calls, their tokens, and the time on the clock."""

    def choose(labelled: LabelledRequest) -> Choice:
        chat.calls.clear()
        start = time.perf_counter()
        retrieve = retrieves(labelled)
        seconds = time.perf_counter() - start
        prompt = sum(call["prompt"] for call in chat.calls)
        written = sum(call["written"] for call in chat.calls)
        return Choice(retrieve, seconds, prompt, written, len(chat.calls))

    return choose


def classify(chat: Chat, application: str, labelled: LabelledRequest) -> bool:
    """Ask the LLM for a class, as LangChain's documentation does; any other reply retrieves."""
    prompt = CLASSIFY.format(application=application, question=_with_history(labelled))
    reply = chat.invoke([HumanMessage(prompt)], max_tokens=8).content
    return "direct" not in str(reply).lower()


def _with_history(labelled: LabelledRequest) -> str:
    if not labelled.request.history:
        return labelled.request.question
    return "\n".join([*labelled.request.history, f"user: {labelled.request.question}"])


def selector(chat: Chat, application: str) -> Any:
    """Return a way by LlamaIndex's unchanged selector; a reply that it cannot parse retrieves."""
    from llama_index.core.llms import CompletionResponse, CustomLLM, LLMMetadata
    from llama_index.core.output_parsers.base import OutputParserException
    from llama_index.core.selectors import LLMSingleSelector
    from llama_index.core.tools import ToolMetadata

    class Completion(CustomLLM):
        @property
        def metadata(self) -> LLMMetadata:
            return LLMMetadata(model_name=chat.model)

        def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
            return CompletionResponse(text=str(chat.invoke([HumanMessage(prompt)]).content))

        def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
            raise NotImplementedError

    tools = [
        ToolMetadata(name="direct", description=DIRECT_TOOL),
        ToolMetadata(name="documents", description=DOCUMENTS_TOOL.format(application=application)),
    ]
    select = LLMSingleSelector.from_defaults(llm=Completion()).select

    def retrieves(labelled: LabelledRequest) -> bool:
        try:
            return select(tools, _with_history(labelled)).ind != 0
        except (OutputParserException, ValueError, KeyError, TypeError):  # what its parser raises
            return True

    return retrieves


def answer_first(chat: Chat) -> Any:
    """Return a way by the first tokens of the LLM's own answer."""

    def messages(inputs: dict[str, Any]) -> list[BaseMessage]:
        return [SystemMessage(ANSWER.system), *inputs["history"], HumanMessage(inputs["question"])]

    options = AnswerFirst(tokens=BEGUN, question_gate=load_gate(llm_name=chat.model, on_error="raise"))
    # An answer that cannot be judged, such as a refusal, retrieves.
    chain = RetrievalGate(load_gate(DEFAULT_GATES["llm"], on_error="retrieve")).route(
        retrieve=RunnableLambda(lambda _: RETRIEVE),
        direct=RunnableLambda(messages) | chat | StrOutputParser(),
        answer_first=options,
    )

    def retrieves(labelled: LabelledRequest) -> bool:
        inputs = {"question": labelled.request.question, "history": as_messages(labelled)}
        return "".join(chain.stream(inputs)) == RETRIEVE

    return retrieves


def similarity_way(application: str) -> dict[str, Decide]:
    """Return semantic-router (1.1) over the gate's own encoder; nothing if it is not installed."""
    if importlib.util.find_spec("semantic_router") is None:
        CONSOLE.print("Left out: semantic-router is not installed.")
        return {}
    from semantic_router import IndexedRouter, Route
    from semantic_router.encoders import DenseEncoder

    from rgate_integrations.models.encoder import EncoderProxy

    class Encoder(DenseEncoder):
        def __call__(self, docs: list[Any]) -> list[list[float]]:
            return EncoderProxy().encoder.vectors([str(doc) for doc in docs], "query: ").tolist()

        async def acall(self, docs: list[Any]) -> list[list[float]]:
            return self(docs)

    routes = [
        Route(name="direct", utterances=list(DIRECT_UTTERANCES)),
        Route(name=RETRIEVE, utterances=list(UTTERANCES[application])),
    ]
    router = IndexedRouter(Encoder(name="gate's encoder"), routes)

    def choose(labelled: LabelledRequest) -> Choice:
        start = time.process_time()
        route = router(labelled.query)
        return Choice(route.name != "direct", time.process_time() - start)

    return {"semantic-router": choose}


def show_answers(title: str, requests: Sequence[LabelledRequest], chosen: Choices, arms: Arms) -> None:
    """Print how often each way's answers are right, and what they cost."""
    alone, informed = arms
    always = np.array([answer.right for answer in informed])
    answered = ~np.isnan(always)
    rows = []
    for way, choices in chosen.items():
        right, prompt, written, calls, seconds = [], [], [], [], []
        for choice, direct, informed_answer in zip(choices, alone, informed, strict=True):
            answer = informed_answer if choice.retrieve else direct
            judged_partial = way == "answer first" and choice.calls > 0
            if judged_partial and not choice.retrieve:  # its call was the answer
                choice = Choice(retrieve=False, seconds=max(0.0, choice.seconds - direct.seconds))
            wasted = (
                direct.prompt if judged_partial and choice.retrieve and not choice.prompt else choice.prompt
            )
            right.append(answer.right)
            prompt.append(answer.prompt + wasted)
            written.append(answer.written + choice.written)
            calls.append(1 + choice.calls)
            seconds.append(answer.seconds + choice.seconds)
        row = [way, *_right_cells(np.array(right)[answered], always[answered], way)]
        row += [f"{np.mean(prompt):.0f}", f"{np.mean(written):.0f}", f"{np.mean(calls):.2f}"]
        row.append(", ".join(f"{value:.2f}" for value in np.percentile(seconds, [50, 95])))
        row += [
            share_cell(*count_skipped(requests, choices, needs_passages=needed)) for needed in (False, True)
        ]
        rows.append(row)
    columns = ["way", f"right, % of {answered.sum()}", "points vs. always [95 %]", "read", "written"]
    columns += ["LLM calls", "s (p50, p95)", "avoided, %", "missed, %"]
    print_table(columns, rows, f"{title}: answers to {len(requests)} requests")


def _right_cells(right: np.ndarray, always: np.ndarray, way: str) -> list[str]:
    if not len(right):
        return ["", ""]
    low, high = mean_interval(right - always)
    gain = f"{100 * (right - always).mean():+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
    return [f"{100 * right.mean():.1f}", "" if way == "always" else gain]
