"""Saved indexes that were damaged, mixed up or made up: typed errors only, never an index that is silently wrong."""

import json
import pickle
import shutil
import sqlite3
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rgate_integrations.errors import ConfigurationError, IndexCorruptError, IndexMismatchError, RGateError
from rgate_integrations.index import Passage, PassageIndex
from rgate_integrations.index.building import build_resumable
from rgate_integrations.index.folder import describe_file
from tests.test_index import Letters, passages

FILES = ("vectors.faiss", "passages.sqlite")
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


def write_manifest(root, manifest):
    text = manifest if isinstance(manifest, str) else json.dumps(manifest)
    (root / "index.json").write_text(text)


def file_of(root, name):
    return root / manifest_of(root)["version"] / name


def put(root, name, content):
    """Replace a file, with a checksum that fits: as somebody who makes a folder up would."""
    file = file_of(root, name)
    file.write_bytes(content)
    manifest = manifest_of(root)
    manifest["files"][name] = describe_file(file)
    write_manifest(root, manifest)


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
        assert len(index) == len(list(index)) == 4
    except RGateError as error:
        return error
    return None


def test_a_whole_index_is_loaded(root):
    assert loaded_or_refused(root) is None


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["../x", "v-000000000000"]),
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
    intact = (root / "index.json").read_text()
    try:
        write_manifest(root, {**manifest_of(root), key: value})
        loaded_or_refused(root)
    finally:
        (root / "index.json").write_text(intact)


@FUZZED
@given(value=JSON)
def test_anything_in_place_of_the_manifest(root, value):
    intact = (root / "index.json").read_text()
    try:
        write_manifest(root, value if isinstance(value, str) else json.dumps(value))
        assert isinstance(loaded_or_refused(root), IndexCorruptError)
    finally:
        (root / "index.json").write_text(intact)


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": "../x"},
        {"version": "/etc"},
        {"version": "v-../../../../x"},
        {"version": "."},
        {"version": 5},
        {"version": "v-000000000000"},
        {"files": {"../../secret": {"bytes": 1, "sha256": ""}}},
        {"files": {}},
        {"files": {"vectors.faiss": {}}},
        {"passages": 4},
        {"passages": -5},
        {"passages": True},
        {"passages": 0},
        {"passages": 1e3},
        {"next_row": 4},
        {"next_row": 0},
        {"next_row": 2**63},
        {"next_row": "5"},
        {"dimension": 25},
        {"dimension": 0},
        {"metric": "l2"},
        {"metric": "inner_product_"},
        {"metric": ["cosine"]},
        {"approximation": {"lists": 1}},
        {"approximation": 3},
        {"embedder": None},
        {"embedder": {"name": "letters"}},
        {"embedder": {"name": 3, "identity": "letters-1"}},
        {"format": 0},
        {"format": "1"},
        {"format": True},
        {"format": None},
    ],
    ids=str,
)
def test_a_manifest_that_says_what_cannot_be_is_refused(root, wrong):
    (root.parent / "x").mkdir()
    write_manifest(root, {**manifest_of(root), **wrong})
    assert isinstance(loaded_or_refused(root), IndexCorruptError)


def test_a_version_elsewhere_is_not_followed(root):
    version = root / manifest_of(root)["version"]
    elsewhere = shutil.copytree(version, root.parent / "elsewhere")
    shutil.rmtree(version)
    for name in ("../elsewhere", str(elsewhere)):
        write_manifest(root, {**manifest_of(root), "version": name})
        assert isinstance(loaded_or_refused(root), IndexCorruptError)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 100_000, '{"format":' * 50_000, "\ud800", "nul\0l", '{"format": NaN}', "1" * 5_000],
)
def test_a_manifest_that_is_no_json_is_refused(root, text):
    (root / "index.json").write_text(text, errors="surrogatepass")
    assert isinstance(loaded_or_refused(root), IndexCorruptError)


def test_a_format_that_is_newer_is_a_mismatch(root):
    write_manifest(root, {**manifest_of(root), "format": 3})
    assert isinstance(loaded_or_refused(root), IndexMismatchError)


