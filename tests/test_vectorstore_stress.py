"""The store under load and under kill -9: nothing is lost, nothing is invented, and what is saved is whole."""

import os
import pickle
import random
import subprocess
import sys
import threading

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from rgate_integrations.errors import WriteError
from rgate_integrations.langchain import FaissVectorStore
from tests.patience import PATIENCE

METRICS = ["COSINE", "MAX_INNER_PRODUCT", "EUCLIDEAN_DISTANCE"]
THREADS = 100


class Digits(Embeddings):
    """How often each digit is in a text."""

    def embed_documents(self, texts):
        return [[float(text.count(digit)) + 0.01 for digit in "0123456789"] for text in texts]

    def embed_query(self, text):
        return self.embed_documents([text])[0]


class Worker:
    """A thread that writes under ids of its own, and knows in a plain dict what must be there.

    Ids of its own: of two threads that write one id, nobody could say which came last. What the others' writes do to
    the searches of this one is checked in every search.
    """

    def __init__(self, store, folder, number, seed):
        self.store, self.folder, self.number = store, folder, number
        self.random = random.Random(seed * 1_000 + number)
        self.expected = {}
        self.counter = 0

    def step(self):
        """Do one thing, and check what comes back."""
        kinds = [self.add, self.upsert, self.delete, self.search, self.get, self.save]
        self.random.choices(kinds, weights=[4, 4, 3, 8, 3, 0.2])[0]()

    def text(self):
        return "".join(self.random.choices("0123456789", k=8))

    def put(self, names):
        documents = []
        for name in names:
            self.counter += 1
            text = self.text()
            metadata = {"owner": self.number, "write": self.counter, "text": text}
            documents.append(Document(page_content=text, metadata=metadata, id=name))
        assert self.store.add_documents(documents) == names
        self.expected |= {document.id: document for document in documents}

    def add(self):
        self.put([f"{self.number}-{self.counter}-{i}" for i in range(self.random.randint(1, 3))])

    def upsert(self):
        if self.expected:
            self.put(self.random.sample(sorted(self.expected), min(2, len(self.expected))))

    def delete(self):
        if self.expected:
            names = self.random.sample(sorted(self.expected), min(2, len(self.expected)))
            assert self.store.delete([*names, "not there"]) is True
            for name in names:
                del self.expected[name]

    def search(self):
        found = self.store.similarity_search_with_score(self.text(), k=5)
        self.check([document for document, _ in found])
        scores = [score for _, score in found]
        assert scores == sorted(scores, reverse=self.store.distance_strategy != "EUCLIDEAN_DISTANCE")
        self.check(self.store.max_marginal_relevance_search(self.text(), k=3, fetch_k=8))
        found = self.store.similarity_search(self.text(), k=3, filter={"owner": {"$eq": self.number}})
        assert len(found) == min(3, len(self.expected))
        self.check(found)

    def get(self):
        names = [*self.random.sample(sorted(self.expected), min(4, len(self.expected))), "not there"]
        found = self.store.get_by_ids(names)
        assert [document.id for document in found] == names[:-1]
        self.check(found)

    def save(self):
        self.store.save_local(self.folder)
        saved = FaissVectorStore.load_local(self.folder, Digits())
        copied = pickle.loads(pickle.dumps(self.store))  # noqa: S301  our own
        names = sorted(self.expected)
        # Others may have saved since, but this thread has written nothing since.
        for twin in (saved, copied):
            assert [document.id for document in twin.get_by_ids(names)] == names

    def check(self, documents):
        """Whoever wrote a document, it is whole; my own are as I wrote them last."""
        names = [document.id for document in documents]
        assert len(set(names)) == len(names)
        for document in documents:
            assert document.metadata["text"] == document.page_content
            if document.metadata["owner"] == self.number:
                assert document == self.expected[document.id]


@pytest.mark.parametrize("strategy", METRICS)
def test_100_threads_lose_and_invent_nothing(tmp_path, strategy):
    seed = 7
    store = FaissVectorStore(Digits(), distance_strategy=strategy)
    workers = [Worker(store, tmp_path / "saved", number, seed) for number in range(THREADS)]
    together, wrong = threading.Barrier(THREADS, timeout=PATIENCE), []

    def work(worker):
        try:
            together.wait()
            for _ in range(12):
                worker.step()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)
    expected = {name: document for worker in workers for name, document in worker.expected.items()}
    assert expected
    store.save_local(tmp_path / "saved")
    for each in (store, FaissVectorStore.load_local(tmp_path / "saved", Digits())):
        held = {p.id: (p.text, dict(p.metadata)) for p in each.index}
        assert held == {name: (d.page_content, d.metadata) for name, d in expected.items()}
        assert len(each.similarity_search("0", k=len(expected) + 9)) == len(expected)
        for name in random.Random(seed).sample(sorted(expected), 20):
            text = expected[name].page_content
            ((found, _),) = each.similarity_search_with_score(text, k=1, filter={"text": text})
            assert found.page_content == text


