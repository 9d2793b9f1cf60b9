"""Patterns on foreign text: no text makes one take more than time in proportion to its length."""

import pytest

from rgate_integrations.answering.claims import parse_claims, split_sentences, subject, without_tags
from rgate_integrations.engine.follow_ups import is_follow_up
from rgate_integrations.gates.ability import resolve_ability
from rgate_integrations.prompts import without_control_tokens

MEGABYTE = 1_000_000
WORST = {  # a megabyte each; time of the square of that would be hours
    "addresses": "://" * (MEGABYTE // 3),
    "spaces": "A" + " " * MEGABYTE + "b",
    "small words": "A" + " of" * (MEGABYTE // 3) + " b",
    "names": " ".join(f"Aa{number}," for number in range(MEGABYTE // 9)),
    "abbreviations": "Dr. A. " * (MEGABYTE // 7),
    "marks": "<" * (MEGABYTE // 8) + "Query " * (MEGABYTE // 7),
    "open tags": "<Claim(" * (MEGABYTE // 7),
    "brackets": "<|" * (MEGABYTE // 2),
    "quotes": '."' * (MEGABYTE // 2),
    "line feeds": "\n" * MEGABYTE,
}


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in WORST.items()])
def test_a_megabyte_of_the_worst_text_is_read(text):
    """Without an end here the test fails by the suite's time limit; nothing is said about seconds."""
    assert parse_claims(without_tags(text)) == []
    assert len(without_control_tokens(text)) <= len(text)
    assert "".join(" ".join(split_sentences(text)).split()) == "".join(text.split())
    assert subject(text)[:1] in text
    is_follow_up(text)
    resolve_ability(text)
