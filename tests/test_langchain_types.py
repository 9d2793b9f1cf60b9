"""LangChain: user code keeps its types under ``mypy --strict``; nothing becomes `Any`."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def test_user_code_keeps_its_types():
    pytest.importorskip("mypy")
    flags = ["--strict", "--warn-unused-ignores", "--follow-imports", "silent"]
    command = [sys.executable, "-m", "mypy", *flags, "tests/langchain_types.py"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ended.stdout.startswith("Success"), ended.stdout + ended.stderr
