"""Tests of the service classes that the option `--slo` of `penstock replay` accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.replay.argument_parsing import ArgumentError
from planner.replay.service_classes import parse_classes
from policies.routing_types import STANDARD, Slo


def test_an_slo_is_two_budgets_or_a_file_of_classes(tmp_path: Path) -> None:
    assert parse_classes("ttft=2s,tpot=50ms") == (Slo("standard", 2.0, 0.05), {})
    assert parse_classes("tpot=50ms")[0].ttft_s == STANDARD.ttft_s
    file = tmp_path / "classes.yaml"
    file.write_text("chat: {ttft: 1s, tpot: 50ms, weight: 4}\nbatch: {ttft: 60s, tpot: 1s}\n")
    standard, named = parse_classes(str(file))
    assert (standard, named["chat"]) == (STANDARD, Slo("chat", 1.0, 0.05, 4.0))


@pytest.mark.parametrize("text", ["tpt=3s", "ttft=soon", "nowhere.yaml"])
def test_a_budget_that_cannot_be_is_named(text: str) -> None:
    with pytest.raises(ArgumentError):
        parse_classes(text)
