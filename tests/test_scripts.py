"""The benchmarks and the cookbook use names that exist, as far as it can be told without running them."""

import ast
import dataclasses
import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("cookbook/*.py")])
PACKAGE = "rgate_integrations"


def parse(script: Path) -> ast.Module:
    return ast.parse(script.read_text(encoding="utf-8"))


def find_import(module: str, name: str | None = None) -> object:
    """Import as the statement would; AttributeError or ModuleNotFoundError if it cannot be done."""
    found = importlib.import_module(module)
    if name is None:
        return found
    try:
        return getattr(found, name)
    except AttributeError:
        return importlib.import_module(f"{module}.{name}")


def imports_of(tree: ast.Module) -> tuple[dict[str, object], list[str]]:
    """What of the package a script imports, by the name it has there; and what cannot be imported."""
    found: dict[str, object] = {}
    missing: list[str] = []
    for node in ast.walk(tree):
        wanted: list[tuple[str, str, str | None]] = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == PACKAGE:
            wanted = [(alias.asname or alias.name, node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            wanted = [(a.asname or a.name, a.name, None) for a in node.names if a.name.startswith(PACKAGE)]
        for local, module, name in wanted:
            try:
                found[local] = find_import(module, name)
            except ModuleNotFoundError as error:
                if error.name and not error.name.startswith(PACKAGE):
                    pytest.skip(f"{error.name} is not installed")
                missing.append(f"line {node.lineno}: {module} has no {name or 'such module'}")
    return found, missing


def has(owner: object, name: str) -> bool:
    """Whether a module or a class has an attribute; fields of a class count, with or without a default."""
    if hasattr(owner, name) or name in getattr(owner, "model_fields", {}):
        return True
    if dataclasses.is_dataclass(owner):
        return name in {field.name for field in dataclasses.fields(owner)}
    return any(name in vars(base).get("__annotations__", {}) for base in getattr(owner, "__mro__", ()))


def unknown_attributes(tree: ast.Module, names: dict[str, object]) -> list[str]:
    """Attributes read on imported modules and classes that they do not have."""
    unknown = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = names.get(node.value.id)
            if isinstance(owner, ModuleType | type) and not has(owner, node.attr):
                unknown.append(f"line {node.lineno}: {node.value.id} has no {node.attr}")
    return unknown


def unknown_arguments(tree: ast.Module, names: dict[str, object]) -> list[str]:
    """Keyword arguments of imported functions and classes that they do not take."""
    unknown = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        called = names.get(node.func.id)
        if not callable(called):
            continue
        parameters = inspect.signature(called).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            continue
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in parameters:
                unknown.append(f"line {node.lineno}: {node.func.id} takes no {keyword.arg}=")
    return unknown


def private_reads(tree: ast.Module) -> list[str]:
    """Private attributes of other objects: they may go at any time, and nothing would say so."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own:
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_script_uses_names_that_exist(script):
    tree = parse(script)
    names, missing = imports_of(tree)
    assert missing == []
    assert unknown_attributes(tree, names) == []
    assert unknown_arguments(tree, names) == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_script_reads_nothing_private(script):
    assert private_reads(parse(script)) == []


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("from rgate_integrations import load_gaet", "has no load_gaet"),
        ("from rgate_integrations.models.nowhere import x", "has no x"),
        ("from rgate_integrations.models import base\nbase.Prox", "base has no Prox"),
        ("from rgate_integrations import Decision\nDecision.retrieved", "Decision has no retrieved"),
        ("from rgate_integrations.models.local import LocalProxy\nLocalProxy(size=3)", "takes no size="),
        ("from rgate_integrations.models.local import shared_proxy\nshared_proxy()._padded([])", "._padded"),
    ],
)
def test_each_kind_of_broken_name_is_found(code, complaint):
    tree = ast.parse(code)
    names, missing = imports_of(tree)
    found = [
        *missing,
        *unknown_attributes(tree, names),
        *unknown_arguments(tree, names),
        *private_reads(tree),
    ]
    assert len(found) == 1
    assert complaint in found[0]


def test_what_exists_is_not_complained_of():
    tree = ast.parse(
        "from rgate_integrations import Decision\nfrom rgate_integrations.models.local import LocalProxy\n"
        "Decision.retrieve, LocalProxy.generate, LocalProxy(device='cpu').name, LocalProxy.__name__\n"
    )
    names, missing = imports_of(tree)
    assert [missing, unknown_attributes(tree, names), unknown_arguments(tree, names)] == [[], [], []]
    assert private_reads(tree) == []


@pytest.mark.parametrize(
    "script", [s for s in SCRIPTS if s.parent.name == "benchmarks"], ids=lambda s: s.name
)
def test_no_benchmark_counts_the_decisions_of_a_gate_that_failed(script):
    """A gate that fails retrieves; in a table that would look like a judgment."""
    silent = []
    for node in ast.walk(parse(script)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "load_gate":
            silent += [node.lineno] * ("on_error" not in {keyword.arg for keyword in node.keywords})
    reading = script.read_text().splitlines()
    decides = [
        n for n in silent if not any(word in reading[n - 1] for word in (".threshold", ".get_proxy()"))
    ]
    assert decides == []
