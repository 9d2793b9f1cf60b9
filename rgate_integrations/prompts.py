"""Prompts as data: named fields, a version, and a hash that is stored with every trained artefact.

Control tokens in a field's value, such as ``<|im_end|>``, are removed before a model reads the prompt. A local
model's tokenizer knows them. For models on servers, `strip_control_tokens` removes those of all common models.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class PromptTemplate:
    """A prompt with named fields, rendered as chat messages or, for base models, as plain text.

    Attributes:
        name: Short name.
        version: Incremented with every change of wording.
        user: The user's turn, with fields such as ``{question}``.
        system: The system turn; empty for none.
        assistant: The beginning of the assistant's turn, which the model continues; may have fields.
        examples: Few-shot turns before the question: (user text, assistant text) pairs.
        cut: Name of the field to truncate if a prompt exceeds the model's limit; the question is truncated
            only if that is not enough.
        raw: Whether it is plain text even for chat models, as in a paper's own format.
        stop_at_newline: Whether a completion ends at the first newline.
    """

    name: str
    version: int
    user: str
    system: str = ""
    assistant: str = ""
    examples: tuple[tuple[str, str], ...] = ()
    cut: str = "question"
    raw: bool = False
    stop_at_newline: bool = False

    @property
    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 of all fields but `cut` and `stop_at_newline`."""
        parts = [self.name, self.version, self.user, self.system, self.assistant, self.examples, self.raw]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def messages(self, **values: str) -> list[dict[str, str]]:
        """Return the chat messages, each with ``role`` and ``content``. If `assistant` is not empty, it is the last.

        Values are inserted literally: braces in a question stay braces.
        """
        turns: list[dict[str, str]] = []
        if self.system:
            turns.append({"role": "system", "content": self.system})
        for user, assistant in self.examples:
            turns += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        turns.append({"role": "user", "content": self.user.format(**values)})
        if self.assistant:
            turns.append({"role": "assistant", "content": self.assistant.format(**values)})
        return turns

    def text(self, **values: str) -> str:
        """Return the prompt as plain text, for a model without a chat template or for a `raw` prompt."""
        shots = [f"{user}\n{assistant}" for user, assistant in self.examples]
        last = f"{self.user}\n{self.assistant}" if self.assistant else self.user
        head = [self.system] if self.system else []
        return "\n\n".join([*head, *shots, last.format(**values)])


ANSWER = PromptTemplate(
    name="answer",
    version=1,
    system="Answer the question briefly, in one or two sentences.",
    user="{question}",
)
"""The default prompt for writing drafts and reading hidden states; base models get `ANSWER_FEW_SHOT` instead."""


def answer_prompt(system: str | None) -> PromptTemplate:
    """Return the prompt `ANSWER` with a direct arm's system message instead of its own.

    None keeps the system message of `ANSWER`; an empty text removes it.
    """
    if system is None or system == ANSWER.system:
        return ANSWER
    return PromptTemplate(name="answer-own", version=1, system=system, user=ANSWER.user)


ANSWER_FEW_SHOT = PromptTemplate(
    name="answer-few-shot",
    version=1,
    user="Question: {question}",
    assistant="Answer:",
    examples=(
        (
            "Question: What is the largest planet of the solar system?",
            "Answer: The largest planet is Jupiter.",
        ),
        ("Question: who painted the starry night", "Answer: Vincent van Gogh painted The Starry Night."),
        ("Question: In which country is the city of Kyoto?", "Answer: Kyoto is a city in Japan."),
    ),
    raw=True,
    stop_at_newline=True,
)

SHORT_ANSWER = PromptTemplate(
    name="short-answer",
    version=1,
    system="Answer with the shortest phrase that is right.",
    user="{question}",
    examples=(
        ("What is the largest planet of the solar system?", "Jupiter"),
        ("who painted the starry night", "Vincent van Gogh"),
        ("In which year did the Second World War end?", "1945"),
    ),
    stop_at_newline=True,
)
"""The prompt for sampled answers, which must be short, because they are compared as strings."""

ANSWER_WITH_PASSAGES = PromptTemplate(
    name="answer-with-passages",
    version=1,
    system="Answer the question briefly, using the passages where they help.",
    user="{passages}\n\nQuestion: {question}",
    cut="passages",
)


CONDENSE = PromptTemplate(
    name="condense",
    version=1,
    user="{conversation}\n\nWrite what the user's last message asks for as one question that can be understood "
    "without this conversation. Answer with the question alone.",
    cut="conversation",
)


