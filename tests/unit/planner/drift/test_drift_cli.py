"""Tests of the command `penstock drift`: has traffic changed since the fleet was sized?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.cli.main import run as penstock
from gateway.config import load_with_warnings
from planner.drift.cli import hourly_rates
from planner.drift.request_measures import shape_of
from planner.traces import TraceRequest
from policies.sizing.workload_drift import ShapeMemory
from tests.command_runner import CommandRunner, Result

TRACE = Path(__file__).parents[3] / "data" / "mooncake_conversation_1500.jsonl.gz"
POOL = "version: 1\npools: {main: {endpoints: [{url: 'http://127.0.0.1:9'}]}}\n"


def run(*words: str) -> Result:
    return CommandRunner().invoke(penstock, ["drift", *words])


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
    result = run(str(shorter(tmp_path)), "--config", str(file), "--no-replay")
    assert result.exit_code == 3
    assert "drift of " in result.output
    words = str(shorter(tmp_path)), "--config", str(file), "--no-replay", "--json"
    plain = json.loads(run(*words).output)
    assert plain["drift"] is True
    assert plain["windows"][1]["index"]["prompt"] > 1
    assert plain["suggestion"] is None


def logged(at_s: float, prompt: int, model: str = "llama-3.1-8b", output: int = 30) -> str:
    line = {"time": at_s, "status": 200, "outcome": "served", "model": model}
    return json.dumps(line | {"prompt_tokens": prompt, "completion_tokens": output})


def test_only_requests_for_the_models_of_the_pool_count(tmp_path: Path) -> None:
    log, file = tmp_path / "access.jsonl", tmp_path / "gateway.yaml"
    lines = [logged(1_795_996_800.0 + n, 100) for n in range(2000)]
    log.write_text("\n".join(lines))
    file.write_text(POOL + "models: [{name: llama-3.1-8b, pool: main}]\n" + run(str(log)).output)
    others = [logged(1_795_996_800.5 + n, 9000, "other") for n in range(2000)]
    log.write_text("\n".join([*lines, *others]))
    assert run(str(log), "--config", str(file)).exit_code == 0
    words = "--only", "other", "--no-replay"
    assert run(str(log), "--config", str(file), *words).exit_code == 3


def test_hours_are_those_of_utc_and_count_with_the_part_that_the_log_covers() -> None:
    begin_s = 1_795_996_800.0 + 13.5 * 3600
    rates = hourly_rates([begin_s + 2 * n for n in range(2701)])  # until 15:00
    assert rates[13:15] == pytest.approx([0.5, 0.5], abs=0.001)
    assert sum(rates[:13]) == 0
    assert hourly_rates([]) == [0.0] * 24


def test_drift_is_followed_by_replays_of_the_running_and_a_newly_sized_fleet(
    tmp_path: Path,
) -> None:
    log, file = tmp_path / "access.jsonl", tmp_path / "gateway.yaml"
    before = [logged(1_795_996_800.0 + 8 * n, 100) for n in range(400)]
    log.write_text("\n".join(before))
    endpoints = ", ".join(
        f"{{url: 'http://127.0.0.1:{9000 + n}', labels: {{gpu: h100}}, layout: {{tp: 8}}}}"
        for n in range(3)
    )
    file.write_text(
        "version: 1\nmodels: [{name: llama-3.1-8b, pool: main}]\n"
        f"pools: {{main: {{endpoints: [{endpoints}]}}}}\n" + run(str(log)).output
    )
    log.write_text("\n".join(logged(1_795_996_800.0 + 8 * n, 2000) for n in range(400)))
    words = str(log), "--config", str(file), "--last", "10m"
    result = run(*words, "--json")
    assert result.exit_code == 3, result.output
    found = json.loads(result.output)["suggestion"]
    assert found["running"]["gpus"] == 24
    assert found["best"]["gpus"] < 24
    assert found["best"]["attainment"] >= found["running"]["attainment"] - 0.005
    assert found["is_suggested"] is True
    shown = run(*words, "--reload", "2000m")
    assert "suggestion: keep the running fleet; reloading the engines costs" in shown.output
    late = run(*words, "--limit", "1ms")
    assert "no suggestion: the replays took more than" in late.output


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
    memory = ShapeMemory(1 << 10)
    first = shape_of(memory, TraceRequest(0.0, 100, 10, (1, 2), session="s"))
    second = shape_of(memory, TraceRequest(1.0, 200, 10, (1, 2, 3, 4), session="s"))
    assert (first.uncached_share, first.turn) == (1.0, 1)
    assert (second.uncached_share, second.turn) == (0.5, 2)
    assert shape_of(memory, TraceRequest(2.0, 10, 1)).turn == 1
