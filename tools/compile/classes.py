"""Which classes of the compiled modules become C classes, and which modules may know them as such.

Every class with __slots__ that stands on its own or on another such does: its attributes are places in memory then, not
look-ups. Read from the sources as they are. Not here: what Cython is told of them (tools/compile/declarations.py).
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Project:
    """Its modules, parsed, by name, and those of their classes that become C classes.

    compiled  the modules that go through Cython
    classes   by full name, those that others stand on before them
    """

    trees: Mapping[str, ast.Module]
    compiled: Collection[str]
    classes: Mapping[str, ast.ClassDef]

    def known(self, module: str) -> dict[str, str]:
        """The full names of the C classes that a module defines or imports, by the names it has for them.

        What is imported for types alone, C has to have when the module begins. So modules may import each other in a
        circle. It works, whichever of them begins, as long as they take nothing but C classes from one another: those
        are there before all else, unless they stand on one of another module. In any other circle it stays unknown.
        """
        tree = self.trees[module]
        for_types = {
            short: full
            for short, full in imported(_for_types(tree)).items()
            if full in self.classes
        }
        back = _reached(module, self._importers)
        for place in {place_of(full) for full in for_types.values()}:
            if any(self._takes_more(each, back) for each in _reached(place, self._imports)):
                for_types = {
                    short: full for short, full in for_types.items() if place_of(full) != place
                }
        return {
            name: full
            for name, full in {**names_of(module, tree), **for_types}.items()
            if full in self.classes
        }

    def _takes_more(self, module: str, others: Collection[str]) -> bool:
        """Whether a module takes more from one of the others than C classes that stand on their own."""
        tree = self.trees[module]
        taken = _taken(tree)
        bases = {taken.get(ast.unparse(base)) for node in classes_of(tree) for base in node.bases}
        return any(
            full in bases or full not in self.classes or bool(self.classes[full].bases)
            for full in taken.values()
            if full in others or place_of(full) in others
        )

    @cached_property
    def _imports(self) -> dict[str, set[str]]:
        """Of each module, the modules that it imports, if only for types."""
        taken = {module: set(_taken(tree).values()) for module, tree in self.trees.items()}
        return {
            module: self.trees.keys() & {*names, *map(place_of, names)}
            for module, names in taken.items()
        }

    @cached_property
    def _importers(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {module: set() for module in self.trees}
        for module, others in self._imports.items():
            for other in others:
                found[other].add(module)
        return found

    @cached_property
    def handed(self) -> frozenset[str]:
        """What is handed on as a value somewhere, and so is always Python's: full names of functions and methods, and
        names of methods of whatever class it may be.

        A name that some class has for an attribute is taken for that wherever its owner cannot be told, else half of
        the methods would be out. A method that is handed on under such a name does not compile, if it matters.
        """
        fields = {name for node in self.classes.values() for name in slots(node) or ()}
        for tree in self.trees.values():
            for node in classes_of(tree):
                fields |= {
                    ast.unparse(each.target)
                    for each in node.body
                    if isinstance(each, ast.AnnAssign)
                }
        return (
            frozenset(
                name for module in self.compiled for name in _handed(module, self.trees[module])
            )
            - fields
        )


def project(trees: Mapping[str, ast.Module], compiled: Collection[str]) -> Project:
    """Of all modules, of which some are compiled."""
    return Project(trees, compiled, _c_classes({module: trees[module] for module in compiled}))


def _c_classes(trees: Mapping[str, ast.Module]) -> dict[str, ast.ClassDef]:
    slotted: dict[str, tuple[set[str], ast.ClassDef]] = {}
    for module, tree in trees.items():
        names = names_of(module, tree)
        for node in classes_of(tree):
            if slots(node) is not None:
                bases = {
                    names.get(ast.unparse(base), "not a compiled class") for base in node.bases
                }
                slotted[names[node.name]] = bases, node
    found: dict[str, ast.ClassDef] = {}
    while ready := [
        name for name, (bases, _) in slotted.items() if name not in found and bases <= found.keys()
    ]:
        found |= {name: slotted[name][1] for name in ready}
    return found


def slots(node: ast.ClassDef) -> list[str] | None:
    """The names in a class's __slots__; None where it has none, or some that do not stand there as such."""
    for statement in node.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__slots__":
            parts = list(ast.walk(statement.value))
            if any(isinstance(part, ast.Name) for part in parts):
                return None
            return [str(part.value) for part in parts if isinstance(part, ast.Constant)]
    return None


def _handed(module: str, tree: ast.Module) -> Iterator[str]:
    """What is read, but not to be called at once: by its full name, where that can be told."""
    names = names_of(module, tree) | _taken(tree)
    told: dict[str, set[str]] = {name: {full} for name, full in names.items()}
    for each in ast.walk(tree):
        if isinstance(each, ast.arg | ast.AnnAssign) and each.annotation is not None:
            kind = ast.unparse(each.annotation).removesuffix(" | None")
            name = each.arg if isinstance(each, ast.arg) else ast.unparse(each.target)
            told.setdefault(name, set()).add(names.get(kind, kind))
    for top in tree.body:
        owners = (
            {**told, "self": {f"{module}.{top.name}"}} if isinstance(top, ast.ClassDef) else told
        )
        called = {id(node.func) for node in ast.walk(top) if isinstance(node, ast.Call)}
        for node in ast.walk(top):
            if isinstance(node, ast.Name) and id(node) not in called:
                yield f"{module}.{node.id}"
            elif isinstance(node, ast.Attribute) and id(node) not in called:
                yield from [
                    f"{each}.{node.attr}" for each in owners.get(ast.unparse(node.value), ())
                ] or [node.attr]


def _reached(first: str, following: Mapping[str, Iterable[str]]) -> set[str]:
    seen, ahead = {first}, [first]
    while ahead:
        new = set(following[ahead.pop()]) - seen
        seen |= new
        ahead += new
    return seen


def classes_of(tree: ast.Module) -> list[ast.ClassDef]:
    """Those that a module defines."""
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


def place_of(full: str) -> str:
    """The module, or the class, that a full name stands in."""
    return full.rpartition(".")[0]


def names_of(module: str, tree: ast.Module) -> dict[str, str]:
    """The full names of the classes that a module defines, and of what it imports by name."""
    return {node.name: f"{module}.{node.name}" for node in classes_of(tree)} | imported(tree.body)


def imported(body: Iterable[ast.stmt]) -> dict[str, str]:
    """The full names of what these statements import by name."""
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    return {
        each.asname or each.name: f"{node.module}.{each.name}"
        for node in imports
        for each in node.names
    }


def _taken(tree: ast.Module) -> dict[str, str]:
    """What a module imports by name, if only for types."""
    return imported(tree.body) | imported(_for_types(tree))


def _for_types(tree: ast.Module) -> list[ast.stmt]:
    """What stands below `if TYPE_CHECKING`."""
    choices = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return [statement for node in choices for statement in node.body]
