"""Ray: two local workers, shards that are done once, and a worker that dies."""

import json

import pytest

from rgate_integrations import load_gate
from rgate_integrations.errors import ConfigurationError, DataFormatError

ray = pytest.importorskip("ray", reason="ray comes with the dev extra")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        # Ray's workers are nice: on a busy machine they would wait for all others, and the tests for them.
        patch.setenv("RAY_worker_niceness", "0")
        ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        yield
        ray.shutdown()


@pytest.fixture
def shards(tmp_path):
    paths = []
    for n in range(3):
        path = tmp_path / f"part-{n}.jsonl"
        path.write_text(
            "".join(json.dumps({"id": i, "question": f"What is {n} + {i}?"}) + "\n" for i in range(5))
        )
        paths.append(path)
    return paths


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_are_decided_once_each(shards, tmp_path):
    from rgate_integrations.serving.ray import gate_files

    out, seen = tmp_path / "out", []
    results = gate_files(shards, out, "constant:never", workers=2, report=lambda *at: seen.append(at))
    assert [r.name for r in results] == [p.name for p in shards]
    assert seen == [(1, 3), (2, 3), (3, 3)]
    rows = lines(results[1])
    assert [r["question"] for r in rows] == [f"What is 1 + {i}?" for i in range(5)]
    assert rows[0] | {"reason": ""} == {
        "id": 0,
        "question": "What is 1 + 0?",
        "retrieve": False,
        "p_known": 1.0,
        "threshold": 0.5,
        "reason": "",
        "error": "",
    }
    results[1].unlink()
    results[0].write_text("left alone")
    with pytest.raises(ConfigurationError, match="made with something else"):
        gate_files(shards, out, "constant:always", workers=2)
    gate_files(shards, out, "constant:never", workers=2)
    assert results[0].read_text() == "left alone"
    assert lines(results[1])[0]["retrieve"] is False
    assert [path.name for path in out.glob(".*")] == [".made_with.json"]


def test_bad_files(shards, tmp_path):
    from rgate_integrations.serving.ray import gate_files

    with pytest.raises(DataFormatError, match="same name"):
        gate_files([shards[0], tmp_path / "x" / shards[0].name], tmp_path / "out")
    shards[0].write_text('{"query": "x"}\n')
    with pytest.raises(DataFormatError, match="line 1: no question"):
        gate_files(shards[:1], tmp_path / "out", "constant:never")
    assert not (tmp_path / "out" / shards[0].name).exists()


def test_a_data_set_gets_columns():
    from ray.data import DataContext, from_items

    from rgate_integrations.serving.ray import gate_dataset

    DataContext.get_current().enable_progress_bars = False
    rows = from_items([{"question": f"q{i}?", "n": i} for i in range(20)])
    found = gate_dataset(
        rows, load_gate("constant:random:0.5"), workers=2, batch_size=5, prefix="g_"
    ).take_all()
    assert sorted(r["n"] for r in found) == list(range(20))
    alone = {
        d.question: d.retrieve
        for d in load_gate("constant:random:0.5").decide_batch([r["question"] for r in found])
    }
    assert {r["question"]: r["g_retrieve"] for r in found} == alone


@pytest.mark.model
def test_a_worker_agrees_with_this_process(smollm2, shards, tmp_path):
    from rgate_integrations.serving.ray import gate_files

    gate = load_gate()
    (result,) = gate_files(shards[:1], tmp_path / "out", gate)
    here = gate.decide_batch([r["question"] for r in lines(shards[0])])
    assert [r["p_known"] for r in lines(result)] == pytest.approx([d.p_known for d in here], abs=1e-3)
    assert all(r["error"] == "" for r in lines(result))
