"""Compile the modules on a request's path with Cython: python -m tools.compile.compile OUT

OUT receives a copy of the project with extension modules next to the sources. It can be installed
by pip, or run with OUT as the working directory or on PYTHONPATH. The image is built this way; the
sources also run without compilation. Requirements: a C compiler, Python's headers, the project's
dependencies, some minutes and 250 MB of memory. Unless CFLAGS is set, debugging information is
omitted, which would be five sixths of a module.

GCC compiles twice for profile-guided optimization: the first build records a training
(tools/compile/training.py), and the second uses the profile. Most of Cython's code handles errors;
the profile keeps that code out of the processor's caches. Other compilers compile once.
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
SOURCE_FOLDERS = ("gateway", "policies", "kvtransfer", "mockgpu", "planner")
PROJECT_FILES = ("pyproject.toml", "README.md", "LICENSE")
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
# A compiled module must behave exactly as its source: access to attributes of None raises, and
# annotations have no effect unless they name a C class.
DIRECTIVES = {"language_level": 3, "annotation_typing": True, "binding": True, "nonecheck": True}


def _c_class_of(
    self: AnnotationNode, env: Any, assigned_value: object = NOT_AN_ARGUMENT
) -> tuple[list[str], Any]:
    """Return the modifiers and the C type of an annotation for Cython.

    Replaces AnnotationNode.analyse_type_annotation. Only C classes become C types, for arguments
    and variables of functions. Other types have a wider meaning in Python: an int has any size, a
    float may be an int, a str may be a subclass. Variables annotated as float become C doubles.
    """
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
    """Copy the project to `out` and compile it there, unless `out` is up to date."""
    digest = _build_digest()
    if (out / STAMP).is_file() and (out / STAMP).read_text() == digest:
        print(f"{out} is up to date")  # noqa: T201
        return
    shutil.rmtree(out, ignore_errors=True)
    for folder in SOURCE_FOLDERS:
        shutil.copytree(
            ROOT / folder, out / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
    for name in PROJECT_FILES:
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
            raise TrainingError("the training has written no profile")
        _build(
            extensions,
            "-fprofile-use -fprofile-partial-training -fprofile-correction -Wno-missing-profile",
        )
    else:
        _build(extensions, "")
    shutil.rmtree("objects")
    for generated in (*written, *(Path(extension.sources[0]) for extension in extensions)):
        generated.unlink()
    Path(STAMP).write_text(digest)
    print(f"{len(extensions)} modules compiled into {out}")  # noqa: T201


def _build_digest() -> str:
    """Return a digest of everything that a build depends on.

    These are the copied files, the build scripts, the interpreter and the compiler's flags.
    """
    digest = hashlib.sha256(
        f"{sys.version} {os.environ.get('CC')} {os.environ.get('CFLAGS')}".encode()
    )
    files = [
        path for folder in SOURCE_FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()
    ]
    copied = [path for path in files if path.suffix not in (".pyc", ".so")] + [
        ROOT / name for name in PROJECT_FILES
    ]
    for path in sorted(
        [*copied, *(ROOT / "tools" / "compile").glob("*.py"), ROOT / "requirements-compile.lock"]
    ):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _build(extensions: list[Extension], flags: str) -> None:
    """Compile the C files to extension modules; profiles are written and read in `objects`."""
    for extension in extensions:
        extension.extra_compile_args = extension.extra_link_args = flags.split()
    build = Distribution({"ext_modules": extensions}).get_command_obj("build_ext")
    build.inplace, build.force, build.parallel = True, True, os.cpu_count()
    build.build_temp = build.build_lib = "objects"
    build.ensure_finalized()
    build.run()


def _is_gcc() -> bool:
    """Whether the compiler, `cc` or the one in CC, is GCC."""
    command = [*os.environ.get("CC", "cc").split(), "--version"]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
    return "Free Software Foundation" in version


def _declare() -> list[Path]:
    """Write the .pxd files next to the sources and return their paths."""
    known, written = read(Path()), []
    for source in map(Path, MODULES):
        if text := declarations(_module_name(source), known):
            written.append(source.with_suffix(".pxd"))
            written[-1].write_text(text)
    return written


def read(root: Path) -> Project:
    """Parse all modules below `root`."""
    sources = [path for folder in SOURCE_FOLDERS for path in (root / folder).rglob("*.py")]
    trees = {_module_name(path.relative_to(root)): ast.parse(path.read_text()) for path in sources}
    return project(trees, [_module_name(Path(module)) for module in MODULES])


def _module_name(source: Path) -> str:
    """Return the full name of a module."""
    return ".".join(source.with_suffix("").parts).removesuffix(".__init__")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
