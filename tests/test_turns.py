"""Turns at a model: one thread at a time, and who only reads does not wait for who writes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rgate_integrations.models.local import LocalProxy
from rgate_integrations.models.model_lock import Turns
from rgate_integrations.models.model_runner import ModelRunner
from rgate_integrations.prompts import ANSWER
from tests.patience import PATIENCE


class Asking:
    """A thread that asks for a turn, notes when it has it, and keeps it until it is let go."""

    def __init__(self, turns, name, seen, *, long=False):
        self.turns, self.name, self.seen, self.long = turns, name, seen, long
        self.has, self.go = threading.Event(), threading.Event()
        self.error = None
        before = len(turns._waiting)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        while not self.has.is_set() and len(turns._waiting) == before:
            self.has.wait(0.001)

    def run(self):
        try:
            with self.turns.turn(long=self.long):
                self.seen.append(self.name)
                self.has.set()
                assert self.go.wait(PATIENCE)
        except RuntimeError as error:
            self.error = error

    def end(self):
        self.go.set()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


def test_turns_come_in_the_order_in_which_they_are_asked_for():
    turns, seen = Turns(), []
    threads = [Asking(turns, i, seen, long=i % 2 == 0) for i in range(6)]
    assert seen == [0]
    for each in threads:
        each.end()
    assert seen == list(range(6))
    assert not turns.taken


def test_one_thread_has_the_turn_at_a_time():
    turns, inside, most = Turns(), [], []

    def work(i):
        for _ in range(50):
            with turns.turn(long=i % 2 == 0):
                inside.append(i)
                most.append(len(inside))
                inside.remove(i)
                turns.give_way()
                inside.append(i)
                most.append(len(inside))
                inside.remove(i)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, i) for i in range(8)]:
            done.result(PATIENCE)
    assert max(most) == 1
    assert not turns.taken


def test_a_long_turn_lets_short_ones_in_and_no_long_one():
    turns, seen = Turns(), []
    with turns.turn(long=True), turns.turn():
        turns.give_way()  # nobody waits
        others = [
            Asking(turns, "long", seen, long=True),
            Asking(turns, "short 1", seen),
            Asking(turns, "short 2", seen),
        ]
        for each in others:
            each.go.set()
        assert turns.wanted
        turns.give_way()
        assert seen == ["short 1", "short 2"]
        assert not turns.wanted
        turns.give_way()
        assert seen == ["short 1", "short 2"]
    for each in others:
        each.end()
    assert seen == ["short 1", "short 2", "long"]


def test_who_asks_while_others_are_let_in_waits_for_the_next_token():
    turns, seen = Turns(), []
    with turns.turn(long=True):
        first = Asking(turns, "first", seen)
        late = []

        def ask_and_leave():
            assert first.has.wait(PATIENCE)
            late.append(Asking(turns, "late", seen))
            first.go.set()

        helper = threading.Thread(target=ask_and_leave)
        helper.start()
        turns.give_way()
        helper.join(PATIENCE)
        assert seen == ["first"], "the text goes on after each of its tokens"
        late[0].go.set()
        turns.give_way()
        assert seen == ["first", "late"]


def test_a_short_turn_lets_nobody_in():
    turns, seen = Turns(), []
    with turns.turn():
        other = Asking(turns, "other", seen)
        assert not turns.wanted
        turns.give_way()
        assert seen == []
    other.end()


def test_at_the_end_of_the_process_nobody_begins_or_goes_on():
    turns, seen = Turns(), []
    owner = Asking(turns, "owner", seen, long=True)
    waits = Asking(turns, "waits", seen)
    closing = threading.Thread(target=turns.close)
    closing.start()
    waits.thread.join(PATIENCE)
    assert "process is ending" in str(waits.error)
    assert closing.is_alive(), "the thread that has the turn is waited for"
    owner.end()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    with pytest.raises(RuntimeError, match="process is ending"), turns.turn():
        pass
    assert seen == ["owner"]


def test_a_text_that_is_being_written_ends_at_its_next_token():
    turns = Turns()
    with turns.turn(long=True):
        turns.close()  # in this thread it does not wait
        with pytest.raises(RuntimeError, match="process is ending"):
            turns.give_way()
    assert not turns.taken


def test_after_a_fork_it_is_free():
    turns, seen = Turns(), []
    owner, waits = Asking(turns, 1, seen), Asking(turns, 2, seen)
    assert turns.taken
    waits.go.set()
    owner.end()
    waits.end()
    with turns.turn(long=True):
        turns.after_fork()
        assert not turns.taken


@pytest.mark.model
@pytest.mark.parametrize("tokens", [1, 12])
def test_what_is_read_between_two_tokens_changes_neither_the_text_nor_what_is_read(tiny, tokens, monkeypatch):
    proxy = LocalProxy(tiny, dtype="float32").load()
    questions = [{"question": q} for q in ("Who wrote Hamlet?", "Where is Oulu?", "Why?")]
    layers = [(1, "all", "mean"), (0, "draft", "mean")]
    alone = proxy.generate_hidden(ANSWER, questions, tokens=tokens, layers=layers)
    read_alone = proxy.hidden(ANSWER, questions[:2], None, layers)
    found = []
    pause = proxy.runner.pause

    def disturbed():
        reader = threading.Thread(
            target=lambda: found.append(proxy.hidden(ANSWER, questions[:2], None, layers))
        )
        reader.start()
        for _ in range(PATIENCE * 1000):
            if proxy._turns.wanted:
                break
            reader.join(0.001)
        before = len(found)
        pause()
        reader.join(PATIENCE)
        assert len(found) == before + 1

    def once_a_token():
        if threading.current_thread() is threading.main_thread():
            disturbed()
        else:
            pause()

    monkeypatch.setattr(proxy.runner, "pause", once_a_token)
    beside = proxy.generate_hidden(ANSWER, questions, tokens=tokens, layers=layers)
    assert len(found) >= tokens
    for (draft, states), (same, same_states) in zip(alone, beside, strict=True):
        assert draft == same
        np.testing.assert_array_equal(states.states, same_states.states)
    for each in found:
        for states, expected in zip(each, read_alone, strict=True):
            np.testing.assert_array_equal(states.states, expected.states)


class Switched:
    """A model whose adapters can be looked at."""

    def __init__(self):
        self.on = None
        self.name = None

    def parameters(self):
        return []

    def set_adapter(self, name):
        self.name = name

    def enable_adapters(self):
        self.on = self.name

    def disable_adapters(self):
        self.on = None


def test_who_is_let_in_finds_the_base_model_and_the_adapter_is_on_again_afterwards(monkeypatch):
    monkeypatch.setattr("rgate_integrations.models.model_runner.fingerprint", lambda model: "")
    turns, model, seen = Turns(), Switched(), []
    runner = ModelRunner(model, None, "fake", 16, 1_000, turns=turns)

    def read():
        with turns.turn(), runner.adapted("its own"):
            seen.append(model.on)

    with turns.turn(long=True), runner.adapted("mine"):
        runner.pause()
        other = threading.Thread(target=read)
        other.start()
        while not turns.wanted:
            other.join(0.001)
        monkeypatch.setattr(turns, "give_way", _noting(turns.give_way, model, seen))
        runner.pause()
        other.join(PATIENCE)
        assert seen == [None, "its own"]
        assert model.on == "mine"
    assert model.on is None


def _noting(give_way, model, seen):
    def noting():
        seen.append(model.on)
        give_way()

    return noting
