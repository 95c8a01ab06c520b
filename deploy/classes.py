"""Which classes of the compiled modules become C classes: their attributes are places in memory then, not look-ups.

Every class with __slots__ does that stands on its own or on another such. What Cython is told of them (a module's .pxd)
is written from the sources as they are. Named here are only the few attributes and methods on the path of a chunk whose
types pay besides, and the one function that computes with machine words.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

# Attributes that hold instances of one C class or None: its DIRECT methods are called there without a look-up.
HOLDS = {
    "gateway.upstream.Connection": {
        "_outbox": "gateway.outbox.Outbox",
        "_pool": "gateway.upstream.Upstream",
        "_relay": "gateway.relay.Relay",
    },
}
# Their arguments are what their annotations say, where that is bytes or a C class, and any object where it is not.
DIRECT = {
    "gateway.framing.ChunkedBody": ("feed",),
    "gateway.outbox.Outbox": ("post",),
    "gateway.relay.Relay": ("feed", "_watch"),
    "policies.prefix_index.PrefixIndex": (
        *("_alive", "_at", "_book", "_holder", "_known", "_make_room", "_measure", "_stamp", "_without"),
        *("insert", "insert_rungs", "match"),
    ),
}

WORDS = {
    "policies.fold": """
cimport cython
cdef unsigned long long MASK
@cython.locals(at=Py_ssize_t, block=Py_ssize_t, number=Py_ssize_t, total=cython.ulonglong, word=cython.ulonglong)
cpdef chain(
    const unsigned long long[::1] words, const unsigned long long[::1] word_keys, const unsigned long long[::1] places,
    unsigned long long fold, unsigned long long mix, unsigned long long key, unsigned long long[::1] keys,
)
"""
}

Classes = dict[str, ast.ClassDef]
"""By full name, those that others stand on before them."""


def c_classes(sources: Mapping[str, Path]) -> Classes:
    """Those in the modules (name -> file) that become C classes."""
    slotted: dict[str, tuple[set[str], ast.ClassDef]] = {}
    for module, source in sources.items():
        tree = ast.parse(source.read_text())
        names = _names(module, tree)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and slots(node) is not None:
                bases = {names.get(ast.unparse(base), "not a compiled class") for base in node.bases}
                slotted[names[node.name]] = bases, node
    found: Classes = {}
    while ready := [name for name, (bases, _) in slotted.items() if name not in found and bases <= found.keys()]:
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


def declarations(module: str, source: Path, classes: Classes) -> str:
    """The .pxd of a module; empty when there is nothing to tell."""
    names = _names(module, ast.parse(source.read_text()))
    mine = {name: node for name, node in classes.items() if name.rpartition(".")[0] == module}
    needed = {names[ast.unparse(base)] for node in mine.values() for base in node.bases}
    needed |= {held for name in mine for held in HOLDS.get(name, {}).values()}
    typed = {"bytes", *(short for short, full in names.items() if full in needed)}
    imports = (full.rpartition(".") for full in sorted(needed))
    lines = [f"from {place} cimport {name}" for place, _, name in imports if place != module]
    for name, node in mine.items():
        lines.append(f"cdef class {node.name}({', '.join(map(ast.unparse, node.bases))}):")
        lines += [f"    {member}" for member in _members(name, node, typed)]
    return "\n".join([*lines, WORDS.get(module, "")]) if lines or module in WORDS else ""


def _members(name: str, node: ast.ClassDef, typed: set[str]) -> Iterator[str]:
    held = HOLDS.get(name, {})
    for attribute in slots(node) or ():
        yield f"cdef public {held.get(attribute, 'object').rpartition('.')[2]} {attribute}"
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name in DIRECT.get(name, ()):
            said = ((each.arg, ast.unparse(each.annotation or ast.Name(""))) for each in method.args.args)
            yield f"cpdef {method.name}({', '.join(f'{kind} {arg}' if kind in typed else arg for arg, kind in said)})"
    yield "pass"


def _names(module: str, tree: ast.Module) -> dict[str, str]:
    """The full names of the classes that a module defines, and of what it imports by name."""
    own = {node.name: f"{module}.{node.name}" for node in tree.body if isinstance(node, ast.ClassDef)}
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return own | {each.asname or each.name: f"{node.module}.{each.name}" for node in imports for each in node.names}
