"""The shape of the package: arrows point down, and nobody reaches into another's private parts."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import rgate_integrations

ROOT = Path(rgate_integrations.__file__).parent
PACKAGE = ROOT.name
FILES = sorted(ROOT.rglob("*.py"))
TREES = {file: ast.parse(file.read_text(encoding="utf-8")) for file in FILES}


def module_of(file: Path) -> str:
    parts = [PACKAGE, *file.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file): file for file in FILES}


def imports_of(tree: ast.Module) -> Iterator[str]:
    """Every module of the package that a file imports, anywhere in it: inside functions and for types too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in MODULES:
                    yield inner
                elif node.module in MODULES:
                    yield node.module


GRAPH = {module_of(file): sorted(set(imports_of(tree))) for file, tree in TREES.items()}


def circles(graph: dict[str, list[str]]) -> list[list[str]]:
    """Strongly connected parts of more than one module (Tarjan), and modules that import themselves."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            part = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(part) > 1 or name in graph[name]:
                found.append(sorted(part))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def test_there_is_no_circle_between_files():
    assert circles(GRAPH) == []


def test_circles_are_found():
    assert circles({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]}) == [["a", "b", "c"]]
    assert circles({"a": ["a"]}) == [["a"]]
    assert circles({"a": ["b"], "b": []}) == []


LAYERS = [
    # From the bottom up. A file may import from its own layer and from those before it.
    {"errors", "decision", "prompts", "runtime"},
    {"models", "index"},
    {"artifacts", "evidence"},
    {"gates"},
    {"engine"},
    {"claims", "answering"},
    {"training", "tuning"},
    {"langchain", "llama_index", "serving"},
    {"cli"},
]


def layer_of(module: str) -> int | None:
    """The layer of a module; None for the package itself, which only names things."""
    if module == PACKAGE:
        return None
    part = module.split(".")[1]
    places = [place for place, names in enumerate(LAYERS) if part in names]
    assert places, f"{module} has no place in the layers"
    return places[0]


def test_arrows_point_down():
    wrong = []
    for module, imported in GRAPH.items():
        mine = layer_of(module)
        for other in imported:
            theirs = layer_of(other)
            if mine is not None and theirs is not None and theirs > mine:
                wrong.append(f"{module} -> {other}")
    assert wrong == []


def test_adapters_do_not_know_each_other():
    adapters = ("langchain", "llama_index", "serving")
    for module, imported in GRAPH.items():
        mine = module.split(".")[1] if "." in module else ""
        if mine in adapters:
            others = {f"{PACKAGE}.{a}" for a in adapters if a != mine}
            assert not [o for o in imported if o.startswith(tuple(others))], module


def private_reads(tree: ast.Module) -> list[str]:
    """Reads of ``x._name`` where the file itself defines no such name: x belongs to somebody else."""
    own = {"_exit"}  # of os, which is public for all that
    own |= {"_reorder_linear_weight", "_linear_pointwise"}  # operators of torch, which have no other names
    own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
        if isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            own |= {target.id for target in targets if isinstance(target, ast.Name)}
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
            continue
        of_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        of_its_base = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super"
        if not of_itself and not of_its_base and node.attr not in own:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def private_by_name(tree: ast.Module) -> list[str]:
    """``getattr(x, "_name")`` is the same, written another way."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            name = node.args[1] if len(node.args) > 1 else None
            text = str(name.value) if isinstance(name, ast.Constant) else ""
            if text.startswith("_") and not text.startswith("__"):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_private_attribute_of_another_modules_object_is_read(file):
    assert private_reads(TREES[file]) + private_by_name(TREES[file]) == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_private_name_of_another_module_is_imported(file):
    taken = []
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            taken += [alias.name for alias in node.names if alias.name.startswith("_")]
    assert [name for name in taken if not name.startswith("__")] == []


def test_private_reads_are_found():
    tree = ast.parse(
        "class A:\n def f(self, b):\n  self._x = 1\n  b._x\n  b._y\n  super()._z\n  getattr(b, '_q')"
    )
    assert private_reads(tree) == ["line 5: b._y"]
    assert private_by_name(tree) == ["line 7: getattr(b, '_q')"]


def test_files_are_of_a_size_that_one_reads():
    long = {str(f.relative_to(ROOT)): n for f in FILES if (n := len(f.read_text().splitlines())) > 500}
    assert long == {}


def test_the_public_face_is_small():
    names = [name for module in MODULES for name in public_names(module)]
    assert len(names) <= 48, sorted(names)


def public_names(module: str) -> list[str]:
    """What a package's ``__all__`` offers; files have one where that helps their readers, and it is not counted."""
    file = MODULES[module]
    if file.name != "__init__.py":
        return []
    for node in TREES[file].body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []
