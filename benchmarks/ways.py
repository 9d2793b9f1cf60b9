"""Ways to answer, each a LangChain chain over the same LLM and the same search; `end_to_end` compares them."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from base import SETS, read_answers, read_records
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import Runnable, RunnableBranch, RunnableLambda, RunnablePassthrough
from served import Forgetful, K, RecordedChat, closed_book, with_passages

from rgate_integrations import load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.engine.loading import DEFAULT_GATES
from rgate_integrations.index.retriever import Retriever
from rgate_integrations.langchain import IndexRetriever, RetrievalGate

Chain: TypeAlias = Runnable[Any, Any]

HELD = 32
EXAMPLES, NEAREST = 150, 5


@dataclass
class Ways:
    """All ways, with the search that they share.

    Attributes:
        index: What is searched.
        data: Folder with labelled requests, for the way that needs examples; None for none.
    """

    index: Retriever
    data: Path | None

    def chains(self, chat: RecordedChat) -> dict[str, Chain]:
        """Return every way, by name, to answer with a chat model; what only an oracle knows is not in it."""
        never = RunnableLambda(closed_book) | chat | StrOutputParser()
        retriever = IndexRetriever(index=self.index, k=K)
        read = {"documents": retriever, "question": RunnablePassthrough()}
        always = read | RunnableLambda(with_passages) | chat | StrOutputParser()
        first_look = load_gate(on_error="raise")
        alone = RetrievalGate(first_look)
        begun = RetrievalGate(load_gate(DEFAULT_GATES["llm"], on_error="raise"))
        # FLARE's trigger (Jiang et al. 2023): the least probable token of a begun answer.
        weakest = RetrievalGate(load_gate("token_probability", tokens=HELD, on_error="raise"))
        options = AnswerFirst(tokens=HELD, question_gate=first_look)
        arms = {"retrieve": always, "direct": never}
        ways = {
            "never": never,
            "always": always,
            "gate, question alone": alone.route(**arms),
            "look first": alone.route(**arms, look_first=True),
            "look first, then answer first": begun.route(**arms, look_first=True, answer_first=options),
            "answer first": begun.route(**arms, answer_first=options),
            "answer first, FLARE's trigger": weakest.route(
                **arms, answer_first=AnswerFirst(tokens=HELD, question_gate=None)
            ),
        }
        if self.data is not None:
            ways["nearest examples"] = RunnableBranch((self.near_examples, always), never)
        return ways

    def near_examples(self, question: str) -> bool:
        """Whether labelled requests for retrieval are nearer than others: what semantic-router does.

        The mean similarity of the five nearest examples of each route is compared.
        """
        vectors, retrieves = self._examples
        similarity = vectors @ Forgetful().embed([question])[0]
        near = np.sort(similarity[retrieves])[-NEAREST:].mean()
        far = np.sort(similarity[~retrieves])[-NEAREST:].mean()
        return bool(near >= far)

    @cached_property
    def _examples(self) -> tuple[np.ndarray, np.ndarray]:
        """Embeddings of labelled requests, as many for either route, and which of them need retrieval."""
        data = Path(self.data or ".")
        found: dict[bool, list[str]] = {True: [], False: []}
        for record in read_records(data / "practical.dev.jsonl"):
            found[record["retrieve"]].append(record["question"])
        for name in SETS:
            for record in read_answers(data, name):
                found[not record["closed_book_correct"]].append(record["question"])
        rng = np.random.default_rng(0)
        chosen: list[str] = []
        for texts in found.values():
            chosen += [texts[row] for row in rng.permutation(len(texts))[:EXAMPLES]]
        return Forgetful().embed(chosen), np.arange(len(chosen)) < min(EXAMPLES, len(found[True]))
