"""Tests that compiled code behaves like interpreted code although it caches attribute look-ups.

This must hold whatever happens to the classes between two look-ups.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from tools.compile.generated_code import improve

SOURCE = """
def read(thing):
    return thing.value

def write(thing, value):
    thing.value = value

def remove(thing):
    del thing.value

def call(thing):
    return thing.method(1, 2)

class Compiled:
    def own(self):
        return self.value

    def own_with(self, value):
        self.value = value

    def own_with_all(self, *values):
        self.value = values

    async def own_later(self):
        return self.value

    def _hidden(self):
        return self.value

    def hidden_of_other(self):
        return self.other._hidden()

def pass_on(function, first, others):
    return function(first, *others)

def read_compiled(thing: Compiled | None):
    return thing.value

def read_after(first, second, thing):
    return [(first, second), (second, first), thing.missing]

class Unused:
    pass
"""
DECLARED = """
cimport cython
@cython.final
cdef class Compiled:
    cdef public object value
    cdef public Compiled other
    cdef object _hidden(self)

cdef class Unused:
    cdef public object value
"""
USER = """
def read(thing):
    return read_field(thing)

def read_field(thing):
    return thing.value
"""
USER_DECLARED = """
from cached cimport Compiled, Unused
cpdef object read_field(Compiled thing)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cython = pytest.importorskip("Cython.Build")
    folder = tmp_path_factory.mktemp("cached")
    sources = {"cached": (SOURCE, DECLARED), "user": (USER, USER_DECLARED)}
    for name, (text, declared) in sources.items():
        (folder / f"{name}.py").write_text(text)
        (folder / f"{name}.pxd").write_text(declared)
    directives = {"language_level": 3, "nonecheck": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        modules = [f"{name}.py" for name in sources]
        cython.cythonize(modules, quiet=True, compiler_directives=directives)
    return folder


@pytest.fixture(scope="module")
def compiled(folder: Path) -> ModuleType:
    return _compiled(folder, "cached")


def _compiled(folder: Path, name: str) -> ModuleType:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    code, library = folder / f"{name}.c", folder / f"{name}.so"
    code.write_text(improve(code.read_text()))
    command = [compiler, "-O0", "-Wall", "-Werror=incompatible-pointer-types", "-shared", "-fPIC"]
    include = f"-I{sysconfig.get_path('include')}"
    subprocess.run([*command, include, str(code), "-o", str(library)], check=True)
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def read(compiled: ModuleType) -> Callable[[object], object]:
    return lambda thing: compiled.read(thing)


@pytest.fixture
def call(compiled: ModuleType) -> Callable[[object], object]:
    return lambda thing: compiled.call(thing)


Read = Callable[[object], object]


class Slotted:
    __slots__ = ("other", "value")

    def method(self, first: int, second: int) -> object:
        return type(self).__name__, first, second


class Struct(msgspec.Struct):
    other: int = 0
    value: int = 7


def slotted(value: object) -> Slotted:
    thing = Slotted()
    thing.other, thing.value = "other", value
    return thing


def test_the_cache_is_in_the_code(compiled: ModuleType) -> None:
    code = Path(str(compiled.__file__)).with_suffix(".c").read_text()
    assert "PENSTOCK_GET_ATTRIBUTE(__pyx_v_thing" in code
    assert "= PENSTOCK_CALL_METHOD(" in code
    assert "PENSTOCK_SET_ATTRIBUTE(__pyx_v_thing" in code


def test_only_objects_other_than_self_are_checked_for_none(compiled: ModuleType) -> None:
    code = Path(str(compiled.__file__)).with_suffix(".c").read_text()
    assert "__pyx_v_thing) == Py_None" in code
    assert "((PyObject *)__pyx_v_self) == Py_None" not in code
    c_object = compiled.Compiled()
    c_object.value = "c"
    assert c_object.own() == compiled.read_compiled(c_object) == "c"
    with pytest.raises(AttributeError, match=r"^'NoneType' object has no attribute 'value'$"):
        compiled.read_compiled(None)
    with pytest.raises(AttributeError, match=r"^'NoneType' object has no attribute '_hidden'$"):
        c_object.hidden_of_other()
    c_object.other = c_object
    assert c_object.hidden_of_other() == "c"


@pytest.mark.parametrize("wrong", [None, 5, object()])
@pytest.mark.parametrize(
    ("method", "arguments"),
    [("own", ()), ("own_with", (1,)), ("own_with_all", (1, 2)), ("own_later", ())],
)
def test_a_method_that_is_called_through_its_class_refuses_other_objects(
    compiled: ModuleType, method: str, arguments: tuple[object, ...], wrong: object
) -> None:
    function = getattr(compiled.Compiled, method)
    expected = rf"^a method of 'cached\.Compiled' was called for a '{type(wrong).__name__}'$"
    with pytest.raises(TypeError, match=expected):
        function(wrong, *arguments)
    with pytest.raises(TypeError, match=expected):
        compiled.pass_on(function, wrong, arguments)


def test_only_classes_of_other_modules_that_are_used_are_imported(
    folder: Path, compiled: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert '"Unused"' in (folder / "user.c").read_text()
    monkeypatch.setitem(sys.modules, "cached", compiled)
    user = _compiled(folder, "user")
    code = (folder / "user.c").read_text()
    assert '"Compiled"' in code
    assert '"Unused"' not in code
    c_object = compiled.Compiled()
    c_object.value = "c"
    assert user.read(c_object) == "c"
    with pytest.raises(TypeError, match=r"^Cannot convert cached\.Unused to cached\.Compiled$"):
        user.read(compiled.Unused())


def test_objects_are_released_after_an_error(compiled: ModuleType) -> None:
    assert "PENSTOCK_RELEASE(__pyx_t_" in Path(str(compiled.__file__)).with_suffix(".c").read_text()
    first, second = object(), object()
    before = sys.getrefcount(first), sys.getrefcount(second)
    for _ in range(3):
        with pytest.raises(AttributeError, match="missing"):
            compiled.read_after(first, second, object())
    assert (sys.getrefcount(first), sys.getrefcount(second)) == before


def test_slots_of_classes_structs_and_c_classes_are_read(compiled: ModuleType, read: Read) -> None:
    c_object = compiled.Compiled()
    c_object.value = "c"
    for _ in range(3):
        assert read(slotted(1)) == 1
        assert read(Struct(value=2)) == 2
        assert read(c_object) == "c"


def test_an_empty_slot_raises_although_a_full_one_was_read(read: Read) -> None:
    assert read(slotted(1)) == 1
    with pytest.raises(AttributeError):
        read(Slotted())
    assert read(slotted(2)) == 2


def test_slots_are_set_and_the_old_value_is_released(compiled: ModuleType) -> None:
    thing = Slotted()
    for _ in range(3):
        value = object()
        compiled.write(thing, value)
        assert thing.value is value
    compiled.write(thing, None)
    assert sys.getrefcount(value) == 2
    compiled.remove(thing)
    with pytest.raises(AttributeError):
        compiled.remove(thing)
    assert not hasattr(thing, "value")


def test_assignments_to_other_attributes_are_left_to_their_types(compiled: ModuleType) -> None:
    class Frozen(msgspec.Struct, frozen=True):
        value: int = 0

    class WithProperty:
        __slots__ = ("stored",)
        value = property(
            lambda self: self.stored, lambda self, value: setattr(self, "stored", value)
        )

    struct, c_object, other = Struct(), compiled.Compiled(), WithProperty()
    for number in range(3):
        for thing in (Slotted(), struct, c_object, other):
            compiled.write(thing, number)
            assert thing.value == number
        with pytest.raises(AttributeError, match="immutable"):
            compiled.write(Frozen(), number)
        with pytest.raises(AttributeError):
            compiled.write(object(), number)


def test_an_assignment_sees_that_its_class_has_changed(compiled: ModuleType) -> None:
    class Changing:
        __slots__ = ("value",)

    thing, seen = Changing(), []
    compiled.write(thing, 1)
    compiled.write(thing, 2)
    Changing.__setattr__ = lambda self, name, value: seen.append(value)  # type: ignore[assignment]
    compiled.write(thing, 3)
    assert (thing.value, seen) == (2, [3])


def test_an_attribute_that_is_missing_raises(read: Read, call: Read) -> None:
    for thing in (None, 5, object()):
        with pytest.raises(AttributeError, match="value"):
            read(thing)
        with pytest.raises(AttributeError, match="method"):
            call(thing)


def test_a_class_that_changes_is_looked_up_again(read: Read, call: Read) -> None:
    class Base:
        __slots__ = ("value",)

        def method(self, first: int, second: int) -> int:
            return first + second

    class Child(Base):
        __slots__ = ()

    thing = Child()
    thing.value = 1
    assert [read(thing), call(thing)] == [1, 3]
    Base.method = lambda self, first, second: first - second  # type: ignore[method-assign]
    assert call(thing) == -1
    Child.value = property(lambda self: "hidden")  # type: ignore[assignment]
    assert read(thing) == "hidden"
    del Child.value
    assert read(thing) == 1
    Child.__getattribute__ = lambda self, name: name  # type: ignore[assignment, method-assign]
    assert read(thing) == "value"


def test_an_attribute_of_the_object_hides_a_method_of_its_class(call: Read) -> None:
    class WithDict:
        def method(self, first: int, second: int) -> object:
            return "class"

    thing = WithDict()
    assert call(thing) == "class"
    thing.method = lambda first, second: "object"  # type: ignore[method-assign]
    assert call(thing) == "object"
    assert call(WithDict()) == "class"


def test_what_slots_contain_is_called_without_the_object(call: Read) -> None:
    class Slotted:
        __slots__ = ("method",)

        def bound(self, first: int, second: int) -> object:
            return self, first, second

    one, other = Slotted(), Slotted()
    one.method, other.method = one.bound, lambda first, second: (first, second)
    assert [call(one), call(other), call(one)] == [(one, 1, 2), (1, 2), (one, 1, 2)]
    del one.method
    with pytest.raises(AttributeError, match="method"):
        call(one)
    other.method = partial(one.bound, 0)  # type: ignore[assignment]
    with pytest.raises(TypeError):
        call(other)


def test_an_attribute_hides_a_method_in_an_object_whose_dictionary_is_made_late(
    call: Read,
) -> None:
    class Late(asyncio.Future[None]):
        __slots__ = ()

        def method(self, first: int, second: int) -> object:
            return "class"

    loop = asyncio.new_event_loop()
    thing, untouched = Late(loop=loop), Late(loop=loop)
    assert [call(thing), call(thing)] == ["class", "class"]
    thing.method = lambda first, second: "object"  # type: ignore[method-assign]
    assert [call(thing), call(untouched), call(thing)] == ["object", "class", "object"]
    loop.close()


def test_methods_of_all_kinds_are_called(call: Read) -> None:
    class Static:
        __slots__ = ()

        @staticmethod
        def method(first: int, second: int) -> object:
            return "static", first, second

    class OfClass:
        __slots__ = ()

        @classmethod
        def method(cls, first: int, second: int) -> object:
            return cls.__name__, first, second

    class Field:
        __slots__ = ("method",)

    field = Field()
    field.method = lambda first, second: ("field", first, second)
    for _ in range(2):
        assert call(Static()) == ("static", 1, 2)
        assert call(OfClass()) == ("OfClass", 1, 2)
        assert call(field) == ("field", 1, 2)
        assert call(Slotted()) == ("Slotted", 1, 2)


def test_a_method_that_replaces_itself_runs_to_its_end(call: Read) -> None:
    class Changing:
        __slots__ = ()

        def method(self, first: int, second: int) -> int:
            Changing.method = lambda self, first, second: 0  # type: ignore[method-assign]
            return first + second

    assert [call(Changing()) for _ in range(2)] == [3, 0]


def _classes() -> Iterator[type]:
    for number in range(200):
        yield type(f"Class{number}", (), {"__slots__": ("value",), "method": lambda *_: "called"})


def test_a_site_that_sees_many_classes_stays_right(read: Read, call: Read) -> None:
    for kind in _classes():
        thing = kind()
        thing.value = kind  # type: ignore[attr-defined]
        assert read(thing) is kind
        assert call(thing) == "called"
    assert read(slotted(1)) == 1


def test_a_slot_that_another_class_borrowed_is_not_read_from_its_objects(read: Read) -> None:
    class Borrower:
        __slots__ = ("own",)
        value = Slotted.__dict__["value"]

    for _ in range(2):
        with pytest.raises(TypeError):
            read(Borrower())


def test_code_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="does not look like Cython's output"):
        improve("int main(void) { return 0; }\n")
