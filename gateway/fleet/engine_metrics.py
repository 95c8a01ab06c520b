"""Parses an engine's load from its Prometheus metrics page. No I/O.

The names of the metrics for each kind of engine are those that the Gateway API Inference Extension
(GIE) and llm-d use. Values of several data-parallel ranks behind one URL are summed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isfinite

import msgspec

from policies.routing_types import EngineKind


class MetricNames(msgspec.Struct, frozen=True):
    """The metric names of one kind of engine; a name is empty if the engine lacks that metric.

    config       info metric whose labels `block_tokens` and `blocks` give the KV capacity; if
                 empty, those two are metrics
    kv_received  metrics of the KV bytes received from other engines, one per connector
    """

    running: bytes
    waiting: bytes
    kv_usage: bytes
    config: bytes = b""
    block_tokens: bytes = b""
    blocks: bytes = b""
    generated_tokens: bytes = b""
    kv_received: tuple[bytes, ...] = ()


METRIC_NAMES: Mapping[EngineKind, MetricNames] = {
    EngineKind.VLLM: MetricNames(
        b"vllm:num_requests_running",
        b"vllm:num_requests_waiting",
        b"vllm:kv_cache_usage_perc",
        b"vllm:cache_config_info",
        b"block_size",
        b"num_gpu_blocks",
        b"vllm:generation_tokens_total",
        (b"vllm:nixl_bytes_transferred_sum", b"vllm:mooncake_bytes_transferred_sum"),
    ),
    EngineKind.SGLANG: MetricNames(
        b"sglang:num_running_reqs",
        b"sglang:num_queue_reqs",
        b"sglang:token_usage",
        b"sglang:cache_config_info",
        b"page_size",
        b"num_pages",
        b"sglang:generation_tokens_total",
    ),
    EngineKind.TRTLLM: MetricNames(
        b"trtllm_num_requests_running",
        b"trtllm_num_requests_waiting",
        b"trtllm_kv_cache_utilization",
        b"",
        b"trtllm_kv_cache_tokens_per_block",
        b"trtllm_kv_cache_max_blocks",
    ),
    # Only older builds export the share of the KV memory.
    EngineKind.LLAMACPP: MetricNames(
        b"llamacpp:requests_processing",
        b"llamacpp:requests_deferred",
        b"llamacpp:kv_cache_usage_ratio",
        generated_tokens=b"llamacpp:tokens_predicted_total",
    ),
    EngineKind.TGI: MetricNames(
        b"tgi_batch_current_size",
        b"tgi_queue_size",
        b"",
        generated_tokens=b"tgi_request_generated_tokens_sum",
    ),
}
"""The metric names of each kind of engine that has metrics."""

NO_METRICS = MetricNames(b"", b"", b"")

RANK_LABELS = {
    EngineKind.VLLM: b"engine",
    EngineKind.SGLANG: b"dp_rank",
    EngineKind.TRTLLM: b"rank",
}


class ScrapedLoad(msgspec.Struct, frozen=True):
    """The load that an engine reports in its metrics; a value is None if it is not reported.

    running            number of requests in its batch
    waiting            number of requests in its queue
    kv_usage           share of its KV memory in use, 0 to 1
    kv_tokens          KV capacity in tokens
    generated_tokens   output tokens since its start
    kv_received_bytes  KV bytes received from other engines since its start
    """

    running: int | None
    waiting: int | None
    kv_usage: float | None
    kv_tokens: int | None
    generated_tokens: int | None = None
    kv_received_bytes: int | None = None

    @property
    def progress(self) -> tuple[int | None, float | None]:
        """Return (output tokens, share of KV in use), which only change while the engine computes.

        During a long prompt, the engine generates no token, but its KV in use grows with every
        computed chunk.
        """
        return self.generated_tokens, self.kv_usage


UNKNOWN_PROGRESS: tuple[int | None, float | None] = (None, None)
"""The progress of an engine that reports none."""


def parse_scrape(text: bytes, engine: EngineKind, rank: int | None = None) -> ScrapedLoad:
    """Parse the text of an engine's metrics page, and return the load that it reports.

    Unknown metrics are ignored.

    rank  the data-parallel rank whose load is returned; None: the sum of all ranks
    """
    names = METRIC_NAMES.get(engine, NO_METRICS)
    if rank is not None:
        text = _lines_of_rank(text, b'%b="%d"' % (RANK_LABELS[engine], rank))
    running, waiting = list(_values(text, names.running)), list(_values(text, names.waiting))
    usage = list(_values(text, names.kv_usage))
    produced = list(_values(text, names.generated_tokens))
    received = [value for name in names.kv_received for value in _values(text, name)]
    return ScrapedLoad(
        running=int(sum(running)) if running else None,
        waiting=int(sum(waiting)) if waiting else None,
        kv_usage=sum(usage) / len(usage) if usage else None,
        kv_tokens=_kv_tokens(text, names),
        generated_tokens=int(sum(produced)) if produced else None,
        kv_received_bytes=int(sum(received)) if received else None,
    )


def _lines_of_rank(text: bytes, label: bytes) -> bytes:
    return b"\n".join([line for line in text.split(b"\n") if label in line])


def _values(text: bytes, name: bytes) -> Iterator[float]:
    # Yield the samples of one metric, but not of metrics whose name only starts with its name.
    start = text.find(name) if name else -1
    while start >= 0:
        end = text.find(b"\n", start)
        line = text[start : end if end >= 0 else len(text)]
        starts_line = start == 0 or text[start - 1 : start] == b"\n"
        if starts_line and line[len(name) : len(name) + 1] in (b"{", b" "):
            try:
                value = float(line[line.rfind(b"}") + 1 :].split()[-1 if b"}" not in line else 0])
            except (ValueError, IndexError):
                return
            if isfinite(value):  # a gauge may be NaN before its first sample
                yield value
        start = text.find(name, start + len(name))


def _kv_tokens(text: bytes, names: MetricNames) -> int | None:
    # Return the sum of the KV capacity of all ranks in tokens, or None if it is not reported.
    #
    # The capacity is read from the labels of an info metric, or from two gauges.
    if not names.config:
        sizes, counts = list(_values(text, names.block_tokens)), list(_values(text, names.blocks))
        return int(sizes[0] * sum(counts)) if sizes and counts else None
    total = 0
    for labels in re.findall(re.escape(names.config) + rb"\{([^}]*)\}", text):
        size = re.search(rb"\b" + names.block_tokens + rb'="(\d+)"', labels)
        count = re.search(rb"\b" + names.blocks + rb'="(\d+)"', labels)
        if size and count:
            total += int(size[1]) * int(count[1])
    return total or None
