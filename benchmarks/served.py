"""Answers of an LLM on a llama.cpp server, each asked for once and kept: a record that chains can run on.

    python benchmarks/served.py --llm qwen2.5-coder-0.5b-instruct --limit 300 --data DIR [--part train]

asks the questions of `mixture`, each alone and with the five passages that a hybrid search finds, and writes what
the server said to benchmarks/out/served/LLM.jsonl, one line a call. It goes on where it was stopped. What the search
found goes to searches.jsonl beside it, the questions to questions.jsonl.

`RecordedChat` is a LangChain chat model that answers from the record, and asks the server only for what is not there.
It keeps a clock of the recorded times, so that any chain can be timed without paying for a prompt twice.
"""

import argparse
import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.messages import (
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    convert_to_openai_messages,
)
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from mixture import Question, read_corpus, read_mixture, read_training

from rgate_integrations.index import HybridIndex, Passage, PassageIndex
from rgate_integrations.index.embedder import SentenceEmbedder
from rgate_integrations.langchain.chains import format_documents
from rgate_integrations.prompts import ANSWER, ANSWER_WITH_PASSAGES
from rgate_integrations.runtime.files import JsonlLog

sys.path.insert(0, str(Path(__file__).parent.parent / "cookbook"))
from llama_server import gguf, serving

OUT = Path(__file__).parent / "out"
TOKENS, K, WORDS = 48, 5, 90
SEARCHED = 20


class NotRecorded(Exception):
    """A call that is not in the record, and there is no server to ask."""


