"""Tests that each statement that `penstock seeds` lists has the expected result."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from planner.seeds.cli import seeds
from planner.seeds.statements import ItemStatus, SeedItem, seed_items
from tests.command_runner import CommandRunner, program
from tests.unit.planner.seeds import gateway_answers, sizing_answers
from tests.unit.planner.seeds.answers import ANSWERS, member

ITEMS = seed_items()
ANSWERED = [item for item in ITEMS if item.status is ItemStatus.ANSWERED]
# Items that are planned for later. The page itself lists the MISSING items.
LATER = {54, 55, 57, 58, 59, 60, 61}
MODULES = (gateway_answers, sizing_answers)
DOTTED = ("plans.", "ladder.", "gates.", "against.")


def outcome_of(item: SeedItem) -> Mapping[str, object]:
    names = [name for name in item.golden if name.startswith(DOTTED)]
    found: dict[str, object] = {name: member(item.command, name) for name in names}
    for function in ANSWERS.get(item.number, ()):
        found |= function(item)
    return found


@pytest.mark.parametrize("item", ANSWERED, ids=lambda item: f"{item.number} {item.item[:40]}")
def test_the_outcome_of_an_item_is_the_golden_one(item: SeedItem) -> None:
    outcome = outcome_of(item)
    assert outcome.keys() >= item.golden.keys()
    for name, golden in item.golden.items():
        if isinstance(golden, str):
            assert golden in str(outcome[name]), name
        else:
            assert outcome[name] == pytest.approx(golden, rel=0.01, abs=1e-12), name


def test_there_are_119_items_and_each_is_answered_or_says_why_not() -> None:
    assert [item.number for item in ITEMS] == list(range(1, 120))
    assert all(item.golden and item.command for item in ANSWERED)
    assert {item.number for item in ITEMS if item.status is ItemStatus.LATER} <= LATER
    assert all(item.note for item in ITEMS if item.status is ItemStatus.MISSING)
    assert ANSWERS.keys() <= {item.number for item in ANSWERED}


def run(*arguments: str) -> tuple[int, str]:
    result = CommandRunner().invoke(program(seeds), arguments)
    return result.exit_code, result.output


def test_the_command_lists_every_item_with_its_command_and_outcome() -> None:
    status, text = run()
    assert status == 0
    assert text.count("\n       = ") == 119
    assert "119 items: " in text
    assert "  38 Least TP" in run("38")[1]
    assert run("38")[1].count("\n       = ") == 1
    assert len(json.loads(run("--seed", "004", "--json")[1])) == 21
    assert run("120") == (
        2,
        "penstock seeds: no such item; valid: 1 to 119, --seed 000, 001, 002, 003, 004\n",
    )
