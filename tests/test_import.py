"""Importing is cheap and brings no heavy module."""

import json
import subprocess
import sys

import pytest

from rgate_integrations.errors import MissingDependencyError, needs_extra
from rgate_integrations.models.catalog import READER
from rgate_integrations.models.download import download
from rgate_integrations.models.encoder import ENCODER

BEFORE = "import json, sys; before = {name.partition('.')[0] for name in sys.modules}"
AFTER = "after = {name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names - before"
NEURAL = {"torch", "transformers", "sentence_transformers"}
HEAVY = {*NEURAL, "faiss", "langchain_core", "llama_index", "sklearn"}
LOADS = """
from rgate_integrations import load_gate, list_gates
list_gates()
load_gate("ik")
load_gate("constant:always").decide("who?")
"""
EMBEDS = "import rgate_integrations.langchain.vectorstore, rgate_integrations.llama_index.embeddings"
DECIDES = """
from rgate_integrations import load_gate
answer_gate = load_gate("answer:default,default-answer", on_error="raise")
answer_gate.decide("What is the capital of France?", draft="Paris")
assert load_gate(on_error="raise").decide("What does our contract say about late delivery?").retrieve
"""
SEARCHES = """
from rgate_integrations.index import Passage, PassageIndex
index = PassageIndex.build([Passage("1", "The Lena flows through Yakutsk.")])
assert index.search(["Which river?"], 1)[0][0].passage.id == "1"
"""
SHOWS_HELP = """
import contextlib, io
from rgate_integrations.cli import main
sys.argv = ["rgate", "--help"]
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main()
"""


def modules_after(code):
    """The packages that a script brings, beside the standard library."""
    whole = "\n".join((BEFORE, code, AFTER, "print(json.dumps([*after]))"))
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_importing_brings_nothing_but_the_standard_library():
    """So it takes milliseconds."""
    code = "import rgate_integrations\ntry: rgate_integrations.nothing\nexcept AttributeError: pass"
    assert modules_after(code) == {"rgate_integrations"}


def test_the_help_of_the_command_line_imports_no_more_than_it_shows():
    """Regression: it imported numpy, pydantic and the gates, and took 0.6 s."""
    assert modules_after(SHOWS_HELP) <= {
        "rgate_integrations",
        "typer",
        "click",
        "annotated_doc",
        "shellingham",
    }


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        (LOADS, HEAVY),
        (EMBEDS, {*NEURAL, "faiss"}),
    ],
)
def test_loading_brings_no_heavy_module(code, absent):
    assert absent & modules_after(code) == set()


@pytest.mark.model
def test_deciding_and_searching_need_neither_torch_nor_transformers(embedder_model):
    download(ENCODER)
    download(READER)
    assert NEURAL & modules_after(DECIDES + SEARCHES) == set()


def test_a_module_that_is_there_but_does_not_fit_is_not_said_to_be_missing():
    """Regression: it was "needed, but not installed"."""
    with (
        pytest.raises(
            MissingDependencyError,
            match=r"cannot import name 'no' from 'json'.* Hint: .*pip install --upgrade",
        ),
        needs_extra("local"),
    ):
        from json import no  # noqa: F401
    with (
        pytest.raises(MissingDependencyError, match=r"module 'nowhere' is needed.* Hint: .*\[serve\]\"$"),
        needs_extra("local"),
        needs_extra("serve"),
    ):
        import nowhere  # noqa: F401
