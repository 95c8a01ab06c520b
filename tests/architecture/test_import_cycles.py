"""No two modules of the gateway need each other, not even for types. Two known circles are left, listed here."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The admin server's pages take the whole App; a Protocol is to replace that.
ADMIN = {
    *("admin", "api", "app", "reload.pages"),
    *("live.flow", "live.hub", "live.marks", "live.pages", "live.standing", "live.view"),
}
WORKERS = {"workers.pages", "workers.supervisor"}


def modules() -> dict[str, ast.Module]:
    """Every module of the gateway by its name below `gateway`; packages themselves import nothing."""
    paths = [path for path in (ROOT / "gateway").rglob("*.py") if path.name != "__init__.py"]
    names = [".".join(path.relative_to(ROOT / "gateway").with_suffix("").parts) for path in paths]
    return {name: ast.parse(path.read_text()) for name, path in zip(names, paths, strict=True)}


def imported(tree: ast.Module) -> Iterator[str]:
    """Names of what a module imports from the gateway, below `if TYPE_CHECKING` and in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gateway":
            package = (node.module or "").removeprefix("gateway").removeprefix(".")
            yield package
            yield from (f"{package}.{alias.name}".removeprefix(".") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("gateway.") for alias in node.names)


def reached(first: str, imports: Mapping[str, set[str]]) -> set[str]:
    """The modules that a module needs, directly or not."""
    seen: set[str] = set()
    ahead = [first]
    while ahead:
        new = imports[ahead.pop()] - seen
        seen |= new
        ahead += new
    return seen


def test_modules_that_need_each_other_are_those_of_the_two_known_circles() -> None:
    trees = modules()
    imports = {name: set(imported(tree)) & trees.keys() - {name} for name, tree in trees.items()}
    circles = {name for name in imports if name in reached(name, imports)}
    assert circles <= ADMIN | WORKERS
