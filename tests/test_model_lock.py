"""The lock of a model: one thread at a time, and who only reads does not wait for who writes."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rgate_integrations.models.local import LocalProxy
from rgate_integrations.models.model_lock import ModelLock
from rgate_integrations.prompts import ANSWER
from tests.patience import PATIENCE


class Holder:
    """A thread that asks for the lock, notes when it has it, and keeps it until it is released."""

    def __init__(self, lock, name, seen):
        self.lock, self.name, self.seen = lock, name, seen
        self.go = threading.Event()
        self.error = None
        before = lock.users
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        wait_until(lambda: lock.users > before)

    def run(self):
        try:
            with self.lock.hold():
                self.seen.append(self.name)
                assert self.go.wait(PATIENCE)
        except RuntimeError as error:
            self.error = error

    def release(self):
        self.go.set()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


def wait_until(happened):
    end = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_threads_get_it_in_the_order_in_which_they_ask():
    lock, seen = ModelLock(), []
    holders = [Holder(lock, i, seen) for i in range(6)]
    for each in holders:
        each.release()
    assert seen == list(range(6))
    assert lock.users == 0


def test_one_thread_holds_it_at_a_time():
    lock, inside, most = ModelLock(), [], []

    def work(i):
        for _ in range(50):
            with lock.hold():
                inside.append(i)
                most.append(len(inside))
                inside.remove(i)
                lock.yield_to_waiters()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8), timeout=PATIENCE))
    assert (max(most), lock.users) == (1, 0)


def test_who_yields_lets_those_go_first_who_wait_now():
    lock, seen, late = ModelLock(), [], []
    with lock.hold(), lock.hold():
        lock.yield_to_waiters()  # nobody waits
        first = Holder(lock, "first", seen)

        def ask_and_release():
            wait_until(lambda: seen)
            late.append(Holder(lock, "late", seen))
            first.go.set()

        helper = threading.Thread(target=ask_and_release)
        helper.start()
        assert lock.wanted
        lock.yield_to_waiters()
        helper.join(PATIENCE)
        assert seen == ["first"], "who asks meanwhile waits for the next token"
        late[0].go.set()
        lock.yield_to_waiters()
        assert seen == ["first", "late"]
        assert not lock.wanted


def test_at_the_end_of_the_process_nobody_begins_or_goes_on():
    lock, seen = ModelLock(), []
    owner, waits = Holder(lock, "owner", seen), Holder(lock, "waits", seen)
    closing = threading.Thread(target=lock.close)
    closing.start()
    waits.thread.join(PATIENCE)
    assert "process is ending" in str(waits.error)
    assert closing.is_alive(), "the thread that holds it is waited for"
    owner.release()
    closing.join(PATIENCE)
    with pytest.raises(RuntimeError, match="process is ending"), lock.hold():
        pass
    assert seen == ["owner"]


def test_a_text_that_is_being_written_ends_at_its_next_token():
    lock = ModelLock()
    with lock.hold():
        lock.close()  # in this thread it does not wait
        with pytest.raises(RuntimeError, match="process is ending"):
            lock.yield_to_waiters()
    assert lock.users == 0


def test_after_a_fork_it_is_free():
    lock = ModelLock()
    with lock.hold():
        lock.after_fork()
        assert lock.users == 0
    with lock.hold():
        assert lock.users == 1


@pytest.mark.model
def test_what_is_read_between_two_tokens_changes_neither_the_text_nor_what_is_read(tiny):
    proxy = LocalProxy(tiny, dtype="float32").load()
    questions = [{"question": q} for q in ("Who wrote Hamlet?", "Where is Oulu?", "Why?")]
    layers = [(1, "all", "mean"), (0, "draft", "mean")]
    alone = proxy.generate(ANSWER, questions, tokens=12)
    read_alone = proxy.hidden(ANSWER, questions[:2], None, layers)
    passes, found, done = [], [], threading.Event()

    def note(layer, arguments):
        passes.append(threading.get_ident())

    def read():
        while not done.is_set():
            found.append(proxy.hidden(ANSWER, questions[:2], None, layers))

    handle = proxy.runner.model.model.layers[0].register_forward_pre_hook(note)
    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: found)
    beside = proxy.generate(ANSWER, questions, tokens=12)
    done.set()
    reader.join(PATIENCE)
    handle.remove()
    own = [i for i, thread in enumerate(passes) if thread == threading.get_ident()]
    assert own[-1] - own[0] > len(own) - 1, "some were read between two tokens"
    assert beside == alone
    for each in found:
        np.testing.assert_array_equal([e.states for e in each], [e.states for e in read_alone])


class Switched:
    """A model whose adapters can be looked at."""

    on = name = None

    def named_parameters(self):
        return []

    def set_adapter(self, name):
        self.name = name

    def enable_adapters(self):
        self.on = self.name

    def disable_adapters(self):
        self.on = None


def test_who_is_let_in_finds_the_base_model_and_the_adapter_is_on_again_afterwards():
    runners = pytest.importorskip("rgate_integrations.models.model_runner", reason="it needs torch")
    lock, model, seen = ModelLock(), Switched(), []
    runner = runners.ModelRunner(model, None, "fake", 16, lock)

    def read():
        with lock.hold():
            seen.append(model.on)
            with runner.adapted("its own"):
                seen.append(model.on)

    with lock.hold(), runner.adapted("mine"):
        other = threading.Thread(target=read)
        other.start()
        wait_until(lambda: lock.wanted)
        runner.pause()
        other.join(PATIENCE)
        assert seen == [None, "its own"]
        assert model.on == "mine"
    assert model.on is None
