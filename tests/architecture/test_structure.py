"""Tests of limits on the shipped packages: sizes of modules and functions, line widths and names.

A limit also applies to the share of code that does I/O.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.architecture.sources import ROOT, SHIPPED, Module, cycles, modules, package_of

MAX_FUNCTION_LINES = 60
MAX_FUNCTION_LINES_P95 = 25
MAX_FILE_LINES = 600
MAX_COLUMNS = 100
MAX_WIDE_LINES_PERCENT = 2.0
MAX_ROOT_MODULES = 6
MAX_SHARED_CLASS_NAMES = 20
MIN_IO_FREE_PERCENT = 45.0
IO_MODULES = frozenset(
    [
        "asyncio",
        "socket",
        "aiohttp",
        "redis",
        "threading",
        "time",
        "os",
        "select",
        "subprocess",
        "ssl",
        "http",
        "signal",
        "uvloop",
        "multiprocessing",
        "concurrent",
        "shutil",
        "tempfile",
        "mmap",
        "selectors",
    ]
)

MODULES = modules(*SHIPPED)


def functions() -> Iterator[tuple[str, int]]:
    for module in MODULES.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield (
                    f"{module.name}.{node.name}",
                    (node.end_lineno or node.lineno) - node.lineno + 1,
                )


def test_no_function_is_longer_than_a_page() -> None:
    assert [name for name, lines in functions() if lines > MAX_FUNCTION_LINES] == []


def test_nineteen_of_twenty_functions_fit_a_small_window() -> None:
    lengths = sorted(lines for _, lines in functions())
    assert lengths[int(len(lengths) * 0.95)] <= MAX_FUNCTION_LINES_P95


def test_no_file_is_too_long_to_read_at_once() -> None:
    assert [
        name for name, module in MODULES.items() if module.source.count("\n") > MAX_FILE_LINES
    ] == []


def test_nearly_all_lines_fit_the_line_length() -> None:
    lines = [line for module in MODULES.values() for line in module.source.splitlines()]
    wide = sum(len(line) > MAX_COLUMNS for line in lines)
    assert 100 * wide / len(lines) <= MAX_WIDE_LINES_PERCENT


def test_the_root_of_the_gateway_keeps_the_spine_only() -> None:
    root = [path.name for path in (ROOT / "gateway").glob("*.py") if path.name != "__init__.py"]
    assert len(root) <= MAX_ROOT_MODULES, root


def classes() -> dict[str, set[str]]:
    defined: dict[str, set[str]] = defaultdict(set)
    for module in MODULES.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined[node.name].add(module.name)
    return defined


def test_class_names_have_one_meaning() -> None:
    shared = {name: places for name, places in classes().items() if len(places) > 1}
    assert len(shared) <= MAX_SHARED_CLASS_NAMES, shared


def test_no_two_classes_of_one_package_share_a_name() -> None:
    for name, places in classes().items():
        packages = [package_of(place) for place in places]
        assert len(set(packages)) == len(packages), f"{name} is defined in {sorted(places)}"


def test_no_modules_import_each_other_in_a_cycle_not_even_for_types() -> None:
    edges = {
        name: sorted(module.imported | module.imported_types) for name, module in MODULES.items()
    }
    assert cycles(edges) == []


def reach(module: Module) -> set[str]:
    reached: set[str] = set()
    pending = [module.name]
    while pending:
        for name in MODULES[pending.pop()].imported - reached:
            reached.add(name)
            pending.append(name)
    return reached


def test_nearly_half_of_the_code_does_no_io() -> None:
    own = {name: not module.outside & IO_MODULES for name, module in MODULES.items()}
    lines = {
        name: sum(
            1 for line in module.source.splitlines() if line.strip() and line.strip()[0] != "#"
        )
        for name, module in MODULES.items()
    }
    free = sum(
        lines[name]
        for name, module in MODULES.items()
        if own[name] and all(own[other] for other in reach(module))
    )
    assert 100 * free / sum(lines.values()) >= MIN_IO_FREE_PERCENT


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_has_no_global_statement(name: str) -> None:
    assert not [node for node in ast.walk(MODULES[name].tree) if isinstance(node, ast.Global)]
