"""What a TP group tells of itself at /metrics: vLLM 0.33's names, labels and buckets, in Prometheus text.

Counting is a few integer additions per step; words are only made when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from mockgpu.scheduler import Scheduler

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


class Histogram:
    """Counts per bucket and a sum; made cumulative only when shown."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count the value, `times` over."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """The series of a histogram in exposition order."""
        total = 0
        for bound, count in zip((*self.bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self.sum}"
        yield f"{name}_count{{{labels}}} {total}"


class GroupMetrics:
    """Numbers of one TP group that its scheduler does not keep: latencies and how requests ended."""

    def __init__(self, model_name: str) -> None:
        self.labels = f'model_name="{model_name}",engine="0"'
        self.finished: Counter[str] = Counter()
        self.malformed_handoffs = 0
        self.tainted = 0
        self.rejections = 0
        self.steps = 0
        self.ttft_s = Histogram(TTFT_BUCKETS)
        self.itl_s = Histogram(ITL_BUCKETS)
        self.e2e_s = Histogram(REQUEST_BUCKETS)
        self.queue_s = Histogram(REQUEST_BUCKETS)

    def render(self, scheduler: Scheduler) -> str:
        """The whole exposition."""
        return "\n".join(self._lines(scheduler)) + "\n"

    def _lines(self, scheduler: Scheduler) -> Iterator[str]:
        labels, pool, totals = self.labels, scheduler.pool, scheduler.totals
        gauges = {
            "vllm:num_requests_running": scheduler.running,
            "vllm:num_requests_waiting": len(scheduler.waiting),
            "vllm:kv_cache_usage_perc": pool.usage,
        }
        for name, value in gauges.items():
            yield f"# TYPE {name} gauge"
            yield f"{name}{{{labels}}} {value}"
        yield "# TYPE vllm:num_requests_waiting_by_reason gauge"
        yield f'vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} {len(scheduler.waiting)}'
        yield f'vllm:num_requests_waiting_by_reason{{{labels},reason="deferred"}} 0'
        yield "# TYPE vllm:cache_config_info gauge"
        yield f'vllm:cache_config_info{{{labels},block_size="{pool.block_tokens}",num_gpu_blocks="{pool.total}"}} 1'
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
            yield f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {self.finished[reason]}'
        yield "# TYPE vllm:admission_rejections counter"
        yield f'vllm:admission_rejections_total{{{labels},reason="max_num_queued_reqs"}} {self.rejections}'
        histograms = {
            "vllm:time_to_first_token_seconds": self.ttft_s,
            "vllm:inter_token_latency_seconds": self.itl_s,
            "vllm:e2e_request_latency_seconds": self.e2e_s,
            "vllm:request_queue_time_seconds": self.queue_s,
        }
        for name, histogram in histograms.items():
            yield f"# TYPE {name} histogram"
            yield from histogram.lines(name, labels)