def test_an_index_of_the_first_format_is_still_loaded(root):
    manifest = manifest_of(root) | {"format": 1}
    del manifest["metric"]
    write_manifest(root, manifest)
    assert loaded_or_refused(root) is None


@pytest.mark.parametrize("name", FILES)
@FUZZED
@given(data=st.data())
def test_a_file_that_was_changed_is_refused(root, name, data):
    file = file_of(root, name)
    intact = file.read_bytes()
    start = data.draw(st.integers(0, len(intact) - 1))
    changed = data.draw(
        st.sampled_from(
            [
                intact[:start],
                intact[:start] + bytes([intact[start] ^ 255]) + intact[start + 1 :],
                intact + b"x",
                intact[start:],
                bytes(len(intact)),
            ]
        )
    )
    try:
        file.write_bytes(changed)
        error = loaded_or_refused(root)
        assert isinstance(error, IndexCorruptError) or changed == intact
    finally:
        file.write_bytes(intact)


@FUZZED
@given(data=st.data())
def test_a_database_with_a_fitting_checksum_is_read_or_refused(root, data):
    """Changed text cannot be told from text that was meant; but no raw error, and as many passages as vectors."""
    intact, manifest = file_of(root, "passages.sqlite").read_bytes(), manifest_of(root)
    start = data.draw(st.integers(0, len(intact) - 1))
    length = data.draw(st.integers(1, 64))
    noise = data.draw(st.binary(min_size=length, max_size=length))
    try:
        put(root, "passages.sqlite", intact[:start] + noise + intact[start + length :])
        index = PassageIndex.load(root, Letters())
        hits = index.search(["ccc"], 9)[0]
        assert len(hits) == len(list(index)) == 5
        index.upsert([Passage("p1", "qqqq"), Passage("new", "rrrr")])
        index.delete([hit.passage.id for hit in hits])
    except RGateError:
        pass
    finally:
        file_of(root, "passages.sqlite").write_bytes(intact)
        write_manifest(root, manifest)


@pytest.mark.parametrize(
    "spoilt", [b"CREATE TABLE \x80assages (", b"CREATE TABLE passages \xff", b"CREATE TABEL passages ("]
)
def test_a_schema_that_cannot_even_be_quoted_is_refused(root, spoilt):
    content = file_of(root, "passages.sqlite").read_bytes()
    assert content.count(b"CREATE TABLE passages (") == 1
    put(root, "passages.sqlite", content.replace(b"CREATE TABLE passages (", spoilt))
    assert isinstance(loaded_or_refused(root), IndexCorruptError)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_with_a_fitting_checksum_is_whole_or_refused(root, name, share):
    content = file_of(root, name).read_bytes()
    put(root, name, content[: int(len(content) * share)])
    error = loaded_or_refused(
        root
    )  # None only if what was cut off is not needed, as SQLite's index of the ids
    assert isinstance(error, IndexCorruptError) or (
        error is None and name == "passages.sqlite" and share >= 0.9
    )


def other_index(tmp_path, how):
    """An index that differs from the one under test in one thing."""
    index = PassageIndex.build(passages(), Letters())
    if how == "rows":
        index.delete(["p1"])
        index.add([Passage("p1", "bbbb")])
    if how == "fewer":
        index.delete(["p1"])
    if how == "more":
        index.add([Passage("more", "zzzz")])
    if how == "metric":
        index = PassageIndex(Letters(), metric="l2")
        index.add(passages())
    if how == "empty":
        index = PassageIndex(Letters())
    return index.save(tmp_path / "other")


@pytest.mark.parametrize("how", ["rows", "fewer", "more", "metric", "empty"])
def test_vectors_of_another_index_are_refused(root, tmp_path, how):
    other = other_index(tmp_path, how)
    put(root, "vectors.faiss", file_of(other, "vectors.faiss").read_bytes())
    assert isinstance(loaded_or_refused(root), IndexCorruptError)


@pytest.mark.parametrize("how", ["rows", "fewer", "more", "empty"])
def test_passages_of_another_index_are_refused(root, tmp_path, how):
    other = other_index(tmp_path, how)
    put(root, "passages.sqlite", file_of(other, "passages.sqlite").read_bytes())
    assert isinstance(loaded_or_refused(root), IndexCorruptError)