@dataclass
class Clock:
    """What the calls of one chain took, by the record.

    Attributes:
        calls: For each call its first message, ``system``, its ``prompt`` tokens, the tokens ``written`` so far, the
            ``seconds`` so far, and whether it is ``whole``.
    """

    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Recorded time of all calls up to now."""
        return float(sum(call["seconds"] for call in self.calls))

    def total(self, name: str) -> int:
        """Return how many tokens all calls read (``"prompt"``) or wrote (``"written"``)."""
        return int(sum(call[name] for call in self.calls))


@dataclass(frozen=True)
class Speed:
    """How fast an LLM is, in tokens a second."""

    read: float
    written: float

    def seconds(self, prompt: int, written: int) -> float:
        """Return how long a call takes up to a token."""
        return prompt / self.read + written / self.written

    @classmethod
    def of(cls, calls: Iterable[dict[str, Any]]) -> "Speed":
        """Return the speed of the fastest tenth of the calls: what else runs on the machine slows the others down."""
        long = [call for call in calls if call["prompt_tokens"] >= 30 and call["completion_tokens"] >= 8]
        read = [1e3 * call["prompt_tokens"] / call["prompt_ms"] for call in long]
        written = [1e3 * call["completion_tokens"] / call["predicted_ms"] for call in long]
        return cls(float(np.percentile(read, 90)), float(np.percentile(written, 90)))


class Record:
    """Calls of one LLM, on disk.

    Args:
        path: The JSONL file.
        llm: Name of the model file, without its suffix.
    """

    def __init__(self, path: Path, llm: str) -> None:
        self.llm = llm
        self._log = JsonlLog(path)
        self.calls: dict[str, dict[str, Any]] = {call["key"]: call for call in self._log.values()}

    def key(self, messages: list[dict[str, Any]], tokens: int) -> str:
        """Return what a call is kept under: it depends on all that the answer depends on."""
        about = json.dumps([self.llm, messages, tokens, 0])
        return hashlib.sha256(about.encode()).hexdigest()[:24]

    def add(self, call: dict[str, Any]) -> None:
        """Keep a call."""
        self._log.append([call])
        self.calls[call["key"]] = call


class RecordedChat(BaseChatModel):
    """A chat model that answers from a record, and from the server what is not in it.

    Attributes:
        record: The record; what the server says is added.
        url: The server; without one, a call that is not in the record raises `NotRecorded`.
        tokens: Maximum number of tokens of an answer.
        clock: Gets the recorded times. Each chain that is timed needs its own.
        speed: Counts the time of a call from its tokens; None for the recorded times.
        meta: Kept with new calls, to find them again.
    """

    record: Any
    url: str = ""
    tokens: int = TOKENS
    clock: Any = None
    speed: Any = None
    meta: dict[str, Any] = {}  # noqa: RUF012  pydantic copies it

    @property
    def _llm_type(self) -> str:
        return "recorded"

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, **kwargs))

    def _stream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        asked = convert_to_openai_messages(messages)
        call = self.call(asked, kwargs.get("max_tokens", self.tokens))
        counted = {"prompt": call["prompt_tokens"], "written": 0, "seconds": 0.0, "whole": False}
        counted["system"] = asked[0]["content"]
        if self.clock is not None:
            self.clock.calls.append(counted)
        last = len(call["chunks"]) - 1
        for number, (seconds, text, tokens) in enumerate(call["chunks"]):
            if self.speed is not None:
                seconds = self.speed.seconds(call["prompt_tokens"], counted["written"] + tokens)
            counted["seconds"] = seconds
            about: dict[str, Any] = {}
            if tokens:
                told = call["tokens"][counted["written"] : counted["written"] + tokens]
                about["logprobs"] = {"content": [_as_openai(token) for token in told]}
            counted["written"] += tokens
            if number == last:
                about["finish_reason"] = call["finish_reason"]
                counted["whole"] = True
            yield ChatGenerationChunk(message=AIMessageChunk(text), generation_info=about or None)

    def call(self, messages: Any, tokens: int) -> dict[str, Any]:
        """Return a call as the record has it; it is made if it is not there yet."""
        key = self.record.key(messages, tokens)
        if key not in self.record.calls:
            if not self.url:
                raise NotRecorded(f"No recorded call for {messages[-1]['content'][:60]!r}, and no server.")
            answered = ask(self.url, self.record.llm, messages, tokens)
            self.record.add({"key": key, "llm": self.record.llm, **answered, "meta": dict(self.meta)})
        found: dict[str, Any] = self.record.calls[key]
        return found


def ask(url: str, llm: str, messages: Any, tokens: int) -> dict[str, Any]:
    """Ask the server, and return all that it says; times are in seconds from the request, unless named ms.

    llama.cpp tells its own times; of another server the clock tells them.
    """
    body = {
        "model": llm,
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "logprobs": True,
        "top_logprobs": 5,
        "cache_prompt": False,  # so that every prompt is read in whole, whatever came before
        "timings_per_token": True,
        "stream_options": {"include_usage": True},
    }
    chunks: list[tuple[float, str, int]] = []
    written: list[dict[str, Any]] = []
    timings: dict[str, Any] = {}
    usage: dict[str, Any] = {}
    finish = None
    start = time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=900) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            data = json.loads(line.removeprefix("data: "))
            timings = data.get("timings") or timings
            usage = data.get("usage") or usage
            for choice in data.get("choices", []):
                told = (choice.get("logprobs") or {}).get("content") or []
                written += [_token(token) for token in told]
                finish = choice.get("finish_reason") or finish
                text = choice["delta"].get("content") or ""
                if text or told or choice.get("finish_reason"):
                    chunks.append((round(time.perf_counter() - start, 4), text, len(told)))
    if not timings:
        first, last = 1e3 * chunks[0][0], 1e3 * chunks[-1][0]
        timings = {"prompt_n": usage["prompt_tokens"], "predicted_n": usage["completion_tokens"]}
        timings |= {"prompt_ms": first, "predicted_ms": last - first}
    return {
        "messages": messages,
        "max_tokens": tokens,
        "text": "".join(text for _, text, _ in chunks),
        "tokens": written,
        "prompt_tokens": timings["prompt_n"] + timings.get("cache_n", 0),
        "completion_tokens": timings["predicted_n"],
        "prompt_ms": round(timings["prompt_ms"], 1),
        "predicted_ms": round(timings["predicted_ms"], 1),
        "finish_reason": finish,
        "chunks": chunks,
        "at": round(time.time()),
        "load": round(os.getloadavg()[0], 1),
    }


def _token(token: dict[str, Any]) -> dict[str, Any]:
    top = [[other["token"], round(other["logprob"], 4)] for other in token.get("top_logprobs", [])]
    return {"token": token["token"], "logprob": round(token["logprob"], 4), "top": top}


def _as_openai(token: dict[str, Any]) -> dict[str, Any]:
    top = [{"token": text, "logprob": logprob} for text, logprob in token["top"]]
    return {"token": token["token"], "logprob": token["logprob"], "top_logprobs": top}


def closed_book(question: str) -> list[BaseMessage]:
    """Return the messages that ask the question alone."""
    return [SystemMessage(ANSWER.system), HumanMessage(ANSWER.user.format(question=question))]


def with_passages(found: dict[str, Any]) -> list[BaseMessage]:
    """Return the messages that ask a ``question`` with its ``documents``, of which the first words are shown."""
    shown = [
        Document(id=d.id, page_content=first_words(d.page_content), metadata=d.metadata)
        for d in found["documents"]
    ]
    user = ANSWER_WITH_PASSAGES.user.format(question=found["question"], passages=format_documents(shown))
    return [SystemMessage(ANSWER_WITH_PASSAGES.system), HumanMessage(user)]


def first_words(text: str) -> str:
    """Return the beginning of a passage."""
    return " ".join(text.split()[:WORDS])


class Forgetful(SentenceEmbedder):
    """Embeds each query anew, so that no way to answer profits from another that searched before it."""

    def embed_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Return normalised vectors, shape (texts, dimension)."""
        return self.embed(texts)


