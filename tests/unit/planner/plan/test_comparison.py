"""Tests of `penstock plan`, which simulates recent requests with another configuration."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gateway.cli.main import config_in_text
from gateway.cli.main import run as penstock
from gateway.config import load_text
from gateway.fleet.endpoint_from_config import prior_belief
from planner.plan import Assumptions, PoolCaseError, cases, recent
from planner.plan.config_to_replay import KV_BLOCK_TOKENS
from planner.replay import Traffic, replay
from planner.replay.group_sim import build_engines
from planner.traces import TraceError, TraceRequest
from policies.routing_types import Endpoint
from policies.sizing.parallel_layout import Layout
from tests.command_runner import CommandRunner

CONFIG = """\
version: 1
models:
  - {{name: chat, pool: chat, parameters: 70B}}
pools:
  chat:
    policy: {policy}
    admission: {admission}
    waiting_room: {{size: 4, timeout: 1s}}
    endpoints:
      - {{url: "http://127.0.0.1:9001", labels: {{gpu: h100}}, layout: {{tp: 4}}, max_concurrency: {cap}}}
      - {{url: "http://127.0.0.1:9002", labels: {{gpu: h100}}, layout: {{tp: 4}}, max_concurrency: {cap}}}
observability: {{access_log: {log}}}
"""
PREFIX = 40  # blocks shared by the sessions of one kind


def line(at: float, **more: Any) -> dict[str, Any]:
    fields = {
        "time": at,
        "id": "req_1",
        "status": 200,
        "outcome": "served",
        "done_us": 1,
        "received_us": 0,
    }
    return {
        **fields,
        "model": "chat",
        "prompt_tokens": 20_800,
        "completion_tokens": 20,
        "slo": "standard",
        **more,
    }


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line_) + "\n" for line_ in lines))
    return path


def traffic(seconds: int, blocks: bool = True) -> list[dict[str, Any]]:
    rng, lines = Random(1), []
    for number in range(2 * seconds):
        kind = rng.randrange(30)
        keys = [1000 * kind + index for index in range(PREFIX)] + [10**6 + number]
        lines.append(line(1e9 + number / 2, **({"blocks": keys} if blocks else {})))
    return lines


def config(
    path: Path, log: Path, policy: str = "round_robin", admission: str = "cap", cap: int = 24
) -> Path:
    path.write_text(CONFIG.format(policy=policy, admission=admission, cap=cap, log=log))
    return path


def run(*arguments: object) -> tuple[int, str]:
    result = CommandRunner().invoke(
        penstock, ["plan", *map(str, arguments)], env={"COLUMNS": "200"}
    )
    return result.exit_code, result.output


def planned(
    tmp_path: Path, log: Path, before: dict[str, Any], after: dict[str, Any], *more: str
) -> tuple[int, Any]:
    running, candidate = (
        config(tmp_path / "a.yaml", log, **before),
        config(tmp_path / "b.yaml", log, **after),
    )
    code, text = run(candidate, "--running", running, "--json", *more)
    return code, json.loads(text) if text.startswith("{") else text


def test_a_policy_that_reads_prefixes_would_have_found_more_cached_and_answered_sooner(
    tmp_path: Path,
) -> None:
    log = write(tmp_path / "access.jsonl", traffic(60))
    code, result = planned(tmp_path, log, {"policy": "round_robin"}, {"policy": "prefix_aware"})
    assert code == 0
    [pool] = result["pools"]
    assert result["blocks"] is True
    assert result["requests"] == 120
    assert pool["after"]["hit_ratio"] > pool["before"]["hit_ratio"]
    assert pool["after"]["ttft"]["mean"] < pool["before"]["ttft"]["mean"]
    assert pool["before"]["offered"] == pool["after"]["offered"] == 120
    assert pool["notes"] == ["groups serve llama-3.1-70b, the nearest known to 70B parameters"]


def test_equal_configurations_give_equal_results(tmp_path: Path) -> None:
    log = write(tmp_path / "access.jsonl", traffic(30))
    code, result = planned(tmp_path, log, {"policy": "priced"}, {"policy": "priced"})
    assert code == 0
    [pool] = result["pools"]
    for side in ("before", "after"):
        for timed in ("pick_us", "wall_s"):
            del pool[side][timed]
    assert pool["before"] == pool["after"]
    assert pool["gain"] == 0.0


def test_additional_refusals_are_reported_and_fail_a_check(tmp_path: Path) -> None:
    longer = {"prompt_tokens": 4000, "completion_tokens": 100}
    log = write(tmp_path / "access.jsonl", [line_ | longer for line_ in traffic(40, blocks=False)])
    arguments = (tmp_path, log, {"cap": 24}, {"cap": 1}, "--fail-if-worse", "5")
    code, result = planned(*arguments)
    assert code == 3
    assert result["pools"][0]["after"]["ends"]["shed"] > result["pools"][0]["before"]["ends"].get(
        "shed", 0
    )
    code, _ = planned(tmp_path, log, {"cap": 1}, {"cap": 24}, "--fail-if-worse", "5")
    assert code == 0


def test_a_log_without_blocks_is_reported_to_compare_no_hits(tmp_path: Path) -> None:
    log = write(tmp_path / "access.jsonl", traffic(10, blocks=False))
    running = config(tmp_path / "a.yaml", log)
    code, text = run(config(tmp_path / "b.yaml", log, "least_loaded"), "--running", running)
    assert code == 0
    assert "observability.access_blocks" in text
    for words in (
        "pool chat",
        "attainment",
        "TTFT p99 (s)",
        "TPOT p99 (ms)",
        "hit ratio",
        "shed",
        "standard: ",
    ):
        assert words in text


def test_requests_before_the_span_warm_caches_and_do_not_count(tmp_path: Path) -> None:
    log = write(tmp_path / "access.jsonl", traffic(60))
    lately = recent(log, 10.0)
    assert len(lately.lines) == 41
    assert lately.warmup_s == pytest.approx(10.0)
    assert recent(log, 3600.0).warmup_s == 0.0


def test_a_refused_request_counts_with_the_median_length_and_a_failed_one_does_not(
    tmp_path: Path,
) -> None:
    lines = [line(1e9 + index, completion_tokens=40 + index) for index in range(3)]
    shed = line(
        1e9 + 4,
        status=429,
        outcome="refused",
        completion_tokens=None,
        prompt_tokens=None,
        body_bytes=4000,
    )
    lately = recent(write(tmp_path / "log", [*lines, shed, line(1e9 + 5, status=502)]), 60.0)
    requests = lately.requests(["chat"])
    assert [line_.output_tokens for line_ in requests] == [40, 41, 42, 41]
    assert requests[-1].input_tokens == 1000
    assert lately.requests(["other"]) == []
    assert lately.requests([]) == []
    assert len(lately.requests(None)) == 4


def test_a_line_that_is_half_written_is_left_for_later(tmp_path: Path) -> None:
    log = write(tmp_path / "log", [line(1e9)])
    log.write_text(log.read_text() + '{"time": 1000000001.0, "sta')
    assert len(recent(log, 60.0).lines) == 1


def test_an_impossible_plan_is_refused_with_a_sentence(tmp_path: Path) -> None:
    log = write(tmp_path / "log", traffic(2))
    running = config(tmp_path / "a.yaml", log)
    code, text = run(config(tmp_path / "b.yaml", log, "rund_robin"), "--running", running)
    assert (code, "b.yaml:6:13 pools.chat.policy" in text) == (1, True)
    code, text = run(running, "--running", running, "--log", tmp_path / "none")
    assert (code, "No such file" in text) == (1, True)
    code, text = run(running, "--running", config(tmp_path / "c.yaml", Path("stdout")))
    assert (code, "--log" in text) == (1, True)
    code, text = run(running, "--running", running, "--last", "soon")
    assert code == 2
    with pytest.raises(TraceError, match="contains no request"):
        recent(write(tmp_path / "empty", []), 1.0)


def test_a_value_by_reference_is_reported_as_missing() -> None:
    pool = {
        "policy": {"name": "priced"},
        "admission": {"name": "cap"},
        "waiting_room": {"size": 4, "timeout": 1.0},
    }
    pool["endpoints"] = [{"max_concurrency": "${CAP}"}]  # type: ignore[dict-item]
    result = {
        "pools": {"chat": pool},
        "slo": {"default": "s", "classes": {"s": {"ttft": 1.0, "tpot": 0.1}}},
    }
    with pytest.raises(PoolCaseError, match="--running"):
        cases(result)
    pool["endpoints"] = [{}]  # type: ignore[dict-item]
    assert len(cases(result)["chat"].assumed) == 2
    assert cases(result)["chat"].models is None
    other = result | {
        "pools": {"chat": pool, "idle": pool},
        "models": [{"name": "a", "pool": "chat"}],
    }
    assert {name: case.models for name, case in cases(other).items()} == {
        "chat": ("a",),
        "idle": (),
    }
    assert cases(result, Assumptions("qwen3-32b", "h200"))["chat"].assumed == ()
    for wrong in (Assumptions(model="gpt-9"), Assumptions(gpu="abacus")):
        with pytest.raises(PoolCaseError, match="unknown"):
            cases(result, wrong)


def test_a_model_with_a_built_in_name_is_replayed_as_that_model_with_its_whole_layout() -> None:
    text = """
