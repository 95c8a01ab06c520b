"""Tests that scripts which run with their own folder on the module path find what they import."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Peers that a benchmark installs itself.
INSTALLED_BY_SCRIPTS = {"mooncake", "nixl"}
# Folders whose files import each other by bare names, and the other folders on their path.
FOLDERS = {"bench/kv": ("bench",)}


def imported(path: Path) -> Iterator[str]:
    # Yield the first part of the name of each imported module.
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def exists(name: str, folders: list[Path]) -> bool:
    if name in sys.stdlib_module_names or name in INSTALLED_BY_SCRIPTS:
        return True
    if any((folder / f"{name}.py").exists() or (folder / name).is_dir() for folder in folders):
        return True
    return find_spec(name) is not None


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_module_that_a_script_imports_exists(folder: str) -> None:
    folders = [ROOT / folder, *(ROOT / other for other in FOLDERS[folder]), ROOT]
    scripts = sorted((ROOT / folder).glob("*.py"))
    assert scripts
    missing = {
        f"{path.name}: {name}"
        for path in scripts
        for name in imported(path)
        if not exists(name, folders)
    }
    assert missing == set()
