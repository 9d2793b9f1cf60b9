"""Requests that name a source of the asker's own: the LLM may know the answer, but it has not read the source."""

import pytest

from rgate_integrations import load_gate

NAMED = [
    "look in my biology notes and tell me what mitosis is",
    "Please check the attached PDF: when did the Berlin Wall fall?",
    "How do you prune roses? There's a sheet on it among the garden club papers I've uploaded.",
    "Laut der angehängten PDF: Wann wurde die Bundesrepublik gegründet?",
    "Consulta el glosario interno y dime qué significa «stakeholder».",
    "附件里写的辛亥革命是哪一年?",
    "첨부한 PDF에는 임진왜란이 몇 년에 일어났다고 되어 있어?",
]


@pytest.mark.parametrize("request_text", NAMED)
def test_a_source_of_the_askers_own_retrieves(request_text):
    """Regression: the question alone is easy, so that these were skipped, at P(known) up to 0.97."""
    decision = load_gate().decide(request_text)
    assert decision.retrieve
    assert decision.override.reason == "Names a source of the asker's own, which the LLM has not read."
    assert decision.reason.startswith(decision.override.reason)


@pytest.mark.parametrize(
    "request_text",
    [
        "what is mitosis",
        "In your own words, what is mitosis?",
        "When did the Berlin Wall fall? Please keep it short.",
        "Wann wurde die Bundesrepublik gegründet? Erklär es wie für ein Kind.",
    ],
)
def test_without_such_a_source_the_question_decides(request_text):
    decision = load_gate().decide(request_text)
    assert (decision.retrieve, decision.override) == (False, None)
