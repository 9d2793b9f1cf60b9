"""The demo's own parts, with an embedder and an LLM that need no model; and the whole of it on the real gate."""

import itertools

import demo
import numpy as np
import pytest
from demo_search import RerankedBM25
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from pydantic import Field

from rgate_integrations.index import Passage

PASSAGES = [
    Passage("1", "A river in Siberia, a river, a river.", title="Ob"),
    Passage("2", "The river of Yakutsk.", title="Lena"),
    Passage("3", "Bread is baked.", title="Bread"),
]


class ByTitle:
    """Embeds what is about the Lena in one direction, and all else in another."""

    name = identity = "by title"

    def embed(self, texts):
        return np.array([[1, 0] if "Lena" in text else [0.6, 0.8] for text in texts], np.float32)

    embed_queries = embed


@pytest.mark.model
def test_the_demo_shows_each_decision_before_its_answer_and_counts(smollm2, tmp_path, capsys):
    class Answers(GenericFakeChatModel):
        calls: list[dict[str, int]] = Field(default_factory=list)

        def _generate(self, *arguments, **options):
            self.calls.append({"prompt": 10, "written": 2})
            return super()._generate(*arguments, **options)

    llm = Answers(messages=itertools.repeat(AIMessage("It is Paris.")))
    search = RerankedBM25(PASSAGES, ByTitle(), tmp_path / "kept")
    (hits,) = search.search(["Is the Lena a river?"], k=5)
    assert [hit.passage.title for hit in hits] == ["Lena", "Ob"], "found by words, ordered by meaning"
    demo.compare(llm, search)
    shown = capsys.readouterr().out
    at = [shown.index(text) for text in (demo.QUESTIONS[0], "skip retrieval: ", "  It is Paris.")]
    assert at == sorted(at)
    assert "1 of 6" in shown  # right, both ways
    assert "always retrieving       6 of 6" in shown
    assert "60 tokens" in shown  # six calls of the LLM
