"""How often the gate decides right about the last message of a conversation, on conversations written for this test.

    python benchmarks/conversations.py [dev] [transcripts] [long]

It judges the part ``test``, or with ``dev`` that part, whose wrong decisions it also prints. With ``transcripts``, a
conversation is one message, as a program would paste it, in each of several formats. With ``long``, each answer has
350 words more: passages of the encyclopaedia that share words with it and its question. It also prints the time.
"""

import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from templates import read_lines

from rgate_integrations import Decision, Request, load_gate
from rgate_integrations.index import BM25Index, read_passages
from rgate_integrations.models.download import corpus_path
from rgate_integrations.runtime.segments import segments

FOLDER = Path(__file__).parent / "conversations"
MORE_WORDS = 350
FORMATS = {
    "USER:": ("USER: {}", "ASSISTANT: {}", "\n", "\nASSISTANT:"),
    "Human:": ("Human: {}", "Assistant: {}", "\n\n", "\n\nAssistant:"),
    "||>User:": ("||>User: {}", "||>AI: {}", "\n", "\n||>AI:"),
    "### User:": ("### User:\n{}", "### Assistant:\n{}", "\n\n", "\n\n### Assistant:\n"),
    "Customer:": ("Customer: {}", "Agent: {}", "\n", ""),
    "[INST]": ("[INST] {} [/INST]", " {} </s><s>", "", ""),
    "<|im_start|>": (
        "<|im_start|>user\n{}<|im_end|>\n",
        "<|im_start|>assistant\n{}<|im_end|>\n",
        "",
        "<|im_start|>assistant\n",
    ),
    "<|start_header_id|>": (
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n{}<|eot_id|>",
        "",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
}
"""Transcript formats: a turn of the user, one of the assistant, the separator of turns, and the end."""


@dataclass(frozen=True)
class Conversation:
    """A conversation whose last message is judged.

    Attributes:
        needs_passages: Whether answering that message takes passages.
        kind: How it relates to the earlier turns, such as ``retry``.
        request: The message, with the turns before it.
    """

    needs_passages: bool
    kind: str
    request: Request


def read_conversations(part: str) -> list[Conversation]:
    """Return the conversations of a part, ``dev`` or ``test``."""
    conversations = []
    for line in read_lines(FOLDER / f"{part}.txt"):
        head, *turns = line.split(" | ")
        label, kind = head.split()
        if kind == "two":
            history = [f"user: {turn}" for turn in turns[:-1]]
        else:
            history = [f"{('user', 'assistant')[i % 2]}: {turn}" for i, turn in enumerate(turns[:-1])]
        conversations.append(Conversation(label == "need", kind, Request(turns[-1], history)))
    return conversations


def lengthen(conversations: list[Conversation]) -> list[Conversation]:
    """Return conversations whose answers have 350 words more, before the question that ends them, if any."""
    index = BM25Index(read_passages(corpus_path("encyclopedia-leads")))
    longer = []
    for conversation in conversations:
        history = list(conversation.request.history)
        for place, turn in enumerate(history):
            if turn.startswith("assistant: "):
                hits = index.search([" ".join(history[max(0, place - 1) : place + 1])], 6)[0]
                *sentences, last = segments(turn.removeprefix("assistant: "))
                end = [last] if last.endswith("?") else []
                begin = ["assistant:", *(sentences if end else [*sentences, last])]
                words = " ".join(hit.passage.text for hit in hits).split()[:MORE_WORDS]
                history[place] = " ".join([*begin, *words, *end])
        longer.append(replace(conversation, request=replace(conversation.request, history=tuple(history))))
    return longer


def format_transcripts(conversations: list[Conversation]) -> list[Conversation]:
    """Return conversations as one text each, in all formats; leaves out those with turns of the user only."""
    transcripts = []
    for conversation in conversations:
        turns = [turn.split(": ", 1) for turn in conversation.request.history]
        turns.append(["user", conversation.request.question])
        if conversation.kind == "two":
            continue
        for name, (user, assistant, between, end) in FORMATS.items():
            text = between.join(
                (user if role == "user" else assistant).format(words) for role, words in turns
            )
            transcripts.append(Conversation(conversation.needs_passages, name, Request(text + end)))
    return transcripts


def main() -> None:
    """Print the shares of right decisions by kind; for the part dev also the wrong ones."""
    part = "dev" if "dev" in sys.argv else "test"
    conversations = read_conversations(part)
    if "transcripts" in sys.argv:
        conversations = format_transcripts(conversations)
    if "long" in sys.argv:
        conversations = lengthen(conversations)
    gate = load_gate(on_error="raise")
    gate.decide("Loads the models.")
    start = time.perf_counter()
    decisions = [gate.decide(conversation.request) for conversation in conversations]
    milliseconds = 1e3 * (time.perf_counter() - start) / len(decisions)
    print(f"{len(conversations)} conversations, part {part}, {milliseconds:.0f} ms each")
    for needs, what in (
        (True, "retrieved of those that need passages"),
        (False, "skipped of those that need none"),
    ):
        right: dict[str, list[bool]] = defaultdict(list)
        for conversation, decision in zip(conversations, decisions, strict=True):
            if conversation.needs_passages == needs:
                right[conversation.kind].append(decision.retrieve == needs)
                right["all"].append(decision.retrieve == needs)
        shares = [f"{kind} {sum(hits)}/{len(hits)}" for kind, hits in right.items()]
        print(f"{what}: {sum(right['all']) / len(right['all']):.1%} ({', '.join(shares)})")
    if part == "dev":  # the test part stays unread
        show(conversations, decisions)


def show(conversations: list[Conversation], decisions: list[Decision]) -> None:
    """Print the wrong decisions."""
    for conversation, decision in zip(conversations, decisions, strict=True):
        if decision.retrieve != conversation.needs_passages:
            print(
                conversation.kind,
                conversation.needs_passages,
                *conversation.request.history,
                conversation.request.question,
                sep=" | ",
            )
            print(f"    {decision.p_known:.2f} {decision.reason}")


if __name__ == "__main__":
    main()
