"""The flow of KV in the live view: handoffs from prefill to decode endpoints, and the bytes that travelled.

The gateway sees no KV. A decode engine says how many bytes it has received (vLLM does); they are shared among the pairs
that it is one half of, by the prompt tokens that travelled. Not here: notes and their arithmetic (gateway/admin/metric_samples.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from gateway.admin.fleet_status import Standing
from gateway.admin.metric_samples import Mark, rate
from gateway.metrics.quantile_sketch import rounded

Names = tuple[str, str]
NEVER = (0, 0, 0)


def flow(standing: Standing, now: Mark, soon: Mark) -> dict[str, Any]:
    """The pairs that ever had a handoff, and all bytes by transport. What no engine tells is null."""
    per_s, moved = rate(now, soon), shared(now, soon)
    transports: defaultdict[str, float] = defaultdict(float)
    pairs = []
    for names, figures in sorted(standing.pairs.items()):
        served, failed, _ = soon.pairs.get(names, NEVER)
        kv_bytes = moved.get(names)
        if kv_bytes is not None and figures.transport is not None:
            transports[figures.transport] += kv_bytes
        pairs.append(
            {
                "prefill": names[0],
                "decode": names[1],
                "per_s": per_s(figures.served - served),
                "failed_per_s": per_s(figures.failed - failed),
                "served": figures.served,
                "failed": figures.failed,
                "mean_s": rounded(figures.mean_s),
                "p95_s": rounded(figures.p95_s),
                "transport": figures.transport,
                "kv_bytes_per_s": None if kv_bytes is None else per_s(kv_bytes),
            }
        )
    by_transport = {name: per_s(kv_bytes) for name, kv_bytes in sorted(transports.items())}
    return {"pairs": pairs, "under_way": standing.under_way, "kv_bytes_per_s": by_transport}


def shared(now: Mark, soon: Mark) -> dict[Names, float]:
    """Bytes of KV that travelled between two notes, by pair: each decoder's, by the tokens of its pairs. Pairs of a
    decoder that does not tell are left out."""
    came = received(now.received, soon.received)
    tokens = {names: told[2] - soon.pairs.get(names, NEVER)[2] for names, told in now.pairs.items()}
    of_decoder: Counter[str] = Counter()
    for (_, decode), count in tokens.items():
        of_decoder[decode] += count
    return {
        (prefill, decode): came[decode] * count / of_decoder[decode] if count else 0.0
        for (prefill, decode), count in tokens.items()
        if decode in came
    }


def received(now: Mapping[str, int], soon: Mapping[str, int]) -> dict[str, int]:
    """By how much these counters have grown: an engine that started anew counts from nothing, of one that tells for the
    first time nothing is known yet."""
    return {name: told - before if told >= (before := soon.get(name, told)) else told for name, told in now.items()}
