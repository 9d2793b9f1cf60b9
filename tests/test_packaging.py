"""What a package index shows: links that lead somewhere."""

import importlib.util
import itertools
import re
import tomllib
from pathlib import Path

import pytest

from rgate_integrations import __version__
from tests.test_docs import BLOCK, surroundings

pytest.importorskip("hatchling")

ROOT = Path(__file__).parent.parent
REPOSITORY = "https://example.org/rgate"


@pytest.fixture(scope="module")
def hook():
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("link", "made"),
    [
        ("[a](docs/a.md)", f"[a]({REPOSITORY}/blob/main/docs/a.md)"),
        ("![a b](docs/a.svg)", f"![a b]({REPOSITORY}/raw/main/docs/a.svg)"),
        ("[a](docs/a.md#part)", f"[a]({REPOSITORY}/blob/main/docs/a.md#part)"),
        ("[a](https://arxiv.org/abs/1)", "[a](https://arxiv.org/abs/1)"),
        ("[a](#here)", "[a](#here)"),
        ("a[0](x)", f"a[0]({REPOSITORY}/blob/main/x)"),
    ],
)
def test_links_to_files_become_addresses(hook, link, made):
    assert hook.with_addresses(link, REPOSITORY) == made


def test_the_readme_has_no_link_left_to_a_file_beside_it(hook):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert hook._RELATIVE.search(text), "the README links to files, or this test says nothing"
    for _, _, target in hook._RELATIVE.findall(text):
        assert (ROOT / target.split("#")[0]).exists(), target
    found = hook._RELATIVE.findall(hook.with_addresses(text, REPOSITORY))
    assert found == []


@pytest.mark.parametrize(("repository", "urls"), [("", False), (f"{REPOSITORY}/", True)])
def test_addresses_come_from_the_environment(hook, monkeypatch, repository, urls):
    monkeypatch.setenv("RGATE_REPOSITORY", repository)
    metadata = {}
    hook.CustomMetadataHook(str(ROOT), {}).update(metadata)
    assert metadata["readme"]["content-type"] == "text/markdown"
    assert (f"]({REPOSITORY}/" in metadata["readme"]["text"]) == urls
    assert metadata.get("urls", {}).get("Repository") == (REPOSITORY if urls else None)


@pytest.mark.parametrize("name", ["langchain-rgate", "llama-index-selectors-rgate"])
def test_a_thin_distribution_asks_for_exactly_this_version(name):
    project = tomllib.loads((ROOT / "distributions" / name / "pyproject.toml").read_text())["project"]
    asked = itertools.chain(project["dependencies"], *project["optional-dependencies"].values())
    ours = [each for each in asked if each.startswith("rgate-integrations")]
    assert ours
    assert project["version"] == __version__
    assert all(each.endswith(f"=={__version__}") for each in ours)


REQUIREMENT = re.compile(
    r"(?P<name>\.|[a-z][a-z-]*rgate[a-z-]*|rgate[a-z_-]*)\[(?P<extras>[a-z,-]+)\]"
)  # with extras: ".[local]", "rgate-integrations[local]"


def install_lines():
    """Yield every line of documents, scripts and messages that says what to install with pip."""
    kinds = ("*.md", "*.mdx", "*.py", "*.sh", "Makefile")
    folders = ("", "docs/**/", "cookbook/**/", "distributions/**/", "rgate_integrations/**/")
    for folder, kind in itertools.product(folders, kinds):
        for path in ROOT.glob(f"{folder}{kind}"):
            for line in path.read_text(encoding="utf-8").splitlines():
                if "pip install" in line:
                    yield path.relative_to(ROOT).as_posix(), line


def test_lines_for_pip_name_distributions_and_extras_that_exist():
    extras = {}
    for folder in (".", "distributions/langchain-rgate", "distributions/llama-index-selectors-rgate"):
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        extras[project["name"]] = {*project.get("optional-dependencies", {})}
    extras["."] = extras["rgate-integrations"]
    lines = list(install_lines())
    assert len(lines) >= 8
    checked = 0
    for path, line in lines:
        for found in REQUIREMENT.finditer(line.replace("{extra}", "local")):
            assert found["name"] in extras, (path, line)
            assert {*found["extras"].split(",")} <= extras[found["name"]], (path, line)
            checked += 1
    assert checked >= 8


def test_extras_that_errors_name_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set()
    for path in (ROOT / "rgate_integrations").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        named.update(re.findall(r'missing_dependency\([^"]*(?:"[^"]*"[^",]*)?, "([a-z-]+)"\)', text))
    assert len(named) >= 6
    assert named <= {*extras}


@pytest.mark.model
@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs/integrations").rglob("*.mdx")))
def test_the_blocks_of_a_page_for_langchain_run(page, monkeypatch, smollm2):
    from langchain_core.vectorstores import InMemoryVectorStore

    monkeypatch.syspath_prepend(str(ROOT / "distributions" / "langchain-rgate"))
    names = surroundings()
    names["vectorstore"] = InMemoryVectorStore(names["embeddings"])
    names["llm"] = names["chat_model"]
    blocks = BLOCK.findall((ROOT / "docs/integrations/langchain" / page).read_text(encoding="utf-8"))
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), names)  # noqa: S102
