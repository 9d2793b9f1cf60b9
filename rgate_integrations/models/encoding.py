"""Turns prompts into token ids: applies chat templates and length limits, and removes control tokens from text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.models.base import Values
from rgate_integrations.prompts import ANSWER, ANSWER_FEW_SHOT, PromptTemplate
from rgate_integrations.runtime.text import encodable

if TYPE_CHECKING:
    import tokenizers

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|endoftext|>", "<|end|>", "</s>")
_SEAM_TOKENS = 8  # spare, because truncated text may have a few more tokens where it meets its neighbours


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt in token ids.

    Attributes:
        ids: The token ids.
        question: Positions of the question's tokens; empty if it was not found.
        template: The template that was rendered (a base model gets a few-shot form of the answer prompt).
        open_ended: Whether the prompt ends without white space, so that a continuation starts with a space.
        text: Token ids of a text that continues the prompt, such as a draft; ``len()`` includes them.
        seed: Seed of a sampled continuation.
    """

    ids: tuple[int, ...]
    question: range
    template: PromptTemplate
    open_ended: bool
    text: tuple[int, ...] = ()
    seed: int = 0

    def __len__(self) -> int:
        return len(self.ids) + len(self.text)


class TextEncoder:
    """Tokenizes text, and removes control tokens from it; see `plain`.

    Args:
        tokenizer: The tokenizer; its own truncation and padding are switched off.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        # A saved tokenizer may be set to truncate or pad, which would lose text or add tokens.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._text_tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        # The longest first, because one may be a part of another.
        self._control = sorted(map(attrgetter("content"), added), key=len, reverse=True)

    def plain(self, text: str) -> str:
        """Replace each control token in a text with a space, so that the text cannot end its own turn."""
        for token in self._control:
            text = text.replace(token, " ")
        return text

    def tokenize(self, text: str, *, add_special_tokens: bool = False) -> tokenizers.Encoding:
        """Tokenize a text. Lone surrogates, which tokenizers reject, are replaced by "?"."""
        return self._text_tokenizer.encode(encodable(text), add_special_tokens=add_special_tokens)

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens around it."""
        return list(self.tokenize(text).ids)

    def truncate(self, text: str, tokens: int) -> str | None:
        """Return a text cut to its first ``tokens`` tokens; None if it is no longer than that."""
        offsets = self.tokenize(text).offsets
        return text[: offsets[tokens - 1][1]] if len(offsets) > tokens else None


