"""Importing is cheap and brings no heavy module."""

import subprocess
import sys


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_importing_the_package_brings_no_heavy_module():
    heavy = (
        "torch transformers langchain_core langchain llama_index faiss sentence_transformers sklearn pydantic"
    )
    code = f"import sys, rgate_integrations; print([m for m in '{heavy}'.split() if m in sys.modules])"
    assert run(code) == "[]"


def test_loading_a_gate_brings_no_torch():
    code = (
        "import sys; from rgate_integrations import load_gate, list_gates; list_gates(); load_gate('ik');"
        "load_gate('constant:always').decide('who?');"
        "print([m for m in ('torch', 'transformers', 'faiss', 'langchain_core') if m in sys.modules])"
    )
    assert run(code) == "[]"


def test_importing_brings_nothing_but_the_standard_library():
    """So it takes milliseconds; `python benchmarks/speed.py` measures them."""
    code = (
        "import sys; before = set(sys.modules); import rgate_integrations;"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(new - sys.stdlib_module_names))"
    )
    assert run(code) == "['rgate_integrations']"


def test_unknown_attributes_are_attribute_errors():
    code = "import rgate_integrations\ntry: rgate_integrations.nothing\nexcept AttributeError as e: print(e)"
    assert "no attribute 'nothing'" in run(code)
