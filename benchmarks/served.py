"""Records the answers of an LLM on a llama.cpp server, so that chains can run on them.

    python benchmarks/served.py --llm qwen2.5-coder-0.5b-instruct --limit 600 --data DIR [--part train]

Asks the questions of `mixture`, each alone and with the five passages that a hybrid search finds, and writes what
the server said to benchmarks/out/served/LLM.jsonl, one line a call. A stopped run continues. Questions of the part
``train``, which gates were trained on, are only asked alone: `begun.py` needs their log-probabilities. The questions
go to questions.PART.jsonl beside it. With ``--publish``, the record goes to benchmarks/recorded/LLM.jsonl.gz, from
where every checkout reads it: what the LLM said, without questions and passages, which have licences of their own.

`RecordedChat` is a LangChain chat model that answers from the record, and asks the server only for what is not there.
It counts the time that its calls take, so that any chain can be timed without paying for a prompt twice.
"""

import contextlib
import gzip
import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from base import OUT, argument_parser, read_records
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

from rgate_integrations.index import HybridIndex, PassageIndex
from rgate_integrations.index.embedder import SentenceEmbedder
from rgate_integrations.index.passage_index import FILE
from rgate_integrations.langchain import IndexRetriever
from rgate_integrations.langchain.chains import format_documents
from rgate_integrations.prompts import ANSWER, ANSWER_WITH_PASSAGES
from rgate_integrations.runtime.jsonl import JsonlLog

sys.path.insert(0, str(Path(__file__).parent.parent / "cookbook"))
from llama_server import gguf, serving

TOKENS, K, WORDS = 48, 5, 90
RECORDED = Path(__file__).parent / "recorded"


class NotRecorded(Exception):
    """A call that is not in the record, without a server to ask."""


@dataclass(frozen=True)
class Speed:
    """Speed of an LLM, in tokens a second."""

    read: float
    written: float

    def seconds(self, prompt: int, written: int) -> float:
        """Return the time of a call that has written so many tokens."""
        return prompt / self.read + written / self.written

    @classmethod
    def of(cls, calls: Iterable[dict[str, Any]]) -> "Speed":
        """Return the speed of the fastest tenth of the calls: what else runs on the machine slows the others down."""
        read, written = [], []
        for call in calls:
            if call["prompt_tokens"] >= 30 and call["completion_tokens"] >= 8:
                read.append(1e3 * call["prompt_tokens"] / call["prompt_ms"])
                written.append(1e3 * call["completion_tokens"] / call["predicted_ms"])
        return cls(float(np.percentile(read, 90)), float(np.percentile(written, 90)))


class Record:
    """Calls of one LLM: those that are published, and those of this machine.

    Args:
        path: The JSONL file of this machine.
        llm: Name of the model file, without its suffix.
    """

    def __init__(self, path: Path, llm: str) -> None:
        self.llm = llm
        self._log = JsonlLog(path)
        self._published = RECORDED / f"{llm}.jsonl.gz"
        published = read_records(self._published) if self._published.exists() else []
        self.calls: dict[str, dict[str, Any]] = {
            call["key"]: call for call in [*published, *self._log.values()]
        }

    def key(self, messages: list[dict[str, Any]], tokens: int) -> str:
        """Return the key of a call, a hash of everything that the answer depends on."""
        about = json.dumps([self.llm, messages, tokens, 0])
        return hashlib.sha256(about.encode()).hexdigest()[:24]

    def add(self, call: dict[str, Any]) -> None:
        """Append a call to the record."""
        self._log.append([call])
        self.calls[call["key"]] = call

    def publish(self) -> None:
        """Write all calls into the repository, so that they need not be made again."""
        self._published.parent.mkdir(exist_ok=True)
        lines = [json.dumps(call, ensure_ascii=False) + "\n" for _, call in sorted(self.calls.items())]
        # Without a time in the header, the same calls give the same file.
        self._published.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))