version: 1
models: [{name: llama-3.1-405b, pool: main}]
pools:
  main:
    endpoints: [{url: "http://127.0.0.1:9001", labels: {gpu: h100}, layout: {tp: 8, pp: 2}}]
retries: {hedge: 0.1}
"""
    case = cases(config_in_text(text))["main"]
    (kind,) = case.fleet.groups
    assert (kind.model, kind.tp, kind.pp) == ("llama-3.1-405b", 8, 2)
    assert case.assumed == ()
    options = case.options(3)
    assert (options.seed, options.learns_lengths) == (3, True)
    assert (options.hedge_share, options.slow_factor, options.slow_start_s) == (0.1, 2.5, 10.0)


def test_a_pool_is_replayed_with_the_blocks_of_its_index_and_with_cached_answers() -> None:
    text = """
version: 1
prefix: {block_bytes: 1024}
pools: {main: {endpoints: [{url: "http://127.0.0.1:9001", labels: {gpu: h100}}]}}
"""
    case = cases(config_in_text(text))["main"]
    assert case.options().index_tokens == 256
    assert (case.fleet.block_tokens, case.fleet.caches_answers) == (KV_BLOCK_TOKENS, True)


@pytest.mark.parametrize(
    ("model", "labels"),
    [
        ("{name: m, pool: main, parameters: 70B, active_parameters: 12B}", "{gpu: h200}"),
        ("{name: qwen3-32b, pool: main}", "{gpu: A100}"),
        ("{name: m, pool: main, parameters: 8B}", "{gpu: abacus}"),
        ("{name: m, pool: main}", "{}"),
        ("{name: m, pool: main}", "{max_num_batched_tokens: '2048'}"),
        ("{name: m, pool: main, parameters: 8B}", "{max_num_batched_tokens: '2048'}"),
    ],
)
def test_a_replayed_gateway_begins_with_the_speeds_that_the_live_one_assumes(
    model: str, labels: str
) -> None:
    text = f"""
