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


def test_every_link_of_the_readme_leads_to_an_address(hook):
    text = hook.with_addresses((ROOT / "README.md").read_text(encoding="utf-8"), REPOSITORY)
    targets = re.findall(r"\]\(([^)\s#]+)", text)
    assert [target for target in targets if not target.startswith("https://")] == []
    paths = [target.partition("/main/")[2] for target in targets if target.startswith(REPOSITORY)]
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
    others = "![a b](docs/a.svg) [a](docs/a.md#part) [a](#here)"
    own = f"{REPOSITORY}/raw/main/docs/a.svg", f"{REPOSITORY}/blob/main/docs/a.md#part"
    assert hook.with_addresses(others, REPOSITORY) == f"![a b]({own[0]}) [a]({own[1]}) [a](#here)"


@pytest.mark.parametrize(("repository", "urls"), [("", False), (f"{REPOSITORY}/", True)])
def test_addresses_come_from_the_environment(hook, monkeypatch, repository, urls):
    monkeypatch.setenv("RGATE_REPOSITORY", repository)
    metadata = {}
    hook.CustomMetadataHook(str(ROOT), {}).update(metadata)
    assert metadata["readme"]["content-type"] == "text/markdown"
    assert (f"]({REPOSITORY}/" in metadata["readme"]["text"]) == urls
    assert metadata.get("urls", {}).get("Repository") == (REPOSITORY if urls else None)


def project_of(folder):
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]


THIN = ["distributions/langchain-rgate", "distributions/llama-index-selectors-rgate"]


@pytest.mark.parametrize("folder", THIN)
def test_a_thin_distribution_asks_for_exactly_this_version(folder):
    project = project_of(folder)
    asked = itertools.chain(project["dependencies"], *project["optional-dependencies"].values())
    versions = {each.partition("==")[2] for each in asked if each.startswith("rgate-integrations")}
    assert versions | {project["version"]} == {__version__}
    assert versions


# With extras: ".[local]", "rgate-integrations[local]".
REQUIREMENT = re.compile(r"(\.|[a-z][a-z-]*rgate[a-z-]*|rgate[a-z_-]*)\[([a-z,-]+)\]")
NAMED_BY_AN_ERROR = re.compile(r'(?:needs_extra\(|missing_dependency\(.*, )"([a-z-]+)"\)')


def test_distributions_and_extras_that_documents_and_errors_name_exist():
    extras = {}
    for project in map(project_of, (".", *THIN)):
        extras[project["name"]] = {*project.get("optional-dependencies", {})}
    extras["."] = extras["rgate-integrations"]
    kinds = ("*.md", "*.mdx", "*.py", "*.sh", "Makefile")
    folders = ("", "docs/**/", "cookbook/**/", "distributions/**/", "rgate_integrations/**/")
    paths = [path for folder in folders for kind in kinds for path in ROOT.glob(f"{folder}{kind}")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    installs = "\n".join(re.findall(".*pip install.*", text)).replace("{extra}", "local")
    asked = set(REQUIREMENT.findall(installs))
    assert len(asked) >= 8
    for name, wanted in asked:
        assert {*wanted.split(",")} <= extras[name]
    named = set(NAMED_BY_AN_ERROR.findall(text))
    assert len(named) >= 6
    assert named <= extras["."]


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


def test_the_guide_says_what_the_extra_all_brings():
    """Regression: it said "all but gpu, ray and serve", and mcp was not in it either."""
    (brought,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][
        "all"
    ]
    row = re.search(r"\| `all` \| (.*) \|", (ROOT / "docs/guides/command_line.md").read_text())
    assert re.findall("`(.*?)`", row[1]) == re.search(r"\[(.*)\]", brought)[1].split(",")
