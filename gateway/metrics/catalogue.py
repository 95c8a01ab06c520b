"""The catalogue of metrics: every metric of the gateway, with help text, labels and buckets.

docs/reference/metrics.md is generated from it. metric_types.py stores the values, and their callers
change them. Label values come from small closed sets in the code or from the configuration; their
number is limited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from gateway.metrics.auto_metrics import AutoMetrics
from gateway.metrics.drift_metrics import DriftMetrics
from gateway.metrics.exposition import render_page
from gateway.metrics.labels import ENDPOINT, KIND, POOL, RESULT, Row
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

MODEL = Label("model", 256)
CODE = Label("code", 32)
REASON = Label("reason", 64)
RESUME_RESULT = Label("result", 16)
STAGE = Label("stage", 16)
PREFILL, DECODE = Label("prefill", 64), Label("decode", 64)
VERSION = Label("version", 2)
HASH = Label("hash", 2)
ROLE = Label("role", 4)
OUTCOME = Label("outcome", 16)
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
"""Upper bounds of TPOT histograms in seconds: those of vLLM and OpenTelemetry, with finer ones
below."""

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

    An attribute is a MetricFamily if the metric has labels (`ttft_seconds.labels(model,
    endpoint)`), else its single child.

    pool_by_label  function that returns the pools of endpoints and models; it is called at each
                   scrape
    """

    def __init__(self) -> None:
        meters = self._meters = MetricRegistry()
        self._process_metrics = ProcessMetrics()
        self.pool_by_label: Callable[[], PoolByLabel] = dict
        self._requests(meters.section(Row.REQUESTS, "telemetry/accounting.py"))
        self._latency(meters.section(Row.LATENCY, "telemetry/accounting.py"))
        self._promises(meters.section(Row.PROMISES, "telemetry/slo_outcomes.py"))
        self._admission(meters.section(Row.ADMISSION, "admission/controller.py"))
        self._endpoints(meters.section(Row.ENDPOINTS, "fleet/endpoint_table.py"))
        self._tokens(meters.section(Row.CACHE, "telemetry/accounting.py"))
        self._batches(meters.section(Row.BATCHES, "batch/runner.py"))
        self._kv_events(meters.section(Row.CACHE, "fleet/kv_events/reader.py"))
        self._split(meters.section(Row.SPLIT, "disagg/handoffs.py"))
        self._shared(meters.section(Row.SHARED, "peers/sync_loop.py"))
        self._process(
            meters.section(Row.CONFIGURATION, "reload/reloader.py"),
            meters.section(Row.PROCESS, "app.py"),
        )
        self.runtime_gauges = RuntimeGauges(meters)
        self.trial_metrics = TrialMetrics(meters, TTFT_BUCKETS_S)
        self.auto_metrics = AutoMetrics(meters)
        self.drift_metrics = DriftMetrics(meters)
        self.mirror_metrics = MirrorMetrics(meters)

    def render(self) -> bytes:
        """Return the present values of all metrics in the Prometheus text format."""
        return render_page(self.collect(), exemplars=False)

    def collect(self, unix_offset: float | None = None) -> Iterator[FamilyReading]:
        """Yield the values of each metric family, one family at a time, so that other work can run
        in between.

        unix_offset  Unix time minus the monotonic clock, seconds, for the times of exemplars; None
                     leaves exemplars out
        """
        families = self._meters.collect(self.pool_by_label(), unix_offset)
        return chain(families, self._process_metrics.collect())

    def catalogue(self) -> tuple[FamilySpec, ...]:
        """Return the specifications of all metric families, in the order in which a scrape lists
        them.
        """
        return tuple(family.spec for family in self._meters.families)

    def remove_endpoint(self, endpoint: str) -> None:
        """Remove all metric series whose label names this endpoint, which was removed."""
        for family in self._meters.families:
            for label in family.spec.labels:
                if label in (ENDPOINT, PREFILL, DECODE):
                    family.remove_children(label.name, endpoint)

    def _requests(self, meters: FamilyFactory) -> None:
        self.requests_total: MetricFamily[Counter] = meters.counter(
            "penstock_requests_total",
            "Requests by HTTP status and reason of the response. 499: the client disconnected; 0: "
            "a request of a batch was pre-empted, and a later attempt continues it.",
            *(MODEL, CODE, REASON),
        )
        self.shed_total: MetricFamily[Counter] = meters.counter(
            "penstock_shed_total",
            "Requests that admission control or a quota refused, by reason and service class.",
            *(REASON, CLASS),
        )
        self.retries_total: MetricFamily[Counter] = meters.counter(
            "penstock_retries_total",
            "Retries on another endpoint before the first byte, by the failure of the previous "
            "attempt.",
            KIND,
        )
        self.hedges_total: MetricFamily[Counter] = meters.counter(
            "penstock_hedges_total",
            "Requests that were also sent to a second endpoint because their first byte was late, "
            "by that endpoint.",
            ENDPOINT,
        )
        self.resumes_total: MetricFamily[Counter] = meters.counter(
            "penstock_resumes_total",
            "Streams that broke after their first byte, by failure and by result: resumed on "
            "another endpoint, closed (only the end of the stream was missing), broke again, or "
            "the reason why they were not resumed. Only for models with resume.",
            *(REASON, RESUME_RESULT),
        )
        self.retry_budget_remaining: Gauge = meters.gauge(
            "penstock_retry_budget_remaining",
            "Number of retries that the gateway's retry budget would allow now.",
        ).labels()
        self.client_disconnects_total: MetricFamily[Counter] = meters.counter(
            "penstock_client_disconnects_total",
            "Clients that disconnected before their response was complete, by stage.",
            STAGE,
        )

    def _latency(self, meters: FamilyFactory) -> None:
        self.ttft_seconds: MetricFamily[Histogram] = meters.histogram(
            "penstock_ttft_seconds",
            "Time from the last byte of the request to the first token sent to the client.",
            TTFT_BUCKETS_S,
            *(MODEL, ENDPOINT),
            has_exemplars=True,
        )
        self.tpot_seconds: MetricFamily[Histogram] = meters.histogram(
            "penstock_tpot_seconds",
            "Mean time per output token after the first, one observation per request.",
            TPOT_BUCKETS_S,
            *(MODEL, ENDPOINT),
            has_exemplars=True,
        )
        self.itl_seconds: Histogram = meters.histogram(
            "penstock_itl_seconds",
            "Time between two chunks of a stream as received from the engine; sampled for one "
            "request in 32.",
            TPOT_BUCKETS_S,
        ).labels()
        self.e2e_seconds: MetricFamily[Histogram] = meters.histogram(
            "penstock_e2e_seconds",
            "Time from the last byte of the request to the last byte of the response.",
            E2E_BUCKETS_S,
            MODEL,
        )
        self.queue_seconds: MetricFamily[Histogram] = meters.histogram(
            "penstock_queue_seconds",
            "Time that a request waited for admission.",
            TTFT_BUCKETS_S,
            POOL,
        )
        self.overhead_seconds: Histogram = meters.histogram(
            "penstock_overhead_seconds",
            "Time in the gateway from the last byte of a request to its dispatch to an endpoint, "
            "without queueing.",
            OVERHEAD_BUCKETS_S,
        ).labels()
        self.shed_seconds: Histogram = meters.histogram(
            "penstock_shed_seconds",
            "Time from the last byte of a request to its refusal by admission control, with "
            "queueing.",
            OVERHEAD_BUCKETS_S,
        ).labels()

    def _promises(self, meters: FamilyFactory) -> None:
        self.goodput_total: MetricFamily[Counter] = meters.counter(
            "penstock_goodput_total",
            "Requests by service class and SLO outcome: met, ttft_missed, tpot_missed, "
            "both_missed, failed, shed. Responses that are not streamed are judged by their total "
            "time. `tenant` is empty unless observability.tenants is set.",
            *(CLASS, SLO_OUTCOME, TENANT, MODEL),
        )
        self.cost_usd_total: MetricFamily[Counter] = meters.counter(
            "penstock_cost_usd_total",
            "Dollars of engine time by the requests that used it, with hardware.price_per_hour, "
            "and of tokens at endpoints with a token_price. `tenant` is empty unless "
            "observability.tenants is set.",
            *(MODEL, CLASS, TENANT),
        )
        self.idle_cost_usd_total: MetricFamily[Counter] = meters.counter(
            "penstock_idle_cost_usd_total",
            "Dollars of engine time without a request, by pool, with hardware.price_per_hour.",
            POOL,
        )
        self.overflow_total: MetricFamily[Counter] = meters.counter(
            "penstock_overflow_total",
            "Requests served by a smaller model instead of being refused.",
            *(MODEL, TIER),
        )
        self.ttft_prediction_error_ratio: Histogram = meters.histogram(
            "penstock_ttft_prediction_error_ratio",
            "Relative error of the predicted time from the pick of an endpoint to the first token; "
            "streamed responses only.",
            RATIO_BUCKETS,
        ).labels()
        self.pick_regret_seconds: Histogram = meters.histogram(
            "penstock_pick_regret_seconds",
            "Predicted time to first token at the picked endpoint minus that at the fastest one; "
            "sampled for one pick in 32.",
            TTFT_BUCKETS_S,
        ).labels()
        self.prefill_tokens_total: MetricFamily[Counter] = meters.counter(
            "penstock_prefill_tokens_total",
            "Prompt tokens computed under a prefix-aware policy, by cause: never_seen, spread "
            "(cached at another endpoint), evicted (no longer cached at the picked endpoint). The "
            "last two are avoidable.",
            CAUSE,
        )

    def _admission(self, meters: FamilyFactory) -> None:
        self.waiting: MetricFamily[Gauge] = meters.gauge(
            "penstock_waiting", "Requests waiting for admission to a pool.", POOL
        )
        self.queued_tokens: MetricFamily[Gauge] = meters.gauge(
            "penstock_queued_tokens",
            "Prompt tokens of the requests waiting for admission to a pool.",
            POOL,
        )
        self.admission_price: MetricFamily[Gauge] = meters.gauge(
            "penstock_admission_price",
            "Price that a pool's admission sets for a typical request, in units of request value; "
            "0 without congestion.",
            POOL,
            merge=Merge.MAX,
        )
        self.admission_phi: MetricFamily[Gauge] = meters.gauge(
            "penstock_admission_session_share",
            "Share of a pool's KV memory that running sessions may fill before new ones are "
            "refused.",
            POOL,
            merge=Merge.MIN,
        )

    def _endpoints(self, meters: FamilyFactory) -> None:
        self.inflight: MetricFamily[Gauge] = meters.gauge(
            "penstock_inflight",
            "Requests that this gateway has sent to an endpoint and that have not ended.",
            ENDPOINT,
        )
        self.endpoint_up: MetricFamily[Gauge] = meters.gauge(
            "penstock_endpoint_up",
            "1 while an endpoint may be picked, 0 while it is dead, drained, ejected, or new and "
            "not yet probed. Failed and new endpoints make up at most half a pool: further ones "
            "may be picked and count 1, except those that refuse connections. An endpoint that "
            "left the configuration keeps its value until its last response has ended.",
            ENDPOINT,
            merge=Merge.MIN,
        )
        self.endpoint_slowness: MetricFamily[Gauge] = meters.gauge(
            "penstock_endpoint_slowness_ratio",
            "Time of an endpoint relative to that of its peers for the same work, while it is "
            "suspected of being slow or ejected for slowness; else 0.",
            ENDPOINT,
            merge=Merge.MAX,
        )
        self.ejections_total: MetricFamily[Counter] = meters.counter(
            "penstock_ejections_total",
            "Ejections of an endpoint from routing, by reason.",
            *(ENDPOINT, REASON),
        )
        self.upstream_errors_total: MetricFamily[Counter] = meters.counter(
            "penstock_upstream_errors_total",
            "Failures of an endpoint that the gateway has seen, by kind; one request may cause "
            "several.",
            *(ENDPOINT, KIND),
        )

    def _tokens(self, meters: FamilyFactory) -> None:
        self.prompt_tokens_total: MetricFamily[Counter] = meters.counter(
            "penstock_prompt_tokens_total",
            "Prompt tokens of answered requests, as reported by engines.",
            MODEL,
        )
        self.completion_tokens_total: MetricFamily[Counter] = meters.counter(
            "penstock_completion_tokens_total",
            "Output tokens of answered requests, as reported by engines.",
            MODEL,
        )
        self.cached_tokens_total: MetricFamily[Counter] = meters.counter(
            "penstock_cached_tokens_total", "Prompt tokens that engines reported as cached.", MODEL
        )
        self.prefix_lookup_tokens_total: Counter = meters.counter(
            "penstock_prefix_lookup_tokens_total",
            "Prompt tokens of requests that were looked up in the prefix index.",
        ).labels()
        self.prefix_hit_tokens_total: Counter = meters.counter(
            "penstock_prefix_hit_tokens_total",
            "Prompt tokens that the prefix index believed to be cached at the picked endpoint.",
        ).labels()
        self.prefix_index_bytes: Gauge = meters.gauge(
            "penstock_prefix_index_bytes", "Memory that the prefix index uses."
        ).labels()

    def _batches(self, meters: FamilyFactory) -> None:
        self.batch_requests_total: MetricFamily[Counter] = meters.counter(
            "penstock_batch_requests_total",
            "Requests of batches by outcome: completed, failed, expired, cancelled; retried counts "
            "attempts that are repeated.",
            OUTCOME,
        )
        self.batch_preemptions_total: MetricFamily[Counter] = meters.counter(
            "penstock_batch_preemptions_total",
            "Requests of batches that were stopped for other requests: kept (the answer is "
            "continued from its tokens), restarted (it begins again), waiting (it had no token).",
            RESULT,
        )
        self.batch_kept_tokens_total: Counter = meters.counter(
            "penstock_batch_kept_tokens_total",
            "Tokens of answers that were kept when a request of a batch was stopped.",
        ).labels()
        self.batch_backlog: Gauge = meters.gauge(
            "penstock_batch_backlog", "Requests of batches that have no result yet."
        ).labels()
        self.batch_running: Gauge = meters.gauge(
            "penstock_batch_running", "Requests of batches that are running now."
        ).labels()

    def _kv_events(self, meters: FamilyFactory) -> None:
        self.endpoint_cache_exact: MetricFamily[Gauge] = meters.gauge(
            "penstock_endpoint_cache_exact",
            "1 while KV events say exactly what an endpoint has cached, 0 while it is guessed; "
            "only for endpoints with kv_events.",
            ENDPOINT,
            merge=Merge.MIN,
        )
        self.kv_event_messages_total: MetricFamily[Counter] = meters.counter(
            "penstock_kv_event_messages_total",
            "Messages of KV events from engines, by kind: applied, gap (messages were missing), "
            "duplicate, restart (the engine began again).",
            *(ENDPOINT, KIND),
        )
        self.kv_event_audits_total: MetricFamily[Counter] = meters.counter(
            "penstock_kv_event_audits_total",
            "Answers whose number of cached tokens was compared with the index of KV events, by "
            "result: right, wrong.",
            *(ENDPOINT, RESULT),
        )
        self.prompts_learned_total: MetricFamily[Counter] = meters.counter(
            "penstock_prompts_learned_total",
            "Prompts that engines were asked to tokenize, by result: learned, failed.",
            RESULT,
        )

    def _split(self, meters: FamilyFactory) -> None:
        self.split_decisions_total: MetricFamily[Counter] = meters.counter(
            "penstock_split_decisions_total",
            "Attempts to serve requests of models with a split, by decision (split, whole) and "
            "reason.",
            *(DECISION, REASON),
        )
        self.split_legs_total: MetricFamily[Counter] = meters.counter(
            "penstock_split_legs_total",
            "Requests to engines that are halves of split requests, by role (prefill, decode) and "
            "outcome.",
            *(ROLE, OUTCOME),
        )
        self.split_stage_seconds: MetricFamily[Histogram] = meters.histogram(
            "penstock_split_stage_seconds",
            "Stages of the time to first token of split requests: queue (until the pick), prefill "
            "(until its response is complete), transfer (until the decode endpoint's first byte), "
            "first_token.",
            TTFT_BUCKETS_S,
            STAGE,
        )
        self.split_handoff_seconds: MetricFamily[Histogram] = meters.histogram(
            "penstock_split_handoff_seconds",
            "Time from the end of prefill to the first decoded token: KV transfer and the first "
            "step.",
            TTFT_BUCKETS_S,
            MODEL,
        )
        self.split_leases_given_up_total: MetricFamily[Counter] = meters.counter(
            "penstock_split_leases_given_up_total",
            "Handoffs of split requests whose KV was freed unread because no decode endpoint was "
            "left for it, by reason.",
            REASON,
        )
        self.split_pairs_total: MetricFamily[Counter] = meters.counter(
            "penstock_split_pairs_total",
            "Attempts to serve a request by a prefill and a decode endpoint, by result: served, "
            "failed.",
            *(PREFILL, DECODE, RESULT),
        )

    def _shared(self, meters: FamilyFactory) -> None:
        self.shared_up: Gauge = meters.gauge(
            "penstock_shared_up",
            "1 while this gateway is connected to the others; 0 without shared state.",
            merge=Merge.MIN,
        ).labels()
        self.shared_staleness_seconds: Gauge = meters.gauge(
            "penstock_shared_staleness_seconds",
            "Time since messages of other gateways could last be received.",
            merge=Merge.MAX,
        ).labels()
        self.shared_peers: Gauge = meters.gauge(
            "penstock_shared_peers",
            "Other gateways that sent a message within the last two seconds.",
            merge=Merge.MIN,
        ).labels()
        self.shared_messages_total: MetricFamily[Counter] = meters.counter(
            "penstock_shared_messages_total",
            "Messages between gateways, by kind and direction (in, out).",
            *(KIND, DIRECTION),
        )
        self.shared_dropped_total: MetricFamily[Counter] = meters.counter(
            "penstock_shared_dropped_total",
            "Messages between gateways that were dropped, by reason: forged, replayed, foreign, "
            "malformed, too_long, late, backlog, inbox, block_bytes, unknown_endpoint.",
            REASON,
        )
        self.blind_picks_total: Counter = meters.counter(
            "penstock_blind_picks_total",
            "Prefix-aware picks of endpoints before this gateway had received the other gateways' "
            "prefix index.",
        ).labels()

    def _process(self, meters: FamilyFactory, process: FamilyFactory) -> None:
        self.config_version_info: MetricFamily[Gauge] = meters.gauge(
            "penstock_config_version_info",
            "1 for the configuration in force, by version and hash of its text.",
            *(VERSION, HASH),
            merge=Merge.LAST,
        )
        self.config_reload_total: MetricFamily[Counter] = meters.counter(
            "penstock_config_reload_total",
            "Configuration changes by result: applied, unchanged, rejected, rolled_back (by "
            "auto_rollback).",
            RESULT,
        )
        self.config_last_reload_successful: Gauge = meters.gauge(
            "penstock_config_last_reload_successful",
            "1 if the last configuration change was applied, 0 if it was rejected.",
            merge=Merge.MIN,
        ).labels()
        self.config_applied_timestamp_seconds: Gauge = meters.gauge(
            "penstock_config_applied_timestamp_seconds",
            "Unix time at which the configuration in force was applied.",
            merge=Merge.MAX,
        ).labels()
        self.config_swap_seconds: Histogram = meters.histogram(
            "penstock_config_swap_seconds",
            "Time that the event loop was blocked to put a new configuration in force.",
            OVERHEAD_BUCKETS_S,
        ).labels()
        self.loop_lag_seconds: Histogram = process.histogram(
            "penstock_loop_lag_seconds",
            "Delay with which a timer of the event loop fires, a sign that the loop was blocked.",
            OVERHEAD_BUCKETS_S,
        ).labels()
        self.bytes_out_total: Counter = process.counter(
            "penstock_bytes_out_total", "Bytes of responses sent to clients."
        ).labels()
        self.open_streams: Gauge = process.gauge(
            "penstock_open_streams", "Requests that were admitted and have not ended yet."
        ).labels()
