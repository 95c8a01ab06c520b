"""Mutation test of policies/sizing: replaces each formula by 1, and checks that a test fails.

A formula is an arithmetic expression, or a comparison that a function returns. Each one is replaced
in a copy of the repository, and the tests of the sizing code run there.

Prints one line per formula, with the name of a test that failed. Exits with status 1 if a formula
can be replaced and all tests pass.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = Path("policies/sizing")
# The quick tests first: most formulas need no others.
TESTS = (
    ("tests/unit/policies/sizing",),
    ("tests/unit/planner/size", "tests/unit/mockgpu/test_seed_figures.py"),
)


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
        yield value.lineno, text, (raw[:begin] + b"(1)" + raw[end:]).decode()


def failing_test(tree: Path) -> str | None:
    """Return the name of the first test that fails in the folder `tree`, or None if all pass.

    tree  copy of the repository, with one formula replaced
    """
    return next((test for tests in TESTS if (test := _failing(tree, tests)) is not None), None)


def _failing(tree: Path, tests: Sequence[str]) -> str | None:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no"]
    result = subprocess.run(  # noqa: S603
        [*command, *tests],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    if result.returncode == 0:
        return None
    match = re.search(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE)
    return match[1] if match else "collection"


def main(arguments: Sequence[str]) -> int:
    """Test the formulas of the named modules, or of all modules, and print the results.

    Returns the exit status: 1 if all tests pass although a formula was replaced, otherwise 0.
    """
    survivors = tried = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignore = shutil.ignore_patterns(".git", ".venv", "__pycache__", "results")
        shutil.copytree(ROOT, tree, ignore=ignore)
        for path in sorted((tree / PACKAGE).glob("*.py")):
            if arguments and path.stem not in arguments:
                continue
            original = path.read_text()
            for line, text, source in mutants(original):
                path.write_text(source)
                test = failing_test(tree)
                tried += 1
                survivors += test is None
                place = f"{PACKAGE / path.name}:{line}"
                verdict = "SURVIVES" if test is None else "killed"
                sys.stdout.write(f"{verdict}  {place}  {text}  {test or ''}\n")
                sys.stdout.flush()
            path.write_text(original)
    sys.stdout.write(f"{tried} formulas, {survivors} survive\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