def open_index(home: Path, data: Path | None) -> HybridIndex:
    """Return the index of the corpus, built once; see `read_corpus`."""
    if not (home / "index.json").is_file():
        passages = read_corpus(data)
        PassageIndex.build(passages, report=lambda n: print(f"{n} of {len(passages)} passages")).save(home)
    return HybridIndex(PassageIndex.load(home, Forgetful()))


def search(index: HybridIndex, question: str) -> tuple[list[Passage], dict[str, Any]]:
    """Return the best passages of a hybrid search, and what both sides said of the first twenty."""
    (hits,) = index.search([question], SEARCHED)
    (dense,) = index.dense.search([question], SEARCHED)
    (words,) = index.bm25.search([question], 1_000)
    by_words = {hit.passage.id: hit.score for hit in words}
    ids = [hit.passage.id for hit in hits]
    similarity = index.dense.vectors(ids) @ index.dense.embed_queries([question])[0]
    about = {
        "hybrid": [
            [name, round(float(s), 4), round(by_words.get(name, 0.0), 4), rank]
            for rank, (name, s) in enumerate(zip(ids, similarity, strict=True), start=1)
        ],
        "dense": [[hit.passage.id, round(hit.score, 4)] for hit in dense],
        "bm25": [[hit.passage.id, round(hit.score, 4)] for hit in words[:SEARCHED]],
    }
    return [hit.passage for hit in hits[:K]], about


