"""The traffic that benchmarks count on: its labels, its mix, and its figures."""

import re
from collections import Counter

import pytest

traffic = pytest.importorskip("traffic_requests")
picture = pytest.importorskip("traffic_picture")

MIX = {
    "in_domain": (120, 120),
    "follow_up": (50, 35),
    "how_to": (40, 0),
    "thanks": (30, 0),
    "task": (45, 0),
    "common": (30, 0),
    "fresh": (20, 20),
    "out_of_domain": (25, 0),
    "language": (25, 15),
    "helper": (15, 0),
}
"""Requests of each kind, and how many of them need passages: the table of the data's README."""
DAYS = {application: traffic.read_traffic(application) for application in traffic.APPLICATIONS}


def normalise(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


@pytest.mark.parametrize("application", DAYS)
def test_the_mix_is_the_one_that_is_stated_and_follow_ups_alone_have_turns_before_them(application):
    day = DAYS[application]
    kinds = Counter(each.kind for each in day)
    needing = Counter(each.kind for each in day if each.needs_passages)
    assert {kind: (kinds[kind], needing[kind]) for kind in kinds} == MIX
    assert len({each.id for each in day}) == 400
    assert len({(each.request.history, each.request.question) for each in day}) == 400
    for each in day:
        roles = [line.split(": ")[0] for line in each.request.history]
        assert roles == (["user", "assistant"] if each.kind == "follow_up" else [])
        assert all(map(normalise, each.gold_answers))


def test_an_answer_of_the_help_desk_is_in_its_handbook():
    handbook = normalise(" ".join(passage.searchable for passage in traffic.read_corpus("helpdesk")))
    for each in DAYS["helpdesk"]:
        if each.needs_passages:
            assert all(normalise(gold) in handbook for gold in each.gold_answers), each.id


def test_the_docs_show_the_saved_figures():
    days = picture.read_figures(picture.FIGURES)
    assert list(days) == list(DAYS)
    page = (picture.PICTURE.parents[1] / "benchmarks" / "traffic.md").read_text(encoding="utf-8")
    for part, day in zip(page.split("\n## ")[1:], days.values(), strict=False):
        cells = [
            [cell.strip() for cell in line[1:-1].split("|")] for line in part.splitlines() if line[:1] == "|"
        ]
        columns, rows = picture.table(day)
        assert [cells[0], *cells[2:]] == [list(columns), *rows]
    for layout, file in picture.files(picture.PICTURE):
        assert file.read_text(encoding="utf-8") == picture.draw(days, layout)


def test_figures_count_what_was_skipped_and_are_read_as_they_were_saved(tmp_path):
    requests = DAYS["library"][:4]
    needed = sum(each.needs_passages for each in requests)
    choices = [traffic.Choice(retrieve=False, seconds=0.001 * n) for n in (1, 2, 3, 40)]
    figures = picture.WayFigures.from_choices(requests, choices)
    assert figures == picture.WayFigures((4 - needed, 4 - needed), (needed, needed), 2.5)
    picture.save_figures({"library": {"gate": figures}}, tmp_path / "figures.json")
    assert picture.read_figures(tmp_path / "figures.json") == {"library": {"gate": figures}}
