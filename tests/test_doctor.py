"""``rgate doctor`` names what is missing and the command that brings it."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from rgate_integrations.cli import doctor
from rgate_integrations.cli.main import app
from rgate_integrations.models.catalog import CATALOGUE
from rgate_integrations.models.download import cached_path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "_devices", lambda: ["cpu (2 threads)"])
    return tmp_path / "cache"


def report() -> dict:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 1
    return json.loads(result.stdout)


def test_an_empty_cache_is_not_made_and_every_entry_has_its_command(cache):
    found = report()
    assert found["cache"]["folder"] == str(cache)
    assert found["cache"]["writable"] is True
    assert found["cache"]["free_gb"] > 0
    assert found["cache"]["entries"] == dict.fromkeys(CATALOGUE, False)
    for name in CATALOGUE:
        assert found["missing"][name] == f"rgate download {name}"
    assert not cache.exists()


def test_what_is_cached_is_not_missing(cache):
    (cache / "all-minilm-l6-v2").mkdir(parents=True)
    (cache / "all-minilm-l6-v2" / "rgate.json").write_text("{}")
    found = report()
    assert found["cache"]["entries"]["all-minilm-l6-v2"] is True
    assert "all-minilm-l6-v2" not in found["missing"]


def test_a_package_that_is_not_installed_has_its_extra(cache, monkeypatch):
    monkeypatch.setattr(doctor, "_MODULES", {"no_such_module": (("no-such",), "local")})
    found = report()
    assert found["packages"] == {"no-such": None}
    assert found["missing"]["no-such"] == 'pip install "rgate-integrations[local]"'


def test_a_module_from_another_distribution_is_found(cache, monkeypatch):
    monkeypatch.setattr(doctor, "_MODULES", {"numpy": (("no-such", "numpy"), "local")})
    found = report()
    assert list(found["packages"]) == ["numpy"]
    assert found["packages"]["numpy"]
    assert "no-such" not in found["missing"]


def test_a_cache_that_cannot_be_written(cache, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    cache.write_text("a file")
    assert report()["cache"]["writable"] is False
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "RGATE_CACHE" in result.stdout


def test_the_page_for_people(cache, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    for word in ("python", "torch", "cpu (2 threads)", "not downloaded"):
        assert word in result.stdout
    for name in CATALOGUE:  # whole, to be copied, even in a narrow terminal
        assert f"  rgate download {name}" in result.stdout.splitlines()


def test_devices():
    found = doctor._devices()
    assert found[0].startswith("cpu (")
    assert str(os.cpu_count()) in found[0]


# --- the contents of the cache -----------------------------------------------------------------------------


@pytest.fixture
def embedder(cache, monkeypatch):
    """The folder of an embedder as a download leaves it."""
    import hashlib

    from rgate_integrations.models import download

    folder = cache / "all-minilm-l6-v2"
    (folder / "1_Pooling").mkdir(parents=True)
    for name, content in (
        ("model.safetensors", b"w" * 50),
        ("config.json", b"{}"),
        ("1_Pooling/config.json", b"{}"),
    ):
        (folder / name).write_bytes(content)
    item = replace(CATALOGUE["all-minilm-l6-v2"], sha256=hashlib.sha256(b"w" * 50).hexdigest())
    download._write_manifest(item, "index", folder)
    return folder


def verify():
    done = CliRunner().invoke(app, ["doctor", "--verify", "--json"])
    return done.exit_code, json.loads(done.stdout)["verified"]


def test_a_cache_as_it_was_downloaded_is_said_to_be_so(embedder):
    assert verify() == (0, {"all-minilm-l6-v2": {"changed": [], "unchecked": [], "mend": ""}})
    assert "all-minilm-l6-v2: as downloaded" in CliRunner().invoke(app, ["doctor", "--verify"]).stdout
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert "verified" not in json.loads(done.stdout), "it reads gigabytes: only when it is asked for"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "1_Pooling/config.json"])
def test_a_file_of_equal_size_that_was_changed_is_found(embedder, name):
    content = (embedder / name).read_bytes()
    (embedder / name).write_bytes(b"x" + content[1:])
    assert cached_path("all-minilm-l6-v2") == embedder, "its size is what it was"
    code, found = verify()
    assert (code, found["all-minilm-l6-v2"]["changed"]) == (1, [name])
    assert found["all-minilm-l6-v2"]["mend"] == f"remove {embedder}, then: rgate download all-minilm-l6-v2"
    done = CliRunner().invoke(app, ["doctor", "--verify"])
    assert f"changed since the download: {name}" in done.stdout.replace("\n", "")


def test_a_file_that_was_not_downloaded_is_found(embedder):
    (embedder / "modeling.py").write_text("x")
    assert verify()[1]["all-minilm-l6-v2"]["changed"] == ["modeling.py"]


def test_an_earlier_version_kept_the_checksum_of_the_weights_alone(embedder):
    manifest = json.loads((embedder / "rgate.json").read_text())
    del manifest["checksums"]
    (embedder / "rgate.json").write_text(json.dumps(manifest))
    code, found = verify()
    assert code == 0
    assert found["all-minilm-l6-v2"]["unchecked"] == ["1_Pooling/config.json", "config.json"]
    (embedder / "model.safetensors").write_bytes(b"x" * 50)
    assert verify()[1]["all-minilm-l6-v2"]["changed"] == ["model.safetensors"]
