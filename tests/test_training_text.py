"""The training text: what is held out is held out, both labels stand in every frame, and nothing is left open."""

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests.test_traffic import DAYS, normalise

training_text = pytest.importorskip("training_text")
text_rows = pytest.importorskip("text_rows")
text_frames = pytest.importorskip("text_frames")

rows = cache(training_text.make_training_rows)
LANGUAGES = text_rows.list_languages()
WHOLE = [each for each in LANGUAGES if "latn" not in each and each != "mixed"]


def test_the_same_seed_gives_the_same_rows_and_another_one_others():
    assert training_text.make_training_rows() == rows()
    other = training_text.make_training_rows(seed=1)
    assert [row.text for row in other] != [row.text for row in rows()]
    assert {row.frame for row in other} >= {row.frame for row in rows() if row.source in ("work", "helpers")}


def test_no_language_and_no_text_is_in_training_and_held_out():
    train = [row for row in rows() if row.part == "train"]
    held_out = {row.language for row in rows() if row.group.startswith("language:") and row.part == "groups"}
    assert held_out == set(text_rows.HELD_OUT_LANGUAGES)
    assert len(held_out) >= 4
    assert not held_out & {row.language for row in train}
    assert len(set(WHOLE) - held_out) >= 15
    texts = {(row.text, row.history) for row in train}
    assert len(texts) == len(train)
    assert not texts & {(row.text, row.history) for row in rows() if row.part != "train"}


def test_a_frame_and_a_held_out_group_are_of_one_part():
    frames, groups = defaultdict(set), defaultdict(set)
    for row in rows():
        groups[row.group].add(row.part)
        if row.source != "paragraphs":
            frames[row.frame].add(row.part)
    assert {frame for frame, parts in frames.items() if len(parts) > 1} == set()
    both = {group for group, parts in groups.items() if {"groups", "train"} <= parts}
    assert both <= {"wrapped:context", "wrapped:plain", "wrapped:transcript"}
    for kind in ("helper:emoji", "helper:moderation", "task:media", "topic:choir", "field:machines"):
        assert groups[kind] == {"groups"}


def test_no_request_of_a_day_trains_the_heads(monkeypatch):
    kind_rows = pytest.importorskip("kind_rows")
    for recorded in ("read_adarague", "read_practical", "read_questions", "read_segment_rows"):
        monkeypatch.setattr(kind_rows, recorded, lambda data: [])
    clean, segments = kind_rows.read_labelled_requests(Path())
    trained = {normalise(label.question) for label in clean} | {normalise(row.text) for row in segments}
    assert len(trained) > 40_000
    assert [
        each.id for day in DAYS.values() for each in day if normalise(each.request.question) in trained
    ] == []


SLOT = re.compile(r"\{(ask|chat|text|question|topic|event|facts|pair|city|person|drug)\}")
ANY_SLOT = re.compile(r"\{[a-z_]+\}|\([^()]*\|")


def test_a_row_has_no_open_slot_and_its_pieces_are_in_the_text_in_order_one_with_its_kind():
    for row in rows():
        assert row.text.strip(), row.frame
        assert not SLOT.search(" ".join((row.text, *row.history))), row.frame
        if row.source not in ("helpers", "wrapped"):
            assert not any(map(ANY_SLOT.search, (row.text, *row.history))), row.frame
        start = 0
        for piece, kind in row.pieces:
            assert kind in text_rows.KINDS
            start = row.text.index(piece, start) + len(piece)
        assert row.kind in {kind for _, kind in row.pieces}, row.frame


def test_a_turn_that_inherits_has_the_kind_of_what_was_asked():
    kinds = {row.kind for row in rows() if row.group == "turns:retry-after-failure"}
    offers = {row.kind for row in rows() if row.group.startswith("turns:offer")}
    assert (kinds, offers) == (set(text_rows.ASKED), {*text_rows.NEEDY, "task"})
    for row in rows():
        if row.source == "turns":
            assert row.history
            assert all(line.startswith(("user: ", "assistant: ")) for line in row.history)


def test_what_is_pasted_is_shared_out_between_the_parts():
    assert text_frames.select_part("abcdefgh", "train") == list("abcefg")
    assert text_frames.select_part("abcdefgh", "frames") == ["d", "h"]
    again = text_rows.read_slots(text_rows.read_sections(text_rows.FOLDER / "turns.txt"))["again"]
    retries = {
        row.text for row in rows() if row.part == "train" and row.group.startswith("turns:retry-after-")
    }
    assert not retries & set(again[3::4])


def test_a_context_with_the_answer_needs_nothing_and_an_empty_one_needs_passages():
    facts = [passage for part in ("train", "groups") for _, passage, _ in text_frames.read_facts(part)]
    assert len(facts) == len(set(facts)) >= 20
    for row in rows():
        if row.group == "wrapped:context":
            assert row.needs_passages == (not any(fact in row.text for fact in facts))
