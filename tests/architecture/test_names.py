"""Tests that old names of classes, modules, functions and variables are not used again.

renamed.tsv lists what was renamed: kind, place, old name and new name. The old name of a class or
module must not exist anywhere. That of a function or attribute must not exist at its place. That of
a variable must not be assigned in the modules that its place matches.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from tests.architecture.sources import ROOT, SHIPPED, modules

TABLE = [
    line.split("\t")
    for line in (Path(__file__).with_name("renamed.tsv")).read_text().splitlines()
    if line and not line.startswith("#")
]
MODULES = modules(*SHIPPED, "tools")


def members(node: ast.ClassDef) -> set[str]:
    names: set[str] = set()
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(child.name)
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            names.add(child.target.id)
        elif (
            isinstance(child, ast.Attribute)
            and isinstance(child.ctx, ast.Store)
            and isinstance(child.value, ast.Name)
            and child.value.id == "self"
        ):
            names.add(child.attr)
    return names


CLASSES: dict[str, list[ast.ClassDef]] = defaultdict(list)
for _module in MODULES.values():
    for _node in ast.walk(_module.tree):
        if isinstance(_node, ast.ClassDef):
            CLASSES[_node.name].append(_node)


def rows(kind: str) -> list[tuple[str, str, str]]:
    return [(place, old, new) for each, place, old, new in TABLE if each == kind]


def test_the_table_has_every_kind_of_name() -> None:
    assert {kind for kind, *_ in TABLE} == {
        "module",
        "class",
        "function",
        "attribute",
        "variable",
    }


def test_replaced_module_paths_do_not_exist() -> None:
    assert [old for _, old, _ in rows("module") if (ROOT / old).exists()] == []


def test_new_module_paths_exist() -> None:
    assert [new for _, _, new in rows("module") if not (ROOT / new).exists()] == []


def test_replaced_class_names_do_not_come_back() -> None:
    current = {new for _, _, new in rows("class")}
    assert [old for _, old, _ in rows("class") if old in CLASSES and old not in current] == []


def test_replaced_functions_are_not_defined_at_their_place() -> None:
    for place, old, new in rows("function"):
        assert place in MODULES, f"{place} is gone: drop its line ({old} -> {new})"
        names = {getattr(node, "name", None) for node in MODULES[place].tree.body}
        assert old not in names, f"{place}.{old} is called {new} now"


def test_replaced_attributes_are_not_defined_on_their_classes() -> None:
    found = {name: set().union(*map(members, nodes)) for name, nodes in CLASSES.items()}
    assert [
        f"{place}.{old} is called {new} now"
        for place, old, new in rows("attribute")
        if old in found.get(place, ())
    ] == []


@cache
def variables(module: str) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.walk(MODULES[module].tree):
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return frozenset(names)


def test_replaced_variables_are_not_assigned_at_their_place() -> None:
    for place, old, new in rows("variable"):
        matching = [name for name in MODULES if fnmatchcase(name, place)]
        assert matching, f"{place} is gone: drop its line ({old} -> {new})"
        assert [name for name in matching if old in variables(name)] == [], f"{old} is {new} now"