class PromptEncoder(TextEncoder):
    """Renders and tokenizes prompts for one model.

    Args:
        tokenizer: A fast tokenizer of transformers.
        limit: Maximum length of a prompt in tokens. To fit, the template's ``cut`` field is truncated first, and the
            question only if that is not enough.

    Attributes:
        chat: Whether the model has a chat template.
        stop_ids: Ids of the tokens that end an answer; the first is the one that `training_pair` adds.
    """

    def __init__(self, tokenizer: Any, limit: int) -> None:
        super().__init__(tokenizer.backend_tokenizer)
        self.tokenizer = tokenizer
        self.limit = limit
        self.chat = bool(getattr(tokenizer, "chat_template", None))
        vocabulary = tokenizer.get_vocab()
        # Several, because a tokenizer's own end of text is often not the token that ends a turn.
        self.stop_ids = [vocabulary[token] for token in _TURN_ENDS if token in vocabulary]
        # Chat models are trained to end with an end-of-turn token, base models with the end-of-text token.
        if tokenizer.eos_token_id is not None:
            self.stop_ids.insert(len(self.stop_ids) if self.chat else 0, tokenizer.eos_token_id)

    def encode(self, prompt: PromptTemplate, values: Values) -> EncodedPrompt:
        """Render a prompt and tokenize it, with fields truncated to keep it within the limit."""
        clean = {name: self.plain(text) for name, text in values.items()}
        encoded = self._encode(prompt, clean)
        for name in (prompt.cut, "question"):  # the question only if truncating the other is not enough
            excess = len(encoded.ids) - self.limit
            if excess > 0 and name in clean:
                keep = len(self.ids(clean[name])) - excess - _SEAM_TOKENS
                clean[name] = self.truncate(clean[name], max(keep, 1)) or clean[name]
                encoded = self._encode(prompt, clean)
        return encoded

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Return the token ids of a conversation, rendered with the chat template and not truncated.

        If the last turn is the assistant's, it stays open, and the model continues it.

        Args:
            messages: The turns, each with ``role`` and ``content``.

        Raises:
            ConfigurationError: The tokenizer has no chat template, or the template rejects the turns.
        """
        turns = [{**turn, "content": self.plain(turn["content"])} for turn in messages]
        try:
            return tuple(self.ids(self._render(turns)))
        except Exception as error:  # a template is the model author's program, which may raise anything
            raise ConfigurationError(
                f"The conversation cannot be rendered with the model's chat template: {error}",
                hint="Use an instruction-tuned model, with alternating user and assistant turns.",
            ) from error

    def training_pair(
        self, prompt: PromptTemplate, values: Values, target: str, *, ends: bool
    ) -> tuple[list[int], list[int]]:
        """Return the token ids of a prompt and of its target; ``ends`` adds the end of an answer.

        That end is a line feed if the template stops at one, and otherwise the model's stop token.
        """
        row = self.encode(prompt, values)
        ids = self.continuation(row, self.plain(target))
        if ends:
            ids += self.ids("\n") if row.template.stop_at_newline else self.stop_ids[:1]
        return list(row.ids), ids

    def continuation(self, encoded: EncodedPrompt, text: str) -> list[int]:
        """Return the token ids of a text that continues a prompt.

        If the prompt does not end in white space, a space is put before the text.
        """
        return self.ids(f" {text}" if encoded.open_ended else text)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds; joined, they are the decoded text."""
        texts: list[str] = []
        for end in range(1, len(ids) + 1):
            texts.append(self.added_text(ids[:end], "".join(texts), is_last=end == len(ids)))
        return texts

    def added_text(self, ids: Sequence[int], before: str, *, is_last: bool) -> str:
        """Return the text that the last token of ``ids`` adds to ``before``, the text of the others.

        It is empty if the token ends in the middle of a character, unless ``is_last``: no more tokens follow.
        """
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if text.endswith("\ufffd") and not is_last:  # the next token will complete the character
            return ""
        return str(text[len(before) :])

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Render turns with the chat template."""
        continues = messages[-1]["role"] == "assistant"  # the model continues its own turn
        return str(
            self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=not continues,
                continue_final_message=continues,
            )
        )

    def _encode(self, prompt: PromptTemplate, values: Values) -> EncodedPrompt:
        # A base model continues text, so it needs examples of answers.
        if prompt == ANSWER and not self.chat:
            prompt = ANSWER_FEW_SHOT
        text = prompt.text(**values)
        if self.chat and not prompt.raw:
            text = self._render(prompt.messages(**values))
        # A chat template writes the control tokens itself.
        encoding = self.tokenize(text, add_special_tokens=prompt.raw or not self.chat)
        return EncodedPrompt(
            ids=tuple(encoding.ids),
            question=_token_range(encoding.offsets, text, values.get("question", "")),
            template=prompt,
            open_ended=not text[-1:].isspace(),
        )


def _token_range(offsets: Sequence[tuple[int, int]], text: str, part: str) -> range:
    """Return the positions of the tokens of the last occurrence of ``part`` in a text; empty if there is none."""
    # The last occurrence, because examples and system turns come before the question.
    start = text.rfind(part)
    if start < 0:
        return range(0)
    end = start + len(part)
    # Control tokens have no text, so their ranges are empty.
    inside = [i for i, (first, last) in enumerate(offsets) if first < min(last, end) and last > start]
    return range(inside[0], inside[-1] + 1) if inside else range(0)
