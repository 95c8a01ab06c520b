"""Tests that the mock engines of `penstock demo` can serve the load that README.md suggests."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from statistics import mean

import pytest

from gateway.cli import demo
from mockgpu.timing.roofline import Roofline, StepWork, profile_named
from planner.bench.workloads import shapes
from policies.sizing.gpus import gpu_named
from policies.sizing.model_shapes import model_named

GROUPS, RATE = 4, 20.0  # `make demo`; README: bench --shape shared-prefix --rate 20
PROMPT_TOKENS, UNCACHED_TOKENS = 7_200, 2_700  # 63 % of the prompt tokens are cached after 30 s


def running_per_group() -> float:
    # Return how many requests each engine decodes in equilibrium, by Little's law.
    #
    # It uses the mock engine's step times.
    sessions = islice(shapes()["shared-prefix"].sessions(0), 1_000)
    answer_tokens = mean(session.turns[0].output_tokens for session in sessions)
    roofline = Roofline(
        model_named("demo-8b"), gpu_named("h100"), demo.DEMO_TP, profile_named("2026")
    )
    rate, running = RATE / GROUPS, 1.0
    for _ in range(200):
        context = round(running * (PROMPT_TOKENS + answer_tokens / 2))
        step_s = roofline.step_s(StepWork(decode_seqs=round(running), decode_context=context))
        prefill_s = roofline.step_s(StepWork(UNCACHED_TOKENS, UNCACHED_TOKENS * PROMPT_TOKENS / 2))
        tpot_s = step_s / (1 - rate * prefill_s)  # decodes stand still while prompts are computed
        running = rate * answer_tokens * tpot_s
    return running


def test_the_readme_bench_fills_at_most_three_quarters_of_the_demo() -> None:
    assert running_per_group() <= 0.75 * demo.MAX_CONCURRENCY


@pytest.mark.parametrize("dialect", [None, "vllm_nixl"])
def test_every_group_of_the_demo_has_that_concurrency(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dialect: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    demo.FOLDER.mkdir()
    result = demo.DemoOptions(GROUPS, "prefix_aware", 8080, 8081, "demo-8b", 1.0, dialect)
    config = demo.load_with_warnings(demo._write_config(result, 9100), {}).config
    endpoints = [endpoint for pool in config.pools.values() for endpoint in pool.endpoints]
    assert [endpoint.max_concurrency for endpoint in endpoints] == [demo.MAX_CONCURRENCY] * GROUPS
