"""Separates an LLM's thoughts from its answer, and recognises replies that do not answer."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

_OPENING = re.compile(
    r"\s*(?:<\|start\|>assistant)?(?:<(?:seed:)?think(?:ing)?>|<thought>|<reasoning>|\[THINK\]|◁think▷|<\|START_THINKING\|>"
    r"|<\|channel\|>(?:analysis|commentary)[^<]{0,99}<\|message\|>|<\|channel>thought|(?-i:analysis(?=[A-Z])))",
    re.IGNORECASE,
)
_FINAL = (
    r"◁/think▷|<\|END_THINKING\|>(?:<\|START_RESPONSE\|>)?"
    r"|(?:<\|end\|>)?(?:<\|start\|>assistant)?<\|channel\|>final[^<]{0,99}<\|message\|>"
)
_CLOSING = re.compile(
    rf"</(?:seed:)?think(?:ing)?>|</thought>|</reasoning>|\[/THINK\]|<channel\|>|assistantfinal|{_FINAL}",
    re.IGNORECASE,
)
# If the prompt has opened the tag, the reply has only the closing one. A tag in quotes is part of an answer.
_CLOSING_ALONE = re.compile(rf"(?<![`'\"])</think>|{_FINAL}", re.IGNORECASE)
_TURN_END = re.compile(r"(?:<\|(?:return|end|END_RESPONSE)\|>)+\s*\Z")

THINKING_OFF = "thinking off"
"""Added to an LLM's name, in a measured ability or a tuned gate, if the LLM's thinking was turned off for it."""

_THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
_THOUGHT_TYPES = frozenset(("reasoning", "thinking", "redacted_thinking", "reasoning_content", "thought"))
# Providers have different words for an answer that was cut off at its maximum length.
_CUT = frozenset(("length", "max_tokens", "max_output_tokens", "incomplete", "model_length"))

# What may come before "I don't know".
_LEAD_IN = (
    r"(?:(?:(?:i am|i'm) (?:very |so |really )?sorry|sorry|i apologi[sz]e|(?:my )?apologies|for (?:any|the) confusion"
    r"|unfortunately|i'm afraid|i am afraid|honestly|to be honest|actually|hmm+|well|oh|(?:good|great) question"
    r"|based on my knowledge|as of my [\w ]{1,30}|leider|désolée?|lo siento|к сожалению|извините|抱歉|对不起"
    r"|すみませんが?)\W*(?:(?:but|that|mais|pero) )?){0,3}"
)
_REFUSAL = re.compile(
    rf"\W*{_LEAD_IN}(?:as an ai\b|i (?:have no|lack(?: the| any)?) (?:idea|clue|information|knowledge|record)"
    r"|no (?:idea|clue)(?=[^\w\s]|\s*$| (?:wh|how|about|sorry))|beats me\b|i'm (?:unable|not able)\b"
    r"|i(?: would|'d) (?:have|need) to (?:look|search)|(?:that is|that's|it is|it's) (?:unknown to me|beyond my)"
    r"|unable to (?:answer|determine)|there is no information (?:about|available|on)|unknown\W*$"
    r"|(?:(?:i am|i'm) )?(?:really )?not (?:really |entirely |completely |quite )?(?:sure|certain|aware|familiar)\b"
    r"|i (?:really |honestly )?(?:do not|don't|cannot|can't|can not|could not|couldn't|am unable|am not able|won't)"
    r"(?= ?(?:know|have (?:any |access|enough|information|that|the|specific)|help|assist|answer|provide|find|comply"
    r"|share|determine|identify|confirm|recall|remember|verify|access|tell you|say|be (?:sure|certain)|to |[.,!]|$))"
    # Of other languages, only the commonest words for "I don't know" and "no idea".
    r"|ich weiß (?:es |das )?(?:leider )?nicht|das weiß ich (?:leider )?nicht|keine ahnung|je ne sais pas|aucune idée"
    r"|no (?:lo )?sé\b|ni idea|non (?:lo )?so\b|(?:eu )?não sei|(?:я )?не знаю|我?(?:不知道|不清楚)|[分わ]かりません"
    r"|(?:잘 )?모르겠|لا أعرف|(?:मुझे )?(?:पता नहीं|नहीं पता)|bilmiyorum)"
)
_TOOL_CALL = re.compile(
    r"\s*(?:<\|?(?:tool|function)[_▁ ]?calls?|\[TOOL_CALLS\]|<\|python_tag\|>|<｜tool▁calls?▁begin｜>"
    r"|<\|channel\|>commentary to="
    r'|(?:```\w*\s*)?\[?\s*\{\s*"(?:tool_calls?"|function(?:_call)?"'
    r'|name"\s*:\s*"[^"]{0,99}"\s*,\s*"(?:arguments|parameters)")\s*:)',
    re.IGNORECASE,
)
_READ = 300  # characters, which are enough to recognise a refusal


class Reply(NamedTuple):
    """An LLM's reply.

    Attributes:
        thoughts: The text of its thoughts. None if it has none: empty tags before an answer do not count. Empty if
            the API hides their text, or if the whole reply is empty tags.
        answer: The rest of the reply; empty if the reply ends while the LLM is still thinking.
    """

    thoughts: str | None
    answer: str


def split_thoughts(text: str) -> Reply:
    """Separate thoughts from the answer at tags such as ``<think>`` and those of OpenAI's harmony format.

    >>> split_thoughts("<think>Easy.</think> Paris")
    Reply(thoughts='Easy.', answer=' Paris')
    >>> split_thoughts("<think>The capital")
    Reply(thoughts='The capital', answer='')
    """
    thoughts: list[str] = []
    end = 0
    opening = _OPENING.match(text)
    if opening is None:
        closing = _CLOSING_ALONE.search(text)
        if closing is None:
            return Reply(None, text)
        thoughts.append(text[: closing.start()])
        end = closing.end()
        opening = _OPENING.match(text, end)
    # An LLM may think several times before it answers, so an opening tag may directly follow a closing one.
    while opening is not None:
        start = opening.end()
        closing = _CLOSING.search(text, start)
        if closing is None:
            thoughts.append(text[start:])
            end = len(text)
            break
        thoughts.append(text[start : closing.start()])
        end = closing.end()
        opening = _OPENING.match(text, end)
    thought = "".join(thoughts).strip()
    return Reply(thought or (None if end < len(text) else ""), _TURN_END.sub("", text[end:]))


def read_reply(message: Any) -> Reply:
    """Return the thoughts and the answer in a message or in a chunk of one.

    The message is a server's JSON or a framework's object. Its thoughts are in a field (``reasoning_content``,
    ``reasoning``, ``thinking``), or in a block of the content (OpenAI's Responses, Anthropic, Gemini, LangChain,
    LlamaIndex). For thoughts in the text itself, use `split_thoughts`.
    """
    content = get_field(message, "content") or get_field(message, "text")
    blocks = get_field(message, "blocks") or content
    thoughts: list[str] = []
    answers: list[str] = []
    for holder in (message, get_field(message, "additional_kwargs")):
        value = next(filter(None, (get_field(holder, name) for name in _THOUGHT_FIELDS)), None)
        if value:
            thoughts.append("".join(_texts(value)))
    for block in [blocks] if isinstance(blocks, str) else blocks or ():
        kind = get_field(block, "type") or get_field(block, "block_type")
        if kind in _THOUGHT_TYPES or get_field(block, "thought") is True:
            thoughts.append("".join(_texts(block)))
        else:
            text = block if isinstance(block, str) else get_field(block, "text")
            answers.append(text if isinstance(text, str) else "")
    return Reply("".join(thoughts) if thoughts else None, "".join(answers))


def _texts(value: Any) -> Iterable[str]:
    """Yield the texts in a block of thoughts, which may be nested in fields such as ``summary`` and ``content``."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Sequence):
        for part in value:
            yield from _texts(part)
    else:
        for name in ("text", "summary", *_THOUGHT_FIELDS, "content"):
            yield from _texts(get_field(value, name) or ())


