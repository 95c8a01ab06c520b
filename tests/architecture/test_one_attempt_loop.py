"""Tests that only one loop chooses endpoints and sends requests: `attempts` in attempt_loop.py.

A retry needs a budget, a health check and a list of failed endpoints. A second loop would have to
repeat all of this, and would soon differ.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

GATEWAY = Path(__file__).parents[2] / "gateway"
FILES = sorted(GATEWAY.rglob("*.py"))
LOOP = ("proxy/attempt_loop.py", "attempts")
# Calls that pick an endpoint, reserve a place, or do both for one attempt. Helpers that do so are
# listed by name.
CALLS = {
    *("pick", "pick_over_cap", "pick_longest", "_pick_alone", "_decide", "choose"),
    *("reserve", "reserve_decode", "reserve_other_decode", "attempt", "attempts"),
}
METHODS_ONLY = {"reserve"}  # the function of this name reserves memory for a body
# A reload asks every new policy one question before the policy is used, and sends nothing.
DRY_RUN = ("reload/dry_run_and_swap.py", "dry_run_steps")

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOPS = (
    *(ast.While, ast.For, ast.AsyncFor),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


def calls(node: ast.AST) -> set[str]:
    functions = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
    names = {function.attr for function in functions if isinstance(function, ast.Attribute)}
    called = {function.id for function in functions if isinstance(function, ast.Name)}
    return (names | called - METHODS_ONLY) & CALLS


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield from own_nodes(node)


def loops(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    for function in ast.walk(tree):
        if isinstance(function, FUNCTIONS):
            for node in own_nodes(function):
                if isinstance(node, LOOPS) and (names := calls(node)):
                    yield function.name, names


def the_loop() -> ast.While:
    tree = ast.parse((GATEWAY / "proxy" / "attempt_loop.py").read_text())
    return next(node for node in ast.walk(tree) if isinstance(node, ast.While))


def test_one_function_of_the_gateway_loops_over_picks_and_reservations() -> None:
    found = {
        (path.relative_to(GATEWAY).as_posix(), name)
        for path in FILES
        for name, _ in loops(ast.parse(path.read_text()))
    }
    assert found == {LOOP, DRY_RUN}


def test_the_loop_chooses_and_attempts_and_nothing_else() -> None:
    assert calls(the_loop()) == {"choose", "attempt"}


def test_nothing_is_awaited_between_a_choice_that_stands_and_its_attempt() -> None:
    body = the_loop().body
    lines = [ast.unparse(statement) for statement in body]
    assert lines[0] == "choice = plan.choose(left_out)"
    attempt = next(i for i, line in enumerate(lines) if "plan.attempt(choice)" in line)
    between = [node for part in body[1:attempt] for node in ast.walk(part)]
    awaits = [ast.unparse(node) for node in between if isinstance(node, ast.Await)]
    # After a health check that took time, the loop chooses again: `names` is None only without an
    # await.
    assert awaits == ["await screen.check(choice)"]


def test_no_plan_attempts_again_by_itself() -> None:
    for path in FILES:
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.AsyncFunctionDef) and function.name == "attempt":
                assert calls(function) <= {"reserve", "attempt"}, path
                assert not any(isinstance(node, LOOPS) for node in own_nodes(function)), path


@pytest.mark.parametrize(
    "body",
    [
        "    while True:\n        pick = run.pick(policy, query, candidates)\n",
        "    for left_out in names:\n        with endpoints.reserve(pick, request, None): pass\n",
        "    return [endpoints.reserve_decode(each, request, None) for each in picks]\n",
        "    while True:\n        if broke:\n            await plan.attempt(plan.choose(()))\n",
    ],
)
def test_every_such_loop_is_seen(body: str) -> None:
    assert list(loops(ast.parse(f"async def f():\n{body}")))


def test_a_function_inside_a_function_with_a_loop_counts_for_itself() -> None:
    inner = "    def g():\n        return run.pick(a, b, c)\n"
    assert not list(loops(ast.parse(f"def f():\n    while True:\n        wait()\n{inner}")))
