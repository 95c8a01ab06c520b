"""Compiles the path of a request and of a chunk with Cython, from the very same sources: tools/compile/compile.py OUT

OUT gets a copy of the project with extension modules beside the sources: pip installs it, or it runs with OUT as the
working directory or on PYTHONPATH. The image is made so; the sources run as they are. It needs a C compiler, Python's
headers, what the project needs to run, some minutes and 250 MB of memory. CFLAGS are the compiler's; unless they are
set, debugging information, five sixths of a module, is left out.

GCC compiles twice: what the first makes notes what runs while it serves a training (tools/compile/training.py), and the second lays
out by that. Most of what Cython writes is for errors; unless it is set aside, a request finds little of its own code in
the processor's caches. Other compilers compile once.
"""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from Cython.Build import cythonize
from Cython.Compiler.ExprNodes import AnnotationNode, BitwiseOrNode
from Cython.Compiler.PyrexTypes import c_double_type
from setuptools import Distribution, Extension

from tools.compile.classes import Project, project
from tools.compile.declarations import declarations
from tools.compile.training import TrainingError, train

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("gateway", "policies", "kvtransfer", "mockgpu", "planner")
PROJECT = ("pyproject.toml", "README.md", "LICENSE")
STAMP = "made-of"
SPINE = ("serve.py", "exchange.py", "route.py")
PACKAGES = (
    *(f"gateway/{name}" for name in ("protocol", "http", "admission", "fleet", "proxy", "disagg")),
    *(f"gateway/{name}" for name in ("legs", "trials", "metrics", "telemetry")),
    "policies",
    *(
        f"policies/{name}"
        for name in ("admission", "prefix", "engine", "latency", "pricing", "health")
    ),
    "kvtransfer/dialects",
)
"""Every module of these packages is compiled; packages inside them are listed on their own."""
MODULES = (
    *(f"gateway/{name}" for name in SPINE if (ROOT / "gateway" / name).is_file()),
    *sorted(
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).glob("*.py")
        if path.name != "__init__.py"
    ),
)
NOT_AN_ARGUMENT = object()
# None has no attributes, and annotations stay annotations unless they name a C class: a compiled module must behave as
# its source does, not faster at the price of meaning.
DIRECTIVES = {"language_level": 3, "annotation_typing": True, "binding": True, "nonecheck": True}


def _c_class_of(
    self: AnnotationNode, env: Any, assigned_value: object = NOT_AN_ARGUMENT
) -> tuple[list[str], Any]:
    """What Cython takes from an annotation, in place of AnnotationNode.analyse_type_annotation: the C class that it
    gives an argument or a variable of a function, and whether that may be None. An int stays one of any size, a float
    may be an int, a str one of its subclasses; what a coroutine returns is not what calling it does. A variable that is
    said to be a float, which few are, is a C double."""
    if (
        assigned_value is NOT_AN_ARGUMENT
        and env.is_local_scope
        and self.expr.is_name
        and self.expr.name == "float"
    ):
        return [], c_double_type
    kind = self.expr.analyse_as_type(env)
    if (
        kind is None
        or not kind.is_extension_type
        or (assigned_value is NOT_AN_ARGUMENT and not env.is_local_scope)
    ):
        return [], None
    return (
        self.expr.analyse_pytyping_modifiers(env) if isinstance(self.expr, BitwiseOrNode) else []
    ), kind


def main(out: Path) -> None:
    """Copies, compiles in place, says how many. Does nothing where that was done with the very same."""
    made_of = _made_of()
    if (out / STAMP).is_file() and (out / STAMP).read_text() == made_of:
        print(f"{out} is compiled from these very sources")  # noqa: T201
        return
    shutil.rmtree(out, ignore_errors=True)
    for room in ROOMS:
        shutil.copytree(
            ROOT / room, out / room, ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
    for name in PROJECT:
        shutil.copy(ROOT / name, out)
    os.chdir(out)
    written = _declare()
    AnnotationNode.analyse_type_annotation = _c_class_of
    os.environ.setdefault("CFLAGS", "-O2 -g0 -DNDEBUG -fwrapv -Werror=incompatible-pointer-types")
    extensions = cythonize(
        list(MODULES), nthreads=os.cpu_count() or 1, compiler_directives=DIRECTIVES, quiet=True
    )
    if _is_gcc():
        _build(extensions, "-fprofile-generate")
        train(out)
        if not any(Path("objects").rglob("*.gcda")):
            raise TrainingError("what ran was noted nowhere")
        _build(
            extensions,
            "-fprofile-use -fprofile-partial-training -fprofile-correction -Wno-missing-profile",
        )
    else:
        _build(extensions, "")
    shutil.rmtree("objects")
    for made in (*written, *(Path(extension.sources[0]) for extension in extensions)):
        made.unlink()  # what they were made of
    Path(STAMP).write_text(made_of)
    print(f"{len(extensions)} modules compiled into {out}")  # noqa: T201


def _made_of() -> str:
    """What a build follows from, in a number: all that is copied, these scripts, interpreter and flags."""
    digest = hashlib.sha256(
        f"{sys.version} {os.environ.get('CC')} {os.environ.get('CFLAGS')}".encode()
    )
    there = [path for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file()]
    copied = [path for path in there if path.suffix not in (".pyc", ".so")] + [
        ROOT / name for name in PROJECT
    ]
    for path in sorted(
        [*copied, *(ROOT / "tools" / "compile").glob("*.py"), ROOT / "requirements-compile.lock"]
    ):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _build(extensions: list[Extension], flags: str) -> None:
    """C to extension modules. Notes of what runs are written, and looked for, beside the objects."""
    for extension in extensions:
        extension.extra_compile_args = extension.extra_link_args = flags.split()
    build = Distribution({"ext_modules": extensions}).get_command_obj("build_ext")
    build.inplace, build.force, build.parallel = True, True, os.cpu_count()
    build.build_temp = build.build_lib = "objects"
    build.ensure_finalized()
    build.run()


def _is_gcc() -> bool:
    """Whether Python's own compiler, or the one in CC, is GCC."""
    command = [*os.environ.get("CC", "cc").split(), "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
    return "Free Software Foundation" in said


def _declare() -> list[Path]:
    """Writes what Cython is told, beside the sources; the files written."""
    known, written = read(Path()), []
    for source in map(Path, MODULES):
        if text := declarations(_name(source), known):
            written.append(source.with_suffix(".pxd"))
            written[-1].write_text(text)
    return written


def read(root: Path) -> Project:
    """All modules below `root`."""
    sources = [path for room in ROOMS for path in (root / room).rglob("*.py")]
    trees = {_name(path.relative_to(root)): ast.parse(path.read_text()) for path in sources}
    return project(trees, [_name(Path(module)) for module in MODULES])


def _name(source: Path) -> str:
    """A module's full name."""
    return ".".join(source.with_suffix("").parts).removesuffix(".__init__")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
