"""README and docs: every Python block runs alone, as a reader copies it; every figure is one that was measured."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rgate_integrations import load_gate
from rgate_integrations.gates.artifacts import TunedArtifact
from rgate_integrations.gates.folder import tuned_files
from rgate_integrations.models.base import PooledLayer
from rgate_integrations.runtime.files import write_folder
from tests.three_corpora import TEXTS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
WITH_CODE = {p.relative_to(ROOT).as_posix(): BLOCK.findall(p.read_text(encoding="utf-8")) for p in PAGES}
WITH_CODE = {name: blocks for name, blocks in WITH_CODE.items() if blocks}
BLOCKS = [
    pytest.param(name, block, id=f"{name}-{number}")
    for name, blocks in WITH_CODE.items()
    for number, block in enumerate(blocks, start=1)
]

SHOWN = re.compile(r"```python\n([^`]*)```\n\nIt prints:\n\n```text\n(.*?)```", re.DOTALL)
PROGRAMS = [
    pytest.param(program, output, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, (program, output) in enumerate(SHOWN.findall(page.read_text(encoding="utf-8")), start=1)
]
MEASURED = ROOT / "docs" / "benchmarks" / "index.md"


def test_the_pages_are_found():
    assert len(WITH_CODE) >= 7
    assert len(WITH_CODE["README.md"]) >= 4
    assert "tutorial-1" in [program.id for program in PROGRAMS]


def surroundings():
    """What the reader of a page has already: chains, a retriever, an index, models."""
    from langchain_core.documents import Document
    from langchain_core.embeddings import DeterministicFakeEmbedding
    from langchain_core.language_models import FakeListChatModel
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables import RunnableLambda, RunnablePassthrough
    from llama_index.core import Document as Node
    from llama_index.core import VectorStoreIndex
    from llama_index.core.embeddings import MockEmbedding
    from llama_index.core.llms import MockLLM

    class Nothing(BaseRetriever):
        def _get_relevant_documents(self, query, *, run_manager):
            return []

    class Handbook(BaseRetriever):
        def _get_relevant_documents(self, query, *, run_manager):
            return [Document(text) for text in TEXTS["leave"]]

    return {
        "rag_chain": {"context": Nothing(), "question": RunnablePassthrough()}
        | RunnableLambda(lambda found: f"with passages: {found['question']}"),
        "llm_chain": RunnableLambda(lambda q: f"without: {q}"),
        "retriever": Handbook(),
        "chat_model": FakeListChatModel(responses=["Shakespeare wrote it."]),
        "embeddings": DeterministicFakeEmbedding(size=8),
        "index": VectorStoreIndex.from_documents([Node(text="x")], embed_model=MockEmbedding(8)),
        "llm": MockLLM(),
    }


def tune_a_gate(folder):
    """Put a gate there that `rgate tune` might have made, with its second gate; they correct nothing."""
    for name, tokens, features in (("my-gate", 0, 0), ("my-gate/answer-first", 32, 5)):
        artifact = TunedArtifact(
            slope=1.0,
            bias=0.0,
            weight=np.zeros((1, 576), np.float32),
            head=np.zeros(features, np.float32),
            layers=(PooledLayer(18, "question", "mean"),),
            tokens=tokens,
            base_model="smollm2-135m-instruct",
            fingerprint="",
            llm="yours",
            threshold=0.5,
            provenance={"data": []},
        )
        write_folder(folder / name, tuned_files(artifact, "default"))


@pytest.mark.model
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("page", "block"), BLOCKS)
def test_a_block_runs_alone(page, block, smollm2, embedder_model, capsys, tmp_path, monkeypatch):
    write = smollm2.runner.generate
    # Nothing here depends on a long text, and 256 tokens of claims take 20 s.
    monkeypatch.setattr(
        smollm2.runner, "generate", lambda rows, tokens, *rest: write(rows, min(tokens, 8), *rest)
    )
    monkeypatch.chdir(tmp_path)
    if "my-gate" in block:
        tune_a_gate(tmp_path)
    names, question = surroundings(), "What is the capital of France?"
    exec(compile(block, page, "exec"), names)  # noqa: S102
    if page == "README.md" and "chain = " in block:
        assert names["chain"].invoke(question).endswith(question)
    if page == "README.md" and "retriever = " in block:
        assert names["retriever"].invoke(question) == []
    if page == "README.md" and "engine = " in block:
        assert question in str(names["engine"].query(question))
    if "print" in block:
        assert capsys.readouterr().out.strip()


@pytest.mark.model
def test_the_models_of_a_web_application_load_however_long_that_takes(caplog):
    """Regression: loading was cut short by the deadline for decisions, and the first requests were late, too."""
    (block,) = WITH_CODE["docs/guides/web.md"]
    names = surroundings()
    exec(compile(block.replace("timeout=2.0", "timeout=1e-9"), "web.md", "exec"), names)  # noqa: S102

    async def start():
        async with names["lifespan"](names["app"]):
            pass

    asyncio.run(start())
    assert caplog.text == ""
    assert names["gate"].invoke("Who wrote Hamlet?").error.type == "DecisionTimeoutError"


@pytest.mark.model
@pytest.mark.parametrize(("program", "output"), PROGRAMS)
def test_a_program_prints_what_its_page_shows(program, output, smollm2, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_begins_with_code_or_a_table_and_no_block_scrolls_sideways(page):
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert [line for block in blocks for line in block.splitlines() if len(line) > 80] == []
    if page.parent.name not in ("reference", "llama_index"):
        assert any(line.startswith(("|", "```", "--8<--")) for line in text.splitlines()[:20])


def rows_of(text):
    """The cells of every row of its tables, links read as their words."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [
        [re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", cell).strip() for cell in row[1:-1].split("|")]
        for row in rows
    ]


