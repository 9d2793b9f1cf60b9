"""Saved indexes that were damaged or made up: typed errors only, never an index that is silently wrong."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from rgate_integrations.errors import IndexCorruptError, IndexMismatchError
from rgate_integrations.index import PassageIndex
from rgate_integrations.index.passage_index import FILE, FORMAT, checksum
from tests.damaged import forbidden
from tests.test_index import Letters, passages

FACTS = {"format": FORMAT, "embedder": "letters", "identity": "letters-1"}
SAVED = [[f"p{i}", "", "x", {}] for i in range(5)]
VECTORS = np.eye(5, dtype=np.float32)


@pytest.fixture
def root(tmp_path):
    return PassageIndex.build(passages(), Letters()).save(tmp_path / "i")


def write(root, facts=FACTS, saved=SAVED, vectors=VECTORS):
    """Write a file whose checksum fits: as somebody who makes one up would."""
    content = saved if isinstance(saved, bytes) else json.dumps(saved).encode()
    metadata = facts | {"checksum": checksum(facts, content, vectors)}
    tensors = {"passages": np.frombuffer(content, np.uint8), "vectors": vectors}
    (root / FILE).write_bytes(save(tensors, metadata=metadata))


def assert_refused(root, error=IndexCorruptError):
    with pytest.raises(error, match=r" Hint: .*[Bb]uild"):
        PassageIndex.load(root, Letters())


def test_what_is_made_up_here_could_be_an_index(root):
    write(root)
    assert [passage.id for passage in PassageIndex.load(root, Letters())] == ["p0", "p1", "p2", "p3", "p4"]


@pytest.mark.parametrize(
    "change",
    [
        lambda content, at: content[:at],
        lambda content, at: content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :],
        lambda content, at: content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :],
        lambda content, at: content[:at] + b"x" + content[at:],
        lambda content, at: bytes(at),
    ],
    ids=["truncated", "flipped", "one bit", "longer", "zeros"],
)
def test_a_file_that_was_changed_is_refused_wherever(root, change):
    content = (root / FILE).read_bytes()
    for at in range(0, len(content), 13):
        (root / FILE).write_bytes(change(content, at))
        with pytest.raises((IndexCorruptError, IndexMismatchError)):
            PassageIndex.load(root, Letters())


@pytest.mark.parametrize(
    "wrong",
    [
        *({"vectors": vectors} for vectors in (VECTORS[:4], VECTORS[0], VECTORS * np.nan, VECTORS[:0])),
        {"vectors": np.zeros((5, 0), np.float32)},
        {"facts": {"format": FORMAT}},
        {"facts": {}},
        *({"saved": saved} for saved in (b"", b"{", b"\xff", b"[" * 100_000, b'[["p", "", "x", {"a": ')),
        *(
            {"saved": [*SAVED[:4], last]}
            for last in (["p4", "", "x"], ["p4", "", None, {}], [4, "", "x", {}])
        ),
        *({"saved": [*SAVED[:4], last]} for last in (["p4", "", "x", []], ["p3", "", "x", {}], {"id": "p4"})),
        {"saved": SAVED[:4]},
        {"saved": b'[["p", "", "x", {"a": "\\ud800"}]]', "vectors": VECTORS[:1]},
    ],
)
def test_what_cannot_be_an_index_is_refused(root, wrong):
    write(root, **wrong)
    assert_refused(root)


@pytest.mark.parametrize("content", [b"", b"{}", b"\0" * 1_000, save({"other": VECTORS})])
def test_a_file_of_another_kind_is_refused(root, content):
    (root / FILE).write_bytes(content)
    assert_refused(root)


@pytest.mark.parametrize("step", ["is_file", "open"])
def test_an_index_that_this_user_may_not_read_is_called_neither_missing_nor_damaged(root, monkeypatch, step):
    """Regression: the gateway ended with a traceback, or with a file that was not found."""
    monkeypatch.setattr(Path, step, forbidden)
    with pytest.raises(IndexCorruptError, match=r"Permission denied.* Hint: .*permissions"):
        PassageIndex.load(root, Letters())


def test_another_format_is_to_be_built_again(root):
    write(root, facts=FACTS | {"format": "3"})
    assert_refused(root, IndexMismatchError)
