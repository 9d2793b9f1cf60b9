"""Importing is cheap and brings no heavy module."""

import subprocess
import sys

NEW = "print(sorted({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names - before))"


def modules_after(code):
    """The packages that a script brings, beside the standard library."""
    whole = f"import sys; before = {{name.partition('.')[0] for name in sys.modules}}\n{code}\n{NEW}"
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_brings_nothing_but_the_standard_library():
    """So it takes milliseconds."""
    code = "import rgate_integrations\ntry: rgate_integrations.nothing\nexcept AttributeError: pass"
    assert modules_after(code) == "['rgate_integrations']"


def test_loading_a_gate_brings_no_heavy_module():
    code = (
        "from rgate_integrations import load_gate, list_gates; list_gates(); load_gate('ik')\n"
        "load_gate('constant:always').decide('who?')"
    )
    found = modules_after(code)
    for heavy in ("torch", "transformers", "faiss", "langchain_core", "llama_index", "sklearn"):
        assert f"'{heavy}'" not in found
