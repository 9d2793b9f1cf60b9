"""A day of three applications: what each way to decide avoids, what it misses, and what it adds.

    python benchmarks/traffic.py                                  ways that need no LLM (minutes)
    python benchmarks/traffic.py --save FILE                      also keeps the figures, for `traffic_picture`
    python benchmarks/traffic.py --llm http://127.0.0.1:8080 --model NAME [--limit 10] [--no-answers]

``traffic/`` has 400 requests to each application; its README says how they are made and labelled. The docs
assistant searches the docstrings of the installed package ``networkx``, the help desk ``traffic/handbook.jsonl``, and
the general assistant the corpus ``encyclopedia-leads`` (`rgate download encyclopedia-leads`).

*Avoided* is the share of requests skipped of those that need no passages, *missed* that of those that need them;
intervals are Wilson's, of 95 %. What a way adds is the median CPU time of a decision, one request at a time. With
``--llm``, ways that ask the LLM of an OpenAI-compatible server are measured too (time on the clock). It also answers
every request alone and with passages, unless ``--no-answers`` is given, and all ways are measured by right answers,
tokens and seconds; see `traffic_llm`. ``OPENAI_API_KEY`` is sent if it is set.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from base import argument_parser, print_table
from templates import keep_words, make_requests
from traffic_llm import Arms, Chat, answer_all, llm_ways, show_answers, similarity_way
from traffic_picture import TRIVIAL, Day, WayFigures, save_figures, table
from traffic_requests import (
    APPLICATIONS,
    Choice,
    Choices,
    Decide,
    K,
    LabelledRequest,
    pick,
    read_corpus,
    read_traffic,
)
from training_text import make_training_rows

from rgate_integrations import CorpusProfile, LookFirst, load_gate
from rgate_integrations.answering.look_first import decide_with_passages
from rgate_integrations.decision import Decision
from rgate_integrations.gates.passage_utility import FoundPassage
from rgate_integrations.index import BM25Index, Passage

STRONG = "gpt-4o"
"""The LLM whose name the named gates get."""


def local_ways(passages: Sequence[Passage]) -> dict[str, Decide]:
    """Return the ways to decide that need no LLM, by name."""
    profile = CorpusProfile.from_texts(passage.searchable for passage in passages)
    index = BM25Index(passages)
    gates = {
        "gate": load_gate(on_error="raise"),
        f"gate, {STRONG}": load_gate(llm_name=STRONG, on_error="raise"),
        "gate, corpus": load_gate(corpus=profile, on_error="raise"),
        f"gate, corpus, {STRONG}": load_gate(corpus=profile, llm_name=STRONG, on_error="raise"),
    }
    ways: dict[str, Decide] = {
        "always": lambda _: Choice(retrieve=True),
        "never": lambda _: Choice(retrieve=False),
    }
    for name, gate in gates.items():
        ways[name] = timed(lambda labelled, gate=gate: gate.decide(labelled.request))
    for name in ("gate", f"gate, {STRONG}"):
        look = timed(lambda labelled, gate=gates[name]: look_first(gate, index, labelled))
        ways[name.replace("gate", "look first")] = look
    return ways


def look_first(gate: Any, index: BM25Index, labelled: LabelledRequest) -> Decision:
    """Decide by the gate and by the passages of a search."""
    decision = gate.decide(labelled.request)
    hits = index.search([labelled.query], K)[0]
    passages = [FoundPassage(hit.passage.text, hit.passage.title) for hit in hits]
    return decide_with_passages(decision, passages, LookFirst())


def timed(decide: Callable[[LabelledRequest], Decision]) -> Decide:
    """Return a way that counts the CPU time of its decisions: other work on the machine does not change it."""

    def choose(labelled: LabelledRequest) -> Choice:
        start = time.process_time()
        decision = decide(labelled)
        return Choice(decision.retrieve, time.process_time() - start)

    return choose


def choose_all(ways: dict[str, Decide], requests: Sequence[LabelledRequest]) -> Choices:
    """Decide all requests in all ways."""
    chosen = {}
    for name, decide in ways.items():
        decide(requests[0])  # loads the models
        chosen[name] = [decide(labelled) for labelled in requests]
    return chosen


def show(title: str, requests: Sequence[LabelledRequest], chosen: Choices) -> Day:
    """Print what each way avoids, misses and adds, and what it skips of each kind; returns the figures."""
    day = {way: WayFigures.from_choices(requests, choices) for way, choices in chosen.items()}
    print_table(*table(day), title)
    show_kinds(title, requests, chosen)
    return day


def show_new(title: str, requests: Sequence[LabelledRequest], chosen: Choices) -> None:
    """Print the same figures without the requests that also come from templates of the training text."""
    made = [request.question for request in make_requests()] + [row.text for row in make_training_rows()]
    made_words = {keep_words(text) for text in made}
    new = [keep_words(labelled.request.question) not in made_words for labelled in requests]
    kept = list(compress(requests, new))
    day = {
        way: WayFigures.from_choices(kept, list(compress(choices, new))) for way, choices in chosen.items()
    }
    print_table(*table(day), f"{title}: without the {len(requests) - len(kept)} that templates also make")


def show_kinds(title: str, requests: Sequence[LabelledRequest], chosen: Choices) -> None:
    """Print the shares that each way skips, by kind: first of what needs no passages, then of what needs them."""
    for needs_passages in (False, True):
        groups: dict[str, list[int]] = defaultdict(list)
        for number, labelled in enumerate(requests):
            if labelled.needs_passages == needs_passages:
                groups[labelled.kind].append(number)
        rows = []
        for way, choices in chosen.items():
            if way in TRIVIAL:
                continue
            skipped = [sum(not choices[number].retrieve for number in numbers) for numbers in groups.values()]
            counts = zip(skipped, groups.values(), strict=True)
            rows.append([way, *(f"{100 * count / len(numbers):.0f}" for count, numbers in counts)])
        kinds = [f"{kind.replace('_', ' ')} ({len(numbers)})" for kind, numbers in groups.items()]
        what = "missed of what needs passages" if needs_passages else "avoided of what needs none"
        print_table(("way", *kinds), rows, f"{title}: {what}, %, by kind (n)")


def main() -> None:
    """Print the tables; with an LLM also those of answers."""
    parser = argument_parser(__doc__)
    parser.add_argument("--applications", nargs="*", choices=tuple(APPLICATIONS), default=tuple(APPLICATIONS))
    parser.add_argument("--limit", type=int, help="how many requests an application")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the figures as JSON")
    parser.add_argument("--llm", metavar="URL", help="an OpenAI-compatible server, without /v1")
    parser.add_argument("--model", default="", help="name of the LLM on the server")
    parser.add_argument("--no-answers", action="store_true", help="the LLM decides, and answers nothing")
    options = parser.parse_args()
    if options.llm and not options.model:
        parser.error("--llm needs --model")
    days: list[tuple[Sequence[LabelledRequest], Choices, Arms]] = []
    figures: dict[str, Day] = {}
    for application in options.applications:
        title, requests = APPLICATIONS[application], pick(read_traffic(application), options.limit)
        passages = read_corpus(application)
        ways = {**local_ways(passages), **similarity_way(application)}
        if options.llm:
            chat = Chat(url=options.llm, model=options.model)
            ways |= llm_ways(chat, title)
        chosen = choose_all(ways, requests)
        figures[application] = show(title, requests, chosen)
        show_new(title, requests, chosen)
        arms: Arms = ([], [])
        if options.llm and not options.no_answers:
            arms = answer_all(chat, passages, requests)
            show_answers(title, requests, chosen, arms)
        days.append((requests, chosen, arms))
    if len(days) > 1:
        title = "all applications"
        requests = [labelled for requests, _, _ in days for labelled in requests]
        chosen = {way: [choice for _, chosen, _ in days for choice in chosen[way]] for way in days[0][1]}
        show(title, requests, chosen)
        alone, informed = ([answer for *_, arms in days for answer in arms[arm]] for arm in (0, 1))
        if alone:
            show_answers(title, requests, chosen, (alone, informed))
    if options.save:
        save_figures(figures, options.save)


if __name__ == "__main__":
    main()
