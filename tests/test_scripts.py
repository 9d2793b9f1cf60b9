"""Benchmarks count no decisions of a gate that failed: it retrieves, which would look like a judgment."""

import ast
import re
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_gates_of_benchmarks_raise(script):
    statements = ast.unparse(ast.parse(script.read_text(encoding="utf-8")))  # each on one line
    for call in re.findall(r"\bload_gate\(.*", statements):
        assert "on_error=" in call or ".threshold" in call or ".get_proxy()" in call
