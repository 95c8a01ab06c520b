"""Which room may import which, and how long things may grow: the picture of docs/architecture.md, held."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "policies": set(),
    "kvtransfer": set(),
    "gateway": {"policies", "kvtransfer"},
    "mockgpu": {"kvtransfer"},
    "planner": {"policies", "mockgpu"},
}
IMPURE = {"asyncio", "socket", "aiohttp", "redis", "threading", "time", "os", "random", "datetime", "importlib"}
LONGEST_FUNCTION, LONGEST_FILE = 60, 450
FILES = [path for room in MAY_IMPORT for path in sorted((ROOT / room).rglob("*.py"))]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """(module, imported name or None) of every import anywhere in the file, lazy ones and those for types included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno} imports relatively"
            yield from ((node.module or "", alias.name) for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_room_imports_only_the_rooms_its_arrows_lead_to(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    reached = {module.split(".")[0] for module, _ in imports(path)} & set(MAY_IMPORT)
    assert reached - {room} <= MAY_IMPORT[room]


@pytest.mark.parametrize("path", [path for path in FILES if name(path).startswith("policies/")], ids=name)
def test_policies_read_no_clock_no_socket_and_no_chance(path: Path) -> None:
    impure = {
        module
        for module, imported in imports(path)
        if module.split(".")[0] in IMPURE and (module, imported) != ("random", "Random")
    }
    assert impure == set()


def test_only_the_command_line_imports_by_name_at_run_time() -> None:
    users = {
        name(path)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__"))
    }
    assert users == {"gateway/cli.py"}


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_and_functions_stay_short_and_nothing_is_global(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= LONGEST_FILE
    for node in ast.walk(ast.parse(text)):
        assert not isinstance(node, ast.Global), f"global in line {node.lineno}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or node.lineno) - node.lineno < LONGEST_FUNCTION, node.name


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_module_begins_by_saying_what_lives_there(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "no docstring"
