"""The store under kill -9 and several writers: nothing is lost, nothing is invented, and what is saved is whole."""

import os
import subprocess
import sys

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding

from tests.patience import PATIENCE

FILES = ["index.safetensors"]  # of a folder that was saved to, however often


EMBEDDINGS = DeterministicFakeEmbedding(size=8)  # equal texts have equal vectors


# Runs in a process of its own, which forks one child for each point and kills it there.
KILLED = """
import os, shutil, signal, sys
from pathlib import Path
import safetensors.numpy
from rgate_integrations.errors import IndexNotFoundError
from rgate_integrations.langchain import FaissVectorStore
from tests.test_vectorstore_stress import EMBEDDINGS, FILES

folder, old, new = Path(sys.argv[1]), int(sys.argv[2]), 40


def store_of(size):
    store = FaissVectorStore(EMBEDDINGS)
    store.add_texts([f"{i:04}" for i in range(size)], ids=[str(i) for i in range(size)])
    store.index.embedder.identity  # computed once
    return store


class Fuse:
    def __init__(self, left):
        self.left, self.points = left, 0

    def point(self):
        self.points += 1
        if self.points == self.left:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, module, name):
        inner = getattr(module, name)

        def wrapped(*given, **options):
            self.point()
            done = inner(*given, **options)
            self.point()
            return done

        setattr(module, name, wrapped)


def reset():
    # A save works after each kill, and removes what that left.
    if old:
        before.save_local(folder)
        assert os.listdir(folder) == FILES
    else:
        shutil.rmtree(folder, ignore_errors=True)


def size_of_what_is_there():
    try:
        loaded = FaissVectorStore.load_local(folder, EMBEDDINGS)
    except IndexNotFoundError:
        return 0
    found = {p.id: p.text for p in loaded.index}
    assert found == {str(i): f"{i:04}" for i in range(len(found))}
    assert [d.id for d in loaded.similarity_search("0002", k=1)] == ["2"]
    return len(found)


before, after = store_of(old), store_of(new)
outcomes, killed = [], 0
while True:
    reset()
    child = os.fork()
    if not child:
        fuse = Fuse(killed + 1)
        for name in ("replace", "fsync", "mkdir", "unlink", "open"):
            fuse.around(os, name)
        fuse.around(safetensors.numpy, "save")
        after.save_local(folder)
        os._exit(0 if fuse.points >= 8 else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    outcomes.append(size_of_what_is_there())
    if status != -signal.SIGKILL:
        assert (status, outcomes[-1]) == (0, new)
        break
    killed += 1
assert set(outcomes) == {old, new}, outcomes
print(killed)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("old", ["3", "0"], ids=["over another", "the first"])
def test_killed_at_any_write_the_old_store_or_the_new_one_is_there(tmp_path, old):
    command = [sys.executable, "-c", KILLED, str(tmp_path / "store"), old]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= 8, "too few points: nothing was tested"


SAVES = """
import sys
from rgate_integrations.langchain import FaissVectorStore
from tests.test_vectorstore_stress import EMBEDDINGS

folder, size = sys.argv[1], int(sys.argv[2])
store = FaissVectorStore(EMBEDDINGS)
store.add_texts([str(i) for i in range(size)])
for _ in range(15):
    store.save_local(folder)
    assert len(FaissVectorStore.load_local(folder, EMBEDDINGS).index) in (5, 50)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a lock of the system")
def test_processes_that_save_into_one_folder_do_not_break_each_other(tmp_path):
    python = [sys.executable, "-c", SAVES, str(tmp_path)]
    processes = [subprocess.Popen([*python, n], stderr=subprocess.PIPE, text=True) for n in ("5", "50")]
    for process in processes:
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors[-3000:]
    assert os.listdir(tmp_path) == FILES
