"""Tests that the metrics of all kinds of engines show the same load by the same values."""

from __future__ import annotations

import pytest

from gateway.fleet.engine_metrics import ScrapedLoad, parse_scrape
from policies.routing_types import EngineKind

VLLM = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 8.0
vllm:num_requests_running{engine="1",model_name="meta-llama/Llama-3.1-8B-Instruct"} 5.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 2.0
vllm:num_requests_waiting{engine="1",model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="x",reason="capacity"} 99.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.75
vllm:generation_tokens_total{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 27453.0
vllm:generation_tokens_created{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 1.7e+09
vllm:nixl_bytes_transferred_bucket{engine="0",model_name="x",le="+Inf"} 7.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="x"} 2.5e+09
vllm:nixl_bytes_transferred_sum{engine="1",model_name="x"} 1.5e+09
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="27000"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="27000"} 1.0
"""

SGLANG = b"""\
# HELP sglang:num_running_reqs The number of running requests
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"} 162.0
sglang:num_queue_reqs{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"} 2826.0
sglang:token_usage{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"} 0.28
sglang:generation_tokens_total{model_name="llama"} 7.557572e+06
sglang:cache_config_info{page_size="64",num_pages="7000",model_name="llama"} 1.0
"""

TRTLLM = b"""\
trtllm_num_requests_running{engine_type="trtllm",model_name="llama"} 3.0
trtllm_num_requests_waiting{engine_type="trtllm",model_name="llama"} 1.0
trtllm_kv_cache_utilization{engine_type="trtllm",model_name="llama"} 0.125
trtllm_kv_cache_tokens_per_block{engine_type="trtllm",model_name="llama"} 32.0
trtllm_kv_cache_max_blocks{engine_type="trtllm",model_name="llama"} 1000.0
"""


@pytest.mark.parametrize(
    ("engine", "text", "reading"),
    [
        (EngineKind.VLLM, VLLM, ScrapedLoad(13, 2, 0.5, 2 * 16 * 27000, 27453, 4_000_000_000)),
        (EngineKind.SGLANG, SGLANG, ScrapedLoad(162, 2826, 0.28, 64 * 7000, 7557572)),
        (EngineKind.TRTLLM, TRTLLM, ScrapedLoad(3, 1, 0.125, 32_000, None)),
    ],
)
def test_the_metrics_of_each_engine_are_parsed_to_the_same_values(
    engine: EngineKind, text: bytes, reading: ScrapedLoad
) -> None:
    assert parse_scrape(text, engine) == reading


@pytest.mark.parametrize("engine", list(EngineKind))
@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n\n",
        b"<html>not metrics</html>",
        VLLM[:200],
        b"vllm:num_requests_running",
        b"\xff\xfe",
    ],
)
def test_a_missing_metric_is_none(engine: EngineKind, text: bytes) -> None:
    assert parse_scrape(text, engine) == ScrapedLoad(None, None, None, None, None)


def test_a_value_that_is_no_number_is_none() -> None:
    assert parse_scrape(b"vllm:num_requests_running{} many\n", EngineKind.VLLM).running is None


def test_a_metric_without_labels_counts() -> None:
    assert (
        parse_scrape(
            b"vllm:num_requests_running 4\nvllm:num_requests_waiting 1.0\n", EngineKind.VLLM
        ).running
        == 4
    )


def test_a_truncated_text_is_parsed_as_far_as_it_goes() -> None:
    for length in range(len(VLLM)):
        parse_scrape(VLLM[:length], EngineKind.VLLM)


def test_samples_that_are_nan_are_ignored() -> None:
    text = b'vllm:num_requests_running{engine="0"} NaN\nvllm:num_requests_running{engine="1"} 3\n'
    assert parse_scrape(text + b"vllm:kv_cache_usage_perc +Inf\n", EngineKind.VLLM).running == 3
