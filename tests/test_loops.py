"""The papers' answer loops, with a scripted LLM and a scripted search."""

from rgate_integrations.evaluation.loops import LoopAnswer, iter_retgen, self_ask


class Script:
    """Says one line after another and remembers what it was asked."""

    def __init__(self, *lines):
        self.lines = list(lines)
        self.asked = []

    def __call__(self, prompt):
        self.asked.append(prompt)
        return self.lines.pop(0)


AGES = {"How old was Ada?": ["Ada was 36."], "How old was Bea?": ["Bea was 40.", "Bea had a dog."]}


def test_self_ask_puts_passages_in_place_of_what_the_llm_supposes():
    llm = Script(
        " Yes.\nFollow up: How old was Ada?\nIntermediate answer: Ada was 99.",
        "Follow up: How old was Bea?\nIntermediate answer: 1",
        "So the final answer is: Bea.\nQuestion: another one",
    )
    found = self_ask("Who lived longer?", llm, AGES.__getitem__, example="")
    assert found == LoopAnswer("Bea.", ("How old was Ada?", "How old was Bea?"), 3)
    assert llm.asked[-1] == (
        "\nQuestion: Who lived longer?\nAre follow up questions needed here: Yes."
        "\nFollow up: How old was Ada?\nIntermediate answer: Ada was 36."
        "\nFollow up: How old was Bea?\nIntermediate answer: Bea was 40.\n"
    )


def test_self_ask_without_follow_ups_and_with_too_many():
    known = Script(" No.\nSo the final answer is: Paris.\nFollow up: And now?")
    assert self_ask("Capital of France?", known, AGES.__getitem__) == LoopAnswer("Paris.", (), 1)
    vague = Script(" Perhaps.", " Rome\nor not")
    assert self_ask("?", vague, AGES.__getitem__) == LoopAnswer("Rome", (), 2)
    assert vague.asked[-1].endswith(" Perhaps.\nSo the final answer is:")
    endless = Script(*["Follow up: How old was Ada?"] * 2, " 36")
    found = self_ask("?", endless, lambda query: [], hops=1)
    assert found == LoopAnswer("36", ("How old was Ada?",), 3)
    assert "Nothing was found." in endless.asked[1]


def test_iter_retgen_searches_with_what_it_has_answered():
    llm = Script(" It is Bea. ", "Bea, of Oulu.", "Oulu")
    searched = []

    def search(query):
        searched.append(query)
        return [f"passage {number} of search {len(searched)}" for number in range(3)]

    found = iter_retgen("Where from?", llm, search, rounds=3, passages=2)
    assert found == LoopAnswer(
        "Oulu", ("Where from?", "Where from? It is Bea.", "Where from? Bea, of Oulu."), 3
    )
    assert searched == list(found.queries)
    assert llm.asked[1] == "passage 0 of search 2\n\npassage 1 of search 2\n\nQuestion: Where from?\nAnswer:"
