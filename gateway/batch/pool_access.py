"""Finds the pool that runs a batch, checks that the tenant may use it, and reads its capacity."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from gateway.admission.pool_queue import PoolQueue
from gateway.batch.completion_window import PoolSchedule
from gateway.batch.concurrency_and_preemption import ConcurrencyLimiter, LatencyTargets, PoolReading
from gateway.batch.file_and_batch_objects import BatchRecord
from gateway.batch.request_attempt import RequestAttempt
from gateway.config import BatchApi, Config
from gateway.fleet.model_alias_lookup import find
from gateway.metrics.catalogue import Metrics
from gateway.protocol.errors import Failure, GatewayError
from gateway.protocol.request.api_keys import wrong_key
from gateway.protocol.request.service_level_headers import (
    CLASS_HEADER,
    MAX_PRIORITY,
    PRIORITY_HEADER,
    HeaderFields,
)
from gateway.routes_and_snapshot import Gateway, Snapshot

WINDOW_S = 0.5  # period over which token rates and missed targets are measured
KNOWN_CLASS_S = 600.0  # a service class counts for this time after its last request
NO_POOL = ""


def batch_class(section: BatchApi, config: Config) -> str:
    """Return the name of the service class of all batch requests.

    It is the setting `slo` of the section, or else the class with the lowest weight.
    """
    classes = config.slo.classes
    return section.slo or min(classes, key=lambda name: (classes[name].weight, name))


def line_headers(section: BatchApi, snapshot: Snapshot, *, is_reserved: bool) -> HeaderFields:
    """Return the headers with which a batch request is served, as if a client had sent them.

    They give the request the lowest service class and priority. With `is_reserved`, the request
    skips its pool's queue, because the batch's completion window ends soon.

    section  the section `batch` of the configuration
    """
    name, levels = batch_class(section, snapshot.config), snapshot.service_classes
    fields = HeaderFields([(CLASS_HEADER, name), (PRIORITY_HEADER, str(-MAX_PRIORITY))])
    read = levels.read_preferences(fields, "")
    own = msgspec.structs.replace(read, skips_queue=is_reserved, is_batch=True)
    fields.cached_preferences = levels, own
    return fields


def find_pool(snapshot: Snapshot, record: BatchRecord) -> str:
    """Return the name of the pool that serves a batch; NO_POOL if no pool serves its model."""
    route = find(snapshot.routes, record.model)
    return NO_POOL if route is None else route.pool


def refusal(snapshot: Snapshot, record: BatchRecord) -> GatewayError | None:
    """Return the error for a batch that its tenant may no longer run; None if it may.

    Tenants and their permitted models change with the configuration. Therefore this is checked
    again while the batch runs. The API key of the batch is not stored.
    """
    if record.tenant and record.tenant not in snapshot.tenants.values():
        return wrong_key()
    if not record.scope:
        return None
    scope = next(
        (value for key, value in snapshot.scopes.items() if scope_digest(key) == record.scope), None
    )
    if scope is None:
        return wrong_key()
    if find(scope.routes, record.model) is None:
        message = f"The model {record.model[:64]!r} does not exist."
        return GatewayError(Failure.MODEL_NOT_FOUND, message, param="model")
    return None


def scope_digest(key_digest: bytes) -> str:
    """Return the text that is stored with a batch to recognise its API key again.

    `key_digest` is the SHA-256 of the key. The result does not reveal the key or its SHA-256.
    """
    return hashlib.sha256(b"batch scope:" + key_digest).hexdigest()[:32]


class PoolAccess:
    """Reads the load of one pool, to compute how many batch requests may run there.

    schedule   the plan for the pool's batches, by their completion windows
    _missed    number of other requests that missed a latency target in the newest window
    _targets   the latency targets of other requests
    _answered  by service class: number of answered live requests, and when it last changed
    """

    def __init__(self, pool: str, gateway: Gateway, metrics: Metrics) -> None:
        self._pool, self._gateway, self._metrics = pool, gateway, metrics
        self._limiter: ConcurrencyLimiter | None = None
        self.schedule = PoolSchedule()
        self._targets = LatencyTargets(float("inf"), float("inf"))
        self._missed = 0
        self._missed_total: float | None = None
        self._answered: dict[str, tuple[float, float]] = {}
        self._window_at = float("-inf")
        self._tokens: dict[int, int] = {}
        self._tpot_s: float | None = None

    @property
    def _queue(self) -> PoolQueue | None:
        queues = self._gateway.gate.pool_queues()
        return next((queue for queue in queues if queue.name == self._pool), None)

    def reserve(self, section: BatchApi) -> int:
        """Return the largest number of batch requests that may run even if the pool is full.

        Batches whose completion windows end soon need it. It is the share `section.reserve` of the
        pool's capacity, but at most `section.concurrency`, the limit on all batch requests.
        """
        queue = self._queue
        if queue is None or not section.reserve:
            return 0
        return min(section.concurrency, max(1, int(section.reserve * queue.places)))

    def usual_s(self, now: float) -> float | None:
        """Return how many seconds the pool's requests run on average; None if none has ended."""
        queue = self._queue
        return None if queue is None else queue.mean_service_s(now)

    def allow(
        self, section: BatchApi, runs: Sequence[RequestAttempt], running: int, now: float
    ) -> int:
        """Return how many batch requests the pool may run now.

        section  the section `batch` of the configuration
        runs     the running batch requests
        running  the number of running batch requests
        now      monotonic time in seconds
        """
        queue = self._queue
        if queue is None:  # requests to a pool without a queue end with an error immediately
            return section.concurrency
        limiter = self._limiter = self._limiter or ConcurrencyLimiter(
            section.share, section.concurrency
        )
        limiter.share, limiter.most = section.share, section.concurrency
        self._measure(section, runs, now)
        missed, self._missed = self._missed, 0
        reading = self._read(queue, runs, missed, now)
        return limiter.allow(reading, self._targets, running, now, self.schedule.plan.places)

    def _read(
        self, queue: PoolQueue, runs: Sequence[RequestAttempt], missed: int, now: float
    ) -> PoolReading:
        own_waiting = sum(run.is_queued for run in runs)
        waiting = max(0, queue.queue_length - own_waiting)
        ttfts = [ttft_s for run in runs if (ttft_s := run.ttft_s(now)) is not None]
        busy = queue.permits_in_use
        ttft_s = max(ttfts, default=None)
        return PoolReading(queue.places, busy, waiting, queue.price, missed, ttft_s, self._tpot_s)

    def _measure(self, section: BatchApi, runs: Sequence[RequestAttempt], now: float) -> None:
        elapsed = now - self._window_at
        if elapsed < WINDOW_S:
            return
        self._window_at = now
        self._read_classes(section, now)
        before, self._tokens = self._tokens, {id(run): run.new_tokens for run in runs}
        # Only requests that have generated since before the window: others spent it on prefill.
        made = [
            tokens - before[run] for run, tokens in self._tokens.items() if before.get(run, 0) > 0
        ]
        self._tpot_s = elapsed * len(made) / max(1, sum(made)) if made else None

    def _read_classes(self, section: BatchApi, now: float) -> None:
        snapshot = self._gateway.snapshot
        own, missed = batch_class(section, snapshot.config), 0.0
        models = {route.name for route in snapshot.routes.values() if route.pool == self._pool}
        answered: dict[str, float] = {}
        for (name, outcome, _, model), counter in self._metrics.goodput_total.children():
            if name != own and model in models:
                answered[name] = answered.get(name, 0.0) + counter.value
                missed += counter.value if outcome.endswith("missed") else 0.0
        for name, count in answered.items():
            if self._answered.get(name, (0.0, 0.0))[0] != count:
                self._answered[name] = count, now
        self._missed = 0 if self._missed_total is None else int(missed - self._missed_total)
        self._missed_total = missed
        in_use = [name for name, (_, at) in self._answered.items() if now - at < KNOWN_CLASS_S]
        self._targets = _tightest(snapshot.config, in_use)


def _tightest(config: Config, names: Sequence[str]) -> LatencyTargets:
    classes = config.slo.classes
    known = {config.slo.default, *(name for name in names if name in classes)}
    sections = [classes[name] for name in known]
    return LatencyTargets(
        min(section.ttft for section in sections), min(section.tpot for section in sections)
    )
