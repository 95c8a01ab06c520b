"""Generates .pxd files, which declare a module's C classes and C functions to Cython.

Attributes, arguments and results keep their type if it is a C class (see extension_classes.py).
Methods and private functions become C functions where possible, because C calls need no look-up by
name.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from tools.compile.extension_classes import Project, classes_of, container_of, slots

HANDWRITTEN = {
    "policies.prefix.key_loops": """
cimport cython
cdef unsigned long long MASK
@cython.locals(index=Py_ssize_t, mask=cython.ulonglong)
cpdef Py_ssize_t find_last_counted(
    const unsigned long long[::1] keys, const unsigned int[::1] counts, Py_ssize_t end
) except -2
@cython.locals(index=Py_ssize_t, key=cython.ulonglong)
cpdef scramble_into(
    unsigned long long[::1] scrambled, const unsigned long long[::1] keys,
    Py_ssize_t step, unsigned long long offset, unsigned long long factor,
)
""",
}
"""Handwritten Cython declarations by module, for what cannot be derived from the sources.

They are for the functions that compute with machine words.
"""

NUMBERS = {
    "policies.prefix.block_hash.ScalarArithmetic": {
        "_fold": "unsigned long long",
        "_mix": "unsigned long long",
        "_position_keys": "const unsigned long long[::1]",
        "_word_keys": "const unsigned long long[::1]",
    }
}
"""The C types of attributes, by class.

The attributes keep memory views for calls of `chain_words`. For a short prompt, creating a view for
each call would cost more than the call itself.
"""

FLOATS: Mapping[str, Collection[str]] = {
    "gateway.metrics.metric_types.Counter": ("value",),
    "gateway.metrics.metric_types.Histogram": ("_high", "_low", "_sum"),
    "policies.pricing.price_loop.PriceLoop": (),
    "policies.engine.engine_load.EngineLoad": (
        *("attention_s_per_pair", "decode_s_per_context_token", "decode_s_per_sequence"),
        *("decode_s_per_token", "fixed_ttft_s", "free_kv_tokens", "kv_used_tokens"),
        *("next_first_token_at", "prefill_done_at", "prefill_s_per_token"),
        *("s_per_freed_kv_token", "slots"),
    ),
    "policies.engine.scheduler_model.EngineModel": (
        *("answers_due_at", "batch_changed_at_step", "context_base", "decode_base_s"),
        *("decode_context_s", "decode_s", "ended_step_s", "first_tokens_at", "forecast_at"),
        *("idle_delay_s", "kv_ratio", "prefill_s", "queued_pairs", "raw_base_s", "raw_context_s"),
        *("step_began_at", "step_ends_at", "step_overhead_s", "steps"),
    ),
    "policies.engine.queued_prompt.QueuedPrompt": (
        *("decode_base_s", "decode_began_at", "decode_begin_step", "decode_context_s"),
        *("enters_at", "output_tokens", "per_expected_token", "prefill_s"),
    ),
    "policies.engine.recent_work_averages.ArrivalAverages": (),
    "policies.engine.recent_work_averages.EngineAverages": (
        *("at", "first_event_at", "pace", "rate", "seen_s", "share"),
    ),
    "policies.engine.step_time.SpeedBelief": (
        *("area_s", "base_s", "context_s", "floor_s", "flop_s", "layers_s", "pair_s"),
        *("request_s", "sequence_s", "token_s"),
    ),
}
"""Attributes that are always floats, by class; all attributes of the class if none is named.

