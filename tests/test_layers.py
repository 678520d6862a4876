"""Who may import whom, and who may differentiate; read from the source, so that imports inside functions count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "gradreg"

# DESIGN.md, "May import": from left to right; within a layer without cycles
LAYERS = [
    {"errors", "_files"},
    {"batch", "scalars", "wrt", "schedules"},
    {"model"},
    {"engine"},
    {"penalties", "regularizers", "attribution", "tracin", "diagnosis", "distributed"},
    {"objective", "heads"},
    {"testing"},
    {"experiments", "conf"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
NOT_AT_MODULE_LEVEL = {"hydra", "omegaconf", "matplotlib", "transformers", "sklearn", "PIL"}
DERIVATIVES = {
    "backward",
    "grad",
    "grad_and_value",
    "hessian",
    "hvp",
    "jacfwd",
    "jacobian",
    "jacrev",
    "jvp",
    "linearize",
    "vhp",
    "vjp",
}
TRANSFORMS = {"functional_call", "stack_module_state", "vmap"}
MAY_DIFFERENTIATE = {"engine"}
MAY_TRANSFORM = {"engine", "model"}
ABOUT_VMAP = {"gradreg.testing.checks._against_loop"}  # compares vmap with a loop; all other truth is plain

SOURCES = sorted(path for path in PACKAGE.rglob("*.py"))
EVERY_FILE = pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in SOURCES}


def layer_of(module: str) -> str:
    """The part behind `gradreg.`; empty for the package itself."""
    return [*module.split("."), ""][1]


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[str, ast.AST]]:
    """Yield the full name of everything that is imported, `from a import b` as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                kept = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*kept, *([base] if base else [])])
            yield from ((f"{base}.{alias.name}", node) for alias in node.names)


def own_imports(path: Path) -> set[str]:
    """Modules of gradreg that a file imports."""
    found = set()
    for name, _ in imports(ast.parse(path.read_text()), module_name(path), path.name == "__init__.py"):
        if name.split(".")[0] != "gradreg":
            continue
        # `from gradreg.batch import Batch` gives gradreg.batch.Batch: cut to the module
        while name not in MODULES and "." in name:
            name = name.rpartition(".")[0]
        found.add(name)
    return found


@EVERY_FILE
def test_imports_go_to_the_left(path: Path) -> None:
    module = module_name(path)
    layer = layer_of(module)
    if not layer:
        return  # gradreg/__init__.py only names what is public
    assert layer in RANK, f"{layer} has no place in DESIGN.md's layers"
    for name in own_imports(path):
        other = layer_of(name)
        assert other, f"{module} imports the package gradreg itself; import from the module that defines the name"
        assert RANK[other] <= RANK[layer], f"{module} imports {name}, which lies to its right"


def test_no_cycles() -> None:
    graph = {module_name(path): own_imports(path) - {module_name(path)} for path in SOURCES}
    graph.pop("gradreg")
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail[trail.index(module) :], module])
        if module in done:
            return
        for other in graph.get(module, ()):
            visit(other, (*trail, module))
        done.add(module)

    for module in graph:
        visit(module, ())


@EVERY_FILE
def test_heavy_libraries_are_not_imported_at_module_level(path: Path) -> None:
    tree = ast.parse(path.read_text())
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    for name, node in imports(tree, module_name(path), path.name == "__init__.py"):
        assert name.split(".")[0] not in NOT_AT_MODULE_LEVEL or id(node) in inside, f"imports {name}"


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def derivatives_used(tree: ast.AST) -> Iterator[str]:
    """Yield what a file takes from torch.func and torch.autograd, and calls of `.backward()`."""
    places = (
        "torch.func",
        "torch.autograd",
        "torch.autograd.functional",
        "torch.autograd.forward_ad",
        "torch._functorch",
    )
    names: dict[str, str] = {}  # local name -> full name
    for name, node in imports(tree, "", False):
        if name.startswith("torch"):
            alias = next(a for a in node.names if name.endswith(a.name))
            names[alias.asname or (name if isinstance(node, ast.Import) else alias.name)] = name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, _, tail = dotted(node).partition(".")
            full = f"{names.get(head, head)}.{tail}"
        elif isinstance(node, ast.Name) and node.id in names:
            full = names[node.id]
        else:
            continue
        owner, _, last = full.rpartition(".")
        if (
            owner in places
            or owner.startswith("torch._functorch")
            or (last == "backward" and isinstance(node, ast.Attribute))
        ):
            yield last


@EVERY_FILE
def test_only_the_engine_differentiates(path: Path) -> None:
    layer = layer_of(module_name(path))
    used = set(derivatives_used(ast.parse(path.read_text())))
    if layer == "testing":
        allowed = {"grad", "vmap"} if module_name(path) in ABOUT_VMAP else {"grad"}
        assert not used & ((TRANSFORMS | DERIVATIVES) - allowed), used
        return
    if layer not in MAY_DIFFERENTIATE:
        assert not used & DERIVATIVES, used & DERIVATIVES
    if layer not in MAY_TRANSFORM:
        assert not used & TRANSFORMS, used & TRANSFORMS


def test_the_engine_does_differentiate() -> None:
    """The search finds what is there, so that its silence elsewhere means something."""
    engine = [path for path in SOURCES if layer_of(module_name(path)) == "engine"]
    used = {name for path in engine for name in derivatives_used(ast.parse(path.read_text()))}
    assert {"grad", "vmap", "vjp", "jvp"} <= used


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch.autograd.grad(a, b)", {"grad"}),
        ("from torch.autograd import grad as g\ng(a)", {"grad"}),
        ("from torch import autograd\nautograd.grad(a)", {"grad"}),
        ("import torch.func as tf\ntf.jacrev(f)", {"jacrev"}),
        ("from torch.func import vmap, hessian\nvmap(hessian(f))", {"vmap", "hessian"}),
        ("from torch import func\nfunc.vjp(f)", {"vjp"}),
        ("from torch.autograd.functional import jacobian\njacobian(f, x)", {"jacobian"}),
        ("loss.backward()", {"backward"}),
        ("import torch\nclass F(torch.autograd.Function):\n    pass", {"Function"}),
        ("x.grad.zero_()", set()),
        ("from torch import nn\nnn.Linear(1, 1)", set()),
    ],
)
def test_the_search_itself(source: str, found: set[str]) -> None:
    assert set(derivatives_used(ast.parse(source))) == found


@pytest.mark.parametrize(
    ("source", "package", "found"),
    [
        ("from gradreg.batch import Batch", False, "gradreg.batch.Batch"),
        ("from ..batch import Batch", False, "gradreg.batch.Batch"),
        ("from . import _request", False, "gradreg.engine._request"),
        ("from ._request import Request", True, "gradreg.engine._request.Request"),
        ("def f():\n    import gradreg.objective", False, "gradreg.objective"),
    ],
)
def test_the_reading_of_imports(source: str, package: bool, found: str) -> None:
    module = "gradreg.engine" if package else "gradreg.engine._plan"
    assert [name for name, _ in imports(ast.parse(source), module, package)] == [found]
