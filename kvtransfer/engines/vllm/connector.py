"""PenstockConnector: the KV connector for vLLM, which moves KV between engines by transfer agents.

    --kv-transfer-config '{"kv_connector": "PenstockConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "penstock_kv.vllm",
      "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"key_file": "/etc/penstock/kv.key"}}'

This module converts vLLM's objects and callbacks. The other modules of the package decide.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.request import RequestStatus

from kvtransfer.agent import Agent
from kvtransfer.engines.vllm.block_report import BlockReport
from kvtransfer.engines.vllm.cache_layout import UnsupportedCache, describe_cache
from kvtransfer.engines.vllm.cache_memory import cache_region, read_facts, read_window
from kvtransfer.engines.vllm.connector_counters import add_counts
from kvtransfer.engines.vllm.connector_metadata import (
    AgentMetadata,
    ConnectorMetrics,
    ConnectorStats,
    ReportMetadata,
    StepMetadata,
)
from kvtransfer.engines.vllm.connector_options import ConnectorOptions
from kvtransfer.engines.vllm.handoff_params import WorkerAddress
from kvtransfer.engines.vllm.handoff_scheduler import (
    HandoffScheduler,
    LoadOrder,
)
from kvtransfer.engines.vllm.handoff_worker import FinishedTransfers, TransferWorker
from kvtransfer.engines.vllm.kv_dump import KvDump
from kvtransfer.engines.vllm.store_scheduler import (
    StoreOrders,
    StoreReport,
    StoreScheduler,
)
from kvtransfer.engines.vllm.store_worker import StoreWorker
from kvtransfer.engines.vllm.transfer_trace import TransferTrace
from kvtransfer.engines.vllm.vllm_objects import (
    engine_family,
    pool_state,
    prompt_chunks,
    prompt_request,
    stored_request,
    weights_identity,
)
from kvtransfer.layout.kv_layout import KvLayout
from kvtransfer.store.reconnecting_client import StoreConnection
from kvtransfer.transfer.handles import Landing, TransferHandle
from kvtransfer.transports.tcp import Tcp
from kvtransfer.util.agent_options import AgentOptions

log = logging.getLogger("penstock")

SUPPORTED = ("0.32.",)
# Seconds for which a step without computation waits for the end of a transfer.
_IDLE_STEP_S = 0.002
# Maximum seconds for which vLLM's scheduler waits for the store's answer to a lookup.
_LOOKUP_TIMEOUT_S = 0.2
# Number of missed heartbeats after which a peer counts as lost. A worker's step may hold the
# interpreter lock for seconds, in which the agent sends no heartbeat.
_MISSED_BEATS = 12

if not vllm.__version__.startswith(SUPPORTED):
    raise ImportError(
        f"PenstockConnector supports vLLM {SUPPORTED[0]}x, but vLLM {vllm.__version__} is installed"
    )


class PenstockConnector(KVConnectorBase_V1):
    """The object that vLLM calls to move KV between engines: Penstock's KV connector.

    vLLM creates one in the scheduler's process, and one in each worker's process. Each serves the
    methods of its side.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        policy = transfer.kv_load_failure_policy
        self._options = ConnectorOptions(transfer.kv_connector_extra_config, policy)
        self._engine = transfer.engine_id
        if policy != "recompute":
            log.warning(
                "kv_load_failure_policy is %s, so a request whose KV does not arrive fails; "
                "set it to recompute",
                policy,
            )
        self._layout: KvLayout | None = None
        self._family = engine_family(vllm_config)
        self._worker: TransferWorker | None = None
        self._agent: Agent | None = None
        self._report: BlockReport | None = None
        self._changed = threading.Event()
        self._store_worker: StoreWorker | None = None
        self._store_scheduler: StoreScheduler | None = None
        self._layers: dict[str, int] = {}
        trace = self._options.trace
        self._trace = TransferTrace(trace) if trace is not None else None
        self._dump: KvDump | None = None
        self._dumped_loads: list[LoadOrder] = []
        self._step_began_s = 0.0
        self._sent: set[str] = set()
        window = read_window(kv_cache_config)
        if window and self._options.store is not None:
            raise UnsupportedCache("a model with a sliding window cannot use the option store")
        self._scheduler = HandoffScheduler(
            self._options.key,
            self._engine,
            self._family,
            lease_s=self._options.lease_s,
            clock=time.monotonic,
            warn=log.warning,
            part_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            layerwise=self._options.layerwise,
            window=window,
        )

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Start this rank's KV agent with the rank's KV cache.

        Raises UnsupportedCache if the cache's layout is not supported.
        """
        rank = get_tensor_model_parallel_rank()
        facts = read_facts(self._vllm_config, self._kv_cache_config)
        self._layout = layout = describe_cache(facts)
        layers = self._kv_cache_config.kv_cache_tensors[0].layers
        self._layers = {name: layer for layer, name in enumerate(layers)}
        region = cache_region(
            layout, [kv_caches[name] for name in layers], f"{self._engine}-{rank}"
        )
        self._agent = Agent(
            f"{self._engine}:{rank}:{secrets.token_hex(4)}",
            layout,
            [region],
            key=self._options.key,
            transports=[Tcp(self._options.host)],
            options=AgentOptions(family=self._family, max_missed_beats=_MISSED_BEATS),
            rank=rank,
            group=self._engine,
        )
        self._agent.open(self)
        self._worker = TransferWorker(self._agent, layout, rank, self._options.timeout_s)
        log.info("kv: the agent of rank %d listens on %s", rank, self._agent.address)
        if self._options.dump is not None:
            self._dump = KvDump(self._options.dump, layout, rank, region.bytes)
        if self._options.store is not None:
            self._store_worker = StoreWorker(
                layout,
                rank,
                region.bytes.data,
                self._connect_store,
                self._changed.set,
                time.perf_counter,
            )

    def _connect_store(self, timeout_s: float = 10.0) -> StoreConnection:
        assert self._options.store is not None
        assert self._layout is not None
        n_bytes = self._layout.rank_block_bytes(0)
        return StoreConnection(self._options.store, n_bytes, timeout_s, log.warning)

    def on_change(self, handle: TransferHandle) -> None:
        """Wake an engine step that waits for a KV transfer, because a transfer has made progress.

        The transfer agent calls this method on its own threads.
        """
        self._changed.set()
        if self._trace is not None and isinstance(handle, Landing):
            end = None if handle.outcome is None else handle.outcome.kind
            self._trace.write("arrived", offer=handle.name, layers=handle.layers, end=end)

    def get_handshake_metadata(self) -> AgentMetadata | None:
        agent = self._agent
        if agent is None or self._layout is None:
            return None
        return AgentMetadata(WorkerAddress(agent.address, agent.name, agent.epoch), self._layout)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Store which KV transfers vLLM's scheduler wants to begin and end in this step.

        vLLM calls this method before it computes.
        """
        super().bind_connector_metadata(connector_metadata)
        self._step_began_s = time.perf_counter()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Begin and end offers of KV to other engines.

        vLLM calls this method before a step writes to the cache. So offers of blocks that get new
        content end in time.
        """
        assert self._worker is not None
        self._worker.prepare(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the KV transfers that the scheduler ordered for this engine step.

        vLLM calls this method after the step's computation, because no load is synchronous.
        """
        assert self._worker is not None
        step_s = time.perf_counter() - self._step_began_s
        metadata, store = self._get_connector_metadata(), self._store_worker
        self._changed.clear()
        self._worker.execute(metadata.orders)
        if store is not None:
            store.execute(metadata.store, step_s)
        is_idle = self._worker.is_idle and (store is None or store.is_idle)
        if not metadata.orders.has_work and not is_idle:
            self._changed.wait(_IDLE_STEP_S)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM schedules a request only after its KV has arrived."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Allow the KV of one layer to be sent, because the step has computed this layer.

        KV is sent from vLLM's own blocks, without a copy.
        """
        layer = self._layers.get(layer_name)
        if layer is None or self._worker is None:
            return
        if self._trace is not None:
            self._trace.write("computed", layer=layer)
        self._worker.mark_computed(layer)

    def wait_for_save(self) -> None:
        """Allow the KV of all layers to be sent, because the step has computed them.

        vLLM keeps the blocks until `get_transfer_results` reports that they are not read any more.
        """
        assert self._worker is not None
        if self._dump is not None:
            orders = self._get_connector_metadata().orders
            for offer in orders.offers:
                self._dump.save("offered", offer.name, offer.blocks)
            self._dumped_loads += orders.loads
        self._worker.finish_step()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether KV is sent layer by layer; vLLM's full CUDA graphs do not support that.

        Inside a full graph, vLLM does not call `save_kv_layer`.
        """
        return bool(extra_config.get("layerwise", True))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        done, store = self._worker.take_finished(), self._store_worker
        if self._dump is not None:
            self._dump_received(self._dump, done)
        if store is not None:
            stored = store.take_finished()
            done = FinishedTransfers(
                self._neither_offered_nor_saved(done.sent | stored.sent, store),
                done.received | stored.received,
                done.failed | stored.failed,
            )
        return KVConnectorTransferResults(done.sent, done.received, done.failed)

    def _dump_received(self, dump: KvDump, done: FinishedTransfers) -> None:
        ended = [load for load in self._dumped_loads if load.request in done.received]
        self._dumped_loads = [load for load in self._dumped_loads if load not in ended]
        for load in ended:
            if load.request not in done.failed:
                n_blocks = -(-load.tokens // load.layout.block_tokens)
                dump.save("received", load.name, load.blocks[:n_blocks])

    def _neither_offered_nor_saved(self, ended: set[str], store: StoreWorker) -> set[str]:
        # The blocks of a request may be offered and saved: they are free when both have ended.
        assert self._worker is not None
        self._sent |= ended
        busy = {r for r in self._sent if self._worker.is_offering(r) or store.is_saving(r)}
        free, self._sent = self._sent - busy, busy
        return free

    def build_connector_worker_meta(self) -> ReportMetadata | None:
        if self._store_worker is None:
            return None
        report = self._store_worker.take_report()
        return ReportMetadata(report) if report != StoreReport() else None

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """Return this process's KV transfer counters since the last call, or None without any."""
        parts = (
            (self._scheduler, self._store_scheduler)
            if self._worker is None
            else (self._worker, self._store_worker)
        )
        counts: dict[str, float] = {}
        for part in parts:
            if part is not None:
                counts = add_counts(counts, part.counts.take())
        return ConnectorStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> ConnectorMetrics:
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End all KV transfers and stop the agent, and the report of cached blocks.

        It waits until no other agent can write to this engine's memory.
        """
        agent, self._agent = self._agent, None
        store, self._store_worker = self._store_worker, None
        if store is not None:
            store.close()
        if agent is not None:
            agent.begin_close()
            agent.finish_close()
        report, self._report = self._report, None
        if report is not None:
            report.close()

    # ---- scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Report the pool's cached blocks to tests from now on, if `block_report` is set."""
        path = self._options.block_report
        if path is not None and self._report is None:
            self._report = BlockReport(path, lambda: pool_state(gpu_block_pool))
            log.warning("kv: the Unix socket %s reports the cached blocks, for tests", path)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Store the addresses of the workers' KV agents, which vLLM has collected by rank.

        Raises ValueError for the addresses of another connector.
        """
        ranks = [metadata[rank] for rank in sorted(metadata)]
        if not all(isinstance(rank, AgentMetadata) for rank in ranks):
            raise ValueError(
                "the workers sent addresses of another connector: MultiConnector must list "
                "PenstockConnector before other connectors that have addresses"
            )
        self._layout = ranks[0].layout
        self._scheduler.set_workers([rank.worker for rank in ranks], self._layout)
        if self._options.store is not None:
            config = self._vllm_config
            self._store_scheduler = StoreScheduler(
                self._connect_store(_LOOKUP_TIMEOUT_S),
                f"{self._family}/{weights_identity(config)}",
                self._layout,
                config.scheduler_config.max_num_batched_tokens,
                time.monotonic,
            )

    def on_new_request(self, request: Any) -> None:
        self._scheduler.begin_prefill(prompt_request(request))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        count = self._scheduler.loadable_tokens(prompt_request(request), num_computed_tokens)
        if not count and self._store_scheduler is not None:
            stored = stored_request(request)
            if stored is not None and not request.skip_reading_prefix_cache:
                count = self._store_scheduler.loadable_tokens(stored, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        (numbers,) = blocks.get_block_ids()
        self._scheduler.begin_load(request.request_id, numbers, num_external_tokens)
        if self._store_scheduler is not None:
            self._store_scheduler.begin_load(request.request_id, numbers, num_external_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        has_work = scheduler_output.total_num_scheduled_tokens > 0
        chunks, store = prompt_chunks(scheduler_output), StoreOrders()
        blocks = scheduler_output.kv_connector_block_state
        self._scheduler.on_step(chunks, lambda request: blocks.resolve_block_ids(request)[0])
        if self._store_scheduler is not None:
            store = self._store_scheduler.take_orders(chunks)
        return StepMetadata(self._scheduler.take_orders(has_work), store)

    def update_connector_output(self, connector_output: Any) -> None:
        sent = connector_output.finished_sending or ()
        received = connector_output.finished_recving or ()
        self._scheduler.on_ended(sent, received)
        if self._store_scheduler is not None:
            metadata = connector_output.kv_connector_worker_meta
            if metadata is not None:
                self._store_scheduler.on_report(metadata.report)
            self._store_scheduler.on_ended(sent, received, connector_output.failed_recving)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Offer the KV of a finished prefill request, or end the transfers of another request.

        With a store, the KV of a request that was not aborted is saved. Returns whether vLLM must
        keep the blocks, and the kv_transfer_params of the response.
        """
        prompt = prompt_request(request)
        self._scheduler.forget(request.request_id)
        is_kept = self._save(request, block_ids)
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        asked = prompt.params.get("do_remote_decode") is True
        finished = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        is_whole = finished and tokens == request.num_prompt_tokens
        parts = self._scheduler.end_prefill(
            request.request_id, block_ids, request.num_prompt_tokens, is_whole=is_whole
        )
        if parts is not None:
            return parts[0] or is_kept, parts[1]
        if not (asked and finished and block_ids and tokens):
            return is_kept, None
        params = self._scheduler.finish_prefill(prompt, block_ids, tokens)
        return is_kept or params is not None, params

    def _save(self, request: Any, block_ids: Sequence[int]) -> bool:
        # Save an ended request's blocks in the store. The last steps of an aborted request may not
        # have been computed.
        store = self._store_scheduler
        if store is None:
            return False
        is_whole = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        stored = stored_request(request) if is_whole else None
        is_kept = stored is not None and store.save(stored, block_ids)
        store.forget(request.request_id)
        return is_kept

    def has_pending_push_work(self) -> bool:
        store = self._store_scheduler
        is_store_busy = store is not None and store.has_pending_work
        return is_store_busy or self._scheduler.has_pending_work


# MultiConnector finds the class of each connector's statistics by name, in vLLM's registry, and
# not by the module path of the configuration. A process may import this module twice.
with contextlib.suppress(ValueError):
    KVConnectorFactory.register_connector(
        PenstockConnector.__name__, __name__, PenstockConnector.__name__
    )