In such a class, arguments and results of private methods are C doubles, too.
"""

SUBCLASSED_BY_TESTS = ("policies.admission.cap_admission.CapAdmission",)
"""C classes without a subclass in the project that stay open for subclasses."""

READ_BY_TESTS = frozenset(
    (
        "_attach_gauges",
        "_begin",
        "_blocks",
        "_bucket",
        "_budget_s",
        "_call_after_turn",
        "_candidates",
        "_change",
        "_children",
        "_client",
        "_connect",
        "_count_strings",
        "_counts",
        "_decode",
        "_deferred_bytes",
        "_descriptor",
        "_discard",
        "_discarded",
        "_due",
        "_endpoints",
        "_examined",
        "_handle",
        "_idle",
        "_levels",
        "_messages",
        "_new_protocol",
        "_next",
        "_one_at_a_time",
        "_outbox",
        "_over",
        "_parse",
        "_paused_until",
        "_pending",
        "_per_client",
        "_pool",
        "_pools",
        "_ratio",
        "_read",
        "_recent",
        "_relay",
        "_responses",
        "_run",
        "_running",
        "_seconds",
        "_slices",
        "_stream",
        "_translate_whole",
        "_unread",
        "_usage_result",
        "_waiting",
    )
)
"""Private names that only tests and benchmarks look up in objects of C classes and in modules."""

HAS_NO_C_FORM = (
    ast.AsyncFunctionDef,
    ast.FunctionDef,
    ast.GeneratorExp,
    ast.Lambda,
    ast.Yield,
    ast.YieldFrom,
)


def declarations(module: str, project: Project) -> str:
    """Return the .pxd file of a module, which tells Cython its C classes and C functions, as text.

    Returns "" if the module has nothing to declare.
    """
    tree, known_classes = project.trees[module], project.known_classes(module)
    c_types = CTypes(known_classes)
    mine = [
        node for node in classes_of(tree) if known_classes.get(node.name) == f"{module}.{node.name}"
    ]
    lines = ["cimport cython"] if mine else []
    # Forward declarations: classes of other modules may have attributes of these classes.
    lines += [f"cdef class {node.name}" for node in mine if not node.bases]
    for short, full in known_classes.items():
        if container_of(full) != module:
            lines.append(f"from {container_of(full)} cimport {full.rpartition('.')[2]} as {short}")
    for node in mine:
        lines += _declare_class(f"{module}.{node.name}", node, c_types, project)
    if module in HANDWRITTEN:
        lines.append(HANDWRITTEN[module])
    else:
        functions = [
            statement
            for statement in tree.body
            if isinstance(statement, ast.FunctionDef) and statement.name.startswith("_")
        ]
        lines += [
            c_types.signature(function, is_visible=_is_visible(function.name, project))
            for function in _c_functions(functions, _need_python_form({module}, project))
        ]
    return "\n".join([*lines, ""]) if lines else ""


def _declare_class(
    full: str, node: ast.ClassDef, c_types: CTypes, project: Project
) -> Iterator[str]:
    # A method that overrides one cannot be final in Cython.
    is_alone = not node.bases and all(node.name not in bases for bases in project.bases.values())
    if is_alone and full not in SUBCLASSED_BY_TESTS:
        yield "@cython.final"
    yield f"cdef class {node.name}({', '.join(map(ast.unparse, node.bases))}):"
    types = c_types.attribute_types(node) | NUMBERS.get(full, {})
    for attribute in slots(node) or ():
        is_float = full in FLOATS and attribute in (FLOATS[full] or (attribute,))
        kind = "double" if is_float else types.get(attribute) or "object"
        access = "public " if _is_visible(attribute, project) else ""
        yield f"    cdef {access}{kind} {attribute}"
    related = {
        name: other
        for name, other in project.classes.items()
        if name != full and _are_related(node, other)
    }
    # A method that related classes override must stay a Python method.
    excluded = {method.name for other in related.values() for method in _functions(other)}
    # Cython makes a C function of each method that overrides one, and super() works in none.
    excluded |= {
        method.name
        for other in _distant_kin(node, project)
        for method in _functions(other)
        if not list(_c_functions([method], ()))
    }
    excluded |= _need_python_form({"", full, *related}, project)
    for method in _c_functions(_functions(node), excluded):
        is_visible = _is_visible(method.name, project)
        has_floats = not is_visible and not FLOATS.get(full, (full,))
        signature = c_types.signature(
            method, of_class=True, is_visible=is_visible, has_floats=has_floats
        )
        yield f"    {signature}"
    yield "    pass"


def _is_visible(name: str, project: Project) -> bool:
    # Return whether Python code can find a name of a C class or of a compiled module.
    #
    # What only C code uses needs no functions that convert its arguments, read it and set it: they
    # would be a third of all code.
    is_private = name.startswith("_") and not name.startswith("__")
    return not is_private or name in READ_BY_TESTS or name in project.looked_up


def _are_related(node: ast.ClassDef, other: ast.ClassDef) -> bool:
    if not node.bases and not other.bases:
        return False
    bases = {ast.unparse(base) for base in node.bases}, {ast.unparse(base) for base in other.bases}
    return other.name in bases[0] or node.name in bases[1]


def _distant_kin(node: ast.ClassDef, project: Project) -> Iterator[ast.ClassDef]:
    # Yield the C classes that a class inherits from, or that inherit from it, over several levels.
    by_name = {other.name: other for other in project.classes.values()}

    def ancestors(of: ast.ClassDef) -> Iterator[str]:
        for base in of.bases:
            name = ast.unparse(base)
            if name in by_name:
                yield name
                yield from ancestors(by_name[name])

    above = set(ancestors(node))
    for other in by_name.values():
        if other.name in above or node.name in ancestors(other):
            yield other


def _functions(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [item for item in node.body if isinstance(item, ast.FunctionDef)]


def _need_python_form(containers: Collection[str], project: Project) -> set[str]:
    return {
        name.rpartition(".")[2]
        for name in project.used_as_values
        if container_of(name) in containers
    } | project.called_with_unpacking


def _c_functions(
    functions: list[ast.FunctionDef], excluded: Collection[str]
) -> Iterator[ast.FunctionDef]:
    # Yield the functions that can become C functions.
    #
    # A function can become one if it is not in `excluded`, and has no special name, no decorator,
    # no keyword-only argument, no closure and no generator.
    for function in functions:
        arguments, inside = (
            function.args,
            [part for part in ast.walk(function) if part is not function],
        )
        if not (
            function.name in excluded
            or function.name.startswith("__")
            or function.decorator_list
            or (arguments.vararg or arguments.kwarg or arguments.kwonlyargs)
            or any(isinstance(part, HAS_NO_C_FORM) or _is_super(part) for part in inside)
        ):
            yield function


def _is_super(part: ast.AST) -> bool:
    # Return whether a part of a function is the call `super()`.
    match part:
        case ast.Call(func=ast.Name(id="super"), args=[], keywords=[]):
            return True
    return False


@dataclass(frozen=True)
class CTypes:
    """Finds which annotations in one module name C classes, so that Cython may use C types there.

    A C class is a Python class that Cython compiles to a C struct.

    names  the full name of a C class, for each name by which the module refers to one
    """

    names: Mapping[str, str]

    def of(self, annotation: ast.expr | None) -> str:
        """Return the C class that an annotation names, such as "Request" for `Request | None`.

        Returns "" if it does not name a C class.
        """
        if isinstance(annotation, ast.BinOp) and ast.unparse(annotation.right) == "None":
            annotation = annotation.left
        name = "" if annotation is None else ast.unparse(annotation)
        return name if name in self.names else ""

    def signature(
        self,
        function: ast.FunctionDef,
        *,
        is_visible: bool,
        of_class: bool = False,
        has_floats: bool = False,
    ) -> str:
        """Return the Cython declaration of a function, with its arguments and their types.

        For example "cpdef object _add(Request request, object number)": bytes and C classes keep
        their type, all other types are declared as object. It is "cdef" instead of "cpdef" if the
        function is not visible to Python code. With `has_floats`, what is annotated as float
        becomes a C double.
        """
        arguments = function.args.args[of_class:]
        declared = ["self"] if of_class else []
        for number, argument in enumerate(arguments):
            name = "" if argument.annotation is None else ast.unparse(argument.annotation)
            kind = "bytes" if name == "bytes" else self.of(argument.annotation) or "object"
            kind = "double" if has_floats and name == "float" else kind
            declared.append(
                f"{kind} {argument.arg}"
                + ("" if number < len(arguments) - len(function.args.defaults) else "=*")
            )
        kind = "cpdef" if is_visible else "cdef"
        result = self.of(function.returns) or "object"
        if has_floats and function.returns is not None and ast.unparse(function.returns) == "float":
            result = "double"
        return f"{kind} {result} {function.name}({', '.join(declared)})"

    def attribute_types(self, node: ast.ClassDef) -> dict[str, str]:
        """Return the C classes of the attributes that a class assigns to `self`, by attribute.

        The C class is that of the attribute's annotation, or else that of the first value assigned
        to it; "" if this is no C class.
        """
        types: dict[str, str] = {}
        for method in _functions(node):
            arguments = {
                argument.arg: self.of(argument.annotation) for argument in method.args.args
            }
            for attribute, value in _assignments(method):
                follows = arguments.get(value.id, "") if isinstance(value, ast.Name) else ""
                types.setdefault(
                    attribute, self.of(value.func) if isinstance(value, ast.Call) else follows
                )
        for statement in ast.walk(node):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Attribute):
                types[ast.unparse(statement.target).removeprefix("self.")] = self.of(
                    statement.annotation
                )
        return types


def _assignments(method: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    for statement in ast.walk(method):
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                pairs = [(target, statement.value)]
                if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                    pairs = list(zip(target.elts, statement.value.elts, strict=True))
                for name, value in pairs:
                    if isinstance(name, ast.Attribute) and ast.unparse(name.value) == "self":
                        yield name.attr, value
