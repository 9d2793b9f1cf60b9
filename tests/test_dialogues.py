"""The composed dialogues that the heads learn follow-ups from: both labels in every frame, no frame in both parts."""

import re

import pytest

dialogues = pytest.importorskip("dialogues")

TRAIN, TEST = dialogues.make_dialogues(part="train"), dialogues.make_dialogues(part="test")


def test_frames_are_of_one_part_and_have_both_labels():
    assert not {each.frame for each in TRAIN} & {each.frame for each in TEST}
    for name in {each.frame for each in TRAIN + TEST}:
        needs = [each.needs_passages for each in TRAIN + TEST if each.frame == name]
        assert 0.4 < sum(needs) / len(needs) < 0.6, name


OPEN = re.compile(r"\{\w+\}|@(task|common|obscure|fresh|private|any)\b|\([^()]*\|")


def test_a_dialogue_is_one_to_five_turns_and_a_message_with_nothing_left_open():
    assert {len(each.turns) for each in TRAIN} == {1, 2, 3, 4, 5}
    for each in TRAIN + TEST:
        assert {role for role, _ in each.turns} <= {"user", "assistant"}
        texts = [each.message, *(text for _, text in each.turns)]
        assert all(text.strip() and not OPEN.search(text) for text in texts)


def test_a_follow_up_has_the_kind_of_what_was_before_and_a_question_of_its_own_has_not():
    assert {each.kind for each in TRAIN if each.frame == "and-country"} == {
        "common",
        "fresh",
        "private",
        "obscure",
    }
    frames = {each.name: each for each in dialogues.read_frames()}
    thanks = [{before for before, _, _ in frames["thanks"].choices(kind)} for kind in ("task", "private")]
    assert thanks == [{"task", "private", "fresh"}] * 2
