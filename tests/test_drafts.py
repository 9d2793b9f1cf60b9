"""A request for a text or plan that says all that is needed, with times and own things in it, needs no passages."""

import pytest

from rgate_integrations import load_gate


@pytest.mark.parametrize(
    "request_text",
    [
        "Write my landlady that the boiler broke last night.",
        "Draft a mail to our suppliers that we are closed from 3 to 7 May.",
        "I need a toast for my uncle's retirement tomorrow",
        "Write a slogan for our flower shop.",
        "Post for tonight: our band plays at nine, free entry.",
        "Schreib meinen Gästen, dass es am Sonntag eine Stunde später losgeht.",
        "Écris un mot pour le facteur : je suis absent jusqu'à mardi.",
        "Escribe a mi vecina que mañana le devuelvo la escalera.",
        "明日の朝会に十分遅れると上司に送る文を書いて。",
    ],
)
def test_a_request_for_a_text_that_says_all_needs_no_passages(request_text):
    """Regression: of 219 such requests, 45 % retrieved, as if they asked about private matters or news."""
    decision = load_gate().decide(request_text)
    assert (decision.retrieve, decision.override) == (False, None)


@pytest.mark.parametrize(
    "request_text",
    [
        "Write my landlady what the lease says about the boiler.",
        "Draft a mail to our suppliers with the dates of our summer break.",
        "packing list for next week's hike from the scouts' letter",
        "Write a text with today's offers of our flower shop.",
        "Post about last night's concert and what the papers wrote.",
        "Schreib meinen Gästen, wann es am Sonntag laut Programm losgeht.",
        "Fasse die Sitzung von heute Morgen zusammen.",
        "Escribe a mi vecina lo que acordamos en la junta de ayer.",
        "Set an alarm for half past six.",
        "Remind me on Monday to pay the rent.",
        "Book a table for four tonight.",
        "When does our band play tonight?",
    ],
)
def test_a_request_that_does_not_say_what_is_to_be_written_retrieves(request_text):
    assert load_gate().decide(request_text).retrieve