def questions(out: Path, data: Path | None, part: str) -> list[Question]:
    """Return the questions of a part, chosen once: later changes of the data move nothing.

    Args:
        out: Where they are kept.
        data: The folder with the question sets; None for those written here.
        part: ``"test"``, ``"train"``, or ``"requests"`` for those written here.
    """
    path = out / f"questions.{part}.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        chosen = read_training(data) if data is not None and part == "train" else read_mixture(data)
        made = path.with_suffix(f".{os.getpid()}")
        made.write_text("".join(json.dumps(asdict(q), ensure_ascii=False) + "\n" for q in chosen))
        made.rename(path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [Question(**{**row, "gold_answers": tuple(row["gold_answers"])}) for row in rows]


def both_arms(record: Record, asked: list[Question]) -> list[Question]:
    """Return the questions that the record has with and without passages."""
    alone, read = set(), set()
    for call in record.calls.values():
        if call["messages"][0]["content"] == ANSWER.system:
            alone.add(call["meta"].get("id"))
        if call["messages"][0]["content"] == ANSWER_WITH_PASSAGES.system:
            read.add(call["meta"].get("id"))
    return [question for question in asked if question.id in alone & read]


class Searches:
    """What the search found for each question, kept on disk.

    Args:
        out: The folder of the record.
        home: The index.
        data: What it is made of, if it is not there yet.
    """

    def __init__(self, out: Path, home: Path, data: Path | None) -> None:
        self._log = JsonlLog(out / "searches.jsonl")
        self._found: dict[str, list[str]] = {}
        self._home, self._data = home, data
        self._passages: dict[str, Passage] = {}

    @cached_property
    def index(self) -> HybridIndex:
        """The index, opened when first needed."""
        return open_index(self._home, self._data)

    def __call__(self, question: Question) -> list[Passage]:
        """Return the passages to show; what is new is kept."""
        if question.id not in self._found:  # another process may have searched for it
            self._found = {each["id"]: [row[0] for row in each["hybrid"]] for each in self._log.values()}
        if question.id not in self._found:
            passages, about = search(self.index, question.question)
            self._log.append([{"id": question.id, "question": question.question, **about}])
            return passages
        if not self._passages:
            self._passages = {passage.id: passage for passage in read_corpus(self._data)}
        return [self._passages[name] for name in self._found[question.id][:K]]


@contextlib.contextmanager
def server(llm: str, url: str | None, threads: int, *, needed: bool = True) -> Iterator[str]:
    """Give the URL of a server: the one that is given, or one that is started; an empty one if none is needed."""
    if url or not needed:
        yield url or ""
        return
    with serving(gguf(llm), slots=1, context=4096, threads=threads) as started:
        yield started


def collect(chat: RecordedChat, asked: Sequence[Question], searches: Searches, arms: list[str]) -> None:
    """Fill the record, question by question, all arms of one before the next."""
    for number, question in enumerate(asked):
        about = {"id": question.id, "kind": question.kind, "part": question.part}
        if "direct" in arms:
            own = chat.model_copy(update={"meta": {**about, "arm": "direct", "passages": []}})
            own.invoke(closed_book(question.question))
        if "passages" in arms:
            passages = searches(question)
            documents = [
                Document(id=p.id, page_content=p.text, metadata={"title": p.title}) for p in passages
            ]
            messages = with_passages({"question": question.question, "documents": documents})
            meta = {**about, "arm": "passages", "passages": [p.id for p in passages]}
            chat.model_copy(update={"meta": meta}).invoke(messages)
        print(number + 1, question.id, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llm", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--data", type=Path, required=True, help="folder with the question sets")
    parser.add_argument("--out", type=Path, default=OUT / "served")
    parser.add_argument("--index", type=Path, default=OUT / "index-mixture")
    parser.add_argument("--part", choices=("test", "train"), default="test")
    parser.add_argument("--limit", type=int, help="how many questions")
    parser.add_argument("--arms", nargs="+", default=["direct", "passages"])
    parser.add_argument("--url", help="an OpenAI-compatible server, instead of one that is started here")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--every", type=int, default=1, help="every n-th question: n processes share the work"
    )
    parser.add_argument("--first", type=int, default=0, help="which of the n this process begins with")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    asked = questions(arguments.out, arguments.data, arguments.part)[: arguments.limit]
    asked = asked[arguments.first :: arguments.every]
    record = Record(arguments.out / f"{arguments.llm}.jsonl", arguments.llm)
    searches = Searches(arguments.out, arguments.index, arguments.data)
    with server(arguments.llm, arguments.url, arguments.threads) as url:
        collect(RecordedChat(record=record, url=url), asked, searches, arguments.arms)


if __name__ == "__main__":
    main()