class TitledText(Protocol):
    """A passage with a title."""

    @property
    def title(self) -> str:
        """Title of its document; may be empty."""

    @property
    def text(self) -> str:
        """The passage."""


def format_passages(passages: Iterable[TitledText]) -> str:
    r"""Join passages for the field ``passages`` of a prompt, with numbers and titles.

    >>> from rgate_integrations.index import Passage
    >>> format_passages([Passage("a", "It is in France.", title="Paris"), Passage("b", "It rains.")])
    '[1] Paris: It is in France.\n\n[2] It rains.'
    """
    blocks = []
    for number, passage in enumerate(passages, start=1):
        heading = f"{passage.title}: " if passage.title else ""
        blocks.append(f"[{number}] {heading}{passage.text}")
    return "\n\n".join(blocks)


# No pattern matches white space, so replacing one token with a space cannot create another.
_BAR = "[|\uff5c]"  # DeepSeek and Hunyuan write the full-width bar
_PATTERNS = (
    # <|im_end|>, <|eot_id|>, <｜begin▁of▁sentence｜>, <|turn>, <turn|>
    rf"<{_BAR}[^\s<>|\uff5c]+{_BAR}?>",
    rf"<[^\s<>|\uff5c]+{_BAR}>",
    # EXAONE: [|assistant|]
    r"\[\|[^\s\[\]|]*\|\]",
    # Llama 2: <<SYS>>
    r"<</?SYS>>",
    # Sentencepiece models, Gemma, T5, Baichuan, Nemotron; <s>, </s>, <bos>, <0x0A>
    r"</?s>|<(?:bos|eos|pad|unk|mask|sep|cls|BOS|EOS|PAD|UNK|image)>",
    r"<(?:start|end)_of_(?:turn|image|audio)>|<(?:image|audio)_soft_token>",
    r"<(?:unused|reserved_|extra_id_|SPECIAL_)\d+>|<0x[0-9A-Fa-f]{2}>",
    # Idefics and SmolVLM: <end_of_utterance>; InternLM: [UNUSED_TOKEN_145]; BERT: [unused1]
    r"<end_of_utterance>|<fake_token_around_image>|\[(?:UNUSED_TOKEN_|unused)\d+\]",
    # MiniMax Text: <beginning_of_sentence>
    r"<(?:beginning|end)_of_sentence>|<begin_of_document>",
    # Ling: <role>HUMAN</role>; LongCat: <longcat_user>
    r"</?role>|</?longcat_\w+>",
    # Command: <BOS_TOKEN>, <EOS_TOKEN>, <EOP_TOKEN>
    r"<[A-Z_]+_TOKEN>",
    # Thinking and tool calls: Qwen, DeepSeek, Hermes, Seed
    r"</?(?:think|thinking|tool_calls?|tool_responses?|tools|function_calls?)>",
    r"</?seed:[\w:]+>",
    # Code models: StarCoder, CodeGemma; Code Llama's are <PRE>, <SUF>, <MID>, <EOT>
    r"<(?:fim[-_](?:prefix|middle|suffix|pad|repo|sep)|file_sep|repo_name|endoftext|PRE|SUF|MID|EOT)>",
    # Mistral: [INST], [SYSTEM_PROMPT], [TOOL_CALLS]; GLM: [gMASK]; BERT: [SEP]
    r"\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CALLS|TOOL_CONTENT|MODEL_SETTINGS|THINK)\]",
    r"\[(?:ARGS|CALL_ID|PREFIX|MIDDLE|SUFFIX|IMG|IMG_BREAK|IMG_END|AUDIO|BEGIN_AUDIO|TRANSCRIBE)\]",
    r"\[(?:[gs]?MASK|CLS|SEP|PAD|UNK|BOS|EOS|EOT)\]|<[se]op>",
    # MiniMax: ]~b] and [e~[, between further brackets
    r"\]~!?b[\[\]]|\[e~\[|\]!p~\[",
)
_CONTROL = re.compile("|".join(_PATTERNS))


def strip_control_tokens(text: str) -> str:
    """Replace each control token with a space, so that a text cannot end its turn.

    Servers interpret the text of control tokens. We do not know which ones a server's model has, so those of
    all common model families are replaced. A text that mentions such tokens, or contains HTML's ``<s>``,
    loses them.
    """
    return _CONTROL.sub(" ", text)
