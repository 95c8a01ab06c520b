"""Reads the project's source files for the architecture tests, with Python's `ast` module.

It finds modules, imports, names and prose without importing the modules. So it also works for
modules that cannot be imported here.
"""

from __future__ import annotations

import ast
import gc
import io
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHIPPED = ("command_line", "policies", "kvtransfer", "gateway", "mockgpu", "planner")
PYTHON_FOLDERS = (*SHIPPED, "tools", "bench", "tests", "deploy")


@dataclass(frozen=True)
class Module:
    """One Python module of the project, with its source text and its imports.

    imported        project modules that it imports at run time
    imported_types  project modules that it imports only under TYPE_CHECKING
    outside         top-level names of all other packages that it imports
    """

    name: str
    path: Path
    source: str
    tree: ast.Module
    imported: frozenset[str]
    imported_types: frozenset[str]
    outside: frozenset[str]


@cache
def modules(*folders: str) -> Mapping[str, Module]:
    # Only imports of modules in `folders` count as imports of project modules. The build script
    # kvtransfer/setup.py is left out, because it is not part of the package.
    paths = {
        dotted_name(path): path
        for top in folders
        for path in sorted((ROOT / top).rglob("*.py"))
        if path != ROOT / "kvtransfer" / "setup.py"
    }
    # The trees have millions of objects, which stay. Collections that visit them would take longer
    # than the tests.
    gc.disable()
    try:
        return {name: _read(name, path, paths) for name, path in paths.items()}
    finally:
        gc.freeze()
        gc.enable()


def dotted_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def package_of(name: str) -> str:
    """Return the package to which a module belongs in imports.txt, the table of allowed imports.

    A package is two levels below a top-level folder: that of the module
    'gateway.http.engine_connections' is 'gateway.http'. A module directly in such a folder is a
    package by itself.
    """
    return ".".join(name.split(".")[:2])


def cycles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    # Return the groups of two or more nodes that reach each other (Tarjan's algorithm).
    #
    # Each group is sorted.
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in edges.get(node, ()):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = []
            while not group or group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                groups.append(sorted(group))

    for node in edges:
        if node not in index:
            visit(node)
    return groups


def prose(module: Module) -> str:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = (node for node in ast.walk(module.tree) if isinstance(node, documented))
    texts = [ast.get_docstring(node) or "" for node in nodes]
    tokens = tokenize.generate_tokens(io.StringIO(module.source).readline)
    texts += [token.string for token in tokens if token.type == tokenize.COMMENT]
    return "\n".join(texts)


def _read(name: str, path: Path, paths: Mapping[str, Path]) -> Module:
    source, tree, imports = _parse(path)
    run: set[str] = set()
    types: set[str] = set()
    outside: set[str] = set()
    for base, attribute, for_types in imports:
        full = f"{base}.{attribute}"
        target = full if full in paths else base if base in paths else None
        if target is None:
            if not for_types:
                outside.add(base.split(".")[0])
        elif target != name:
            (types if for_types else run).add(target)
    return Module(name, path, source, tree, frozenset(run), frozenset(types), frozenset(outside))


@cache
def _parse(path: Path) -> tuple[str, ast.Module, list[tuple[str, str, bool]]]:
    source = path.read_text()
    tree = ast.parse(source)
    return source, tree, list(_imports(tree, is_for_types=False))


def _imports(node: ast.AST, *, is_for_types: bool) -> Iterator[tuple[str, str, bool]]:
    # Yield (module, imported name or "", whether only for types) of every import below `node`.
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, "", is_for_types) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, "imports are absolute in this project"
            yield from ((child.module or "", alias.name, is_for_types) for alias in child.names)
        else:
            guarded = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from _imports(child, is_for_types=is_for_types or guarded)
