"""Counts an engine's KV transfers, under the metric names of the imitated vLLM connector."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvtransfer.protocol.outcomes import OutcomeKind, TransferOutcome
from mockgpu.histogram import BucketHistogram

XFER_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
BYTES_BUCKETS = tuple(float(1 << exponent) for exponent in range(10, 34, 2))


class HandoffStats:
    """Counts the KV that one engine sent and received, and writes it as vLLM's metrics.

    `connector` is "nixl" or "mooncake"; metric names contain it.
    """

    def __init__(self, connector: str) -> None:
        self._name = f"vllm:{connector}"
        self.xfer_s = BucketHistogram(XFER_BUCKETS)
        self.xfer_bytes = BucketHistogram(BYTES_BUCKETS)
        self.failed = 0
        self.expired = 0
        self.given_ends: Counter[str] = Counter()
        self.took_ends: Counter[str] = Counter()

    def count_sent(self, end: TransferOutcome) -> None:
        self.given_ends[end.reason] += 1
        self.expired += end.kind is OutcomeKind.EXPIRED

    def count_received(self, end: TransferOutcome, seconds: float) -> None:
        self.took_ends[end.reason] += 1
        if end.has_landed:
            self.xfer_s.observe(seconds)
            self.xfer_bytes.observe(end.n_bytes)
        elif end.kind is not OutcomeKind.CANCELLED:
            self.failed += 1

    def lines(self, labels: str) -> Iterator[str]:
        for name, histogram in (
            (f"{self._name}_xfer_time_seconds", self.xfer_s),
            (f"{self._name}_bytes_transferred", self.xfer_bytes),
        ):
            yield f"# TYPE {name} histogram"
            yield from histogram.lines(name, labels)
        for name, value in (
            (f"{self._name}_num_failed_transfers", self.failed),
            (f"{self._name}_num_kv_expired_reqs", self.expired),
        ):
            yield f"# TYPE {name} counter"
            yield f"{name}_total{{{labels}}} {value}"
        for name, ends in (("mock:kv_given", self.given_ends), ("mock:kv_taken", self.took_ends)):
            yield f"# TYPE {name} counter"
            for reason, count in sorted(ends.items()):
                yield f'{name}_total{{{labels},end="{reason}"}} {count}'