def test_swapped_files_are_refused(root):
    vectors, database = (file_of(root, name).read_bytes() for name in FILES)
    put(root, "vectors.faiss", database)
    put(root, "passages.sqlite", vectors)
    assert isinstance(loaded_or_refused(root), IndexCorruptError)


def faiss_bytes(tmp_path, made):
    faiss = pytest.importorskip("faiss")
    faiss.write_index(made(faiss), str(tmp_path / "made.faiss"))
    return (tmp_path / "made.faiss").read_bytes()


VECTORS = np.eye(26, dtype=np.float32)[:5]
ROWS = np.arange(5)


def filled(index, rows=ROWS, vectors=VECTORS):
    index.add_with_ids(vectors, rows.astype(np.int64))
    return index


KINDS = {
    "flat without rows": lambda f: f.IndexFlatIP(26),
    "a graph": lambda f: f.IndexHNSWFlat(26, 4),
    "a graph with rows": lambda f: filled(f.IndexIDMap2(f.IndexHNSWFlat(26, 4, f.METRIC_INNER_PRODUCT))),
    "rows of another kind": lambda f: filled(f.IndexIDMap(f.IndexFlatIP(26))),
    "another dimension": lambda f: filled(
        f.IndexIDMap2(f.IndexFlatIP(5)), vectors=np.eye(5, dtype=np.float32)
    ),
    "the same row twice": lambda f: filled(f.IndexIDMap2(f.IndexFlatIP(26)), np.array([0, 1, 2, 3, 3])),
    "a negative row": lambda f: filled(f.IndexIDMap2(f.IndexFlatIP(26)), np.array([-1, 1, 2, 3, 4])),
    "distances": lambda f: filled(f.IndexIDMap2(f.IndexFlatL2(26))),
    "an empty one": lambda f: f.IndexIDMap2(f.IndexFlatIP(26)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_faiss_file_of_another_kind_is_refused(root, tmp_path, kind):
    put(root, "vectors.faiss", faiss_bytes(tmp_path, KINDS[kind]))
    assert isinstance(loaded_or_refused(root), IndexCorruptError)


TABLE = (
    "CREATE TABLE passages (row INTEGER PRIMARY KEY, id TEXT UNIQUE, title TEXT, text TEXT, metadata TEXT)"
)
ROW = "INSERT INTO passages VALUES (?, ?, ?, ?, ?)"
GOOD = [(i, f"p{i}", "", "x", "{}") for i in range(5)]
DATABASES = {
    "no table": [("CREATE TABLE other (a)", [])],
    "another table": [("CREATE TABLE passages (row INTEGER PRIMARY KEY, id)", [])],
    "a view that never ends": [
        (
            "CREATE VIEW passages AS WITH RECURSIVE n(row) AS (SELECT 0 UNION ALL SELECT row + 1 FROM n) "
            "SELECT row, row AS id, '' AS title, 'x' AS text, '{}' AS metadata FROM n",
            [],
        ),
    ],
    "a trigger": [
        (TABLE, []),
        (ROW, GOOD),
        ("CREATE TRIGGER t AFTER INSERT ON passages BEGIN DELETE FROM passages; END", []),
    ],
    "bytes for text": [(TABLE, []), (ROW, [*GOOD[:4], (4, "p4", "", b"\xff", "{}")])],
    "nothing for text": [(TABLE, []), (ROW, [*GOOD[:4], (4, "p4", None, None, None)])],
    "no id": [(TABLE, []), (ROW, [*GOOD[:4], (4, None, "", "x", "{}")])],
    "a negative row": [(TABLE, []), (ROW, [*GOOD[:4], (-4, "p4", "", "x", "{}")])],
}


def database(tmp_path, statements):
    path = tmp_path / "made.sqlite"
    path.unlink(missing_ok=True)
    made = sqlite3.connect(path)
    for statement, rows in statements:
        made.executemany(statement, rows) if rows else made.execute(statement)
    made.commit()
    made.close()
    return path.read_bytes()


@pytest.mark.parametrize("kind", DATABASES)
def test_a_database_of_another_kind_is_refused(root, tmp_path, kind):
    put(root, "passages.sqlite", database(tmp_path, DATABASES[kind]))
    assert isinstance(loaded_or_refused(root), IndexCorruptError)


@pytest.mark.parametrize("metadata", ["", "[]", "5", "{", "[" * 100_000, '{"a":' * 5_000, "null"])
def test_metadata_that_is_no_object_is_a_typed_error(root, tmp_path, metadata):
    rows = [*GOOD[:4], (4, "p4", "", "x", metadata)]
    put(root, "passages.sqlite", database(tmp_path, [(TABLE, []), (ROW, rows)]))
    assert isinstance(loaded_or_refused(root), IndexCorruptError)


@pytest.mark.parametrize("damage", ["folder for a file", "folder for the manifest", "no permission"])
def test_what_the_system_refuses_is_a_typed_error(root, damage):
    target = root / "index.json" if damage == "folder for the manifest" else file_of(root, "vectors.faiss")
    content = target.read_bytes()
    target.unlink()
    target.mkdir()
    error = loaded_or_refused(root)
    assert isinstance(error, RGateError)
    target.rmdir()
    target.write_bytes(content)
    assert loaded_or_refused(root) is None


def test_an_approximate_index_is_checked_too(tmp_path):
    rng = np.random.default_rng(0)
    many = [Passage(f"{i}", "".join(rng.choice(list("abcdefghij"), 8))) for i in range(400)]
    for metric in ("cosine", "inner_product", "l2"):
        index = PassageIndex(Letters(), metric=metric)
        index.add(many)
        index.optimise(exact_up_to=100)
        assert index.approximation is not None
        root = index.save(tmp_path / metric)
        loaded = PassageIndex.load(root, Letters())
        assert loaded.search(["aab"], 5) == index.search(["aab"], 5)
        assert pickle.loads(pickle.dumps(index)).search(["aab"], 5) == index.search(["aab"], 5)  # noqa: S301
        assert index.delete(["5"]) == 1
        other = index.save(tmp_path / "other")
        put(root, "vectors.faiss", file_of(other, "vectors.faiss").read_bytes())
        with pytest.raises(IndexCorruptError, match="399 vectors for 400"):
            PassageIndex.load(root, Letters())
        write_manifest(
            root, manifest_of(other) | {"version": manifest_of(root)["version"], "approximation": None}
        )


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"\x93NUMPY", "short", "pickle"])
def test_kept_parts_of_a_build_that_are_damaged_are_made_again(tmp_path, monkeypatch, damage):
    corpus, out = tmp_path / "c.jsonl", tmp_path / "i"
    corpus.write_text("".join(json.dumps({"id": p.id, "text": p.text}) + "\n" for p in passages()))

    def stops(index, folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(PassageIndex, "save", stops)
        with pytest.raises(KeyboardInterrupt):
            build_resumable(corpus, out, Letters())
    (part,) = out.glob(".building/*.npy")
    if isinstance(damage, bytes):
        part.write_bytes(damage)
    elif damage == "short":
        np.save(part, np.load(part)[:2])
    else:
        np.save(part, np.array([object()]), allow_pickle=True)
    embedder = Letters()
    build_resumable(corpus, out, embedder)
    assert embedder.calls == 1
    assert [h.passage.id for h in PassageIndex.load(out, Letters()).search(["ccc"], 1)[0]] == ["p2"]


def test_an_index_is_not_saved_over_a_file(tmp_path):
    (tmp_path / "i").write_text("mine")
    with pytest.raises(ConfigurationError, match="is a file"):
        PassageIndex.build(passages(), Letters()).save(tmp_path / "i")
    assert (tmp_path / "i").read_text() == "mine"


def test_a_reader_that_is_overtaken_by_a_save_reads_the_new_one(root, monkeypatch):
    from rgate_integrations.index import folder

    newer, checked = PassageIndex.build(passages(4), Letters()), []

    def overtaken(where, manifest):
        if not checked:
            newer.save(root)
        checked.append(manifest.version)
        check(where, manifest)

    check = folder.check_files
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
    done = subprocess.run(
        [sys.executable, "-c", FAISS_FUZZ, str(root)], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "done", done.stderr[-3000:]
