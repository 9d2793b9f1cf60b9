"""A router over a shelf and a writer, in each framework, with all that its parts note: for one contract of both."""

from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.llama_index import CorpusRetriever, GatedQueryEngine
from tests import llama_index_parts
from tests.begun_answers import TEXT, EventRecorder, Knowing, Librarian, Reader, Shelf, answer_to
from tests.langchain_fakes import SINGLES


class Side:
    """What a framework's router is made of.

    Args:
        judge: The gate, or a class to make one of.
        scores: What the gate that screens questions says of them; None for no such gate.
        answers: Whether the direct arm answers first.
        look: How what was found is judged; None not to look first.
        fails_at: Token before which the LLM fails.
        writer: Other options of the LLM that writes: its pace, and what fails.
        names: Names of corpora, each with a shelf of its own whose text ends with the name; () for one without.
        **options: Of `AnswerFirst`.
    """

    def __init__(
        self,
        *,
        judge=Reader,
        scores=None,
        answers=True,
        look=None,
        fails_at=None,
        writer=None,
        names=(),
        **options,
    ):
        self.judge = judge() if isinstance(judge, type) else judge
        self.screen = None if scores is None else (Librarian if names else Reader)(scores)
        options = {"tokens": 4, "question_gate": self.screen} | options
        self.names = names
        writes = {"fails_at": fails_at} | (writer or {})
        self.make(AnswerFirst(**options) if answers else False, look or False, writes)

    @property
    def queries(self):
        """What each corpus was asked."""
        return {name: shelf.queries for name, shelf in self.shelves.items()}


class LangChain(Side):
    """A LangChain router."""

    way = "invoke"

    def make(self, answer_first, look_first, writes):
        self.shelf, self.writer, self.recorder = Shelf(), Knowing(**writes), EventRecorder()
        self.shelves = {name: Shelf(texts=[f"{TEXT} {name}"]) for name in self.names}
        retrieve = {name: reading(shelf) for name, shelf in self.shelves.items()} or reading(self.shelf)
        self.router = RetrievalGate(self.judge).route(
            retrieve=retrieve,
            direct=self.writer.bind(stop=None) | StrOutputParser()
            if answer_first
            else RunnableLambda(answer_to),
            answer_first=answer_first,
            look_first=look_first,
        )

    def ask(self, question, threshold=None):
        config = {"callbacks": [self.recorder]}
        if threshold is not None:
            config["configurable"] = {"retrieval_threshold": threshold}
        return SINGLES[self.way](self.router, question, config).strip()

    async def aask(self, question):
        return (await self.router.ainvoke(question)).strip()

    @property
    def decision(self):
        return self.recorder.events[-1]


def reading(shelf):
    """Return a chain that reads what a shelf has."""
    context = shelf | (lambda found: " ".join(document.page_content for document in found))
    return {"context": context} | RunnableLambda(lambda asked: f"<{asked['context']}>")


class LangChainStream(LangChain):
    """The same, as an asynchronous stream."""

    way = "astream"


class LlamaIndex(Side):
    """A LlamaIndex engine."""

    way = "query"

    def make(self, answer_first, look_first, writes):
        self.shelf, self.writer = llama_index_parts.Shelf(), llama_index_parts.Writer(**writes)
        self.shelves = {name: llama_index_parts.Shelf(f"{TEXT} {name}") for name in self.names}
        shelf = CorpusRetriever(self.shelves) if self.shelves else self.shelf
        streaming = "stream" in self.way
        self.engine = GatedQueryEngine.from_defaults(
            llama_index_parts.over(shelf, streaming=streaming),
            self.judge,
            self.writer,
            streaming=streaming,
            answer_first=answer_first,
            look_first=look_first,
        )

    def ask(self, question, threshold=None):
        engine = self.engine if threshold is None else self.engine.with_threshold(threshold)
        text, response = llama_index_parts.ask(engine, question, self.way)
        self.decision = response.metadata["rgate"]
        return text.strip()

    async def aask(self, question):
        return str(await self.engine.aquery(question))


class LlamaIndexStream(LlamaIndex):
    """The same, as an asynchronous stream."""

    way = "astream"


SIDES = (LangChain, LangChainStream, LlamaIndex, LlamaIndexStream)
