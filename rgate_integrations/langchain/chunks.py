"""What can be read of the chunks of a streamed answer, and what they add up to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage, BaseMessageChunk, message_chunk_to_message
from langchain_core.runnables import AddableDict

# The last is that of `with_structured_output(include_raw=True)`.
_ANSWER_KEYS = ("answer", "output", "result", "text", "raw")


def text_of(chunk: Any) -> str | None:
    """Return the text of an answer in a chunk; None for a tool call or a parsed object."""
    if isinstance(chunk, str):
        return chunk
    if isinstance(chunk, BaseMessage):
        return None if _calls_tool(chunk) else chunk.text
    if isinstance(chunk, Mapping):
        texts = [chunk[key] for key in _ANSWER_KEYS if isinstance(chunk.get(key), str | BaseMessage)]
        if texts:
            return text_of(texts[0])
        # Chains with several outputs stream one after another: their answer may come yet.
        return "" if isinstance(chunk, AddableDict) else None
    return None


def _calls_tool(message: BaseMessage) -> bool:
    """Whether a message holds a tool call, or a part of one."""
    if getattr(message, "tool_call_chunks", None) or getattr(message, "tool_calls", None):
        return True
    return any(message.additional_kwargs.get(name) for name in ("tool_calls", "function_call"))


def added_up(chunks: Sequence[Any]) -> Any:
    """Return the answer that chunks add up to: what the arm, invoked, would have returned."""
    if not chunks:
        return None
    total = chunks[0]
    for chunk in chunks[1:]:
        total = _added(total, chunk)
    return message_chunk_to_message(total) if isinstance(total, BaseMessageChunk) else total


def _added(total: Any, chunk: Any) -> Any:
    addable = isinstance(total, str | BaseMessageChunk | AddableDict) and isinstance(chunk, type(total))
    if isinstance(total, list) and isinstance(chunk, list):
        addable = chunk[: len(total)] != total
    # Parsers give the whole object anew, each time with more in it.
    return total + chunk if addable else chunk
