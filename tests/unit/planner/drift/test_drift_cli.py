"""Tests of `penstock drift`: it prints what a log is sized for, and compares another log with
it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gateway.cli.main import app
from gateway.config import load_with_warnings
from planner.drift.shapes import ShapeReader
from planner.traces import TraceRequest

TRACE = Path(__file__).parents[3] / "data" / "mooncake_conversation_1500.jsonl.gz"
POOL = "version: 1\npools: {main: {endpoints: [{url: 'http://127.0.0.1:9'}]}}\n"


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["drift", *words])


def shorter(folder: Path) -> Path:
    file = folder / "other.jsonl"
    lines = [
        json.dumps({"timestamp": 700 * n, "input_length": 64, "output_length": 4000,
                    "hash_ids": [n]})
        for n in range(3000)
    ]  # fmt: skip
    file.write_text("\n".join(lines))
    return file


def test_a_printed_block_belongs_into_the_configuration_and_its_own_log_has_no_drift(
    tmp_path: Path,
) -> None:
    printed = run(str(TRACE))
    file = tmp_path / "gateway.yaml"
    file.write_text(POOL + printed.output)
    config = load_with_warnings(file, {}).config
    assert sum(config.sized_for["main"].prompt) == pytest.approx(1.0, abs=0.01)
    same = run(str(TRACE), "--config", str(file))
    assert same.exit_code == 0, same.output
    assert "no drift" in same.output


def test_other_shapes_end_with_3_and_name_the_measures(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(POOL + run(str(TRACE)).output)
    result = run(str(shorter(tmp_path)), "--config", str(file))
    assert result.exit_code == 3
    assert "drift of " in result.output
    assert "penstock size MODEL --from" in " ".join(result.output.split())
    plain = json.loads(run(str(shorter(tmp_path)), "--config", str(file), "--json").output)
    assert plain["drift"] is True
    assert plain["windows"][1]["index"]["prompt"] > 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: 1\n", "has no section sized_for"),
        ("sized_for: {a: {}, b: {}}\n", "no pool ''; its pools: a, b"),
        ("sized_for: {a: {prompt: [1]}}\n", "sized_for.prompt must be a list of 21 numbers"),
        ("sized_for: [", "gateway.yaml"),
    ],
)
def test_a_configuration_without_a_usable_block_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    result = run(str(TRACE), "--config", str(file))
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_block_that_came_before_is_cached_and_turns_are_counted() -> None:
    reader = ShapeReader()
    first = reader.read(TraceRequest(0.0, 100, 10, (1, 2), session="s"))
    second = reader.read(TraceRequest(1.0, 200, 10, (1, 2, 3, 4), session="s"))
    assert (first.uncached_share, first.turn) == (1.0, 1)
    assert (second.uncached_share, second.turn) == (0.5, 2)
    assert reader.read(TraceRequest(2.0, 10, 1)).turn == 1
