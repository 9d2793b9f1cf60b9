"""Benchmarks count no decisions of a gate that failed: it retrieves, which would look like a judgment."""

import ast
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_gates_of_benchmarks_raise(script):
    text = script.read_text(encoding="utf-8")
    silent = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "load_gate":
            line = text.splitlines()[node.lineno - 1]
            decides = ".threshold" not in line and ".get_proxy()" not in line
            if decides and "on_error" not in [keyword.arg for keyword in node.keywords]:
                silent.append(line)
    assert silent == []
