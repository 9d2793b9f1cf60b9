"""Whether a query engine streams. LlamaIndex has no public way to ask, so this looks for its synthesizer."""

from __future__ import annotations

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.response_synthesizers import BaseSynthesizer


def streams(engine: BaseQueryEngine) -> bool:
    """Whether an engine's synthesizer streams, or that of an engine inside; False where there is none."""
    seen: set[int] = set()
    waiting: list[object] = [engine]
    while waiting:
        part = waiting.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, BaseSynthesizer):
            return bool(vars(part).get("_streaming", False))
        if isinstance(part, BaseQueryEngine):
            for value in vars(part).values():
                waiting += value if isinstance(value, list | tuple) else [value]
    return False
