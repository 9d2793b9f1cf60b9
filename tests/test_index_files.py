"""Saved indexes that were damaged, mixed up or made up: typed errors only, never an index that is silently wrong."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rgate_integrations.errors import IndexCorruptError, IndexMismatchError, RGateError
from rgate_integrations.index import Passage, PassageIndex, folder
from rgate_integrations.index.folder import describe_file
from tests.test_index import Letters, passages

faiss = pytest.importorskip("faiss")

VECTORS, PASSAGES = "vectors.faiss", "passages.jsonl"
both_files = pytest.mark.parametrize("name", [VECTORS, PASSAGES])
FUZZED = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def root(tmp_path):
    return PassageIndex.build(passages(), Letters()).save(tmp_path / "i")


def manifest_of(root):
    return json.loads((root / "index.json").read_text())


def write_manifest(root, **changes):
    (root / "index.json").write_text(json.dumps(manifest_of(root) | changes))


def file_of(root, name):
    return root / manifest_of(root)["version"] / name


def put(root, name, content):
    """Replace a file, with a checksum that fits: as somebody who makes a folder up would."""
    file = file_of(root, name)
    file.write_bytes(content)
    write_manifest(root, files=manifest_of(root)["files"] | {name: describe_file(file)})


def loaded_or_refused(root):
    """Load, and use what was loaded; it must be what was saved. Returns the error, or None."""
    try:
        index = PassageIndex.load(root, Letters())
        assert list(index) == passages()
        found = [hit.passage.id for hit in index.search(["ccc"], 9)[0]]
        assert found[0] == "p2"
        assert sorted(found) == [f"p{i}" for i in range(5)]
        index.add([Passage("after", "qqqq")])
        assert index.search(["qqqq"], 1)[0][0].passage.id == "after"
        assert index.delete(["after", "p0"]) == 2
    except RGateError as error:
        return error
    return None


def assert_refused(root):
    assert isinstance(loaded_or_refused(root), IndexCorruptError)


# --- the manifest ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        *({"version": value} for value in ("../x", "/etc", "v-../../../../x", ".", 5, "v-000000000000")),
        {"files": {"../../secret": {"bytes": 1, "sha256": ""}}},
        {"files": {}},
        {"files": {"vectors.faiss": {}}},
        *({"passages": value} for value in (4, -5, True, 0, 1e3)),
        *({"next_row": value} for value in (4, 0, 2**63, "5")),
        *({"dimension": value} for value in (25, 0)),
        *({"metric": value} for value in ("l2", "inner_product_", ["cosine"])),
        *({"approximation": value} for value in ({"lists": 1}, 3, "HNSW32")),
        *({"embedder": value} for value in (None, {"name": "letters"}, {"name": 3, "identity": "letters-1"})),
        *({"format": value} for value in ("1", True, None)),
    ],
    ids=str,
)
def test_a_manifest_that_says_what_cannot_be_is_refused(root, wrong):
    (root.parent / "x").mkdir()
    write_manifest(root, **wrong)
    assert_refused(root)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "[" * 100_000, '{"format":' * 50_000, "\ud800", "nul\0l", '{"format": NaN}', "1" * 5_000],
)
def test_a_manifest_that_is_no_json_is_refused(root, text):
    (root / "index.json").write_text(text, errors="surrogatepass")
    assert_refused(root)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("v-000000000000"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = [
    "format",
    "version",
    "passages",
    "next_row",
    "dimension",
    "metric",
    "approximation",
    "embedder",
    "files",
]


@FUZZED
@given(key=st.sampled_from(KEYS), value=JSON)
def test_any_value_in_the_manifest(root, key, value):
    intact = manifest_of(root)
    write_manifest(root, **{key: value})
    loaded_or_refused(root)
    write_manifest(root, **intact)


def test_a_version_elsewhere_is_not_followed(root):
    version = root / manifest_of(root)["version"]
    elsewhere = shutil.copytree(version, root.parent / "elsewhere")
    shutil.rmtree(version)
    for name in ("../elsewhere", str(elsewhere)):
        write_manifest(root, version=name)
        assert_refused(root)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_other_formats_are_to_be_built_again(root, number):
    write_manifest(root, format=number, version="another kind of thing")
    error = loaded_or_refused(root)
    assert isinstance(error, IndexMismatchError)
    assert "Build it again" in error.hint


# --- its files ---------------------------------------------------------------------------------------------


@both_files
@FUZZED
@given(data=st.data())
def test_a_file_that_was_changed_is_refused(root, name, data):
    file = file_of(root, name)
    intact = file.read_bytes()
    start = data.draw(st.integers(0, len(intact) - 1))
    flipped = intact[:start] + bytes([intact[start] ^ 255]) + intact[start + 1 :]
    changes = [intact[:start], flipped, intact + b"x", bytes(len(intact))]
    file.write_bytes(data.draw(st.sampled_from(changes)))
    error = loaded_or_refused(root)
    assert isinstance(error, IndexCorruptError)
    assert name in str(error)
    file.write_bytes(intact)


@both_files
@pytest.mark.parametrize("replace", [lambda file: None, lambda file: file.mkdir()], ids=["none", "a folder"])
def test_a_file_that_cannot_be_read_is_refused(root, name, replace):
    file_of(root, name).unlink()
    replace(file_of(root, name))
    assert_refused(root)


@FUZZED
@given(data=st.data())
def test_passages_with_a_fitting_checksum_are_read_or_refused(root, data):
    """Changed text cannot be told from text that was meant; but no raw error, and as many passages as vectors."""
    intact = file_of(root, PASSAGES).read_bytes()
    start = data.draw(st.integers(0, len(intact) - 1))
    noise = data.draw(st.binary(min_size=1, max_size=64))
    put(root, PASSAGES, intact[:start] + noise + intact[start + len(noise) :])
    try:
        index = PassageIndex.load(root, Letters())
        hits = index.search(["ccc"], 9)[0]
        assert len(hits) == len(list(index)) == 5
        index.upsert([Passage("p1", "qqqq"), Passage("new", "rrrr")])
        index.delete([hit.passage.id for hit in hits])
    except RGateError:
        pass
    put(root, PASSAGES, intact)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.9, 0.99])
@both_files
def test_a_truncated_file_with_a_fitting_checksum_is_refused(root, name, share):
    content = file_of(root, name).read_bytes()
    put(root, name, content[: int(len(content) * share)])
    assert_refused(root)


def moved(index):
    index.delete(["p1"])
    index.add([Passage("p1", "bbbb")])


@pytest.mark.parametrize(
    "change",
    [
        moved,
        lambda index: index.delete(["p1"]),
        lambda index: index.add([Passage("more", "zzzz")]),
        lambda index: index.delete([f"p{i}" for i in range(5)]),
    ],
    ids=["other rows", "fewer", "more", "empty"],
)
@both_files
def test_a_file_of_another_index_is_refused(root, tmp_path, name, change):
    other = PassageIndex.load(root, Letters())
    change(other)
    put(root, name, file_of(other.save(tmp_path / "other"), name).read_bytes())
    assert_refused(root)


def filled(index, rows=(0, 1, 2, 3, 4), dimension=26):
    index.add_with_ids(np.eye(dimension, dtype=np.float32)[:5], np.array(rows))
    return index


@pytest.mark.parametrize(
    "make",
    [
        lambda: faiss.IndexFlatIP(26),
        lambda: faiss.IndexHNSWFlat(26, 4),
        lambda: filled(faiss.IndexIDMap2(faiss.IndexHNSWFlat(26, 4, faiss.METRIC_INNER_PRODUCT))),
        lambda: filled(faiss.IndexIDMap(faiss.IndexFlatIP(26))),
        lambda: filled(faiss.IndexIDMap2(faiss.IndexFlatIP(5)), dimension=5),
        lambda: filled(faiss.IndexIDMap2(faiss.IndexFlatIP(26)), (0, 1, 2, 3, 3)),
        lambda: filled(faiss.IndexIDMap2(faiss.IndexFlatIP(26)), (-1, 1, 2, 3, 4)),
        lambda: filled(faiss.IndexIDMap2(faiss.IndexFlatL2(26))),
        lambda: faiss.IndexIDMap2(faiss.IndexFlatIP(26)),
    ],
    ids=[
        "flat",
        "graph",
        "graph-with-rows",
        "rows-of-another-kind",
        "dimension",
        "row-twice",
        "negative-row",
        "distances",
        "empty",
    ],
)
def test_a_faiss_file_of_another_kind_is_refused(root, tmp_path, make):
    faiss.write_index(make(), str(tmp_path / "made.faiss"))
    put(root, VECTORS, (tmp_path / "made.faiss").read_bytes())
    assert_refused(root)


GOOD = [[i, f"p{i}", "", "x", {}] for i in range(5)]


@pytest.mark.parametrize(
    "last",
    [
        [4, "p4", "", "x"],
        [4, "p4", "", None, {}],
        [4, 4, "", "x", {}],
        ["4", "p4", "", "x", {}],
        [-4, "p4", "", "x", {}],
        [4, "p3", "", "x", {}],
        [3, "p4", "", "x", {}],
        [4, "p4", "", "x", []],
        {"row": 4},
    ],
    ids=str,
)
def test_passages_of_another_kind_are_refused(root, last):
    put(root, PASSAGES, "".join(json.dumps(line) + "\n" for line in [*GOOD[:4], last]).encode())
    assert_refused(root)


@pytest.mark.parametrize("metadata", ["", "{", "[" * 100_000, '{"a":' * 5_000, '{"a": "\\ud800"}', "\xff"])
def test_metadata_that_is_no_json_is_refused(root, metadata):
    lines = "".join(json.dumps(line) + "\n" for line in GOOD[:4])
    put(root, PASSAGES, f'{lines}[4, "p4", "", "x", {metadata}]\n'.encode("latin-1", "surrogatepass"))
    assert_refused(root)


# --- saves at the same time --------------------------------------------------------------------------------


def test_a_reader_that_is_overtaken_by_a_save_reads_the_new_one(root, monkeypatch):
    newer, checked, check = PassageIndex.build(passages(4), Letters()), [], folder.check_files

    def overtaken(where, manifest):
        if not checked:
            newer.save(root)
        checked.append(manifest.version)
        check(where, manifest)

    monkeypatch.setattr(folder, "check_files", overtaken)
    assert len(PassageIndex.load(root, Letters())) == 4
    assert len(set(checked)) == 2


# FAISS is not made for files that somebody has made up, and may end the process. What it says must be typed.
FAISS_FUZZ = """
import random, sys
from pathlib import Path
from rgate_integrations.errors import RGateError
from rgate_integrations.index import PassageIndex
from tests.test_index import Letters
from tests.test_index_files import file_of, put

root, rng = Path(sys.argv[1]), random.Random(5)
intact = file_of(root, "vectors.faiss").read_bytes()
for _ in range(200):
    changed = bytearray(intact)
    for _ in range(rng.choice([1, 1, 4])):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    put(root, "vectors.faiss", bytes(changed))
    try:
        index = PassageIndex.load(root, Letters())
        assert len(index.search(["ccc"], 9)[0]) == 5
    except RGateError:
        pass
print("done")
"""


def test_a_faiss_file_with_a_fitting_checksum_is_read_or_refused(root):
    command = [sys.executable, "-c", FAISS_FUZZ, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "done", done.stderr[-3000:]
