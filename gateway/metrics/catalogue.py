"""The catalogue of metrics: every metric of the gateway, with help text, labels and buckets.

docs/reference/metrics.md is generated from it. The types in metric_types.py store the values, and
other modules update them. Label values come from small sets in the code or from the configuration,
and their number is limited.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import chain

from gateway.metrics.auto_metrics import AutoMetrics
from gateway.metrics.drift_metrics import DriftMetrics
from gateway.metrics.exposition import render_page
from gateway.metrics.labels import (
    DECODE,
    ENDPOINT,
    ENDPOINT_LABELS,
    KIND,
    POOL,
    PREFILL,
    RESULT,
    Row,
)
from gateway.metrics.metric_types import (
    Counter,
    FamilyFactory,
    FamilyReading,
    FamilySpec,
    Gauge,
    Histogram,
    Label,
    Merge,
    MetricFamily,
    MetricRegistry,
    PoolByLabel,
)
from gateway.metrics.mirror_metrics import MirrorMetrics
from gateway.metrics.process_metrics import ProcessMetrics
from gateway.metrics.runtime_gauges import RuntimeGauges
from gateway.metrics.trial_metrics import TrialMetrics
from gateway.util.work_in_turns import Steps, WorkMeter

SERIES_PER_ITEM = 16
"""How many series can be looked at in the time of one item of a WorkMeter."""

MODEL = Label("model", 256)
CODE = Label("code", 32)
REASON = Label("reason", 64)
RESUME_RESULT = Label("result", 16)
STAGE = Label("stage", 16)
VERSION = Label("version", 2)
HASH = Label("hash", 2)
ROLE = Label("role", 4)
OUTCOME = Label("outcome", 16)
SCHEDULE = Label("schedule", 4)
DECISION = Label("decision", 4)
DIRECTION = Label("direction", 2)
CLASS = Label("class", 33)
SLO_OUTCOME = Label("slo_outcome", 8)
TENANT = Label("tenant", 64)
TIER = Label("tier", 64)
CAUSE = Label("cause", 4)

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Upper bounds of TTFT histograms in seconds. They are vLLM's, so that histograms of the gateway
and of engines are comparable."""

