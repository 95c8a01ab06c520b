"""An engine's /metrics page in Prometheus text format, with the metrics of vLLM 0.33.

Counting costs a few integer additions per step. The text is built only when a client requests it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from mockgpu.engine_formats import EngineFormat
from mockgpu.handoff.kv_handoff import KvHandoff
from mockgpu.histogram import BucketHistogram
from mockgpu.scheduler import Scheduler
from mockgpu.split_legs import DecodeLeg

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")


class GroupMetrics:
    """The metrics that a mock engine's scheduler does not count: latencies and finish reasons."""

    def __init__(self, model_name: str, rank: int = 0) -> None:
        self.labels = f'model_name="{model_name}",engine="{rank}"'
        self.finished: Counter[str] = Counter()
        self.malformed_handoffs = 0
        self.tainted = 0
        self.rejections = 0
        self.steps = 0
        self.ttft_s = BucketHistogram(TTFT_BUCKETS)
        self.itl_s = BucketHistogram(ITL_BUCKETS)
        self.e2e_s = BucketHistogram(REQUEST_BUCKETS)
        self.queue_s = BucketHistogram(REQUEST_BUCKETS)
        # Yields the metrics of the use of a store of KV, by their labels.
        self.store_lines: Callable[[str], Iterator[str]] | None = None

    def render(
        self,
        scheduler: Scheduler,
        handoff: KvHandoff | None = None,
        engine: EngineFormat = EngineFormat.VLLM,
    ) -> str:
        """Return the metrics page, in Prometheus text format.

        handoff  source of the KV transfer metrics; None: the engine has none
        engine   the imitated engine; its own metrics are added to vLLM's
        """
        lines = [*self._gauges(scheduler), *self._counters(scheduler), *self._latencies()]
        if handoff is not None:
            lines += [*_fetch_stages(scheduler, self.labels), *handoff.lines(self.labels)]
        if self.store_lines is not None:
            lines += self.store_lines(self.labels)
        if engine is not EngineFormat.VLLM:
            lines += _other_engine_lines(scheduler, engine)
        return "\n".join(lines) + "\n"

    def _gauges(self, scheduler: Scheduler) -> Iterator[str]:
        labels, pool = self.labels, scheduler.pool
        gauges = {
            "vllm:num_requests_running": scheduler.running,
            "vllm:num_requests_waiting": scheduler.queued,
            "vllm:kv_cache_usage_perc": pool.usage,
            "mock:kv_blocks_in_use": pool.total - pool.free,
            "mock:kv_blocks_kept": scheduler.kept_blocks,
        }
        for name, value in gauges.items():
            yield f"# TYPE {name} gauge"
            yield f"{name}{{{labels}}} {value}"
        yield "# TYPE vllm:num_requests_waiting_by_reason gauge"
        by_reason = "vllm:num_requests_waiting_by_reason"
        yield f'{by_reason}{{{labels},reason="capacity"}} {len(scheduler.waiting)}'
        deferred = scheduler.queued - len(scheduler.waiting)
        yield f'{by_reason}{{{labels},reason="deferred"}} {deferred}'
        yield "# TYPE vllm:cache_config_info gauge"
        cache = f'block_size="{pool.block_tokens}",num_gpu_blocks="{pool.total}"'
        yield f"vllm:cache_config_info{{{labels},{cache}}} 1"

    def _counters(self, scheduler: Scheduler) -> Iterator[str]:
        # Yield the lines of counters (totals since the start).
        labels, totals = self.labels, scheduler.totals
        counters = {
            "vllm:prefix_cache_queries": totals.prefix_queries,
            "vllm:prefix_cache_hits": totals.prefix_hits,
            "vllm:num_preemptions": totals.preemptions,
            "vllm:prompt_tokens": totals.prompt_tokens,
            "vllm:prompt_tokens_cached": totals.prefix_hits,
            "vllm:generation_tokens": totals.output_tokens,
            "mock:malformed_handoff": self.malformed_handoffs,
            "mock:tainted_answers": self.tainted,
            "mock:engine_steps": self.steps,
        }
        for name, value in counters.items():
            yield f"# TYPE {name} counter"
            yield f"{name}_total{{{labels}}} {value}"
        yield "# TYPE vllm:request_success counter"
        for reason in FINISHED_REASONS:
            count = self.finished[reason]
            yield f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {count}'
        yield "# TYPE vllm:admission_rejections counter"
        rejections = f'{labels},reason="max_num_queued_reqs"'
        yield f"vllm:admission_rejections_total{{{rejections}}} {self.rejections}"

    def _latencies(self) -> Iterator[str]:
        labels = self.labels
        histograms = {
            "vllm:time_to_first_token_seconds": self.ttft_s,
            "vllm:inter_token_latency_seconds": self.itl_s,
            "vllm:e2e_request_latency_seconds": self.e2e_s,
            "vllm:request_queue_time_seconds": self.queue_s,
        }
        for name, histogram in histograms.items():
            yield f"# TYPE {name} histogram"
            yield from histogram.lines(name, labels)


def _fetch_stages(scheduler: Scheduler, labels: str) -> Iterator[str]:
    wants = sum(isinstance(job.leg, DecodeLeg) and job.cached < 0 for job in scheduler.waiting)
    stages = {
        "waiting_to_start": wants,
        "in_progress": len(scheduler.fetching),
        "completed_waiting": len(scheduler.fetched),
    }
    yield "# TYPE vllm:num_requests_kv_fetch_by_stage gauge"
    for stage, count in stages.items():
        yield f'vllm:num_requests_kv_fetch_by_stage{{{labels},stage="{stage}"}} {count}'


def _other_engine_lines(scheduler: Scheduler, engine: EngineFormat) -> Iterator[str]:
    # Yield the metrics that a gateway reads from SGLang or TensorRT-LLM, under their names.
    pool, totals = scheduler.pool, scheduler.totals
    if engine is EngineFormat.SGLANG:
        yield f"sglang:num_running_reqs {scheduler.running}"
        yield f"sglang:num_queue_reqs {scheduler.queued}"
        yield f"sglang:token_usage {pool.usage}"
        yield f"sglang:generation_tokens_total {totals.output_tokens}"
        cache = f'page_size="{pool.block_tokens}",num_pages="{pool.total}"'
        yield f"sglang:cache_config_info{{{cache}}} 1"
        yield f"sglang:num_decode_transfer_queue_reqs {len(scheduler.fetching)}"
        yield f"sglang:num_prefill_inflight_queue_reqs {len(scheduler.kept)}"
    else:
        yield f"trtllm_num_requests_running {scheduler.running}"
        yield f"trtllm_num_requests_waiting {scheduler.queued}"
        yield f"trtllm_kv_cache_utilization {pool.usage}"
        yield f"trtllm_kv_cache_tokens_per_block {pool.block_tokens}"
        yield f"trtllm_kv_cache_max_blocks {pool.total}"
        yield f"trtllm_kv_cache_used_blocks {pool.total - pool.free}"
