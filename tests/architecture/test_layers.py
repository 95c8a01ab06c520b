"""Tests that packages import each other only as imports.txt allows, and never in a cycle.

A package is two levels below a top-level folder (gateway.http), or a module in the folder itself
(gateway.app). Imports that are only for types count too.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT, SHIPPED, cycles, modules, package_of

TABLE = Path(__file__).with_name("imports.txt")
FOLDERS = (*SHIPPED, "tools")
MODULES = modules(*FOLDERS)
ALLOWED_FOLDERS = {
    "command_line": set(),
    "policies": set(),
    "kvtransfer": set(),
    "gateway": {"command_line", "policies", "kvtransfer"},
    "mockgpu": {"command_line", "kvtransfer", "policies"},
    "planner": {"command_line", "policies", "mockgpu", "kvtransfer"},
    "tools": {"command_line", "gateway", "policies", "planner"},
}
# The command line collects the commands of other folders inside functions, so that serving never
# loads them.
LAZY_IMPORTS = {
    "gateway.cli.plan": {"planner"},
    "gateway.cli.config_commands": {"planner"},
    "gateway.cli.doctor.command": {"planner"},
}


def allowed() -> dict[str, set[str]]:
    lines = [line for line in TABLE.read_text().splitlines() if line and line[0] != "#"]
    return {name: set(rest.split()) for name, _, rest in (line.partition(":") for line in lines)}


def actual() -> dict[str, set[str]]:
    edges: dict[str, set[str]] = defaultdict(set)
    for name, module in MODULES.items():
        package = package_of(name)
        edges[package] |= {package_of(other) for other in module.imported | module.imported_types}
        edges[package].discard(package)
    return dict(edges)


@pytest.mark.parametrize("package", sorted(actual()))
def test_a_package_imports_what_the_table_allows(package: str) -> None:
    assert actual()[package] - allowed().get(package, set()) == set()


def test_the_table_has_no_stale_line() -> None:
    packages = {package_of(name) for name in MODULES}
    named = {name for row in allowed().values() for name in row} | allowed().keys()
    assert named - packages == set()


def test_no_two_packages_import_each_other_and_none_in_a_cycle() -> None:
    # A folder's own __init__ is loaded before its packages and imports nothing.
    table = {name: row for name, row in allowed().items() if "." in name}
    assert cycles(table) == []


@pytest.mark.parametrize("name", sorted(MODULES))
def test_folders_import_only_along_the_arrows(name: str) -> None:
    module = MODULES[name]
    folder = name.split(".")[0]
    imported = {other.split(".")[0] for other in module.imported | module.imported_types}
    excused = LAZY_IMPORTS.get(name, set()) - eager_folders(module.tree)
    assert imported - {folder} - ALLOWED_FOLDERS[folder] - excused == set()


def eager_folders(tree: ast.Module) -> set[str]:
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    inside = {
        node
        for function in ast.walk(tree)
        if isinstance(function, functions)
        for node in ast.walk(function)
    }
    imports = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom | ast.Import) and node not in inside
    ]
    names = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in imports
        for alias in node.names
    }
    return {name.split(".")[0] for name in names}


def test_every_folder_is_read() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in (m.path for m in MODULES.values())} == set(
        FOLDERS
    )
