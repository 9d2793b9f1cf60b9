"""LangChain: user code keeps its types under ``mypy --strict``; nothing becomes `Any`."""

import subprocess
import sys
from pathlib import Path

import pytest

# No type that a user sees is one of these: to read them all would take half of the time.
CONFIG = """
[mypy]
[mypy-torch.*,transformers.*]
follow_imports = skip
"""


def test_user_code_keeps_its_types(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(CONFIG)
    flags = ["--strict", "--warn-unused-ignores", "--follow-imports", "silent"]
    # `make type` follows imports in another way: in one cache each of the two would undo the other's work of 20 s.
    flags += ["--cache-dir", ".mypy_cache/langchain_types", "--config-file", str(tmp_path / "mypy.ini")]
    command = [sys.executable, "-m", "mypy", *flags, "tests/langchain_types.py"]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=600
    )
    assert ended.stdout.startswith("Success"), ended.stdout + ended.stderr