def get_field(thing: Any, name: str) -> Any:
    """Return a mapping's value or an object's attribute of this name; None if there is none."""
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def count_thinking(usage: Any) -> int:
    """Return an API's count of thinking tokens, from the usage of OpenAI, SGLang or LangChain; 0 if it has none."""
    counts = (
        get_field(usage, "reasoning_tokens"),
        get_field(get_field(usage, "output_token_details"), "reasoning"),
        get_field(get_field(usage, "completion_tokens_details"), "reasoning_tokens"),
        get_field(get_field(usage, "output_tokens_details"), "reasoning_tokens"),
    )
    return max([count for count in counts if isinstance(count, int)], default=0)


def is_truncated(reason: object) -> bool:
    """Return whether a finish reason means that an answer was cut off at its maximum length."""
    return str(reason).rpartition(".")[2].lower() in _CUT


def describe_non_answer(text: str) -> str:
    """Return ``"nothing"``, ``"a tool call"`` or ``"a refusal"`` for texts that are not answers; empty for an answer.

    Refusals are recognised in English; in some other languages, only the commonest ways to say "I don't know".

    >>> describe_non_answer("I'm sorry, but I cannot help with that.")
    'a refusal'
    >>> describe_non_answer("I can't wait to see Rome.")
    ''
    """
    if not text.strip():
        return "nothing"
    if _TOOL_CALL.match(text):
        return "a tool call"
    # A refusal is clear from its first words. Matching only at the start avoids matches inside an answer.
    return "a refusal" if _REFUSAL.match(text[:_READ].lower().replace("’", "'")) else ""


def find_answer_start(tokens: Sequence[str], answer: str) -> int:
    """Return the index of the token in which the last occurrence of an answer begins.

    It is ``len(tokens)`` if the answer is empty or does not occur, or if a token is not a string.
    """
    if not answer or not all(isinstance(token, str) for token in tokens):
        return len(tokens)
    start = "".join(tokens).rfind(answer)
    if start < 0:
        return len(tokens)
    return bisect_right(list(accumulate(map(len, tokens))), start)