version: 1
models: [{model}]
pools:
  main:
    endpoints: [{{url: "http://127.0.0.1:9001", labels: {labels}, layout: {{tp: 2}}}}]
"""
    config = load_text(text.encode(), "gateway.yaml", {}).config
    (spec,) = config.pools["main"].endpoints
    endpoint = Endpoint("e", spec.url, "main", "m", layout=Layout(tp=2), labels=spec.labels)
    case = cases(config_in_text(text))["main"]
    ((group,),) = build_engines(case.fleet, None, merges_steps=True, has_caps=True)  # type: ignore[arg-type]
    assert group.load.belief.shape == prior_belief(config, endpoint).shape
    stated = spec.labels.get("max_num_batched_tokens", "8192")
    assert group.load.belief.budget_tokens == int(stated)


def test_a_replayed_gateway_predicts_nothing_that_no_policy_reads() -> None:
    text = """
version: 1
pools:
  main: {policy: POLICY, endpoints: [{url: "http://127.0.0.1:9001", labels: {gpu: h100}}]}
"""
    predicted = {}
    for policy in ("prefix_aware", "priced"):
        case = cases(config_in_text(text.replace("POLICY", policy)))["main"]
        arrivals = Traffic(arrivals=[TraceRequest(0.0, 1000, 10)])
        run = replay(case.fleet, arrivals, case.policy(), case.admission(), case.options())
        predicted[policy] = run.records[0].predicted_ttft_s is not None
    assert predicted == {"prefix_aware": False, "priced": True}


def test_labels_state_the_limits_of_an_engine_step() -> None:
    def text(labels: str) -> str:
        return f"""
version: 1
pools:
  main:
    endpoints: [{{url: "http://127.0.0.1:9001", labels: {{gpu: h100{labels}}}}}]
"""

    (usual,) = cases(config_in_text(text("")))["main"].fleet.groups
    stated = ', max_num_seqs: "128", max_num_batched_tokens: "2048"'
    (kind,) = cases(config_in_text(text(stated)))["main"].fleet.groups
    assert (usual.max_num_seqs, usual.max_num_batched_tokens) == (256, 8192)
    assert (kind.max_num_seqs, kind.max_num_batched_tokens) == (128, 2048)
    assert (usual.labelled_num_seqs, kind.labelled_num_seqs) == (None, 128)
    assert (usual.labelled_batched_tokens, kind.labelled_batched_tokens) == (None, 2048)
