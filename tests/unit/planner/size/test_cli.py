"""Tests of the command `penstock size`: text, JSON, written files, errors, exit statuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.main import config_in_text
from gateway.config import load_with_warnings
from planner.process_map import WorkerError
from planner.size.cli import size
from tests.command_runner import CommandRunner, Result, program

MODELS = Path(__file__).parents[3] / "data" / "models"
HARBOR = (
    *("llama-3.1-70b", "--in", "6000", "--out", "200", "--context", "8k", "--ttft", "1.2s"),
    *("--tpot", "40ms", "--max-concurrency", "24", "--concurrency", "24"),
)


def run(*arguments: str) -> Result:
    return CommandRunner().invoke(program(size, read_config=config_in_text), arguments)


def plain(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    members = json.loads(result.stdout)
    assert isinstance(members, dict)
    return members


def test_the_text_has_every_gate_the_fleet_its_prices_and_what_is_left_out() -> None:
    result = run(*HARBOR)
    assert result.exit_code == 0
    questions = [line for line in result.stdout.splitlines() if line[:1].isdigit()]
    assert [line[0] for line in questions] == list("123456789")
    assert all("[seed" in line for line in questions)
    assert "Fleet: " in result.stdout
    assert "x TP 4" in result.stdout
    assert "per 1M tokens: prompt $" in result.stdout
    assert "Not considered: speculative decoding" in result.stdout
    assert "measured grid" in result.stdout


def test_borrowed_constants_are_named_with_a_wider_error() -> None:
    text = run(*HARBOR, "--gpu", "mi300x").stdout
    assert "90 % of points within 40% (prefill) and 25% (decode)" in text
    assert "constants borrowed from h100" in text


def test_json_has_the_plan_with_verdict_and_dollars() -> None:
    (plan,) = plain(*HARBOR)["plans"]
    assert plan["layout"] == {"tp": 4, "pp": 1, "ep": 1, "dp": 1, "cp": 1}
    assert plan["memory"]["verdict"] == "serves"
    assert plan["memory"]["is_enough"] is True
    assert plan["usd_hour"] == plan["gpus"] * 2.5
    assert len(plan["gates"]) == 9


def test_several_kinds_of_gpu_are_compared_by_price() -> None:
    kinds = (*HARBOR, "--gpu", "h100,h200,b200", "--price", "h100=2.5,h200=3,b200=50")
    result = run(*kinds)
    assert all(f"\n{name} " in result.stdout for name in ("h100", "h200", "b200"))
    assert len(plain(*kinds)["plans"]) == 3


def test_the_front_and_the_ladder_are_tables_and_json() -> None:
    arguments = (*HARBOR, "--gpus", "16", "--front", "--ladder", "16")
    text = run(*arguments).stdout
    assert "for the 40.0 ms promise costs" in text
    assert "not possible: meta-llama/Llama-3.1-70B-Instruct on h100, TP 1 x PP 1" in text
    assert "TP tax" in text
    members = plain(*arguments)
    assert sum(point["is_best"] for point in members["front"]) >= 5
    assert [step["tp"] for step in members["ladder"]] == [1, 2, 4, 8, 16]
    assert members["ladder"][0]["parts"]["weights_s"] > 0


def test_a_missed_promise_and_missing_gpus_end_with_status_3() -> None:
    late = run("llama-3.1-70b", "--tpot", "1ms")
    assert late.exit_code == 3
    at_once = int(re.findall(r"^  batch (\d+): ", late.stdout, re.MULTILINE)[-1])
    assert at_once > 1
    assert f"at batch {at_once} of this plan, TPOT is missed by" in late.stdout
    result = run(*HARBOR[:-1], "480", "--gpus", "8")
    assert result.exit_code == 3
    assert "MISSED" in result.stdout


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-120b", "jamba-mini"])
def test_a_config_json_is_sized(model: str) -> None:
    result = run(str(MODELS / f"{model}.json"), "--gpu", "h200", "--concurrency", "8")
    assert result.exit_code == 0, result.stderr


def test_a_folder_with_a_config_json_is_sized(tmp_path: Path) -> None:
    folder = tmp_path / "own-model"
    folder.mkdir()
    (folder / "config.json").write_text((MODELS / "llama-3.1-8b.json").read_text())
    result = run(str(folder), "--emit", "vllm", "--gpu", "a100")
    assert f"vllm serve {folder}" in result.stdout
    assert "--served-model-name own-model" in result.stdout


def test_a_quantisation_file_beside_config_json_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((MODELS / "llama-3.1-70b.json").read_text())
    beside, command = tmp_path / "hf_quant_config.json", [str(tmp_path), "--gpu", "h200"]
    section = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    beside.write_text(json.dumps({"quantization": section}))
    # 69.5 G parameters of 9/16 bytes, and 2.1 G of embeddings of two.
    assert "42.7 GB of weights" in run(*command).output
    beside.write_text("{}")
    refused = run(*command)
    assert (refused.exit_code, "lacks the section quantization" in refused.output) == (2, True)


def test_a_gpu_of_ones_own_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    members = {"name": "own", "hbm_gb": 96, "hbm_tb_s": 4, "bf16_tflops": 900, "fp8_tflops": 1800}
    file.write_text(json.dumps(members | {"link_gb_s": 450, "nic_gb_s": 50, "domain_gpus": 4}))
    text = run("llama-3.1-70b", "--gpu", str(file), "--quant", "bf16").stdout
    assert "on own" in text
    assert "borrowed from h100" in text
    file.write_text(json.dumps(members))
    assert "lacks the fields link_gb_s, nic_gb_s" in run("llama-3.1-70b", "--gpu", str(file)).stderr
    file.write_text(json.dumps(members | {"link_gb_s": 0, "nic_gb_s": 50}))
    assert (
        "link_gb_s of the user-defined GPU must be"
        in run("llama-3.1-70b", "--gpu", str(file)).stderr
    )


@pytest.mark.parametrize("model", ["llama-3.1-70b", "deepseek-v3", "llama-3.1-405b"])
def test_the_emitted_gateway_yaml_is_valid_without_a_warning(tmp_path: Path, model: str) -> None:
    file = tmp_path / "gateway.yaml"
    options = ("--gpu", "h200", "--concurrency", "40", "--ttft", "2s", "--promise", "slow:tpot=1s")
    file.write_text(run(model, *options, "--emit", "gateway").stdout)
    loaded = load_with_warnings(file, {})
    assert loaded.warnings == ()
    endpoints = loaded.config.pools["main"].endpoints
    assert {endpoint.labels["gpu"] for endpoint in endpoints} == {"h200"}
    assert set(loaded.config.slo.classes) == {"standard", "slow"}
    used = sum(e.layout.tp * e.layout.pp * e.layout.dp for e in endpoints)
    assert loaded.config.hardware.gpus == used


def test_mock_groups_and_gateway_yaml_agree_on_ports_and_name() -> None:
    mock, gateway = (run(*HARBOR, "--emit", target).stdout for target in ("mock", "gateway"))
    assert "penstock mock --groups 2 --port 9000 --model llama-3.1-70b-fp8 " in mock
    assert "http://127.0.0.1:9000" in gateway
    assert "{name: llama-3.1-70b-fp8, pool: main, context_tokens: 8192}" in gateway


@pytest.mark.parametrize(
    ("target", "part"),
    [
        ("vllm", "--quantization fp8"),
        ("sglang", "--tp-size 4"),
        ("trtllm", "tensor_parallel_size: 4"),
        ("helm", "config:\n  hardware:"),
    ],
)
def test_each_target_is_emitted_alone(target: str, part: str) -> None:
    result = run(*HARBOR, "--emit", target)
    assert part in result.stdout
    assert "Fleet:" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["abacus"], "unknown model 'abacus'; known models: demo-8b, llama-3.1-8b,"),
        (["missing.json"], "cannot read missing.json: No such file"),
        (["llama-3.1-70b", "--gpus", "0"], "--gpus must be at least 1, not 0"),
        (["llama-3.1-70b", "--gpu", "x1"], "unknown GPU 'x1'; known GPUs: a100, h100,"),
        (["llama-3.1-70b", "--gpu", ","], "--gpu must not be empty; valid: a100"),
        (["llama-3.1-70b", "--rate", "1", "--concurrency", "2"], "exclude each other"),
        (["llama-3.1-70b", "--context", "1k"], "--context must be at least 2,200"),
        (["llama-3.1-70b", "--context", "1m"], "the model's maximum of 131,072 tokens"),
        (
            ["llama-3.1-70b", "--tpot", "fast"],
            "--tpot: 'fast' is not a time above zero; valid forms:",
        ),
        (
            ["llama-3.1-70b", "--in", "-3"],
            "--in: '-3' is not a number of tokens; valid forms: 8192, 8k",
        ),
        (["llama-3.1-70b", "--cached", "2"], "--cached must be from 0 to 0.999"),
        (["llama-3.1-70b", "--quant", "int3"], "unknown --quant 'int3'; valid: auto, bf16, fp8"),
        (
            ["deepseek-v3", "--gpu", "h200", "--quant", "bf16"],
            "are quantised already; valid: auto, fp8",
        ),
        (["llama-3.1-70b", "--kv-dtype", "x"], "unknown --kv-dtype 'x'; valid: bf16, fp8"),
        (["llama-3.1-70b", "--price", "free"], "--price 'free' is invalid"),
        (["llama-3.1-70b", "--domain", "0"], "--domain must be at least 1, not 0"),
        (["llama-3.1-70b", "--best-effort"], "--best-effort requires a promise"),
        (
            ["llama-3.1-70b", "--promise", "chat"],
            "--promise 'chat' is invalid; an example is chat:ttft=1s",
        ),
        (
            ["llama-3.1-70b", "--promise", "c:ttft=1s,p=1"],
            "is invalid: the percentile p must be from 50 to",
        ),
        (
            ["llama-3.1-70b", "--promise", "c:ttft=1s", "--promise", "c:tpot=1s"],
            "promises for the class 'c' are given twice; give each class once",
        ),
        (["llama-3.1-70b", "--emit", "helmet"], "unknown --emit 'helmet'; valid: vllm, sglang"),
        (
            [str(MODELS / "gpt-oss-120b.json"), "--gpu", "h200", "--emit", "mock"],
            "mock engines need a built-in model",
        ),
        ([""], "unknown model ''; known models: demo-8b"),
        (["meta-llama/Llama-3.1-8B"], "; the nearest is llama-3.1-8b; for any other model, give"),
        (["llama-3.1-70b", "--in", "200k"], "--in plus --out (205,000) exceeds the model's"),
        (
            ["llama-3.1-70b", "--price", "h200=3"],
            "price for h200, but --gpu does not contain it; valid: h100",
        ),
        (["llama-3.1-70b", "--promise", "c:ttft=1s,ttft=2s"], "'c:ttft=1s,ttft=2s' is invalid"),
        (
            ["llama-3.1-70b", "--emit", "vllm", "--report", "size.html"],
            "--emit prints only one file; to get --report, run the command again without --emit",
        ),
        (["llama-3.1-70b", "--from", "/dev/null"], "/dev/null:1: the file is empty"),
        (
            ["llama-3.1-70b", "--tp", "7"],
            "--tp 7 is impossible for meta-llama/Llama-3.1-70B-Instruct-FP8; valid TP sizes: 1, 2, 4, 8",
        ),
        (["llama-3.1-70b", "--tp", "0"], "--tp must be at least 1, not 0"),
        (["llama-3.1-70b", "--ladder", "0"], "--ladder must be a batch size from 1 to 4096, not 0"),
        (["llama-3.1-405b", "--gpus", "4"], "needs 8 GPUs of type h100 (TP 8), but only 4 are"),
    ],
)
def test_wrong_input_is_one_line_that_says_what_is_valid(
    arguments: list[str], message: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("penstock size: ")


def test_a_file_that_is_not_json_or_lacks_members_is_named(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("{")
    assert "is not valid JSON" in run(str(file)).stderr
    file.write_text('{"num_hidden_layers": 2}')
    assert "lacks hidden_size, num_attention_heads, vocab_size" in run(str(file)).stderr


def test_the_plan_and_other_shapes_are_replayed_on_a_log() -> None:
    trace = MODELS.parent / "mooncake_conversation_1500.jsonl.gz"
    arguments = ("llama-3.1-70b", "--in", "12000", "--out", "340", "--context", "32k", "--last")
    options = (*arguments, "60s", "--rate", "3", "--ttft", "5s", "--tpot", "100ms")
    members = plain(*options, "--from", str(trace))
    results = members["replayed"]
    assert 3 <= len(results) <= 5
    assert any("prefill" in result["fleet"] for result in results)
    shares = [result["attainment"] for result in results]
    assert shares == sorted(shares, reverse=True)
    assert 0 < shares[0] <= 1
    text = run(*options, "--from", str(trace)).stdout
    assert "replayed on the log, with the emitted configuration" in text


def test_replays_in_several_processes_have_the_results_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = MODELS.parent / "mooncake_conversation_1500.jsonl.gz"
    sizes = ("llama-3.1-70b", "--in", "12000", "--out", "340", "--context", "32k", "--rate", "3")
    options = (*sizes, "--ttft", "5s", "--tpot", "100ms", "--from", str(trace), "--last", "20s")
    results = []
    for cores in (1, 3):
        monkeypatch.setattr(
            "planner.size.finalist_replays.available_cores", lambda cores=cores: cores
        )
        results.append(plain(*options)["replayed"])
    assert len(results[0]) >= 3
    assert results[0] == results[1]


def test_a_replay_whose_process_is_killed_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kill_second(work: object, items: Sequence[object], *_: object) -> None:
        raise WorkerError(1, "its process ended with SIGKILL")

    monkeypatch.setattr("planner.size.finalist_replays.map_in_processes", kill_second)
    trace = MODELS.parent / "mooncake_conversation_1500.jsonl.gz"
    result = run(*HARBOR, "--from", str(trace), "--last", "5s")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("penstock size: replay of 1 prefill + 1 decode x TP 4: its process")


def test_a_replayed_fleet_refuses_what_its_emitted_wait_queue_does_not_hold() -> None:
    trace = MODELS.parent / "mooncake_conversation_1500.jsonl.gz"
    arguments = ("llama-3.1-70b", "--in", "12000", "--out", "340", "--context", "32k")
    promises = ("--ttft", "5s", "--tpot", "100ms", "--from", str(trace), "--last", "60s")
    # The fleet is sized for a thirtieth of the request rate in the log.
    (own, *_) = plain(*arguments, *promises, "--rate", "0.1")["replayed"]
    assert own["refused"] > 0.5
    assert own["attainment"] + own["refused"] <= 1


def test_other_shapes_are_replayed_with_the_largest_batch_within_the_promise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleets: list[tuple[str, int]] = []

    def collect(work: object, items: Sequence[Any], *_: object) -> None:
        fleets.extend((i.case.fleet.name, i.case.fleet.kinds[0].max_concurrency) for i in items)
        raise WorkerError(0, "the test runs no replay")

    monkeypatch.setattr("planner.size.finalist_replays.map_in_processes", collect)
    trace = MODELS.parent / "mooncake_conversation_1500.jsonl.gz"
    arguments = (*HARBOR[:-2], "--rate", "14", "--tpot", "60ms", "--from", str(trace))
    run(*arguments, "--last", "5s")
    # On the front of layouts, TP 8 has a batch of at most 4: beyond it, TP 4 is better.
    assert fleets == [
        *(("8 x TP 4", 24), ("5 prefill + 3 decode x TP 4", 24)),
        *(("6 prefill + 2 decode x TP 4", 24), ("16 x TP 2 llama-3.1-70b-fp8", 16)),
        ("4 x TP 8 llama-3.1-70b-fp8", 24),
    ]


def test_the_cost_of_a_smaller_model_stands_beside() -> None:
    arguments = (*HARBOR, "--against", "llama-3.1-8b")
    text = run(*arguments).stdout
    assert "meta-llama/Llama-3.1-8B" in text
    assert "whether it answers as well" in text
    members = plain(*arguments)
    assert members["against"]["usd_hour"] < members["plans"][0]["usd_hour"]
    assert "unknown model 'x'" in run(*HARBOR, "--against", "x").stderr


def test_a_log_that_cannot_be_replayed_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("{}\n")
    result = run(*HARBOR, "--from", str(file))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    trace = MODELS.parent / "mooncake_conversation_1500.jsonl.gz"
    assert "'x' is not a valid time" in run(*HARBOR, "--from", str(trace), "--last", "x").stderr
    own = run(str(MODELS / "llama-3.1-8b.json"), "--from", str(trace), "--last", "1m")
    assert "--from needs a built-in model" in own.stderr


def test_a_plan_with_pipeline_stages_is_replayed_and_emitted_for_mocks() -> None:
    trace = MODELS.parent / "mooncake_conversation_1500.jsonl.gz"
    deep = ("llama-3.1-405b", "--quant", "bf16", "--concurrency", "4", "--ttft", "30s")
    (own, *_) = plain(*deep, "--from", str(trace), "--last", "1m")["replayed"]
    assert own["fleet"] == "1 x TP 8 x PP 2"
    assert own["gpus"] == 16
    assert own["tpot_p95_s"] > 0.02
    assert "--tp 8 --pp 2 " in run(*deep, "--emit", "mock").stdout
    experts = run("deepseek-v3", "--gpu", "h200", "--emit", "mock").stdout
    assert "--tp 1 --ep 8 --dp 8 " in experts


def test_the_command_loads_no_server_and_no_arrays() -> None:
    code = "import planner.size.cli, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = {"numpy", "aiohttp", "uvloop", "pydantic", "planner.replay", "gateway", "ruamel"}
    assert not heavy & set(loaded)


def test_a_larger_tp_with_fewer_gpus_is_named_and_can_be_chosen() -> None:
    command = [str(MODELS / "gpt-oss-120b.json"), "--in", "4000", "--out", "500"]
    command += ["--context", "16k", "--rate", "5", "--ttft", "1s", "--tpot", "50ms", "--json"]
    (least,) = json.loads(run(*command).stdout)["plans"]
    (wider,) = json.loads(run(*command, "--tp", "2").stdout)["plans"]
    assert (least["layout"]["tp"], least["gpus"], wider["layout"]["tp"], wider["gpus"]) == (
        1,
        5,
        2,
        2,
    )
    assert "--tp 2 needs fewer GPUs, 2 instead of 5" in least["gates"][7]["notes"][0]
    assert wider["gates"][7]["notes"][0].startswith("seeds 000 and 002 replicate first")