class RecordedChat(BaseChatModel):
    """A chat model that answers from a record, and from the server what is not in it.

    Attributes:
        record: The record; new calls are added to it.
        url: The server; without one, a call that is not in the record raises `NotRecorded`.
        tokens: Maximum number of tokens of an answer.
        speed: Computes the time of a call from its tokens; without it, calls take no time.
        meta: Saved with new calls, to find them again.
        calls: For each call its first message, ``system``, its ``prompt`` tokens, and up to now the ``written``
            tokens and the ``seconds``. Clear it before each chain that is timed.
    """

    record: Any
    url: str = ""
    tokens: int = TOKENS
    speed: Any = None
    meta: dict[str, Any] = {}  # noqa: RUF012  pydantic copies it
    calls: list[dict[str, Any]] = []  # noqa: RUF012

    @property
    def _llm_type(self) -> str:
        return "recorded"

    @property
    def seconds(self) -> float:
        """The time of all calls up to now."""
        return float(sum(call["seconds"] for call in self.calls))

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, **kwargs))

    def _stream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        openai_messages = convert_to_openai_messages(messages)
        call = self.call(openai_messages, kwargs.get("max_tokens", self.tokens))
        prompt = call["prompt_tokens"]
        counted = {"system": openai_messages[0]["content"], "prompt": prompt, "written": 0, "seconds": 0.0}
        self.calls.append(counted)
        for text, tokens in call["chunks"]:
            about: dict[str, Any] = {}
            if tokens:
                about["logprobs"] = {"content": tokens}
            counted["written"] += len(tokens)
            if self.speed is not None:
                counted["seconds"] = self.speed.seconds(prompt, counted["written"])
            yield ChatGenerationChunk(message=AIMessageChunk(text), generation_info=about or None)
        yield ChatGenerationChunk(
            message=AIMessageChunk(""), generation_info={"finish_reason": call["finish_reason"]}
        )

    def call(self, messages: Any, tokens: int) -> dict[str, Any]:
        """Return a recorded call; makes it first if it is missing."""
        key = self.record.key(messages, tokens)
        if key not in self.record.calls:
            if not self.url:
                raise NotRecorded(f"No recorded call for {messages[-1]['content'][:60]!r}, and no server.")
            response = ask(self.url, self.record.llm, messages, tokens)
            self.record.add({"key": key, "llm": self.record.llm, **response, "meta": dict(self.meta)})
        recorded: dict[str, Any] = self.record.calls[key]
        return recorded


def ask(url: str, llm: str, messages: Any, tokens: int) -> dict[str, Any]:
    """Ask the server; returns its answer, in the chunks of text and tokens that it sent."""
    body = {
        "model": llm,
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "logprobs": True,
        "top_logprobs": 1,
        "cache_prompt": False,  # every prompt is read from its beginning, whatever came before
        "timings_per_token": True,
    }
    chunks: list[tuple[str, list[dict[str, Any]]]] = []
    timings: dict[str, Any] = {}
    finish = None
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=900) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            data = json.loads(line.removeprefix("data: "))
            timings = data.get("timings") or timings
            for choice in data.get("choices", []):
                finish = choice.get("finish_reason") or finish
                written = (choice.get("logprobs") or {}).get("content") or []
                text = choice["delta"].get("content") or ""
                if text or written:
                    chunk_tokens = [{name: token[name] for name in ("token", "logprob")} for token in written]
                    chunks.append((text, chunk_tokens))
    return {
        "system": messages[0]["content"],
        "text": "".join(text for text, _ in chunks),
        "prompt_tokens": timings["prompt_n"] + timings.get("cache_n", 0),
        "completion_tokens": timings["predicted_n"],
        "prompt_ms": round(timings["prompt_ms"], 1),
        "predicted_ms": round(timings["predicted_ms"], 1),
        "finish_reason": finish,
        "chunks": chunks,
    }


def closed_book(question: str) -> list[BaseMessage]:
    """Return the messages that ask the question alone."""
    return [SystemMessage(ANSWER.system), HumanMessage(ANSWER.user.format(question=question))]


