"""Finds the Python classes that can be compiled to C classes (Cython extension types).

A class with __slots__ becomes a C class if all its base classes do. The attributes of a C class are
fields of a C struct, so that access needs no dictionary look-up.

The main class is Project. declarations.py writes the declarations that Cython needs.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Project:
    """The parsed modules of the project, and which of their classes Cython compiles to C classes.

    trees     syntax trees of all modules, by module name
    compiled  names of the modules that Cython compiles
    classes   the C classes by full name (module and class); base classes come first
    """

    trees: Mapping[str, ast.Module]
    compiled: Collection[str]
    classes: Mapping[str, ast.ClassDef]

    def known_classes(self, module: str) -> dict[str, str]:
        """Return the C classes that a module can name, as a mapping from names to full names.

        A C class is a Python class that Cython compiles to a C struct. A module can name the
        classes that it defines or imports. Imports under `if TYPE_CHECKING` count, because Cython
        executes them at run time as well.

        Modules that import each other can fail to load at run time. Therefore a type-only import
        that closes such a cycle is left out, unless all classes imported in the cycle are C classes
        without bases. Those exist before any other code of their module runs.
        """
        tree = self.trees[module]
        for_types = {
            short: full
            for short, full in from_imports(_type_only_statements(tree)).items()
            if full in self.classes
        }
        back = _reachable(module, self._importers)
        for container in {container_of(full) for full in for_types.values()}:
            if any(
                self._imports_more(other, back) for other in _reachable(container, self._imports)
            ):
                for_types = {
                    short: full
                    for short, full in for_types.items()
                    if container_of(full) != container
                }
        return {
            name: full
            for name, full in {**names_of(module, tree), **for_types}.items()
            if full in self.classes
        }

    def _imports_more(self, module: str, others: Collection[str]) -> bool:
        tree = self.trees[module]
        imports = _all_imports(tree)
        bases = {imports.get(ast.unparse(base)) for node in classes_of(tree) for base in node.bases}
        return any(
            full in bases or full not in self.classes or bool(self.classes[full].bases)
            for full in imports.values()
            if full in others or container_of(full) in others
        )

    @cached_property
    def _imports(self) -> dict[str, set[str]]:
        # Return the modules that each module imports, including imports for types only.
        imports = {module: set(_all_imports(tree).values()) for module, tree in self.trees.items()}
        return {
            module: self.trees.keys() & {*names, *map(container_of, names)}
            for module, names in imports.items()
        }

    @cached_property
    def _importers(self) -> dict[str, set[str]]:
        importers: dict[str, set[str]] = {module: set() for module in self.trees}
        for module, others in self._imports.items():
            for other in others:
                importers[other].add(module)
        return importers

    @cached_property
    def used_as_values(self) -> frozenset[str]:
        """Return the full names of functions and methods that are passed as values (callbacks).

        They must stay Python functions. If the class of a method is unknown, the result contains
        the method's bare name, unless some class has an attribute of this name. Otherwise half of
        all methods would match. If a callback is missed, its module fails to compile.
        """
        fields = {name for node in self.classes.values() for name in slots(node) or ()}
        for tree in self.trees.values():
            for node in classes_of(tree):
                fields |= {
                    ast.unparse(statement.target)
                    for statement in node.body
                    if isinstance(statement, ast.AnnAssign)
                }
        return (
            frozenset(
                name
                for module in self.compiled
                for name in _used_as_values(module, self.trees[module], self.classes.keys())
            )
            - fields
        )

    @cached_property
    def looked_up(self) -> frozenset[str]:
        """Return the private names that code may look up by name at run time.

        All other private attributes and methods are used only as `self.name` in C classes, and all
        other private functions only by their own module. Python code need not see those.
        """
        found = {
            name
            for module, tree in self.trees.items()
            for top in tree.body
            for name in names_looked_up(top, is_closed=self._is_closed(module, top))
        }
        with_slots = {node.name: slots(node) or () for node in self.classes.values()}
        for tree in self.trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and node.attr == "__slots__":
                    found.update(with_slots.get(ast.unparse(node.value), ()))
        return frozenset(found)

    @cached_property
    def bases(self) -> Mapping[str, Collection[str]]:
        """Return the base classes of each class, all by their names without modules."""
        bases: dict[str, set[str]] = {}
        for tree in self.trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    bases.setdefault(node.name, set()).update(map(_short_name, node.bases))
        return bases

    @cached_property
    def _kin(self) -> frozenset[str]:
        # The names of all C classes, of classes that inherit from one, and of those classes' bases.
        kin = {node.name for node in self.classes.values()}
        while new := {name for name, bases in self.bases.items() if kin & {*bases}} - kin:
            kin |= new
        return frozenset(kin.union(*(self.bases[name] for name in kin)))

    def _is_closed(self, module: str, top: ast.stmt) -> bool:
        # Return whether `self.name` in a statement is no look-up by name in an object of a C class.
        #
        # It is none in a C class, and in a class that is not related to any.
        if not isinstance(top, ast.ClassDef):
            return False
        if any(isinstance(node, ast.ClassDef) and node is not top for node in ast.walk(top)):
            return False
        return f"{module}.{top.name}" in self.classes or top.name not in self._kin

    @cached_property
    def called_with_unpacking(self) -> frozenset[str]:
        """Return the names of functions and methods that are called with *arguments or **keywords.

        They must stay Python functions, because C functions do not support such calls.
        """
        return frozenset(
            ast.unparse(node.func).rpartition(".")[2]
            for module in self.compiled
            for node in ast.walk(self.trees[module])
            if isinstance(node, ast.Call) and _unpacks(node)
        )


def project(trees: Mapping[str, ast.Module], compiled: Collection[str]) -> Project:
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
    classes: dict[str, ast.ClassDef] = {}
    while ready := [
        name
        for name, (bases, _) in slotted.items()
        if name not in classes and bases <= classes.keys()
    ]:
        classes |= {name: slotted[name][1] for name in ready}
    return classes


def slots(node: ast.ClassDef) -> list[str] | None:
    """Return the names in a class's __slots__.

    Returns None if the class has no __slots__, or if they are not all string literals.
    """
    for statement in node.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__slots__":
            parts = list(ast.walk(statement.value))
            if any(isinstance(part, ast.Name) for part in parts):
                return None
            return [str(part.value) for part in parts if isinstance(part, ast.Constant)]
    return None


def _used_as_values(module: str, tree: ast.Module, classes: Set[str]) -> Iterator[str]:
    # Yield the names that a module reads without calling them.
    #
    # A name is full, `module.Class.name`, where its class is known, and bare otherwise. `classes`
    # are the C classes: an attribute of a new object, as in `Class().name`, belongs to one.
    names = names_of(module, tree) | _all_imports(tree)
    types: dict[str, set[str]] = {name: {full} for name, full in names.items()}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            kind = ast.unparse(node.annotation).removesuffix(" | None")
            name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            types.setdefault(name, set()).add(names.get(kind, kind))
    for top in tree.body:
        owners = (
            {**types, "self": {f"{module}.{top.name}"}} if isinstance(top, ast.ClassDef) else types
        )
        called = {id(node.func) for node in ast.walk(top) if isinstance(node, ast.Call)}
        for node in ast.walk(top):
            if isinstance(node, ast.Name) and id(node) not in called:
                yield f"{module}.{node.id}"
            elif isinstance(node, ast.Attribute) and id(node) not in called:
                known: set[str] = set()
                if isinstance(node.value, ast.Name | ast.Attribute):
                    known = owners.get(ast.unparse(node.value), known)
                elif isinstance(node.value, ast.Call):
                    known = {names.get(ast.unparse(node.value.func), "")} & classes
                yield from [f"{owner}.{node.attr}" for owner in known] or [node.attr]


def _short_name(base: ast.expr) -> str:
    return ast.unparse(base).partition("[")[0].rpartition(".")[2]


def names_looked_up(top: ast.stmt, *, is_closed: bool) -> Iterator[str]:
    """Yield the attribute names that a statement may look up, including names in its strings.

    These attributes must be visible to Python code.

    top        the statement
    is_closed  True to leave out access by `self.name`, because C code needs no look-up there
    """
    listed = {
        id(part)
        for node in ast.walk(top)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__"
        for part in ast.walk(node.value)
    }
    for node in ast.walk(top):
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            if not (is_closed and is_own):
                yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in listed
        ):
            yield from node.value.split(".")


def _unpacks(call: ast.Call) -> bool:
    return any(isinstance(argument, ast.Starred) for argument in call.args) or any(
        keyword.arg is None for keyword in call.keywords
    )


def _reachable(first: str, following: Mapping[str, Iterable[str]]) -> set[str]:
    reached, ahead = {first}, [first]
    while ahead:
        new = set(following[ahead.pop()]) - reached
        reached |= new
        ahead += new
    return reached


def classes_of(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


def container_of(full: str) -> str:
    return full.rpartition(".")[0]


def names_of(module: str, tree: ast.Module) -> dict[str, str]:
    """Return which classes a module defines or imports: a mapping from their names to full names.

    module  name of the module
    tree    its syntax tree
    """
    return {node.name: f"{module}.{node.name}" for node in classes_of(tree)} | from_imports(
        tree.body
    )


def from_imports(body: Iterable[ast.stmt]) -> dict[str, str]:
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in imports
        for alias in node.names
    }


def _all_imports(tree: ast.Module) -> dict[str, str]:
    return from_imports(tree.body) | from_imports(_type_only_statements(tree))


def _type_only_statements(tree: ast.Module) -> list[ast.stmt]:
    choices = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return [statement for node in choices for statement in node.body]
