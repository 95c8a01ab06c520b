"""Tests of the list of compiled modules: they exist, and their C classes are declared."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tools.compile import extension_classes, source_tree
from tools.compile.declarations import FLOATS, READ_BY_TESTS, declarations

ROOT = Path(__file__).parents[2]


PROJECT = source_tree.read(ROOT)
PACKAGES = ("gateway", "policies")
WITH_DOUBLES = {
    "policies.pricing.price_loop",
    *("policies.engine.scheduler_model", "policies.engine.engine_model_updates"),
    "policies.engine.load_forecast",
    *("gateway.metrics.metric_types", "gateway.telemetry.access_line"),
}
"""The modules in which a local that is annotated `float` may become a C double."""
RUN_ON_COMPILED_MODULES = (
    *("bench/**/*.py", "tests/*.py", "tests/contract/gateway/**/*.py", "tests/e2e/**/*.py"),
    *(f"tests/{kind}/{name}/**/*.py" for kind in ("unit", "property") for name in PACKAGES),
)
"""The benchmarks and tests that run on compiled modules."""


@cache
def declared_of(module: str) -> str:
    return declarations(module, PROJECT)


def told(module: str) -> list[str]:
    return declared_of(module).splitlines()


def slots_of(name: str) -> set[str]:
    module, _, short = name.rpartition(".")
    declared = declared_of(module).split("cdef class ")
    (mine,) = [each for each in declared if each.startswith(f"{short}(")]
    fields = [line for line in mine.splitlines() if line.startswith("    cdef ")]
    return {line.split()[-1] for line in fields if not line.endswith(")")}


def _functions_in(body: list[ast.stmt]) -> set[str]:
    return {each.name for each in body if isinstance(each, ast.FunctionDef)}


def _methods_in(body: list[ast.stmt]) -> set[str]:
    return {
        each.name
        for each in body
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        if not {"classmethod", "staticmethod"} & {*map(ast.unparse, each.decorator_list)}
    }


def _is_field(module: str, line: ast.AnnAssign) -> bool:
    tree = PROJECT.trees[module]
    return line in tree.body or any(
        line in each.body for each in ast.walk(tree) if isinstance(each, ast.ClassDef)
    )


def of(**sources: str) -> extension_classes.Project:
    trees = {module: ast.parse(text) for module, text in sources.items()}
    return extension_classes.project(trees, trees)


def test_every_module_that_is_compiled_exists() -> None:
    assert all((ROOT / name).exists() for name in source_tree.MODULES)
    assert len(set(source_tree.MODULES)) == len(source_tree.MODULES)


def test_what_is_optimized_for_size_is_compiled_and_what_is_off_the_path_is_not() -> None:
    compiled = {*source_tree.MODULES, *(str(Path(name).parent) for name in source_tree.MODULES)}
    assert set(source_tree.SMALL) < compiled
    assert not {*source_tree.OFF_PATH} & compiled
    assert all((ROOT / name).exists() for name in source_tree.OFF_PATH)


def test_compiled_modules_know_every_c_class_though_some_modules_are_not_compiled() -> None:
    everything = [name for name in PROJECT.trees if name.split(".")[0] in ("gateway", "policies")]
    whole = extension_classes.project(PROJECT.trees, everything)
    assert len(whole.classes) > len(PROJECT.classes)
    off_path = {
        str(Path(name).with_suffix("")).replace("/", ".")
        for name in source_tree.OFF_PATH
        if name.endswith(".py")
    }
    for module in PROJECT.compiled:
        used = {full.rpartition(".")[0] for full in whole.known_classes(module).values()}
        assert not used & off_path, f"{module} uses a class of {used & off_path}"


def test_a_build_is_known_by_all_that_is_copied_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (
        "gateway/page.html",
        "policies/routing_types.py",
        "pyproject.toml",
        "tools/compile/compile.py",
        "gateway/model.so",
        "gateway/__pycache__/model.cpython-311.pyc.140006615903440",
    )
    for name in (*names, *source_tree.PROJECT_FILES, "requirements-compile.lock"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("old")
    monkeypatch.setattr(source_tree, "ROOT", tmp_path)
    seen = [source_tree.tree_digest()]
    for name in names:
        (tmp_path / name).write_text("new")
        seen.append(source_tree.tree_digest())
    assert len(set(seen)) == len(names) - 1
    assert seen[-1] == seen[-2] == seen[-3]  # what is compiled already is not copied


def test_classes_on_the_path_of_a_chunk_are_c_classes_with_all_their_slots() -> None:
    for name in (
        "gateway.protocol.response.relay.Relay",
        "gateway.http.engine_connections.UpstreamConnection",
        "gateway.http.write_queue.WriteQueue",
    ):
        assert slots_of(name) == set(extension_classes.slots(PROJECT.classes[name]) or ()) != set()


def test_the_path_of_a_chunk_is_called_without_a_look_up() -> None:
    assert {
        "    cdef public Relay _relay",
        "    cdef public WriteQueue _outbox",
        "    cpdef object data_received(self, bytes data)",
    } <= set(told("gateway.http.engine_connections"))
    assert "    cpdef object feed(self, bytes data, object now)" in told(
        "gateway.protocol.response.relay"
    )
    assert (
        "    cpdef object enqueue(self, object transport, bytes data, object descriptor=*)"
        in told("gateway.http.write_queue")
    )


def test_a_class_on_another_base_or_with_slots_named_elsewhere_stays_what_it_is() -> None:
    project = of(
        module="class Base:\n    __slots__ = ('a',)\n\nclass On(Base):\n    __slots__ = ('b', '_c')\n\n"
        "class Plain:\n    pass\n\nclass Other(Protocol):\n    __slots__ = ()\n\n"
        "class Named:\n    __slots__ = (*FIELDS, 'd')\n"
    )
    assert list(project.classes) == ["module.Base", "module.On"]
    assert declarations("module", project) == (
        "cimport cython\n"
        "cdef class Base\n"
        "cdef class Base():\n    cdef public object a\n    pass\n"
        "cdef class On(Base):\n    cdef public object b\n    cdef object _c\n    pass\n"
    )


ITEM = "class Item:\n    __slots__ = ('n',)\n"


def test_an_attribute_holds_a_c_class_where_its_annotation_or_its_first_value_says_so() -> None:
    holder = (
        "from item import Item\nclass Holder:\n    __slots__ = ('a', 'b', 'c', 'd', 'e', 'f')\n"
        "    def __init__(self, a: Item, b: Item | None, other):\n"
        "        self.a, self.b = a, b\n        self.c = Item()\n        self.d: Item | None = other\n"
        "        self.e = other.item\n        self.f: object = a\n"
        "    def later(self, item: Item):\n        self.e = item\n        f: Item = item\n"
    )
    lines = declarations("holder", of(item=ITEM, holder=holder)).splitlines()
    kinds = {line.split()[-1]: line.split()[-2] for line in lines if "cdef public" in line}
    assert kinds == {
        "a": "Item",
        "b": "Item",
        "c": "Item",
        "d": "Item",
        "e": "object",
        "f": "object",
    }


@pytest.mark.parametrize(
    "body",
    [
        "    async def m(self): pass\n",
        "    def m(self):\n        yield 1\n",
        "    def m(self):\n        return lambda: self\n",
        "    def m(self, *, late=False): pass\n",
        "    def m(self, *each): pass\n",
        "    @property\n    def m(self): pass\n",
        "    def m(self):\n        super().m()\n",
        "    def __m__(self): pass\n",
        "    def m(self): pass\n    def n(self, loop):\n        loop.call_soon(self.m)\n",
    ],
)
def test_a_method_without_a_form_in_c_or_handed_on_as_a_value_stays_pythons(body: str) -> None:
    assert " m(" not in declarations("item", of(item=ITEM + body))


def test_a_method_of_a_new_object_that_is_a_value_stays_pythons_beside_such_a_field() -> None:
    item = ITEM + "    def m(self): pass\n"
    user = "from item import Item\nclass Other:\n    m: int\nhanded_on = Item().m\n"
    assert " m(" not in declarations("item", of(item=item, user=user))


def test_a_method_is_declared_with_the_c_classes_and_bytes_of_its_annotations() -> None:
    body = "    def m(self, item: Item, data: bytes, at: float = 0.0) -> Item | None: pass\n"
    assert "    cpdef Item m(self, Item item, bytes data, object at=*)\n" in declarations(
        "item", of(item=ITEM + body)
    )


def test_a_method_called_with_unpacked_arguments_stays_pythons() -> None:
    item = ITEM + "    def m(self, a): pass\n    def k(self, a): pass\n    def j(self, a): pass\n"
    user = (
        "def use(one, values, named):\n    one.m(*values)\n    one.k(values)\n    one.j(**named)\n"
    )
    declared = declarations("item", of(item=item, user=user))
    assert [name for name in "mkj" if f" {name}(" in declared] == ["k"]


def test_a_method_handed_on_by_another_module_or_found_in_two_of_a_kin_stays_pythons() -> None:
    item = ITEM + "    def m(self): pass\n    def k(self): pass\n"
    user = "from item import Item\ndef use(one: Item, loop):\n    loop.call_soon(one.m)\n"
    kin = "from item import Item\nclass On(Item):\n    __slots__ = ()\n    def k(self): pass\n"
    assert " m(" not in declarations("item", of(item=item, user=user))
    assert " k(" in declarations("item", of(item=item, user=user))
    assert " k(" not in declarations("item", of(item=item, kin=kin))


def test_a_method_that_a_grandchild_extends_by_super_stays_pythons() -> None:
    item = ITEM + "    def m(self): pass\n    def k(self): pass\n"
    kin = (
        "from item import Item\nclass On(Item):\n    __slots__ = ()\n"
        "class Last(On):\n    __slots__ = ()\n"
        "    def m(self):\n        super().m()\n    def k(self): pass\n"
    )
    declared = declarations("item", of(item=item, kin=kin))
    assert [name for name in "mk" if f" {name}(" in declared] == ["k"]


@pytest.mark.parametrize(
    "user",
    [
        "def use(one):\n    one._m()\n    return one._a\n",
        "NAMES = ('_m', '_a')\n",
        "NAMES = ('other._m', 'other._a')\n",
        "from item import Item\nclass On(Item):\n    def k(self):\n        return self._m() + self._a\n",
    ],
)
def test_private_names_of_a_c_class_are_hidden_unless_something_may_look_them_up(user: str) -> None:
    item = (
        "class Item:\n    __slots__ = ('_a',)\n"
        "    def _m(self): pass\n    def k(self):\n        return self._m() + self._a\n"
    )
    unrelated = "class Other:\n    def k(self):\n        return self._m() + self._a\n"
    hidden = declarations("item", of(item=item, user=unrelated))
    assert "    cdef object _a\n" in hidden
    assert "    cdef object _m(self)\n" in hidden
    shown = declarations("item", of(item=item, user=user))
    assert "    cdef public object _a\n" in shown
    assert "    cpdef object _m(self)\n" in shown


def test_the_private_names_that_tests_read_stay_visible() -> None:
    private = {
        name
        for node in PROJECT.classes.values()
        for name in (*(extension_classes.slots(node) or ()), *_functions_in(node.body))
    } | {name for module in PROJECT.compiled for name in _functions_in(PROJECT.trees[module].body)}
    hidden = {name for name in private if name.startswith("_")} - PROJECT.looked_up
    read = {
        name
        for pattern in RUN_ON_COMPILED_MODULES
        for path in ROOT.glob(pattern)
        for top in ast.parse(path.read_text()).body
        for name in extension_classes.names_looked_up(top, is_closed=isinstance(top, ast.ClassDef))
    }
    assert sorted(hidden & read) == sorted(READ_BY_TESTS)


def test_all_slots_of_a_class_stay_visible_where_its_list_of_slots_is_used() -> None:
    item = "class Item:\n    __slots__ = ('_a',)\n"
    assert "public" not in declarations("item", of(item=item))
    assert "public" in declarations("item", of(item=item, user="NAMES = Item.__slots__\n"))


def test_self_is_the_object_of_a_method_and_nothing_else_so_that_it_cannot_be_none() -> None:
    # The compiler removes checks whether `self` is None (tools/compile/generated_code.py).
    for module in PROJECT.compiled:
        tree = PROJECT.trees[module]
        methods = {id(each) for node in extension_classes.classes_of(tree) for each in node.body}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                names = [each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)]
                assert "self" not in (names[1:] if id(node) in methods else names), module
            elif isinstance(node, ast.Name) and node.id == "self":
                assert isinstance(node.ctx, ast.Load), module


def test_methods_of_c_classes_are_never_called_through_their_class() -> None:
    # In compiled code, such a call passes any object, even None, as `self`.
    for module, tree in PROJECT.trees.items():
        classes = PROJECT.known_classes(module)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of = node.func.value
                owner = classes.get(of.id) if isinstance(of, ast.Name) else None
                methods = [] if owner is None else PROJECT.classes[owner].body
                assert node.func.attr not in _methods_in(methods), (module, node.lineno)


def test_private_functions_are_called_without_a_look_up_and_public_ones_are_not() -> None:
    text = "def _own(a, data: bytes): pass\ndef shown(): return _own(1, b'')\ndef _kept(): pass\nTABLE = (_kept,)\n"
    assert declarations("module", of(module=text)) == "cdef object _own(object a, bytes data)\n"


def test_private_methods_of_a_class_of_floats_take_and_return_doubles() -> None:
    lines = [line.strip() for line in told("policies.pricing.price_loop")]
    assert "cdef double _loss(self, double share)" in lines
    assert "cpdef object set_request(self, object request, object now, object part)" in lines


def test_what_prices_and_engine_models_are_made_of_are_doubles_and_nothing_else_is_declared_so() -> (
    None
):
    for module in PROJECT.compiled:
        lines = [line for line in told(module) if "double" in line]
        declared = [" ".join(line.split()[-2:]) for line in lines if "(" not in line]
        # Arguments and results of methods are doubles only in classes of nothing but floats.
        wholly = [full for full, names in FLOATS.items() if not names]
        assert len(declared) == len(lines) or any(
            full.rpartition(".")[0] == module for full in wholly
        )
        expected = [
            name
            for full, names in FLOATS.items()
            if full.rpartition(".")[0] == module
            for name in names or extension_classes.slots(PROJECT.classes[full]) or ()
        ]
        assert sorted(declared) == sorted(f"double {name}" for name in expected)
        if module in WITH_DOUBLES:
            continue
        for each in ast.walk(PROJECT.trees[module]):
            if (
                isinstance(each, ast.AnnAssign)
                and isinstance(each.target, ast.Name)
                and not _is_field(module, each)
            ):
                assert ast.unparse(each.annotation) != "float", (
                    f"{module}: {each.target.id} would be a C double"
                )


def test_a_class_imported_for_types_alone_is_known_unless_that_closes_a_circle_of_more_than_classes() -> (
    None
):
    first = "if TYPE_CHECKING:\n    from second import Second\nclass First:\n    __slots__ = ()\n"
    second = "from first import {}\nclass Second:\n    __slots__ = ()\n"
    assert "Second" in of(first=first, second=second.format("First")).known_classes("first")
    assert "Second" not in of(first=first, second=second.format("helper")).known_classes("first")
    stands = "from first import First\nclass Second(First):\n    __slots__ = ()\n"
    assert "Second" not in of(first=first, second=stands).known_classes("first")
