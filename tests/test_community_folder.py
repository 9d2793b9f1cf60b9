"""Folders of langchain_community's FAISS store: taken over as they are, and nothing in their pickle is run."""

import datetime
import os
import pickle
import sys
import types
from unittest.mock import patch

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from rgate_integrations.errors import DataFormatError, IndexCorruptError, IndexNotFoundError
from rgate_integrations.langchain import FaissVectorStore


class Letters(Embeddings):
    def embed_documents(self, texts):
        return [[float(t.count("a")), float(t.count("b")), float(t.count("c"))] for t in texts]

    def embed_query(self, text):
        return self.embed_documents([text])[0]


class InMemoryDocstore:
    """As langchain_community has it, under its name there."""

    def __init__(self, documents):
        self._dict = documents


HOME = "langchain_community.docstore.in_memory"


InMemoryDocstore.__module__ = HOME


def pickled(value, protocol=pickle.DEFAULT_PROTOCOL):
    """Pickle with the class under its name there; the modules are gone again when the folder is read."""
    parents = {
        name: types.ModuleType(name) for name in ("langchain_community", "langchain_community.docstore")
    }
    home = types.SimpleNamespace(InMemoryDocstore=InMemoryDocstore)
    with patch.dict(sys.modules, {**parents, HOME: home}):
        return pickle.dumps(value, protocol)


DOCUMENTS = {
    "x": Document(page_content="aaa", id="x", metadata={"n": 1, "deep": {"list": [1, None, True]}}),
    "y": Document(page_content="bbb"),
    "z": Document(page_content="abc"),
}


def save(folder, names=None, documents=None, metric="L2", protocol=pickle.DEFAULT_PROTOCOL):
    faiss = pytest.importorskip("faiss")
    documents = DOCUMENTS if documents is None else documents
    vectors = np.array(
        Letters().embed_documents([d.page_content for d in documents.values()]), dtype=np.float32
    )
    flat = faiss.IndexFlatL2(3) if metric == "L2" else faiss.IndexFlatIP(3)
    flat.add(vectors)
    faiss.write_index(flat, str(folder / "index.faiss"))
    held = (InMemoryDocstore(documents), dict(enumerate(documents)) if names is None else names)
    (folder / "index.pkl").write_bytes(pickled(held, protocol))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("metric", "strategy", "score"), [("L2", "EUCLIDEAN_DISTANCE", 0.0), ("IP", "MAX_INNER_PRODUCT", 9.0)]
)
def test_a_folder_is_taken_over(tmp_path, protocol, metric, strategy, score):
    save(tmp_path, metric=metric, protocol=protocol)
    store = FaissVectorStore.from_community_folder(tmp_path, Letters())
    assert store.distance_strategy == strategy
    assert {d.id: (d.page_content, d.metadata) for d in store.get_by_ids(["x", "y", "z"])} == {
        name: (d.page_content, d.metadata) for name, d in DOCUMENTS.items()
    }
    ((found, value),) = store.similarity_search_with_score("bbb", k=1)
    assert (found.id, value) == ("y", score)
    store.save_local(tmp_path / "ours")
    assert FaissVectorStore.load_local(tmp_path / "ours", Letters()).similarity_search("a", k=1)[0].id in "xz"
    cosine = FaissVectorStore.from_community_folder(tmp_path, Letters(), distance_strategy="COSINE")
    assert cosine.similarity_search_with_score("bbb", k=1)[0][1] == pytest.approx(1)


def test_load_local_says_what_to_call(tmp_path):
    save(tmp_path)
    with pytest.raises(IndexNotFoundError) as caught:
        FaissVectorStore.load_local(tmp_path, Letters(), allow_dangerous_deserialization=True)
    assert "from_community_folder" in caught.value.hint
    with pytest.raises(IndexNotFoundError):
        FaissVectorStore.from_community_folder(tmp_path / "nowhere", Letters())


class Harmful:
    def __init__(self, call, *arguments):
        self.made_by = (call, arguments)

    def __reduce__(self):
        return self.made_by


def harmful(path):
    return [
        Harmful(os.system, f"touch {path}"),
        Harmful(eval, f"open({str(path)!r}, 'w')"),
        Harmful(os.mkdir, str(path)),
        Harmful(exec, f"open({str(path)!r}, 'w')"),
        Harmful(pickle.loads, pickle.dumps(Harmful(os.mkdir, str(path)))),
    ]


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("where", ["alone", "metadata", "names", "docstore"])
def test_nothing_that_a_pickle_names_is_run(tmp_path, number, where):
    target = tmp_path / "was run"
    bad = harmful(target)[number]
    save(tmp_path)
    store = InMemoryDocstore(
        {"x": Document(page_content="a", metadata={"bad": bad})} if where == "metadata" else {"x": bad}
    )
    held = {
        "alone": bad,
        "metadata": (store, {0: "x"}),
        "names": (InMemoryDocstore({}), bad),
        "docstore": (bad, {}),
    }[where]
    (tmp_path / "index.pkl").write_bytes(pickled(held))
    with pytest.raises(DataFormatError, match="without risk") as caught:
        FaissVectorStore.from_community_folder(tmp_path, Letters())
    assert "from_community_index" in caught.value.hint
    assert not target.exists()


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"nonsense",
        pickle.dumps(None),
        pickle.dumps(({}, {})),
        pickle.dumps((1, 2, 3)),
        pickle.dumps(({"_dict": {}}, {0: "x"})),
        b"\x80\x04cbuiltins\nset\n}b.",
        b"(" * 100_000,
    ],
)
def test_a_damaged_pickle_is_a_typed_error(tmp_path, wrong):
    save(tmp_path)
    (tmp_path / "index.pkl").write_bytes(wrong)
    with pytest.raises(DataFormatError):
        FaissVectorStore.from_community_folder(tmp_path, Letters())


@pytest.mark.parametrize(
    "names",
    [
        {},
        {0: "x", 1: "y"},
        {0: "x", 1: "y", 2: "?"},
        {0: "x", 1: "y", 3: "z"},
        {0: "x", 1: "y", "2": "z"},
        [1],
        {0: "x", 1: "y", 2: []},
    ],
)
def test_rows_that_do_not_fit_are_a_typed_error(tmp_path, names):
    save(tmp_path, names)
    with pytest.raises(DataFormatError):
        FaissVectorStore.from_community_folder(tmp_path, Letters())


def test_metadata_that_is_no_json_is_refused_by_its_type(tmp_path):
    save(
        tmp_path,
        documents={"x": Document(page_content="a", metadata={"t": datetime.date(2026, 1, 1)})},
    )
    with pytest.raises(DataFormatError, match=r"datetime\.date"):
        FaissVectorStore.from_community_folder(tmp_path, Letters())


@pytest.mark.parametrize("content", [b"", b"nonsense", b"IxFI", b"IxF2" + bytes(200)])
def test_damaged_vectors_are_a_typed_error(tmp_path, content):
    save(tmp_path)
    (tmp_path / "index.faiss").write_bytes(content)
    with pytest.raises((IndexCorruptError, DataFormatError)):
        FaissVectorStore.from_community_folder(tmp_path, Letters())