# Runs in a process of its own, which forks one child for each point and kills it there.
KILLED = """
import os, shutil, signal, sys
from pathlib import Path
import faiss
from langchain_core.documents import Document
from rgate_integrations.errors import IndexNotFoundError
from rgate_integrations.index.passages import PassageStore
from rgate_integrations.langchain import FaissVectorStore
from tests.test_vectorstore_stress import Digits

folder = Path(sys.argv[1])
faiss.omp_set_num_threads(1)


def store_of(size):
    store = FaissVectorStore(Digits())
    numbers = range(size)
    store.add_texts([f"{i:04}" for i in numbers], [{"i": i} for i in numbers], ids=[str(i) for i in numbers])
    return store


class Fuse:
    def __init__(self, left):
        self.left, self.names = left, []

    def point(self, name):
        self.names.append(name)
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, module, name):
        inner = getattr(module, name)

        def wrapped(*given, **options):
            self.point("before " + name)
            done = inner(*given, **options)
            self.point("after " + name)
            return done

        setattr(module, name, wrapped)


def install(fuse):
    for name in ("replace", "rename", "fsync", "mkdir", "unlink", "rmdir", "open"):
        fuse.around(os, name)
    fuse.around(faiss, "write_index")
    fuse.around(PassageStore, "save")


def reset():
    # A save works after each kill, and removes what that left.
    if old:
        before.save_local(folder)
        assert len(list(folder.glob("v-*"))) == 1
    else:
        shutil.rmtree(folder, ignore_errors=True)


def content():
    try:
        loaded = FaissVectorStore.load_local(folder, Digits())
    except IndexNotFoundError:
        return 0
    found = {p.id: p.text for p in loaded.index}
    assert found == {str(i): f"{i:04}" for i in range(len(found))}
    assert [d.id for d in loaded.similarity_search("0002", k=1, filter={"i": 2})] == ["2"]
    return len(found)


old, new, killed, outcomes = int(sys.argv[2]), 40, 0, set()
before, after = store_of(old), store_of(new)
before.index.embedder.identity, after.index.embedder.identity  # computed once
reset()
while True:
    child = os.fork()
    if not child:
        fuse = Fuse(killed + 1)
        install(fuse)
        after.save_local(folder)
        os._exit(0 if len(fuse.names) >= 8 else 1)
    status = os.waitpid(child, 0)[1]
    size = content()
    assert size in (old, new), size
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0 and size == new
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    outcomes.add(size)
    killed += 1
    reset()
    assert content() == old
assert outcomes == {old, new}
print(killed)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("old", ["3", "0"], ids=["over another", "the first"])
def test_killed_at_any_write_the_old_store_or_the_new_one_is_there(tmp_path, old):
    command = [sys.executable, "-c", KILLED, str(tmp_path / "store"), old]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= 15, "too few points: nothing was tested"


SAVES = """
import sys
from rgate_integrations.langchain import FaissVectorStore
from tests.test_vectorstore_stress import Digits

folder, size = sys.argv[1], int(sys.argv[2])
store = FaissVectorStore(Digits())
store.add_texts([str(i) for i in range(size)])
for _ in range(15):
    store.save_local(folder)
    assert len(FaissVectorStore.load_local(folder, Digits()).index) in (5, 50)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a lock of the system")
def test_processes_that_save_into_one_folder_do_not_break_each_other(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SAVES, str(tmp_path / "s"), str(size)], stderr=subprocess.PIPE, text=True
        )
        for size in (5, 50)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors[-3000:]
    assert len(FaissVectorStore.load_local(tmp_path / "s", Digits()).index) in (5, 50)
    assert len(list((tmp_path / "s").glob("v-*"))) == 1


@pytest.mark.parametrize("signal_at", ["write", "manifest"])
def test_a_save_that_fails_leaves_no_rest(tmp_path, monkeypatch, signal_at):
    store = FaissVectorStore.from_texts(["1", "2"], Digits())
    store.save_local(tmp_path / "s")
    store.add_texts(["3"])
    target = {
        "write": "rgate_integrations.index.folder.VectorTable.write",
        "manifest": "rgate_integrations.index.folder.write_atomically",
    }[signal_at]

    def full(*given, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(target, full)
        with pytest.raises(WriteError, match="No space"):
            store.save_local(tmp_path / "s")
    assert len(list((tmp_path / "s").glob("v-*"))) == 1
    assert len(FaissVectorStore.load_local(tmp_path / "s", Digits()).index) == 2
    store.save_local(tmp_path / "s")
    assert len(FaissVectorStore.load_local(tmp_path / "s", Digits()).index) == 3
