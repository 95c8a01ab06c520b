"""The messages of Penstock's KV connector between vLLM's processes, as subtypes of vLLM's types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvtransfer.engines.vllm.connector_counters import COUNTERS, Counts, add_counts
from kvtransfer.engines.vllm.handoff_params import WorkerAddress
from kvtransfer.engines.vllm.handoff_scheduler import StepOrders
from kvtransfer.engines.vllm.store_scheduler import (
    StoreOrders,
    StoreReport,
)
from kvtransfer.layout.kv_layout import KvLayout


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The scheduler's message to the workers: which KV transfers begin and end in a step."""

    orders: StepOrders
    store: StoreOrders


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """A worker's message to the scheduler: how long it took to load KV from the host's store."""

    report: StoreReport

    def aggregate(self, other: Any) -> ReportMetadata:
        """Combine the reports of two ranks about loads of KV, and keep the longer time of each
        load.

        The longer time of the engine's step is kept as well.
        """
        return ReportMetadata(self.report.merged(other.report))


@dataclass
class AgentMetadata(KVConnectorHandshakeMetadata):
    """A worker's message to the scheduler: the address of its KV agent, and its KV layout."""

    worker: WorkerAddress
    layout: KvLayout


class ConnectorStats(KVConnectorStats):
    """The counters of KV transfers in one reporting interval, by name.

    connector_counters.py lists the names.
    """

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: Any) -> ConnectorStats:
        """Add the KV transfer counters of another rank or process. Returns the sum."""
        self.data = add_counts(self.data, other.data)
        return self

    def reduce(self) -> dict[str, float]:
        """Return the counters of KV transfers by name, as vLLM logs them."""
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):
    """The KV connector's counters as Prometheus counters on vLLM's page /metrics."""

    def __init__(self, config: Any, types: Any, labels: Any, values: Mapping[int, Any]) -> None:
        super().__init__(config, types, labels, values)
        counters = {
            name: self._counter_cls(f"vllm:{name}", text, labelnames=labels)
            for name, text in COUNTERS.items()
        }
        self._by_engine = {
            engine: {name: counter.labels(*label) for name, counter in counters.items()}
            for engine, label in values.items()
        }

    def observe(self, transfer_stats_data: Counts, engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            self._by_engine[engine_idx][name].inc(amount)
