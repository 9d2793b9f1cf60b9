"""Ray Data on two local workers: each question gets the decision that the gate makes in this process."""

import pytest

from rgate_integrations import load_gate

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray", reason="ray comes with the dev extra")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        # Ray's workers are nice: on a busy machine they would wait for all others, and the tests for them.
        patch.setenv("RAY_worker_niceness", "0")
        ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        yield
        ray.shutdown()


@pytest.mark.parametrize(
    "gate", ["constant:random:0.5", pytest.param("default", marks=pytest.mark.model), "popularity"]
)
def test_a_data_set_gets_columns(gate, smollm2):
    from ray.data import DataContext, from_items

    from rgate_integrations.serving.ray import gate_dataset

    DataContext.get_current().enable_progress_bars = False
    rows = from_items([{"question": f"What is {number} + 1?", "n": number} for number in range(20)])
    found = gate_dataset(rows, gate, concurrency=2, batch_size=5).take_all()
    assert sorted(row["n"] for row in found) == list(range(20))
    here = load_gate(gate).decide_batch([row["question"] for row in found])
    for row, decision in zip(found, here, strict=True):
        assert row["retrieve"] == decision.retrieve
        assert row["p_known"] == pytest.approx(decision.p_known, abs=1e-3)
        assert row["error"] == ("" if decision.error is None else decision.error.message)
