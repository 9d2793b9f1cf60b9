"""The LLM asked whether it needs retrieval: what others do, at the price of one more call.

    python benchmarks/asked.py --llm qwen2.5-coder-0.5b-instruct --data DIR [--limit 100]

asks it in three ways about the questions whose answers are in the record (see `served`), and keeps what it says
there. It goes on where it was stopped. `ways` makes chains of the three.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableBranch, RunnableLambda
from mixture import Question
from served import OUT, NotRecorded, Record, RecordedChat, both_arms, questions, server

Chain: TypeAlias = Runnable[Any, Any]
Asking: TypeAlias = Callable[[str], bool]

ROUTER_PROMPT = ChatPromptTemplate.from_template(
    "Given the user question below, classify it as either being `direct`, if you can answer it from memory, or "
    "`retrieve`, if documents must be searched.\n\nDo not respond with more than one word.\n\n"
    "<question>\n{question}\n</question>\n\nClassification:"
)
"""The prompt of LangChain's guide to routing, with other classes."""
ADAPT_PROMPT = ChatPromptTemplate.from_messages(
    [
        (
            "system",
            "Answer the question briefly, in one or two sentences. If you do not know, reply only: RETRIEVE",
        ),
        ("user", "{question}"),
    ]
)
"""The question that ADAPT-LLM (Labruna et al. 2024) trains an LLM for; here it is asked without training."""
TOOLS = (
    ("direct", "Answers well-known facts from memory, without documents."),
    ("docs", "Searches documents for what is not known from memory."),
)
CLASS_TOKENS, SELECTION_TOKENS = 4, 96  # a selector writes JSON with a reason in it

BY_PROMPT = "LLM asked, LangChain prompt"
BY_SELECTOR = "LLM asked, LlamaIndex selector"
BY_ANSWER = "LLM asked to answer or retrieve"


def asked_chains(chat: RecordedChat, always: Chain, never: Chain) -> dict[str, Chain]:
    """Return the ways that ask the LLM first, by name.

    Args:
        chat: The LLM.
        always: Answers from passages.
        never: Answers without them.
    """
    return {
        BY_PROMPT: RunnableBranch((asked_by_prompt(chat), always), never),
        BY_SELECTOR: RunnableBranch((asked_by_selector(chat), always), never),
        BY_ANSWER: _answer_or_retrieve(chat, always),
    }


def asked_by_prompt(chat: RecordedChat) -> Asking:
    """Return what asks the LLM for one word; all but a clear "direct" retrieves."""
    chain = ROUTER_PROMPT | chat.bind(max_tokens=CLASS_TOKENS)
    return lambda question: "direct" not in chain.invoke({"question": question}).text.lower()


def asked_by_selector(chat: RecordedChat) -> Asking:
    """Return what asks LlamaIndex's selector to choose a tool; what cannot be parsed retrieves."""
    from llama_index.core.selectors import LLMSingleSelector
    from llama_index.core.tools import ToolMetadata
    from llama_index_chat import ChatLLM

    selector = LLMSingleSelector.from_defaults(llm=ChatLLM(answering=chat.bind(max_tokens=SELECTION_TOKENS)))
    tools = [ToolMetadata(name=name, description=text) for name, text in TOOLS]

    def retrieves(question: str) -> bool:
        try:
            return bool(selector.select(tools, question).ind != 0)
        except NotRecorded:
            raise
        except Exception:
            return True

    return retrieves


def _answer_or_retrieve(chat: RecordedChat, always: Chain) -> Chain:
    asking = ADAPT_PROMPT | chat | StrOutputParser()

    def answered(question: str) -> Any:
        text = asking.invoke({"question": question})
        return always if "retrieve" in text.lower() else text

    return RunnableLambda(answered)


def collect(chat: RecordedChat, asked: list[Question]) -> None:
    """Ask the LLM in every way, question by question; neither arm is run."""
    silent = RunnableLambda(lambda question: "")
    for number, question in enumerate(asked):
        about = {"id": question.id, "kind": question.kind, "part": question.part, "passages": []}
        for name in (BY_PROMPT, BY_SELECTOR, BY_ANSWER):
            own = chat.model_copy(update={"meta": {**about, "arm": name}})
            asked_chains(own, silent, silent)[name].invoke(question.question)
        print(number + 1, question.id, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llm", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--data", type=Path, help="folder with the question sets")
    parser.add_argument("--out", type=Path, default=OUT / "served", help="where the record is")
    parser.add_argument("--limit", type=int, help="how many questions")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    record = Record(arguments.out / f"{arguments.llm}.jsonl", arguments.llm)
    asked = both_arms(
        record, questions(arguments.out, arguments.data, "test" if arguments.data else "requests")
    )
    with server(arguments.llm, None, arguments.threads) as url:
        collect(RecordedChat(record=record, url=url), asked[: arguments.limit])


if __name__ == "__main__":
    main()
