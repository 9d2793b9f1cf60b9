"""``rgate doctor`` names what is missing and the command that brings it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from rgate_integrations.cli import doctor
from rgate_integrations.cli.main import app
from rgate_integrations.models.catalog import CATALOGUE


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
    monkeypatch.setattr(doctor, "_MODULES", {"no_such_module": ("no-such", "local")})
    found = report()
    assert found["packages"] == {"no-such": None}
    assert found["missing"]["no-such"] == 'pip install "rgate-integrations[local]"'


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
