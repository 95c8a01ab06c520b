"""The house's arrows and measures, read from the source: who may import whom, what is forbidden, what is too long."""

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
# The command line gathers every room's commands, inside functions, so that serving never loads them.
LAZY_IMPORTS = {"gateway/cli/main.py": {"mockgpu", "planner"}}
IMPURE = {"aiohttp", "asyncio", "os", "redis", "secrets", "socket", "subprocess", "threading", "time", "uvloop"}
RANDOM_TYPE_ONLY = {"random": {"Random"}}
# kvtransfer reaches the machine in these files and in transports/; the rest of it is plain functions and state.
KVTRANSFER_IO = {"asyncio", "ctypes", "fcntl", "mmap", "os", "select", "socket", "subprocess", "threading", "time"}
MAY_DO_IO = {
    "agent.py": KVTRANSFER_IO,
    "handles.py": {"asyncio", "os"},
    "lines.py": {"threading"},
    "hold.py": {"threading"},
    "clock.py": {"threading", "time"},
    "memory_files.py": {"fcntl", "mmap", "os"},
}
UNSAFE_MODULES = {"dill", "marshal", "pickle", "shelve"}
UNSAFE_CALLS = {"compile", "eval", "exec"}
# A request runs as an errand until it must wait as a Task (gateway/http/eager_task.py): what asks for the current Task would
# find none, or somebody else's. `within` makes one first; the lobby's requests have one.
NEED_A_TASK = {"current_task", "timeout", "timeout_at", "wait_for"}
MAY_NEED_A_TASK = {"errand.py": {"timeout"}, "lobby.py": {"current_task"}}
OFF_THE_REQUESTS_PATH = {
    *("admin.py", "app.py", "cli.py", "config", "demo.py", "docgen.py", "lifecycle.py", "live", "reload", "restart"),
    *("shared", "watch", "workers"),
}
MOST_LINES_OF_A_FUNCTION, MOST_LINES_OF_A_FILE = 60, 600

FILES = sorted(path for room in MAY_IMPORT for path in (ROOT / room).rglob("*.py"))
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))


def imports(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """Modules imported anywhere below `tree`, with the names taken from them (none: the module itself)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, set()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute here"
            yield node.module or "", {alias.name for alias in node.names}


def lazy(tree: ast.Module) -> set[str]:
    """Rooms imported inside functions only."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {node for function in functions for node in ast.walk(function)}
    eager = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) and node not in inside]
    return rooms(tree) - rooms(ast.Module(eager, []))


def rooms(tree: ast.AST) -> set[str]:
    return {module.split(".")[0] for module, _ in imports(tree)} & MAY_IMPORT.keys()


@every_file
def test_rooms_import_only_along_the_arrows(path: Path) -> None:
    tree, name = ast.parse(path.read_text()), path.relative_to(ROOT)
    excused = LAZY_IMPORTS.get(name.as_posix(), set()) & lazy(tree)
    assert rooms(tree) - {name.parts[0]} - MAY_IMPORT[name.parts[0]] - excused == set()


@every_file
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    tree = ast.parse(path.read_text())
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert calls & UNSAFE_CALLS == set()
    assert {module.split(".")[0] for module, _ in imports(tree)} & UNSAFE_MODULES == set()


@every_file
def test_no_function_writes_to_its_module(path: Path) -> None:
    assert not [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Global)]


@every_file
def test_functions_and_files_stay_small(path: Path) -> None:
    source = path.read_text()
    assert source.count("\n") <= MOST_LINES_OF_A_FILE
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < MOST_LINES_OF_A_FUNCTION, f"{node.name} is too long"


@pytest.mark.parametrize("path", sorted((ROOT / "policies").rglob("*.py")), ids=lambda path: path.name)
def test_policies_are_pure(path: Path) -> None:
    for module, names in imports(ast.parse(path.read_text())):
        top = module.split(".")[0]
        assert top not in IMPURE
        assert top not in RANDOM_TYPE_ONLY or (names and names <= RANDOM_TYPE_ONLY[top])


@pytest.mark.parametrize("path", sorted((ROOT / "kvtransfer").rglob("*.py")), ids=lambda path: path.name)
def test_kvtransfer_does_io_only_at_its_edge(path: Path) -> None:
    name = path.relative_to(ROOT / "kvtransfer")
    allowed = KVTRANSFER_IO if name.parts[0] == "transports" else MAY_DO_IO.get(name.as_posix(), set())
    used = {module.split(".")[0] for module, _ in imports(ast.parse(path.read_text()))} & KVTRANSFER_IO
    assert used - allowed == set()


def taken_from_asyncio(tree: ast.AST) -> set[str]:
    """Names of asyncio that are used below `tree`, however they are reached."""
    found = {name for module, names in imports(tree) if module.split(".")[0] == "asyncio" for name in names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "asyncio":
            found.add(node.attr)
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "gateway").rglob("*.py")), ids=lambda path: path.name)
def test_nothing_on_a_requests_path_asks_for_a_task_that_may_not_be_there(path: Path) -> None:
    name = path.relative_to(ROOT / "gateway")
    if name.parts[0] not in OFF_THE_REQUESTS_PATH:
        used = taken_from_asyncio(ast.parse(path.read_text())) & NEED_A_TASK
        assert used == MAY_NEED_A_TASK.get(name.as_posix(), set()), "see `within` in gateway/http/eager_task.py"


@pytest.mark.parametrize("line", ["async with asyncio.timeout(1): ...", "from asyncio import wait_for as bounded"])
def test_every_way_to_such_a_name_is_seen(line: str) -> None:
    tree = ast.parse(f"import asyncio\nasync def waits():\n    {line}")
    assert taken_from_asyncio(tree) & NEED_A_TASK


def test_every_room_was_read() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(MAY_IMPORT)
