"""What Cython is told of the compiled modules, written from the sources as they are: a module's .pxd.

What annotations say is a C class (tools/compile/classes.py) is declared so, wherever it stands: an attribute, an argument, what a
method returns. Methods and private functions are called without a look-up where C has a form for them.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from tools.compile.classes import Project, classes_of, place_of, slots

WORDS = {
    "policies.prefix.block_hash": """
cimport cython
cdef unsigned long long MASK
@cython.locals(index=Py_ssize_t, block=Py_ssize_t, column=Py_ssize_t, total=cython.ulonglong, word=cython.ulonglong)
cpdef chain(
    const unsigned long long[::1] words, const unsigned long long[::1] word_keys, const unsigned long long[::1] places,
    unsigned long long fold, unsigned long long mix, unsigned long long key, unsigned long long[::1] keys,
)
"""
}
"""The one function that computes with machine words."""

NUMBERS = {
    "policies.prefix.block_hash.WordByWord": {
        "_fold": "unsigned long long",
        "_mix": "unsigned long long",
        "_places": "const unsigned long long[::1]",
        "_word_keys": "const unsigned long long[::1]",
    }
}
"""And what it is handed: made once, such a view costs more than the function does for a short prompt."""

FLOATS = {"policies.pricing.price._RequestTerms"}
"""Classes that hold nothing else."""

HAS_NO_C_FORM = (
    ast.AsyncFunctionDef,
    ast.FunctionDef,
    ast.GeneratorExp,
    ast.Lambda,
    ast.Yield,
    ast.YieldFrom,
)


def declarations(module: str, project: Project) -> str:
    """The .pxd of a module; empty when there is nothing to tell."""
    tree, known = project.trees[module], project.known(module)
    kinds = Kinds(known)
    mine = [node for node in classes_of(tree) if known.get(node.name) == f"{module}.{node.name}"]
    # Classes of other modules may hold one of these, whose declarations are not read to their end yet.
    lines = [f"cdef class {node.name}" for node in mine if not node.bases]
    for short, full in known.items():
        if place_of(full) != module:
            lines.append(f"from {place_of(full)} cimport {full.rpartition('.')[2]} as {short}")
    for node in mine:
        lines += _class(f"{module}.{node.name}", node, kinds, project)
    if module in WORDS:
        lines.append(WORDS[module])
    else:
        functions = [
            each
            for each in tree.body
            if isinstance(each, ast.FunctionDef) and each.name.startswith("_")
        ]
        lines += [
            kinds.signature(each) for each in _direct(functions, _handed_in({module}, project))
        ]
    return "\n".join([*lines, ""]) if lines else ""


def _class(full: str, node: ast.ClassDef, kinds: Kinds, project: Project) -> Iterator[str]:
    yield f"cdef class {node.name}({', '.join(map(ast.unparse, node.bases))}):"
    held = kinds.held(node) | NUMBERS.get(full, {})
    for attribute in slots(node) or ():
        yield f"    cdef public {'double' if full in FLOATS else held.get(attribute) or 'object'} {attribute}"
    kin = {
        name: each
        for name, each in project.classes.items()
        if name != full and _related(node, each)
    }
    # What two of a kin have is found by Python alone.
    but = {method.name for each in kin.values() for method in _functions(each)}
    for method in _direct(_functions(node), but | _handed_in({"", full, *kin}, project)):
        yield f"    {kinds.signature(method, of_class=True)}"
    yield "    pass"


def _related(node: ast.ClassDef, other: ast.ClassDef) -> bool:
    """Whether one of two classes stands on the other."""
    bases = {ast.unparse(base) for base in node.bases}, {ast.unparse(base) for base in other.bases}
    return other.name in bases[0] or node.name in bases[1]


def _functions(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef)]


def _handed_in(places: Collection[str], project: Project) -> set[str]:
    return {name.rpartition(".")[2] for name in project.handed if place_of(name) in places}


def _direct(functions: list[ast.FunctionDef], but: Collection[str]) -> Iterator[ast.FunctionDef]:
    """Those that have a form in C: no special name or decorator, no arguments by name alone, and no closures or
    generators within."""
    for each in functions:
        told, inside = each.args, [part for part in ast.walk(each) if part is not each]
        if not (
            each.name in but
            or each.name.startswith("__")
            or each.decorator_list
            or (told.vararg or told.kwarg or told.kwonlyargs)
            or any(
                isinstance(part, HAS_NO_C_FORM) or ast.unparse(part) == "super()" for part in inside
            )
        ):
            yield each


@dataclass(frozen=True)
class Kinds:
    """The C classes that a module knows, by the names it has for them."""

    names: Mapping[str, str]

    def of(self, annotation: ast.expr | None) -> str:
        """The one that an annotation names, alone or beside None; "" where it is none of them."""
        if isinstance(annotation, ast.BinOp) and ast.unparse(annotation.right) == "None":
            annotation = annotation.left
        name = "" if annotation is None else ast.unparse(annotation)
        return name if name in self.names else ""

    def signature(self, function: ast.FunctionDef, *, of_class: bool = False) -> str:
        """How C calls a function: what is bytes by its annotation, or a C class, is declared so."""
        arguments = function.args.args[of_class:]
        told = ["self"] if of_class else []
        for number, each in enumerate(arguments):
            plain = each.annotation is not None and ast.unparse(each.annotation) == "bytes"
            kind = "bytes" if plain else self.of(each.annotation) or "object"
            told.append(
                f"{kind} {each.arg}"
                + ("" if number < len(arguments) - len(function.args.defaults) else "=*")
            )
        return f"cpdef {self.of(function.returns) or 'object'} {function.name}({', '.join(told)})"

    def held(self, node: ast.ClassDef) -> dict[str, str]:
        """What the attributes of a class hold: as annotated, else as it follows from what is assigned first."""
        found: dict[str, str] = {}
        for method in _functions(node):
            arguments = {each.arg: self.of(each.annotation) for each in method.args.args}
            for attribute, value in _assigned(method):
                follows = arguments.get(value.id, "") if isinstance(value, ast.Name) else ""
                found.setdefault(
                    attribute, self.of(value.func) if isinstance(value, ast.Call) else follows
                )
        for each in ast.walk(node):
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Attribute):
                found[ast.unparse(each.target).removeprefix("self.")] = self.of(each.annotation)
        return found


def _assigned(method: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """The attributes of its own that a method assigns, with what each gets."""
    for statement in ast.walk(method):
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                pairs = [(target, statement.value)]
                if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                    pairs = list(zip(target.elts, statement.value.elts, strict=True))
                for name, value in pairs:
                    if isinstance(name, ast.Attribute) and ast.unparse(name.value) == "self":
                        yield name.attr, value