def test_every_figure_of_the_readme_is_one_that_was_measured():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    measured = rows_of(MEASURED.read_text(encoding="utf-8"))
    figures = [row for row in rows_of(readme) if re.search(r"\d", "".join(row))]
    assert len(figures) >= 15
    assert [row for row in figures if row not in [found[: len(row)] for found in measured]] == []
    prose = re.sub(r"```.*?```", "", readme, flags=re.DOTALL)
    prose = "\n".join(line for line in prose.splitlines() if not line.startswith("|"))
    assert re.findall(r"\d[\d.,]* (?:%|ms|points|s)\b", prose) == []


def test_what_was_measured_is_on_the_page_and_printed_by_the_command_that_it_names():
    page = ""
    text = MEASURED.read_text(encoding="utf-8").partition("## All claims")[2].partition("\n##")[0]
    lines = [line for line in text.splitlines() if re.match(r"\| .*`\w+\.py`", line)]
    assert len(lines) >= 25
    for line in lines:
        claim, figure, _, command, _ = (cell.strip() for cell in line[1:-1].split("|"))
        if link := re.search(r"\((\w+\.md)\)", claim):
            page = (MEASURED.parent / link[1]).read_text(encoding="utf-8")
        assert (ROOT / "benchmarks" / command.strip("`")).exists()
        assert command.strip("`") in page
        for number in re.findall(r"\d[\d.]*", figure):
            # What is skipped is the rest of what is retrieved.
            assert number in page or f"{100 - float(number):.1f}" in page, (claim, number)


def test_the_gate_of_the_contributing_guide_works():
    from tests.scripted_proxy import ScriptedProxy

    (block,) = BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    names = {}
    exec(block, names)  # noqa: S102
    gate = load_gate(names["ShortDraftGate"](), proxy=ScriptedProxy())
    decision = gate.decide("who?")
    assert decision.error is None
    assert decision.p_known == 1 - len(decision.draft.tokens) / 33
