"""What deploy/compile.py and classes.py say of the sources holds: modules, classes, attributes and methods exist. What
training.py asks for is served."""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from gateway.config import examine_text

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "deploy"))
import classes  # noqa: E402
import compile as compiling  # noqa: E402
import training  # noqa: E402

SOURCES = {name.removesuffix(".py").replace("/", "."): ROOT / name for name in compiling.MODULES}
FOUND = classes.c_classes(SOURCES)


def slots_of(name: str) -> set[str]:
    """A C class's attributes, with those of the classes it stands on."""
    module, _, short = name.rpartition(".")
    declared = classes.declarations(module, SOURCES[module], FOUND).split("cdef class ")
    (mine,) = [each for each in declared if each.startswith(f"{short}(")]
    return {line.split()[-1] for line in mine.splitlines() if line.strip().startswith("cdef public")}


def test_every_module_that_is_compiled_exists() -> None:
    assert all(source.exists() for source in SOURCES.values())
    assert len(set(compiling.MODULES)) == len(compiling.MODULES)


def test_classes_on_the_path_of_a_chunk_are_c_classes_with_all_their_slots() -> None:
    for name in ("gateway.relay.Relay", "gateway.upstream.Connection", "gateway.outbox.Outbox"):
        assert slots_of(name) == set(classes.slots(FOUND[name]) or ()) != set()


@pytest.mark.parametrize("name", [*classes.HOLDS, *classes.DIRECT])
def test_what_is_typed_is_there(name: str) -> None:
    assert classes.HOLDS.get(name, {}).keys() <= slots_of(name)
    assert set(classes.HOLDS.get(name, {}).values()) <= FOUND.keys()
    methods = {node.name for node in FOUND[name].body if isinstance(node, ast.FunctionDef)}
    assert set(classes.DIRECT.get(name, ())) <= methods


def test_a_class_on_another_base_or_with_slots_named_elsewhere_stays_what_it_is(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(
        "class Base:\n    __slots__ = ('a',)\n\nclass On(Base):\n    __slots__ = ('b', '_c')\n\n"
        "class Plain:\n    pass\n\nclass Other(Protocol):\n    __slots__ = ()\n\n"
        "class Named:\n    __slots__ = (*FIELDS, 'd')\n"
    )
    found = classes.c_classes({"module": source})
    assert list(found) == ["module.Base", "module.On"]
    assert classes.declarations("module", source, found) == (
        "cdef class Base():\n    cdef public object a\n    pass\n"
        "cdef class On(Base):\n    cdef public object b\n    cdef public object _c\n    pass\n"
    )


def test_the_training_is_a_configuration_and_a_mix_that_asks_for_all_of_it() -> None:
    plain, priced, prefill, decode = ([f"http://127.0.0.1:{port}"] for port in range(4001, 4005))
    text = training.configuration(plain, priced, prefill, decode).encode()
    served = {model.name for model in examine_text(text, "training", {}).config.models}
    bodies = [json.loads(body) for body in training.mix(Random(0))]
    assert len(bodies) == training.REQUESTS
    kinds = Counter((body["model"], "stream" in body) for body in bodies)
    assert {model for model, _ in kinds} == served
    assert min(kinds.values()) > 50
    assert max(len(body["messages"][0]["content"]) for body in bodies) > 100_000
