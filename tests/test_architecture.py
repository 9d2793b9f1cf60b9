"""The shape of the package. That arrows point down is checked by import-linter (`make lint`), see pyproject.toml."""

import ast
from pathlib import Path

import rgate_integrations

ROOT = Path(rgate_integrations.__file__).parent
PACKAGE = ROOT.name
TREES = {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(ROOT.rglob("*.py"))}
NODES = [(file, node) for file, tree in TREES.items() for node in ast.walk(tree)]


def test_nothing_private_of_another_module_is_imported():
    taken = []
    for file, node in NODES:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            private = [alias.name for alias in node.names if alias.name.startswith("_")]
            taken += [f"{file.name}: {name}" for name in private if not name.startswith("__")]
    assert taken == []


def test_files_and_functions_are_of_a_size_that_one_reads():
    long = [file.name for file in TREES if len(file.read_text(encoding="utf-8").splitlines()) > 500]
    for file, node in NODES:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 60:
            long.append(f"{file.name}: {node.name}")
    assert long == []


def test_the_public_face_is_small():
    names = []
    for file, tree in TREES.items():
        for node in tree.body if file.name == "__init__.py" else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names += ast.literal_eval(node.value)
    assert len(names) <= 66, sorted(names)
