"""An engine's own load, read from its Prometheus text. Pure: bytes in, Reading out.

Names per engine kind are those of engines.md A2 (the same mapping GIE and llm-d use). Ranks behind one URL are summed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import isfinite

import msgspec

from policies.model import EngineKind


class Names(msgspec.Struct, frozen=True):
    """Which metrics carry the facts; block_tokens and blocks are labels of one info metric, or metrics of their own.

    kv_received: bytes of KV that came from other engines, by each of the connectors that may be at work.
    """

    running: bytes
    waiting: bytes
    kv_usage: bytes
    config: bytes = b""
    block_tokens: bytes = b""
    blocks: bytes = b""
    produced: bytes = b""
    kv_received: tuple[bytes, ...] = ()


NAMES = {
    EngineKind.VLLM: Names(
        b"vllm:num_requests_running",
        b"vllm:num_requests_waiting",
        b"vllm:kv_cache_usage_perc",
        b"vllm:cache_config_info",
        b"block_size",
        b"num_gpu_blocks",
        b"vllm:generation_tokens_total",
        (b"vllm:nixl_bytes_transferred_sum", b"vllm:mooncake_bytes_transferred_sum"),
    ),
    EngineKind.SGLANG: Names(
        b"sglang:num_running_reqs",
        b"sglang:num_queue_reqs",
        b"sglang:token_usage",
        b"sglang:cache_config_info",
        b"page_size",
        b"num_pages",
        b"sglang:generation_tokens_total",
    ),
    EngineKind.TRTLLM: Names(
        b"trtllm_num_requests_running",
        b"trtllm_num_requests_waiting",
        b"trtllm_kv_cache_utilization",
        b"",
        b"trtllm_kv_cache_tokens_per_block",
        b"trtllm_kv_cache_max_blocks",
    ),
}
PATHS = {EngineKind.VLLM: "/metrics", EngineKind.SGLANG: "/metrics", EngineKind.TRTLLM: "/prometheus/metrics"}


class Reading(msgspec.Struct, frozen=True):
    """Requests running and waiting, share of KV in use (0..1), KV capacity, tokens ever generated, bytes of KV ever
    received from other engines. None: not told."""

    running: int | None
    waiting: int | None
    kv_usage: float | None
    kv_tokens: int | None
    produced: int | None = None
    kv_received_bytes: int | None = None


def read(text: bytes, engine: EngineKind) -> Reading:
    """The load in a scrape. Lines it does not know are not looked at."""
    names = NAMES[engine]
    running, waiting = list(_values(text, names.running)), list(_values(text, names.waiting))
    usage = list(_values(text, names.kv_usage))
    produced = list(_values(text, names.produced)) if names.produced else []
    received = [value for name in names.kv_received for value in _values(text, name)]
    return Reading(
        running=int(sum(running)) if running else None,
        waiting=int(sum(waiting)) if waiting else None,
        kv_usage=sum(usage) / len(usage) if usage else None,
        kv_tokens=_kv_tokens(text, names),
        produced=int(sum(produced)) if produced else None,
        kv_received_bytes=int(sum(received)) if received else None,
    )


def _values(text: bytes, name: bytes) -> Iterator[float]:
    """The samples of one metric; a name that only begins alike is another metric."""
    at = text.find(name)
    while at >= 0:
        end = text.find(b"\n", at)
        line = text[at : end if end >= 0 else len(text)]
        starts_line = at == 0 or text[at - 1 : at] == b"\n"
        if starts_line and line[len(name) : len(name) + 1] in (b"{", b" "):
            try:
                value = float(line[line.rfind(b"}") + 1 :].split()[-1 if b"}" not in line else 0])
            except (ValueError, IndexError):
                return
            if isfinite(value):  # a gauge may be NaN before its first sample
                yield value
        at = text.find(name, at + len(name))


def _kv_tokens(text: bytes, names: Names) -> int | None:
    """Tokens of KV over all ranks, from an info metric's labels or from two gauges."""
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
