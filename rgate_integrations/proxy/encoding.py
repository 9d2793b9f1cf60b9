"""From prompts to token ids: chat templates, limits, and text that must not act as control tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from rgate_integrations.prompts import ANSWER, ANSWER_FEW_SHOT, PromptTemplate
from rgate_integrations.proxy.base import Values

_MARK = "\u2042"
"""Stands for a value; no template has it."""
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|endoftext|>", "<|end|>", "</s>")


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt in token ids.

    Attributes:
        ids: The token ids.
        question: Half-open range of the positions that hold the question; empty range if not found.
        template: The template that was rendered (a base model gets a few-shot form of the answer prompt).
        open_ended: Whether the text ends without white space, so that a continuation starts with a space.
    """

    ids: tuple[int, ...]
    question: range
    template: PromptTemplate
    open_ended: bool


class PromptEncoder:
    """Renders and tokenizes prompts for one model.

    Args:
        tokenizer: A fast tokenizer of transformers.
        limit: Greatest length of a prompt in tokens. A longer one has its template's ``cut`` field
            shortened, and only then, if that is not enough, the question.
    """

    def __init__(self, tokenizer: Any, limit: int) -> None:
        self.tokenizer = tokenizer
        self.limit = limit
        self.chat = bool(getattr(tokenizer, "chat_template", None))
        self._beginnings: dict[PromptTemplate, tuple[int, ...]] = {}
        self._control = sorted(
            {str(t) for t in [*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()]},
            key=len,
            reverse=True,
        )

    def stop_ids(self) -> list[int]:
        """Return the ids of the tokens that end an answer."""
        vocabulary = self.tokenizer.get_vocab()
        ids = {vocabulary[t] for t in _TURN_ENDS if t in vocabulary}
        if self.tokenizer.eos_token_id is not None:
            ids.add(self.tokenizer.eos_token_id)
        return sorted(ids)

    @property
    def turn_end(self) -> list[int]:
        """The token that ends an answer, if the tokenizer has one."""
        vocabulary = self.tokenizer.get_vocab()
        ids = [vocabulary[t] for t in _TURN_ENDS if t in vocabulary] if self.chat else []
        eos = self.tokenizer.eos_token_id
        return ids[:1] or ([eos] if eos is not None else [])

    def encode(self, prompt: PromptTemplate, values: Values) -> EncodedPrompt:
        """Render a prompt and tokenize it within the limit."""
        clean = {name: self.plain(text) for name, text in values.items()}
        encoded = self._encode(prompt, clean)
        for name in (prompt.cut, "question"):
            excess = len(encoded.ids) - self.limit
            if excess > 0 and name in clean:
                keep = len(self.ids(clean[name])) - excess - 8
                clean[name] = self.cut(clean[name], max(keep, 1)) or clean[name]
                encoded = self._encode(prompt, clean)
        return encoded

    def beginning(self, prompt: PromptTemplate) -> tuple[int, ...]:
        """Return the token ids with which a prompt begins whatever its fields hold, such as its system turn."""
        if prompt not in self._beginnings:
            some, other = (self._encode(prompt, dict.fromkeys(prompt.fields, v)).ids for v in ("a", "1"))
            self._beginnings[prompt] = tuple(
                a for a, _ in takewhile(lambda p: p[0] == p[1], zip(some, other, strict=False))
            )
        return self._beginnings[prompt]

    def after_draft(self, prompt: PromptTemplate) -> list[int]:
        """Return the token ids that follow the draft in a prompt with a `PromptTemplate.follow_up`."""
        return self.ids(self._tail(prompt))

    def goes_on(self, prompt: PromptTemplate, written: PromptTemplate) -> bool:
        """Return whether ``prompt`` is, to the letter, ``written`` with a draft and what follows it."""
        values = dict.fromkeys(prompt.fields, _MARK)
        whole, begun = (self._text(p, values)[0] for p in (prompt, written))
        return prompt.follows(written) and whole.startswith(begun + _MARK)

    def plain(self, text: str) -> str:
        """Replace the spellings of control tokens, so that a text cannot end its own turn."""
        for token in self._control:
            if token in text:
                text = text.replace(token, " ")
        return text

    def ids(self, text: str) -> list[int]:
        """Tokenize plain text without adding control tokens."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def cut(self, text: str, tokens: int) -> str | None:
        """Return ``text`` cut to a number of tokens, or None when it is not longer."""
        offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)[
            "offset_mapping"
        ]
        return text[: offsets[tokens - 1][1]] if len(offsets) > tokens else None

    def continuation(self, encoded: EncodedPrompt, text: str) -> list[int]:
        """Tokenize a text that continues a prompt, with the space that the prompt left off."""
        return self.ids(f" {text}" if encoded.open_ended else text)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds; the texts joined are the decoded whole."""
        texts: list[str] = []
        done = ""
        for end in range(1, len(ids) + 1):
            whole = self.tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False)
            if whole.endswith("\ufffd") and end < len(ids):  # half a character: the next token completes it
                texts.append("")
                continue
            texts.append(whole[len(done) :])
            done = whole
        return texts

    def _text(self, prompt: PromptTemplate, values: Values) -> tuple[str, PromptTemplate]:
        if self.chat and not prompt.raw:
            messages = prompt.messages(**values)
            begun = messages[-1]["role"] == "assistant"
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not begun, continue_final_message=begun
            )
            return str(text), prompt
        if prompt == ANSWER:
            prompt = ANSWER_FEW_SHOT
        return prompt.text(**values), prompt

    def _tail(self, prompt: PromptTemplate) -> str:
        text = self._text(prompt, dict.fromkeys(prompt.fields, _MARK))[0]
        return text[text.rfind(_MARK) + len(_MARK) :]

    def _encode(self, prompt: PromptTemplate, values: Values) -> EncodedPrompt:
        text, prompt = self._text(prompt, values)
        special = not (self.chat and not prompt.raw)
        tail = self._tail(prompt) if prompt.follow_up else ""
        encoding = self.tokenizer(
            text.removesuffix(tail), add_special_tokens=special, return_offsets_mapping=True
        )
        return EncodedPrompt(
            ids=(*encoding["input_ids"], *self.ids(tail)),
            question=_token_range(encoding["offset_mapping"], text, values.get("question", "")),
            template=prompt,
            open_ended=not text[-1:].isspace(),
        )


def _token_range(offsets: Sequence[tuple[int, int]], text: str, part: str) -> range:
    start = text.rfind(part) if part else -1
    if start < 0:
        return range(0)
    end = start + len(part)
    inside = [i for i, (a, b) in enumerate(offsets) if a < end and b > start and b > a]
    return range(inside[0], inside[-1] + 1) if inside else range(0)
