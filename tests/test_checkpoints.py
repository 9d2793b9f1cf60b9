"""Checkpoints of a training run: only whole ones, and only those of the very same run, are gone on from."""

import dataclasses
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.tuning.training.target_trainer import Row, prepare, seal
from rgate_integrations.tuning.training.trainer import Recipe, Run

RECIPE = Recipe(epochs=4, learning_rate=2e-3, batch_size=4)
FILES = ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


def checkpoint(checkpoints, number, *, sealed=True):
    folder = checkpoints / f"checkpoint-{number}"
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_bytes(f"what {name} has in it".encode() * 20)
    if sealed:
        seal(folder)
    return folder


def names(checkpoints):
    return sorted(path.name for path in checkpoints.glob("checkpoint-*"))


def test_only_the_very_same_run_is_resumed(tmp_path):
    """The number of rows told runs apart before: other labels for as many questions went on from the old weights."""
    rows, others = [Row((1,), (2,), 1.0)], [Row((1,), (3,), 1.0)]
    run, checkpoints = Run("m", "weights", RECIPE, 0), tmp_path / "checkpoints"
    assert not prepare(checkpoints, run.identity(rows), resume=True)
    assert not prepare(checkpoints, run.identity(rows), resume=True), "there is nothing to go on from"
    kept = checkpoint(checkpoints, 1)
    assert prepare(checkpoints, run.identity(rows), resume=True)
    for changes in ({"seed": 1}, {"fingerprint": "other"}, {"recipe": RECIPE.with_options(epochs=9)}):
        with pytest.raises(ConfigurationError, match="other data"):
            prepare(checkpoints, dataclasses.replace(run, **changes).identity(rows), resume=True)
    with pytest.raises(ConfigurationError, match="other data") as refused:
        prepare(checkpoints, run.identity(others), resume=True)
    assert "--resume" in refused.value.hint
    assert kept.exists(), "a refusal destroys nothing"
    assert not prepare(checkpoints, run.identity(others), resume=False)
    assert not kept.exists()


def test_a_checkpoint_that_a_kill_left_half_written_is_not_gone_on_from(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    prepare(checkpoints, "this run", resume=False)
    checkpoint(checkpoints, 2, sealed=False)
    checkpoint(checkpoints, 1)
    assert prepare(checkpoints, "this run", resume=True)
    assert names(checkpoints) == ["checkpoint-1"]
    shutil.rmtree(checkpoints / "checkpoint-1")
    checkpoint(checkpoints, 3, sealed=False)
    assert not prepare(checkpoints, "this run", resume=True), "nothing is left: begin anew"


def damaged(checkpoints, name, harm):
    """Prepare a folder of two checkpoints, of which the later one has a damaged file; returns what is left."""
    shutil.rmtree(checkpoints, ignore_errors=True)
    prepare(checkpoints, "this run", resume=False)
    checkpoint(checkpoints, 2)
    file = checkpoint(checkpoints, 4) / name
    (checkpoints / "checkpoint-4" / "rng_state_1.pth").write_bytes(b"what another process adds is no damage")
    content = harm(file.read_bytes())
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    assert prepare(checkpoints, "this run", resume=True)
    return names(checkpoints)


@pytest.mark.parametrize(
    ("name", "harm", "left"),
    [
        ("optimizer.pt", lambda content: content, ["checkpoint-2", "checkpoint-4"]),
        ("optimizer.pt", lambda content: None, ["checkpoint-2"]),
        ("checksums.json", lambda content: b"[]", ["checkpoint-2"]),
        ("checksums.json", lambda content: b"{}", ["checkpoint-2"]),
        *((name, lambda content: content[:60], ["checkpoint-2"]) for name in (*FILES, "checksums.json")),
    ],
)
def test_a_checkpoint_with_a_cut_file_is_dropped(tmp_path, name, harm, left):
    assert damaged(tmp_path / "c", name, harm) == left


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from([*FILES, "checksums.json"]), at=st.integers(0, 300), bit=st.integers(0, 7))
def test_a_checkpoint_with_a_flipped_bit_is_dropped_and_the_one_before_is_used(name, at, bit, tmp_path):
    """One deep inside of `optimizer.pt` reached torch before, which raised errors of its own."""

    def flipped(content):
        return content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :]

    assert damaged(tmp_path / "c", name, flipped) == ["checkpoint-2"]
