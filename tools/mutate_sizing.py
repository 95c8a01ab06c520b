"""Mutation test of policies/sizing: replaces each formula by 1, and checks that a test fails.

    python -m tools.mutate_sizing [MODULE]...

A formula is an arithmetic expression, or a comparison that a function returns. First, each one is
replaced in the functions of a child process that has imported all tests, which takes about a
second. Where all tests pass there, the formula is replaced in a copy of the repository, and the
tests run in a new process: values that are computed while modules are imported then change too.

Prints one line per formula, with the name of a test that failed. Exits with status 1 if a formula
can be replaced and all tests pass.
"""

from __future__ import annotations

import ast
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from types import CodeType, FunctionType

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = Path("policies/sizing")
# Tests in the order in which they run: quick ones first, which detect most mutations.
TESTS = (
    ("tests/unit/policies/sizing",),
    ("tests/unit/planner/size", "tests/unit/mockgpu/test_seed_figures.py"),
)
TESTS_LIMIT_S = 400
QUIET = ("-x", "-q", "-p", "no:cacheprovider", "--tb=no")


def formulas(tree: ast.Module) -> Iterator[ast.expr]:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    for function in functions:
        pending: list[ast.AST] = list(function.body)
        while pending:
            node = pending.pop(0)
            is_compared = isinstance(node, ast.Return) and isinstance(node.value, ast.Compare)
            if isinstance(node, ast.Return) and node.value is not None and is_compared:
                yield node.value
            elif isinstance(node, ast.BinOp) and _is_formula(node):
                yield node
            else:
                pending[:0] = ast.iter_child_nodes(node)


def _is_formula(value: ast.BinOp) -> bool:
    nodes = list(ast.walk(value))
    texts = (ast.JoinedStr, ast.List, ast.Dict, ast.Set, ast.ListComp)
    return (
        not isinstance(value.op, ast.BitOr | ast.BitAnd)
        and any(isinstance(node, ast.Name | ast.Attribute) for node in nodes)
        and not any(isinstance(node, texts) for node in nodes)
    )


def mutants(source: str) -> Iterator[tuple[int, str, str]]:
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    raw = source.encode()
    seen: set[int] = set()
    for value in formulas(ast.parse(source)):
        begin = starts[value.lineno - 1] + value.col_offset
        end = starts[(value.end_lineno or value.lineno) - 1] + (value.end_col_offset or 0)
        if begin in seen:
            continue
        seen.add(begin)
        text = re.sub(r"\s+", " ", raw[begin:end].decode())
        # Keep the line ends, so that the following lines keep their numbers.
        one = b"(1" + b"\n" * raw[begin:end].count(b"\n") + b")"
        yield value.lineno, text, (raw[:begin] + one + raw[end:]).decode()


class _FirstFailure:
    """A plugin of pytest that stores which test failed first."""

    def __init__(self) -> None:
        self.name: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.name is None:
            self.name = report.nodeid


def run_tests(tests: Sequence[str]) -> str | None:
    """Run tests in this process. Return the name of the first test that fails, None if all pass."""
    failure = _FirstFailure()
    with redirect_stdout(StringIO()):
        status = pytest.main([*QUIET, *tests], plugins=[failure])
    return failure.name or (None if status == pytest.ExitCode.OK else "collection")


def failing_test_in_child(path: Path, source: str) -> str | None:
    """Run tests in a child process in which the functions of a module are those of `source`.

    Returns the name of the first test that fails, or None if all pass.

    path  the module that `source` replaces
    """
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiver)
        signal.alarm(TESTS_LIMIT_S)  # a formula that a loop depends on may never end
        replace_functions(path, source)
        test = next((test for tests in _ordered(path) if (test := run_tests(tests))), None)
        os.write(sender, (test or "").encode())
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver, "rb") as pipe:
        test = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return test or (f"exit status {status}" if status else None)


def _ordered(path: Path) -> Iterator[Sequence[str]]:
    # Return the tests in order: those of the module itself come first, because they are the most
    # likely to fail.
    own = Path(TESTS[0][0], f"test_{path.stem}.py")
    return iter((((str(own),),) if Path(ROOT, own).exists() else ()) + TESTS)


def replace_functions(path: Path, source: str) -> None:
    """Give all functions of an imported module the code of the same functions in `source`."""
    codes = dict(_codes(compile(source, str(path), "exec")))
    for value in gc.get_objects():
        if isinstance(value, FunctionType) and value.__code__.co_filename == str(path):
            code = codes.get(_place(value.__code__))
            if code is not None and code.co_freevars == value.__code__.co_freevars:
                value.__code__ = code
        elif isinstance(value, _CACHED):
            value.cache_clear()


_CACHED = type(cache(len))


def _codes(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield _place(constant), constant
            yield from _codes(constant)


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def failing_test(tree: Path) -> str | None:
    """Return the name of the first test that fails in the folder `tree`, or None if all pass.

    tree  copy of the repository, with one formula replaced
    """
    return next((test for tests in TESTS if (test := _failing(tree, tests)) is not None), None)


def _failing(tree: Path, tests: Sequence[str]) -> str | None:
    result = subprocess.run(  # noqa: S603
        [sys.executable, "-m", "pytest", *QUIET, *tests],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=TESTS_LIMIT_S,
        check=False,
    )
    if result.returncode == 0:
        return None
    match = re.search(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE)
    return match[1] if match else "collection"


def failing_test_in_copy(path: Path, source: str) -> str | None:
    """Run tests in a copy of the repository with one changed file.

    Returns the name of the first test that fails, or None if all pass.

    path  the module whose text is `source` in the copy
    """
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignore = shutil.ignore_patterns(".git", ".venv", "__pycache__", "build", "results")
        shutil.copytree(ROOT, tree, ignore=ignore)
        (tree / path.relative_to(ROOT)).write_text(source)
        return failing_test(tree)


def main(arguments: Sequence[str]) -> int:
    """Replace each formula of the named modules (or of all), and print whether a test fails.

    Returns the exit status: 0 if a test fails for each replaced formula, 1 if all tests pass for
    one of them, and 2 if a test fails without a change.
    """
    os.chdir(ROOT)
    for tests in TESTS:  # also imports everything that the children need
        if (test := run_tests(tests)) is not None:
            sys.stdout.write(f"fails without a change: {test}\n")
            return 2
    survivors = tried = 0
    for path in sorted((ROOT / PACKAGE).glob("*.py")):
        if arguments and path.stem not in arguments:
            continue
        for line, text, source in mutants(path.read_text()):
            test = failing_test_in_child(path, source) or failing_test_in_copy(path, source)
            tried += 1
            survivors += test is None
            verdict = "SURVIVES" if test is None else "killed"
            sys.stdout.write(f"{verdict}  {PACKAGE / path.name}:{line}  {text}  {test or ''}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{tried} formulas, {survivors} survive\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
