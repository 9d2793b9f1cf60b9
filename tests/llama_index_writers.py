"""What the LlamaIndex tests of answer first and look first share: an LLM that writes token by token, and a shelf."""

import asyncio
from types import SimpleNamespace

from llama_index.core.base.llms.types import CompletionResponse, LLMMetadata, LogProb
from llama_index.core.llms import MockLLM
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.core.query_engine import CustomQueryEngine, RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from pydantic import Field

from tests.begun_answers import TEXT, answer_to


class Writer(MockLLM):
    """Writes an answer token by token: `UNSURE` for prompts with "unknown" in them, else `KNOWN`.

    Attributes:
        calls: The prompts, in order.
        ended: What became of each stream: "whole" or "closed".
        fails_at: Token before which it fails; None never.
        pace: Called before each token with its number; what it returns is awaited.
        usage: What its server says that it has read; None if it does not say.
    """

    usage: int | None = None
    calls: list = Field(default_factory=list)
    ended: list = Field(default_factory=list)
    fails_at: int | None = None
    pace: object = None

    def __init__(self, *, fails_at=None, pace=None):
        super().__init__()
        self.fails_at = fails_at
        self.pace = pace

    @property
    def metadata(self):
        return LLMMetadata(model_name="writer", is_chat_model=False)

    def complete(self, prompt, formatted=False, **options):
        self.calls.append(prompt)
        return CompletionResponse(text=answer_to(prompt))

    async def acomplete(self, prompt, formatted=False, **options):
        return self.complete(prompt, formatted, **options)

    def _chunks(self, prompt):
        self.calls.append(prompt)
        words = answer_to(prompt).split()
        for number, word in enumerate(words):
            if number == self.fails_at:
                raise OSError("connection lost")
            text = " ".join(words[: number + 1])
            delta = word if number == 0 else f" {word}"
            yield CompletionResponse(text=text, delta=delta, **self._told(delta, number))

    def _told(self, delta, number):
        return {} if self.usage is None else {"raw": {"usage": {"prompt_tokens": self.usage}}}

    @llm_completion_callback()
    def stream_complete(self, prompt, formatted=False, **options):
        def written():
            try:
                yield from self._chunks(prompt)
            except GeneratorExit:
                self.ended.append("closed")
                raise
            self.ended.append("whole")

        return written()

    @llm_completion_callback()
    async def astream_complete(self, prompt, formatted=False, **options):
        async def written():
            try:
                for number, chunk in enumerate(self._chunks(prompt)):
                    waited = self.pace(number) if self.pace is not None else None
                    if waited is not None:
                        await waited
                    yield chunk
            except (GeneratorExit, asyncio.CancelledError):
                self.ended.append("closed")
                raise
            self.ended.append("whole")

        return written()


class Telling(Writer):
    """A writer that can tell log-probabilities, where at least one likeliest token is asked for.

    Attributes:
        logprobs: Whether it is asked for them.
        top_logprobs: How many of the likeliest tokens it is asked for.
        refuses: Whether its server refuses.
        form: How they are told: as a server's chats or completions do, or in LlamaIndex's own form.
        asked: What it was asked for at each call.
    """

    logprobs: bool | None = None
    top_logprobs: int = 0
    refuses: bool = False
    form: str = "chat"
    asked: list = Field(default_factory=list)

    def _chunks(self, prompt):
        self.asked.append(self.logprobs)
        if self.logprobs and self.refuses:
            raise ValueError("unknown parameter logprobs")
        yield from super()._chunks(prompt)

    def _told(self, delta, number):
        if not self.logprobs or not self.top_logprobs:
            return {}
        value = -0.25 * number
        if self.form == "own":
            return {"logprobs": [[LogProb(token=delta, logprob=value), LogProb(logprob=-9.0)]]}
        if self.form == "chat":
            told = SimpleNamespace(content=[SimpleNamespace(token=delta, logprob=value)])
        else:
            told = SimpleNamespace(tokens=[delta], token_logprobs=[value], top_logprobs=[{delta: value}])
        return {"raw": SimpleNamespace(choices=[SimpleNamespace(logprobs=told)])}


class Shelf(BaseRetriever):
    """Finds one text for every query; fails for "broken", and finds nothing for "empty"."""

    def __init__(self):
        self.queries = []
        super().__init__()

    def _retrieve(self, query_bundle):
        self.queries.append(query_bundle.query_str)
        if "broken" in query_bundle.query_str:
            raise TimeoutError("index gone")
        return [] if "empty" in query_bundle.query_str else [NodeWithScore(node=TextNode(text=TEXT))]


def over(retriever, *, streaming=False):
    """Return an engine that reads what a retriever finds."""
    return RetrieverQueryEngine(retriever, get_response_synthesizer(llm=MockLLM(), streaming=streaming))


class Rag(CustomQueryEngine):
    """An engine of one step, with passages."""

    def custom_query(self, query_str):
        return f"read about {query_str}"