def with_passages(inputs: dict[str, Any], words: int = WORDS) -> list[BaseMessage]:
    """Return the messages that ask a ``question`` with the first words of its ``documents``."""
    shortened = []
    for document in inputs["documents"]:
        text = " ".join(document.page_content.split()[:words])
        shortened.append(Document(id=document.id, page_content=text, metadata=document.metadata))
    user = ANSWER_WITH_PASSAGES.user.format(question=inputs["question"], passages=format_documents(shortened))
    return [SystemMessage(ANSWER_WITH_PASSAGES.system), HumanMessage(user)]


class Forgetful(SentenceEmbedder):
    """Embeds each query again, so that no way to answer profits from an earlier search."""

    def embed_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Return normalised vectors, shape (texts, dimension)."""
        return self.embed(texts)


def open_index(data: Path | None) -> HybridIndex:
    """Return the index of the corpus, built once; see `read_corpus`."""
    home = OUT / ("index-mixture" if data else "index-leads")
    if not (home / FILE).is_file():
        PassageIndex.build(read_corpus(data)).save(home)
    return HybridIndex(PassageIndex.load(home, Forgetful()))


def questions(out: Path, data: Path | None, part: str) -> list[Question]:
    """Return the questions of a part. They are chosen once, so that later changes of the data do not matter.

    Args:
        out: Folder where they are saved.
        data: The folder with the question sets; None for those written here.
        part: ``"test"``, ``"train"``, or ``"requests"`` for those written here.
    """
    path = out / f"questions.{part}.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        chosen = read_training(data) if data is not None and part == "train" else read_mixture(data)
        path.write_text(
            "".join(json.dumps(asdict(question), ensure_ascii=False) + "\n" for question in chosen)
        )
    return [Question(**{**row, "gold_answers": tuple(row["gold_answers"])}) for row in read_records(path)]


def both_arms(record: Record, candidates: list[Question]) -> list[Question]:
    """Return the questions that the record has with and without passages."""
    ids: dict[str, set[str]] = defaultdict(set)
    for call in record.calls.values():
        ids[call["system"]].add(call["meta"].get("id"))
    both = ids[ANSWER.system] & ids[ANSWER_WITH_PASSAGES.system]
    return [question for question in candidates if question.id in both]


def server(llm: str) -> contextlib.AbstractContextManager[str]:
    """Start a server for an LLM; yields its URL, or an empty one without an LLM."""
    return serving(gguf(llm), slots=1, context=4096, threads=0) if llm else contextlib.nullcontext("")


def collect(chat: RecordedChat, selected: Sequence[Question], retriever: IndexRetriever | None) -> None:
    """Record the answer to each question alone and, with a retriever, with passages."""
    for question in selected:
        about = {"id": question.id, "kind": question.kind, "part": question.part}
        direct_chat = chat.model_copy(update={"meta": {**about, "arm": "direct"}})
        direct_chat.invoke(closed_book(question.question))
        if retriever is not None:
            documents = retriever.invoke(question.question)
            meta = {**about, "arm": "passages", "passages": [document.id for document in documents]}
            messages = with_passages({"question": question.question, "documents": documents})
            chat.model_copy(update={"meta": meta}).invoke(messages)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--llm", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--data", type=Path, required=True, help="folder with the question sets")
    parser.add_argument("--out", type=Path, default=OUT / "served", help="folder of the record")
    parser.add_argument("--part", choices=("test", "train"), default="test")
    parser.add_argument("--limit", type=int, help="how many questions")
    parser.add_argument("--publish", action="store_true", help="write the record into the repository")
    arguments = parser.parse_args()
    selected = questions(arguments.out, arguments.data, arguments.part)[: arguments.limit]
    record = Record(arguments.out / f"{arguments.llm}.jsonl", arguments.llm)
    retriever = None
    if arguments.part == "test":
        retriever = IndexRetriever(index=open_index(arguments.data), k=K)
    with server(arguments.llm) as url:
        collect(RecordedChat(record=record, url=url), selected, retriever)
    if arguments.publish:
        record.publish()


if __name__ == "__main__":
    main()
