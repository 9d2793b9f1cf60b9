"""Patterns on foreign text: no text makes one take more than time in proportion to its length."""

import pytest

from rgate_integrations import Draft, Request
from rgate_integrations.answering.claims import (
    parse_claims,
    sentence_claims,
    split_sentences,
    subject,
    without_tags,
)
from rgate_integrations.engine.follow_ups import is_follow_up
from rgate_integrations.engine.scoring import read_request
from rgate_integrations.gates.llm_names import parse_name
from rgate_integrations.gates.passage_utility import tokenize
from rgate_integrations.prompts import strip_control_tokens
from rgate_integrations.runtime.segments import segments

SIZE = 200_000
WORST = {  # 200 kB each; time of the square of that would be an hour
    "addresses": "://" * (SIZE // 3),
    "spaces": "A" + " " * SIZE + "b",
    "small words": "A" + " of" * (SIZE // 3) + " b",
    "names": " ".join(f"Aa{number}," for number in range(SIZE // 9)),
    "abbreviations": "Dr. A. " * (SIZE // 7),
    "marks": "<" * (SIZE // 8) + "Query " * (SIZE // 7),
    "open tags": "<Claim(" * (SIZE // 7),
    "brackets": "<|" * (SIZE // 2),
    "quotes": '."' * (SIZE // 2),
    "line feeds": "\n" * SIZE,
    "tags": "<Claim> <Query> " * (SIZE // 16),
    "unclosed tags": "<Claim(a <Query(" * (SIZE // 16),
    "one tag": "<Claim>" + " a" * (SIZE // 2),
    "pronouns": "it is " * (SIZE // 6),
    "words": "aa, " * (SIZE // 4) + "it?",
}


def squeezed(text):
    return "".join(text.split())


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in WORST.items()])
def test_the_worst_text_is_read(text):
    """Without an end here the test fails by the suite's time limit; nothing is said about seconds."""
    for claim in parse_claims(text):
        assert squeezed(claim.text) in squeezed(text)
    assert parse_claims(without_tags(text)) == []
    assert len(strip_control_tokens(text)) <= len(text)
    assert squeezed("".join(split_sentences(text))) == squeezed("".join(segments(text))) == squeezed(text)
    assert subject(text)[:1] in text
    assert len(sentence_claims("Who is Bo?", Draft(text=text))) <= len(split_sentences(text))
    assert all(word in text.lower() for word in list(tokenize(text))[:3])
    if text.strip():
        read = read_request(Request(f"a{text}b"))
        assert (read.truncated, len(read.question) <= 2_500) == (True, True)


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in WORST.items()])
def test_patterns_that_read_no_more_than_a_few_hundred_characters_read_those_of_the_worst_text(text):
    """Texts that are longer are not looked at, so a megabyte would say nothing about the patterns."""
    for part in (text[:400], text[-400:]):
        assert is_follow_up(part) == is_follow_up(part.strip())
        assert parse_name(part).words == parse_name(part.upper()).words
