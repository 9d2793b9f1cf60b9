"""Ways to answer, each a LangChain chain over the same LLM and the same search; `end_to_end` compares them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import Runnable, RunnableBranch, RunnableLambda, RunnablePassthrough
from served import Forgetful, K, RecordedChat, closed_book, with_passages

from rgate_integrations import load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.engine.loading import DEFAULT_GATES
from rgate_integrations.index.retriever import Retriever
from rgate_integrations.langchain import IndexRetriever, RetrievalGate
from rgate_integrations.runtime.files import read_jsonl

Chain: TypeAlias = Runnable[Any, Any]

HELD = 32
EXAMPLES, NEAREST = 150, 5


@dataclass
class Ways:
    """All ways, with gates, search and examples that they share.

    Attributes:
        index: What is searched.
        data: Folder with labelled requests, for the ways that need examples; None for none.
        only: Names of the ways to try beside never and always; None for all.
    """

    index: Retriever
    data: Path | None
    only: Sequence[str] | None = None

    def chains(self, chat: RecordedChat) -> dict[str, Chain]:
        """Return every way, by name, to answer with a chat model; what only an oracle knows is not in it."""
        never = RunnableLambda(closed_book) | chat | StrOutputParser()
        answer = RunnableLambda(with_passages) | chat | StrOutputParser()
        retriever = IndexRetriever(index=self.index, k=K)
        always = {"documents": retriever, "question": RunnablePassthrough()} | answer
        begun = RetrievalGate(self.judge)
        options = AnswerFirst(tokens=HELD, question_gate=self.first_look)

        def claims(filtered: bool) -> Chain:
            """Search the claims of the begun answer, beside the question."""
            searched = begun.guard(retriever, k=K, filter_claims=filtered)
            read = {"documents": searched, "question": RunnablePassthrough()} | answer
            return begun.route(retrieve=read, direct=never, answer_first=options)

        alone = RetrievalGate(self.first_look)
        ways = {
            "never": never,
            "always": always,
            "gate, question alone": alone.route(retrieve=always, direct=never),
            "look first": alone.route(retrieve=always, direct=never, look_first=True),
            "look first, then answer first": begun.route(
                retrieve=always, direct=never, look_first=True, answer_first=options
            ),
            "answer first": begun.route(retrieve=always, direct=never, answer_first=options),
            "answer first, claims": claims(False),
            "answer first, unknown claims": claims(True),
            "answer first, FLARE's trigger": RetrievalGate(self.weakest_token).route(
                retrieve=always, direct=never, answer_first=AnswerFirst(tokens=HELD, question_gate=None)
            ),
        }
        if self.data is not None:
            ways["nearest examples"] = RunnableBranch((self.near_examples, always), never)
        if self.only is not None:
            ways = {name: way for name, way in ways.items() if name in ("never", "always", *self.only)}
        return ways

    @cached_property
    def first_look(self) -> Any:
        """The default gate: it reads the question alone."""
        return load_gate(on_error="raise")

    @cached_property
    def judge(self) -> Any:
        """The gate that reads a begun answer."""
        return load_gate(DEFAULT_GATES["llm"], on_error="raise")

    @cached_property
    def weakest_token(self) -> Any:
        """FLARE's trigger (Jiang et al. 2023): the least probable token of a begun answer."""
        return load_gate("token_probability", tokens=HELD, on_error="raise")

    def near_examples(self, question: str) -> bool:
        """Whether labelled requests for retrieval are nearer than others: what semantic-router does.

        The mean similarity of the five nearest examples of each route is compared.
        """
        vectors, retrieves = self._examples
        similarity = vectors @ Forgetful().embed([question])[0]
        means = [np.sort(similarity[retrieves == side])[-NEAREST:].mean() for side in (True, False)]
        return bool(means[0] >= means[1])

    @cached_property
    def _examples(self) -> tuple[np.ndarray, np.ndarray]:
        """Embeddings of labelled requests, as many for either route, and which of them need retrieval."""
        data = Path(self.data or ".")
        found: dict[bool, list[str]] = {True: [], False: []}
        for _, record in read_jsonl(data / "practical.dev.jsonl"):
            found[record["retrieve"]].append(record["question"])
        for name in ("nq", "trivia", "hotpotqa", "2wikimultihopqa", "musique", "squad"):
            for _, record in read_jsonl(data / f"adaptive_llama31_8b.{name}.dev.jsonl"):
                found[not record["closed_book_correct"]].append(record["question"])
        rng = np.random.default_rng(0)
        chosen = {side: _sample(texts, rng) for side, texts in found.items()}
        vectors = Forgetful().embed([*chosen[True], *chosen[False]])
        return vectors, np.repeat([True, False], [len(chosen[True]), len(chosen[False])])


def _sample(texts: Sequence[str], rng: np.random.Generator) -> list[str]:
    return [texts[row] for row in rng.permutation(len(texts))[:EXAMPLES]]
