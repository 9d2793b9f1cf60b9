"""Whether a query engine streams. LlamaIndex has no public way to ask, so this looks for its synthesizer."""

from __future__ import annotations

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.response_synthesizers import BaseSynthesizer


def streams(engine: BaseQueryEngine) -> bool:
    """Whether an engine's synthesizer streams; without one, that of an engine inside. False where there is none."""
    waiting: list[object] = [engine]
    while waiting:
        part = waiting.pop(0)
        if not isinstance(part, BaseQueryEngine):
            continue
        synthesizer = vars(part).get("_response_synthesizer")
        if isinstance(synthesizer, BaseSynthesizer):
            return bool(vars(synthesizer).get("_streaming", False))
        for value in vars(part).values():
            waiting += value if isinstance(value, list) else [value]
    return False