TPOT_BUCKETS_S = (
    *(0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
"""Upper bounds of TPOT histograms in seconds: those of vLLM and OpenTelemetry, and smaller ones
below.
"""

E2E_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""Upper bounds of histograms of request durations in seconds; they are vLLM's."""

RATIO_BUCKETS = (0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds of histograms of relative errors, from 1 % to 1000 %."""

OVERHEAD_BUCKETS_S = (
    *(0.00005, 0.0001, 0.00015, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.002, 0.003),
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
)
"""Upper bounds of histograms of the latency that the gateway adds, from 50 microseconds to 1 s."""


class Metrics:
    """All metrics of one gateway process, created once and passed to the parts that update them.

    If a metric has labels, its attribute is a MetricFamily (`ttft_seconds.labels(model,
    endpoint)`). Otherwise it is the metric itself, such as a Counter.

    pool_by_label  function that maps each endpoint and model to its pool; called at each scrape
    """

    def __init__(self) -> None:
        registry = self._registry = MetricRegistry()
        self._process_metrics = ProcessMetrics()
        self.pool_by_label: Callable[[], PoolByLabel] = dict
        self._requests(registry.section(Row.REQUESTS, "telemetry/accounting.py"))
        self._latency(registry.section(Row.LATENCY, "telemetry/accounting.py"))
        self._promises(registry.section(Row.PROMISES, "telemetry/slo_outcomes.py"))
        self._admission(registry.section(Row.ADMISSION, "admission/pool_queue.py"))
        self._endpoints(registry.section(Row.ENDPOINTS, "fleet/endpoint_load_and_health.py"))
        self._tokens(registry.section(Row.CACHE, "telemetry/accounting.py"))
        self._batches(registry.section(Row.BATCHES, "batch/batch_runner.py"))
        self._kv_events(registry.section(Row.CACHE, "fleet/kv_events/event_reader.py"))
        self._split(registry.section(Row.SPLIT, "disagg/handoffs.py"))
        self._shared(registry.section(Row.SHARED, "peers/sync_loop.py"))
        self._process(
            registry.section(Row.CONFIGURATION, "reload/reloader.py"),
            registry.section(Row.PROCESS, "app.py"),
        )
        self.runtime_gauges = RuntimeGauges(registry)
        self.trial_metrics = TrialMetrics(registry, TTFT_BUCKETS_S)
        self.auto_metrics = AutoMetrics(registry)
        self.drift_metrics = DriftMetrics(registry)
        self.mirror_metrics = MirrorMetrics(registry)

    def render(self) -> bytes:
        """Return the current values of all metrics in the Prometheus text format."""
        return render_page(self.collect(), exemplars=False)

    def collect(self, unix_offset: float | None = None) -> Iterator[FamilyReading]:
        """Yield the values of one metric family at a time; other work may run between two of them.

        unix_offset  Unix time minus monotonic time in seconds, for the times of exemplars; None
                     leaves exemplars out
        """
        return filter(None, self.collect_in_parts(unix_offset))

    def collect_in_parts(self, unix_offset: float | None = None) -> Iterator[FamilyReading | None]:
        """Like collect(), but also yield None within large families, so that other work may run."""
        families = self._registry.collect_in_parts(self.pool_by_label(), unix_offset)
        return chain(families, self._process_metrics.collect())

    def catalogue(self) -> tuple[FamilySpec, ...]:
        """Return the specifications of all metric families, in the order of a scrape."""
        return tuple(family.spec for family in self._registry.families)

    def remove_endpoints_steps(self, endpoints: Collection[str]) -> Steps[None]:
        """Remove all metric series of these endpoints; yield wherever other work may run.

        Call this after the endpoints were removed.
        """
        meter = WorkMeter()
        for family in self._registry.families:
            for label in family.spec.labels:
                if label in ENDPOINT_LABELS:
                    family.remove_children(label.name, *endpoints)
                    if meter.is_part_over(family.child_count // SERIES_PER_ITEM + 1):
                        yield

    def _requests(self, factory: FamilyFactory) -> None:
        self.requests_total: MetricFamily[Counter] = factory.counter(
            "penstock_requests_total",
            "Requests by HTTP status and reason of the response. Status 499: the client "
            "disconnected. Status 0: a batch request was pre-empted, and a later attempt "
            "continues it.",
            *(MODEL, CODE, REASON),
        )
        self.shed_total: MetricFamily[Counter] = factory.counter(
            "penstock_shed_total",
            "Requests that admission control or a quota refused, by reason and service class.",
            *(REASON, CLASS),
        )
        self.retries_total: MetricFamily[Counter] = factory.counter(
            "penstock_retries_total",
            "Retries on another endpoint before the first byte of the response, by the failure of "
            "the previous attempt.",
            KIND,
        )
        self.hedges_total: MetricFamily[Counter] = factory.counter(
            "penstock_hedges_total",
            "Requests that were also sent to a second endpoint because their first byte was late, "
            "by second endpoint.",
            ENDPOINT,
        )
        self.resumes_total: MetricFamily[Counter] = factory.counter(
            "penstock_resumes_total",
            "Streams that broke after their first byte, by failure and by result: resumed on "
            "another endpoint, closed (only the end of the stream was missing), broke again, or "
            "the reason why the stream could not be resumed. Only for models with resume.",
            *(REASON, RESUME_RESULT),
        )
        self.retry_budget_remaining: Gauge = factory.gauge(
            "penstock_retry_budget_remaining",
            "Number of further retries that the gateway's retry budget would allow now.",
        ).labels()
        self.client_disconnects_total: MetricFamily[Counter] = factory.counter(
            "penstock_client_disconnects_total",
            "Clients that disconnected before their response was complete, by stage.",
            STAGE,
        )

    def _latency(self, factory: FamilyFactory) -> None:
        self.ttft_seconds: MetricFamily[Histogram] = factory.histogram(
            "penstock_ttft_seconds",
            "Seconds from the last byte of a request to the first token sent to the client.",
            TTFT_BUCKETS_S,
            *(MODEL, ENDPOINT),
            has_exemplars=True,
        )
        self.tpot_seconds: MetricFamily[Histogram] = factory.histogram(
            "penstock_tpot_seconds",
            "Mean seconds per output token after the first; one observation per request.",
            TPOT_BUCKETS_S,
            *(MODEL, ENDPOINT),
            has_exemplars=True,
        )
        self.itl_seconds: Histogram = factory.histogram(
            "penstock_itl_seconds",
            "Seconds between two chunks of a stream, as received from the engine; sampled for one "
            "request in 32.",
            TPOT_BUCKETS_S,
        ).labels()
        self.e2e_seconds: MetricFamily[Histogram] = factory.histogram(
            "penstock_e2e_seconds",
            "Seconds from the last byte of a request to the last byte of its response.",
            E2E_BUCKETS_S,
            MODEL,
        )
        self._latency_at_gateway(factory)

    def _latency_at_gateway(self, factory: FamilyFactory) -> None:
        self.queue_seconds: MetricFamily[Histogram] = factory.histogram(
            "penstock_queue_seconds",
            "Seconds that a request waited for admission to its pool.",
            TTFT_BUCKETS_S,
            POOL,
        )
        self.overhead_seconds: Histogram = factory.histogram(
            "penstock_overhead_seconds",
            "Seconds in the gateway from the last byte of a request until it is sent to an "
            "endpoint, without the wait for admission.",
            OVERHEAD_BUCKETS_S,
        ).labels()
        self.shed_seconds: Histogram = factory.histogram(
            "penstock_shed_seconds",
            "Seconds from the last byte of a request to its refusal by admission control, with "
            "the wait for admission.",
            OVERHEAD_BUCKETS_S,
        ).labels()

    def _promises(self, factory: FamilyFactory) -> None:
        self.goodput_total: MetricFamily[Counter] = factory.counter(
            "penstock_goodput_total",
            "Requests by service class and SLO outcome: met, ttft_missed, tpot_missed, "
            "both_missed, failed, shed. Responses that are not streamed are judged by their total "
            "time. `tenant` is empty unless observability.tenants is set.",
            *(CLASS, SLO_OUTCOME, TENANT, MODEL),
        )
        self.cost_usd_total: MetricFamily[Counter] = factory.counter(
            "penstock_cost_usd_total",
            "Cost of requests in dollars: their share of the engines' time at "
            "hardware.price_per_hour, or their tokens at endpoints with a token_price. `tenant` "
            "is empty unless observability.tenants is set.",
            *(MODEL, CLASS, TENANT),
        )
        self.idle_cost_usd_total: MetricFamily[Counter] = factory.counter(
            "penstock_idle_cost_usd_total",
            "Cost in dollars of the time in which engines of a pool had no request, at "
            "hardware.price_per_hour.",
            POOL,
        )
        self.overflow_total: MetricFamily[Counter] = factory.counter(
            "penstock_overflow_total",
            "Requests that a smaller model served because they would otherwise have been refused.",
            *(MODEL, TIER),
        )
        self._predictions(factory)

    def _predictions(self, factory: FamilyFactory) -> None:
        self.ttft_prediction_error_ratio: Histogram = factory.histogram(
            "penstock_ttft_prediction_error_ratio",
            "Relative error of the predicted time from the pick of an endpoint to the first "
            "token. Streamed responses only.",
            RATIO_BUCKETS,
        ).labels()
        self.pick_regret_seconds: Histogram = factory.histogram(
            "penstock_pick_regret_seconds",
            "Predicted seconds to the first token at the picked endpoint, minus those at the "
            "fastest candidate; sampled for one pick in 32.",
            TTFT_BUCKETS_S,
        ).labels()
        self.prefill_tokens_total: MetricFamily[Counter] = factory.counter(
            "penstock_prefill_tokens_total",
            "Prompt tokens that engines computed under a prefix-aware policy, by cause: "
            "never_seen (cached nowhere), spread (cached at another endpoint), evicted (no longer "
            "cached at the picked endpoint). The last two are avoidable.",
            CAUSE,
        )

    def _admission(self, factory: FamilyFactory) -> None:
        self.waiting: MetricFamily[Gauge] = factory.gauge(
            "penstock_waiting", "Requests that are waiting for admission to a pool.", POOL
        )
        self.queued_tokens: MetricFamily[Gauge] = factory.gauge(
            "penstock_queued_tokens",
            "Prompt tokens of the requests that are waiting for admission to a pool.",
            POOL,
        )
        self.admission_price: MetricFamily[Gauge] = factory.gauge(
            "penstock_admission_price",
            "Price of admission to a pool for a typical request, in units of request value; 0 "
            "without overload. Requests of lower value are refused more often as it rises.",
            POOL,
            merge=Merge.MAX,
        )
        self.admission_phi: MetricFamily[Gauge] = factory.gauge(
            "penstock_admission_session_share",
            "Share of a pool's KV memory (0 to 1) that running sessions may use before new "
            "sessions are refused.",
            POOL,
            merge=Merge.MIN,
        )
        self.tenant_inflight: MetricFamily[Gauge] = factory.gauge(
            "penstock_tenant_inflight",
            "Requests in progress of a tenant with limits.concurrent_requests, at this gateway.",
            TENANT,
        )

    def _endpoints(self, factory: FamilyFactory) -> None:
        self.inflight: MetricFamily[Gauge] = factory.gauge(
            "penstock_inflight",
            "Requests of this gateway in progress at an endpoint.",
            ENDPOINT,
        )
        self.endpoint_up: MetricFamily[Gauge] = factory.gauge(
            "penstock_endpoint_up",
            "1 while an endpoint may be picked. 0 while it is dead, drained, ejected, or new and "
            "not yet probed. At most half a pool is out of rotation for failures: further failing "
            "endpoints may be picked and count as 1, except those that refuse connections. An "
            "endpoint that left the configuration keeps its value until its last response has "
            "ended.",
            ENDPOINT,
            merge=Merge.MIN,
        )
        self.endpoint_slowness: MetricFamily[Gauge] = factory.gauge(
            "penstock_endpoint_slowness_ratio",
            "Time of an endpoint divided by the time of its peers for the same work, while it is "
            "suspected of slowness or ejected for it; else 0.",
            ENDPOINT,
            merge=Merge.MAX,
        )
        self.ejections_total: MetricFamily[Counter] = factory.counter(
            "penstock_ejections_total",
            "Ejections of an endpoint (pauses in which it gets no requests), by reason.",
            *(ENDPOINT, REASON),
        )
        self.upstream_errors_total: MetricFamily[Counter] = factory.counter(
            "penstock_upstream_errors_total",
            "Failures at an endpoint that the gateway observed, by kind; one request may count "
            "several times.",
            *(ENDPOINT, KIND),
        )

    def _tokens(self, factory: FamilyFactory) -> None:
        self.prompt_tokens_total: MetricFamily[Counter] = factory.counter(
            "penstock_prompt_tokens_total",
            "Prompt tokens of served requests, as reported by engines.",
            MODEL,
        )
        self.completion_tokens_total: MetricFamily[Counter] = factory.counter(
            "penstock_completion_tokens_total",
            "Output tokens of served requests, as reported by engines.",
            MODEL,
        )
        self.cached_tokens_total: MetricFamily[Counter] = factory.counter(
            "penstock_cached_tokens_total",
            "Prompt tokens of served requests that engines reported as cached.",
            MODEL,
        )
        self.prefix_lookup_tokens_total: Counter = factory.counter(
            "penstock_prefix_lookup_tokens_total",
            "Prompt tokens of all requests for which the prefix index was searched.",
        ).labels()
        self.prefix_hit_tokens_total: Counter = factory.counter(
            "penstock_prefix_hit_tokens_total",
            "Prompt tokens that, by the prefix index, were cached at the picked endpoint.",
        ).labels()
        self.prefix_index_bytes: Gauge = factory.gauge(
            "penstock_prefix_index_bytes", "Bytes of memory that the prefix index uses."
        ).labels()

    def _batches(self, factory: FamilyFactory) -> None:
        self.batch_requests_total: MetricFamily[Counter] = factory.counter(
            "penstock_batch_requests_total",
            "Requests of batches by outcome: completed, failed, expired, cancelled, or retried "
            "(an attempt that is repeated).",
            OUTCOME,
        )
        self.batch_preemptions_total: MetricFamily[Counter] = factory.counter(
            "penstock_batch_preemptions_total",
            "Batch requests that were stopped to make room for other requests: kept (the answer "
            "continues after its tokens), restarted (the answer begins again), waiting (no token "
            "was generated yet).",
            RESULT,
        )
        self.batch_kept_tokens_total: Counter = factory.counter(
            "penstock_batch_kept_tokens_total",
            "Output tokens that were kept when their batch request was stopped.",
        ).labels()
        self.batch_backlog: Gauge = factory.gauge(
            "penstock_batch_backlog", "Batch requests that have no result yet."
        ).labels()
        self.batch_running: Gauge = factory.gauge(
            "penstock_batch_running", "Batch requests that are running now."
        ).labels()
        self._batch_windows(factory)

    def _batch_windows(self, factory: FamilyFactory) -> None:
        self.batches: MetricFamily[Gauge] = factory.gauge(
            "penstock_batches",
            "Running batches by whether they will end within their completion windows: on_time, "
            "hurried (places are reserved for them), behind (they will probably not end in time).",
            SCHEDULE,
        )
        self.batch_reserved_places: Gauge = factory.gauge(
            "penstock_batch_reserved_places",
            "Places of pools that are reserved for batches whose completion windows end soon.",
        ).labels()

    def _kv_events(self, factory: FamilyFactory) -> None:
        self.endpoint_cache_exact: MetricFamily[Gauge] = factory.gauge(
            "penstock_endpoint_cache_exact",
            "1 while KV events report exactly what an endpoint has cached, 0 while the gateway "
            "estimates it. Only for endpoints with kv_events.",
            ENDPOINT,
            merge=Merge.MIN,
        )
        self.kv_event_messages_total: MetricFamily[Counter] = factory.counter(
            "penstock_kv_event_messages_total",
            "Messages with KV events from engines, by kind: applied, gap (earlier messages are "
            "missing), duplicate, restart (the engine restarted).",
            *(ENDPOINT, KIND),
        )
        self.kv_event_audits_total: MetricFamily[Counter] = factory.counter(
            "penstock_kv_event_audits_total",
            "Answers whose number of cached tokens was compared with the number expected from KV "
            "events, by result: right, wrong.",
            *(ENDPOINT, RESULT),
        )
        self.prompts_learned_total: MetricFamily[Counter] = factory.counter(
            "penstock_prompts_learned_total",
            "Prompts whose token ids the gateway requested from an engine, by result: learned, "
            "failed.",
            RESULT,
        )

    def _split(self, factory: FamilyFactory) -> None:
        self.split_decisions_total: MetricFamily[Counter] = factory.counter(
            "penstock_split_decisions_total",
            "Attempts to serve requests of models with a split, by decision (split, whole, pull) "
            "and its reason.",
            *(DECISION, REASON),
        )
        self.split_legs_total: MetricFamily[Counter] = factory.counter(
            "penstock_split_legs_total",
            "Requests to engines that are one half of a split request, by role (prefill, decode) "
            "and outcome.",
            *(ROLE, OUTCOME),
        )
        self.split_stage_seconds: MetricFamily[Histogram] = factory.histogram(
            "penstock_split_stage_seconds",
            "Seconds of each stage of a split request's time to first token: queue (until "
            "endpoints are picked), prefill (until its response is complete), transfer (until the "
            "decode endpoint's first byte), first_token.",
            TTFT_BUCKETS_S,
            STAGE,
        )
        self.split_handoff_seconds: MetricFamily[Histogram] = factory.histogram(
            "penstock_split_handoff_seconds",
            "Seconds from the end of a split request's prefill to its first decoded token: the KV "
            "transfer and the first decode step.",
            TTFT_BUCKETS_S,
            MODEL,
        )
        self.split_leases_given_up_total: MetricFamily[Counter] = factory.counter(
            "penstock_split_leases_given_up_total",
            "Split requests whose prefilled KV was freed unread because no decode endpoint could "
            "use it, by reason.",
            REASON,
        )
        self.split_pairs_total: MetricFamily[Counter] = factory.counter(
            "penstock_split_pairs_total",
            "Attempts to serve a split request, by prefill endpoint, decode endpoint and result: "
            "served, failed.",
            *(PREFILL, DECODE, RESULT),
        )
        self._pulls(factory)

    def _pulls(self, factory: FamilyFactory) -> None:
        self.pulls_total: MetricFamily[Counter] = factory.counter(
            "penstock_pulls_total",
            "Requests whose endpoint was to fetch the cached beginning of the prompt from another "
            "one, by result: pulled, computed (the endpoint computed the prompt), failed.",
            RESULT,
        )
        self.pulled_tokens_total: Counter = factory.counter(
            "penstock_pulled_tokens_total",
            "Prompt tokens whose KV an endpoint fetched from another one in place of computing "
            "them, as estimated by the gateway.",
        ).labels()
        self.pull_seconds: Histogram = factory.histogram(
            "penstock_pull_seconds",
            "Seconds until the endpoint that has the beginning of a prompt has offered its KV.",
            TTFT_BUCKETS_S,
        ).labels()

    def _shared(self, factory: FamilyFactory) -> None:
        self.shared_up: Gauge = factory.gauge(
            "penstock_shared_up",
            "1 while this gateway is connected to the other gateways, else 0; also 0 without "
            "shared state.",
            merge=Merge.MIN,
        ).labels()
        self.shared_staleness_seconds: Gauge = factory.gauge(
            "penstock_shared_staleness_seconds",
            "Seconds since messages of other gateways could last be received; 0 while connected.",
            merge=Merge.MAX,
        ).labels()
        self.shared_peers: Gauge = factory.gauge(
            "penstock_shared_peers",
            "Number of other gateways that sent a message within the last two seconds.",
            merge=Merge.MIN,
        ).labels()
        self.shared_messages_total: MetricFamily[Counter] = factory.counter(
            "penstock_shared_messages_total",
            "Messages between gateways, by kind and direction (in: received, out: sent).",
            *(KIND, DIRECTION),
        )
        self.shared_dropped_total: MetricFamily[Counter] = factory.counter(
            "penstock_shared_dropped_total",
            "Messages between gateways that were dropped, by reason: forged, replayed, foreign, "
            "malformed, too_long, late, backlog, inbox, block_bytes, unknown_endpoint.",
            REASON,
        )
        self.blind_picks_total: Counter = factory.counter(
            "penstock_blind_picks_total",
            "Picks by a prefix-aware policy that were made before the prefix index of the other "
            "gateways had arrived.",
        ).labels()

    def _process(self, factory: FamilyFactory, process: FamilyFactory) -> None:
        self.config_version_info: MetricFamily[Gauge] = factory.gauge(
            "penstock_config_version_info",
            "1 for the current configuration, with its version and the hash of its text as labels.",
            *(VERSION, HASH),
            merge=Merge.LAST,
        )
        self.config_reload_total: MetricFamily[Counter] = factory.counter(
            "penstock_config_reload_total",
            "Attempts to change the configuration, by result: applied, unchanged, rejected, "
            "rolled_back (by auto_rollback).",
            RESULT,
        )
        self.config_last_reload_successful: Gauge = factory.gauge(
            "penstock_config_last_reload_successful",
            "1 if the last change of the configuration was applied, 0 if it was rejected.",
            merge=Merge.MIN,
        ).labels()
        self.config_applied_timestamp_seconds: Gauge = factory.gauge(
            "penstock_config_applied_timestamp_seconds",
            "Unix time in seconds at which the current configuration was applied.",
            merge=Merge.MAX,
        ).labels()
        self.config_swap_seconds: Histogram = factory.histogram(
            "penstock_config_swap_seconds",
            "Seconds for which applying a new configuration blocked the event loop.",
            OVERHEAD_BUCKETS_S,
        ).labels()
        self.loop_lag_seconds: Histogram = process.histogram(
            "penstock_loop_lag_seconds",
            "Seconds by which a timer of the event loop fires late, which shows how long the loop "
            "was blocked.",
            OVERHEAD_BUCKETS_S,
        ).labels()
        self.bytes_out_total: Counter = process.counter(
            "penstock_bytes_out_total", "Bytes of responses sent to clients."
        ).labels()
        self.open_streams: Gauge = process.gauge(
            "penstock_open_streams", "Requests that were admitted and are in progress."
        ).labels()
