"""The shape of the package: arrows point down, and nobody reaches into another's private parts."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import rgate_integrations

ROOT = Path(rgate_integrations.__file__).parent
PACKAGE = ROOT.name
FILES = sorted(ROOT.rglob("*.py"))
TREES = {file: ast.parse(file.read_text(encoding="utf-8")) for file in FILES}
EACH_FILE = pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))

LAYERS = [
    # From the bottom up. A file may import from its own layer and from those before it.
    {"errors", "decision", "prompts", "runtime"},
    {"models", "index"},
    {"gates.artifacts", "gates.folder", "gates.evidence"},
    {"gates"},
    {"engine"},
    {"answering"},
    {"tuning"},
    {"langchain", "llama_index", "serving"},
    {"cli"},
]


def module_of(file: Path) -> str:
    return ".".join([PACKAGE, *file.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")


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


GRAPH = {module: sorted(set(imports_of(TREES[file]))) for module, file in MODULES.items()}


def test_there_is_no_circle_between_files():
    TopologicalSorter(GRAPH).prepare()
    with pytest.raises(CycleError):  # it finds those that there are
        TopologicalSorter({"a": ["b"], "b": ["c"], "c": ["a"]}).prepare()


def layer_of(module: str) -> int:
    _, *parts = module.split(".")
    for room in (".".join(parts[:2]), parts[0]):  # a room in a room may be below it
        for place, names in enumerate(LAYERS):
            if room in names:
                return place
    raise AssertionError(f"{module} has no place in the layers")


def test_arrows_point_down_and_adapters_do_not_know_each_other():
    wrong = []
    for module, imported in GRAPH.items():
        for other in imported:
            if PACKAGE in (module, other):  # the package itself only names things
                continue
            mine, theirs = module.split(".")[1], other.split(".")[1]
            beside = mine in LAYERS[-2] and theirs in LAYERS[-2] and mine != theirs
            if layer_of(other) > layer_of(module) or beside:
                wrong.append(f"{module} -> {other}")
    assert wrong == []


def private_reads(tree: ast.Module) -> list[str]:
    """Reads of ``x._name`` where the file itself defines no such name: x belongs to somebody else."""
    own = {"_exit", "_replace"}  # of os and of named tuples, public for all that
    own |= {"_reorder_linear_weight", "_linear_pointwise"}  # operators of torch, which have no other names
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own.add(node.name)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_itself = ast.unparse(node.value) in ("self", "cls", "super()")
            name = node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            # The same, written another way.
            of_itself = False
            name = ast.unparse(node.args[1]).strip("'")
        else:
            continue
        if name.startswith("_") and not name.startswith("__") and not of_itself and name not in own:
            found.append(ast.unparse(node))
    return found


@EACH_FILE
def test_nothing_private_of_another_module_is_read_or_imported(file):
    taken = []
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            taken += [alias.name for alias in node.names if alias.name.startswith("_")]
    assert [name for name in taken if not name.startswith("__")] == []
    assert private_reads(TREES[file]) == []


def test_private_reads_are_found():
    tree = ast.parse(
        "class A:\n def f(self, b):\n  self._x = 1\n  b._x\n  b._y\n  super()._z\n  getattr(b, '_q')"
    )
    assert sorted(private_reads(tree)) == ["b._y", "getattr(b, '_q')"]


def test_files_are_of_a_size_that_one_reads():
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in FILES}
    assert {name: n for name, n in lengths.items() if n > 500} == {}


def test_the_public_face_is_small():
    names = []
    for file in FILES:
        for node in TREES[file].body if file.name == "__init__.py" else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names += ast.literal_eval(node.value)
    assert len(names) <= 50, sorted(names)
