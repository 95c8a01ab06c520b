"""The catalogue: every metric of the gateway, with help, labels and buckets. docs/reference/metrics.md is made from it.

Lives here: names and meanings. Not here: how a number is kept (meters.py) or when it changes (its callers).
Stages and reasons come from small closed sets in the code, models and endpoints from the configuration; all are capped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gateway.exposition import page
from gateway.meters import Counter, Family, Gauge, Histogram, Label, Merge, Meters, Pools, Reading, Section, Spec
from gateway.observe.inside import Inside
from gateway.observe.labels import ENDPOINT, KIND, POOL, RESULT, Row
from gateway.observe.trials import Trials

MODEL = Label("model", 256)
CODE = Label("code", 32)
REASON = Label("reason", 64)
RESUMED = Label("result", 16)
STAGE = Label("stage", 16)
PREFILL, DECODE = Label("prefill", 64), Label("decode", 64)
VERSION = Label("version", 2)
HASH = Label("hash", 2)
ROLE = Label("role", 4)
OUTCOME = Label("outcome", 16)
DECISION = Label("decision", 4)
DIRECTION = Label("direction", 2)
CLASS = Label("class", 33)
KEPT = Label("kept", 8)
TENANT = Label("tenant", 64)
TIER = Label("tier", 64)
CAUSE = Label("cause", 4)

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""vLLM's, so that the gateway's and the engines' histograms can be laid over each other."""

TPOT_BUCKETS_S = (
    *(0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
"""vLLM's and OpenTelemetry's, with finer ones below and vLLM's longer ones above."""

E2E_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""vLLM's buckets for whole requests."""

RATIO_BUCKETS = (0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)
"""Relative errors from 1 % to ten times."""

OVERHEAD_BUCKETS_S = (
    *(0.00005, 0.0001, 0.00015, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.002, 0.003),
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
)
"""What the gateway adds: 50 us to 1 s."""


class Metrics:
    """All metrics of one gateway process. Made once by the composition root and handed down; nothing here is global.

    Families with labels are asked for a child (`ttft_seconds.labels(model, endpoint)`), the others are the child.
    `pools` is asked at each scrape for the pools of endpoints and models.
    """

    def __init__(self) -> None:
        meters = self._meters = Meters()
        self.pools: Callable[[], Pools] = dict
        self._requests(meters.section(Row.REQUESTS, "account.py"))
        self._latency(meters.section(Row.LATENCY, "account.py"))
        self._promises(meters.section(Row.PROMISES, "kept.py"))
        self._admission(meters.section(Row.ADMISSION, "gate.py"))
        self._endpoints(meters.section(Row.ENDPOINTS, "endpoints.py"))
        self._tokens(meters.section(Row.CACHE, "account.py"))
        self._split(meters.section(Row.SPLIT, "split/handoffs.py"))
        self._shared(meters.section(Row.SHARED, "shared/pump.py"))
        self._process(meters.section(Row.CONFIGURATION, "reload/reloader.py"), meters.section(Row.PROCESS, "app.py"))
        self.inside = Inside(meters)
        self.trials = Trials(meters, TTFT_BUCKETS_S)

    def render(self) -> bytes:
        """The text of a scrape in Prometheus' format."""
        return page(self.readings(), exemplars=False)

    def readings(self, *, exemplars: bool = False) -> Iterator[Reading]:
        """All families one by one, for a server that lets its streams go on in between."""
        return self._meters.readings(self.pools(), exemplars=exemplars)

    def catalogue(self) -> tuple[Spec, ...]:
        """What there is, in order."""
        return tuple(family.spec for family in self._meters.families)

    def forget_endpoint(self, endpoint: str) -> None:
        """Drops the series of an endpoint that was removed."""
        for family in self._meters.families:
            for label in family.spec.labels:
                if label in (ENDPOINT, PREFILL, DECODE):
                    family.forget(label.name, endpoint)

    def _requests(self, meters: Section) -> None:
        self.requests_total: Family[Counter] = meters.counter(
            "penstock_requests_total",
            "Requests answered, by HTTP status (499: the client left) and the reason of the answer.",
            *(MODEL, CODE, REASON),
        )
        self.shed_total: Family[Counter] = meters.counter(
            "penstock_shed_total",
            "Requests refused at the door to protect the others, by reason and service class.",
            *(REASON, CLASS),
        )
        self.retries_total: Family[Counter] = meters.counter(
            "penstock_retries_total",
            "Second tries on another endpoint before the first byte, by what broke the first.",
            KIND,
        )
        self.hedges_total: Family[Counter] = meters.counter(
            "penstock_hedges_total",
            "Requests sent to a second endpoint as well because their first byte was late, by that endpoint.",
            ENDPOINT,
        )
        self.resumes_total: Family[Counter] = meters.counter(
            "penstock_resumes_total",
            "Streams that broke after their first byte, where they are continued elsewhere: what broke them, and what "
            "came of it (resumed, closed: only the end was missing, broke again, or why it could not be).",
            *(REASON, RESUMED),
        )
        self.retry_budget_remaining: Gauge = meters.gauge(
            "penstock_retry_budget_remaining", "Retries that the fleet-wide budget allows right now."
        ).labels()
        self.client_disconnects_total: Family[Counter] = meters.counter(
            "penstock_client_disconnects_total", "Clients that left before their answer was complete, by stage.", STAGE
        )

    def _latency(self, meters: Section) -> None:
        self.ttft_seconds: Family[Histogram] = meters.histogram(
            "penstock_ttft_seconds",
            "Time from the last byte of the request to the first token handed to the client.",
            TTFT_BUCKETS_S,
            *(MODEL, ENDPOINT),
            marked=True,
        )
        self.tpot_seconds: Family[Histogram] = meters.histogram(
            "penstock_tpot_seconds",
            "Mean time per output token after the first, one observation per request.",
            TPOT_BUCKETS_S,
            *(MODEL, ENDPOINT),
            marked=True,
        )
        self.itl_seconds: Histogram = meters.histogram(
            "penstock_itl_seconds",
            "Time between two pieces of a stream as they came from the engine; one request in 32 is looked at.",
            TPOT_BUCKETS_S,
        ).labels()
        self.e2e_seconds: Family[Histogram] = meters.histogram(
            "penstock_e2e_seconds",
            "Time from the last byte of the request to the last byte of the answer.",
            E2E_BUCKETS_S,
            MODEL,
        )
        self.queue_seconds: Family[Histogram] = meters.histogram(
            "penstock_queue_seconds", "Time a request spent in the waiting room.", TTFT_BUCKETS_S, POOL
        )
        self.overhead_seconds: Histogram = meters.histogram(
            "penstock_overhead_seconds",
            "The gateway's own time from the last byte of the request to its dispatch, waiting left out.",
            OVERHEAD_BUCKETS_S,
        ).labels()
        self.shed_seconds: Histogram = meters.histogram(
            "penstock_shed_seconds",
            "Time from the last byte of a request to its refusal at the door, waiting included.",
            OVERHEAD_BUCKETS_S,
        ).labels()

    def _promises(self, meters: Section) -> None:
        self.goodput_total: Family[Counter] = meters.counter(
            "penstock_goodput_total",
            "Requests by service class and what became of their promise: met, ttft_missed, tpot_missed, both_missed, "
            "failed, shed. An answer that comes whole is judged by its end. `tenant` is empty unless asked for.",
            *(CLASS, KEPT, TENANT, MODEL),
        )
        self.overflow_total: Family[Counter] = meters.counter(
            "penstock_overflow_total", "Requests served by a smaller model in place of a refusal.", *(MODEL, TIER)
        )
        self.ttft_prediction_error_ratio: Histogram = meters.histogram(
            "penstock_ttft_prediction_error_ratio",
            "How far the expected time from pick to first token was off, as a share of what it was; streams alone.",
            RATIO_BUCKETS,
        ).labels()
        self.pick_regret_seconds: Histogram = meters.histogram(
            "penstock_pick_regret_seconds",
            "How much later the first token was expected where a request went than where it would have come soonest; "
            "one pick in 32 is looked at.",
            TTFT_BUCKETS_S,
        ).labels()
        self.prefill_tokens_total: Family[Counter] = meters.counter(
            "penstock_prefill_tokens_total",
            "Prompt tokens that were computed where prefixes are known, by why: never_seen, spread (another endpoint "
            "held them), evicted (its own cache had lost them). The last two could have been avoided.",
            CAUSE,
        )

    def _admission(self, meters: Section) -> None:
        self.waiting: Family[Gauge] = meters.gauge("penstock_waiting", "Requests in the waiting room of a pool.", POOL)
        self.queued_tokens: Family[Gauge] = meters.gauge(
            "penstock_queued_tokens", "Prompt tokens of the requests in the waiting room of a pool.", POOL
        )
        self.admission_price: Family[Gauge] = meters.gauge(
            "penstock_admission_price",
            "What a pool's admission asks for a typical request's work, in worth of requests; 0 while it is calm.",
            POOL,
            merge=Merge.MAX,
        )
        self.admission_phi: Family[Gauge] = meters.gauge(
            "penstock_admission_session_share",
            "Share of a pool's KV memory that sessions under way may fill before new ones are refused.",
            POOL,
            merge=Merge.MIN,
        )

    def _endpoints(self, meters: Section) -> None:
        self.inflight: Family[Gauge] = meters.gauge(
            "penstock_inflight", "Requests booked on an endpoint and not yet given back.", ENDPOINT
        )
        self.endpoint_up: Family[Gauge] = meters.gauge(
            "penstock_endpoint_up",
            "1 while an endpoint may be picked, 0 while it is dead, drained by hand, ejected, or new and not yet found "
            "well. Of those that failed or are new at most half a pool stays out: the others may be picked and count "
            "1. One that refuses connections always stays out. "
            "One that left the configuration or was not found again keeps its value until its last answer has ended.",
            ENDPOINT,
            merge=Merge.MIN,
        )
        self.endpoint_slowness: Family[Gauge] = meters.gauge(
            "penstock_endpoint_slowness_ratio",
            "How many times as long as its peers an endpoint takes for the same work, while it is suspected of being "
            "slow or ejected for it; else 0.",
            ENDPOINT,
            merge=Merge.MAX,
        )
        self.ejections_total: Family[Counter] = meters.counter(
            "penstock_ejections_total", "Times an endpoint was taken out, by reason.", *(ENDPOINT, REASON)
        )
        self.upstream_errors_total: Family[Counter] = meters.counter(
            "penstock_upstream_errors_total",
            "Failures of an endpoint as seen by the gateway, by kind; several may belong to one request.",
            *(ENDPOINT, KIND),
        )

    def _tokens(self, meters: Section) -> None:
        self.prompt_tokens_total: Family[Counter] = meters.counter(
            "penstock_prompt_tokens_total", "Prompt tokens of answered requests, as the engines counted them.", MODEL
        )
        self.completion_tokens_total: Family[Counter] = meters.counter(
            "penstock_completion_tokens_total",
            "Output tokens of answered requests, as the engines counted them.",
            MODEL,
        )
        self.cached_tokens_total: Family[Counter] = meters.counter(
            "penstock_cached_tokens_total", "Prompt tokens that engines took from their prefix cache.", MODEL
        )
        self.prefix_lookup_tokens_total: Counter = meters.counter(
            "penstock_prefix_lookup_tokens_total", "Prompt tokens looked up in the gateway's prefix index."
        ).labels()
        self.prefix_hit_tokens_total: Counter = meters.counter(
            "penstock_prefix_hit_tokens_total", "Prompt tokens the index believed to be cached where they were sent."
        ).labels()
        self.prefix_index_bytes: Gauge = meters.gauge(
            "penstock_prefix_index_bytes", "Memory the prefix index accounts for."
        ).labels()

    def _split(self, meters: Section) -> None:
        self.split_decisions_total: Family[Counter] = meters.counter(
            "penstock_split_decisions_total",
            "Attempts at requests of models with a split: split between two endpoints or whole, and why.",
            *(DECISION, REASON),
        )
        self.split_legs_total: Family[Counter] = meters.counter(
            "penstock_split_legs_total", "Legs of split requests, by role and how they ended.", *(ROLE, OUTCOME)
        )
        self.split_stage_seconds: Family[Histogram] = meters.histogram(
            "penstock_split_stage_seconds",
            "Parts of the time to first token of split requests: queue (to the pick), prefill (to its whole answer), "
            "transfer (to the decoder's first byte), first_token.",
            TTFT_BUCKETS_S,
            STAGE,
        )
        self.split_handoff_seconds: Family[Histogram] = meters.histogram(
            "penstock_split_handoff_seconds",
            "From the prefill's whole answer to the decoder's first token: transfer, and the first step.",
            TTFT_BUCKETS_S,
            MODEL,
        )
        self.split_leases_given_up_total: Family[Counter] = meters.counter(
            "penstock_split_leases_given_up_total",
            "Handoffs that no decoder was left to read, handed to one only to have the KV freed, by reason.",
            REASON,
        )
        self.split_pairs_total: Family[Counter] = meters.counter(
            "penstock_split_pairs_total",
            "Attempts of a prefill and a decode endpoint at a request, by how they ended: served, failed.",
            *(PREFILL, DECODE, RESULT),
        )

    def _shared(self, meters: Section) -> None:
        self.shared_up: Gauge = meters.gauge(
            "penstock_shared_up",
            "1 while other gateways can be heard and told; 0 also without a shared view.",
            merge=Merge.MIN,
        ).labels()
        self.shared_staleness_seconds: Gauge = meters.gauge(
            "penstock_shared_staleness_seconds",
            "For how long nothing could be heard of other gateways.",
            merge=Merge.MAX,
        ).labels()
        self.shared_peers: Gauge = meters.gauge(
            "penstock_shared_peers",
            "Other gateways heard within the last two seconds.",
            merge=Merge.MIN,
        ).labels()
        self.shared_messages_total: Family[Counter] = meters.counter(
            "penstock_shared_messages_total",
            "Messages between gateways, by kind and direction (in, out).",
            *(KIND, DIRECTION),
        )
        self.shared_dropped_total: Family[Counter] = meters.counter(
            "penstock_shared_dropped_total",
            "Messages between gateways that nothing came of, by reason: forged, replayed, foreign, malformed, "
            "too_long, late, backlog, inbox, block_bytes, unknown_endpoint.",
            REASON,
        )
        self.blind_picks_total: Counter = meters.counter(
            "penstock_blind_picks_total",
            "Picks by prefix that a gateway made before it knew what others know, after its start.",
        ).labels()

    def _process(self, meters: Section, process: Section) -> None:
        self.config_version_info: Family[Gauge] = meters.gauge(
            "penstock_config_version_info",
            "1 for the configuration in force, by its version and its text's hash.",
            *(VERSION, HASH),
            merge=Merge.LAST,
        )
        self.config_reload_total: Family[Counter] = meters.counter(
            "penstock_config_reload_total",
            "Configurations that were offered: applied, unchanged, rejected, rolled_back (by auto_rollback).",
            RESULT,
        )
        self.config_last_reload_successful: Gauge = meters.gauge(
            "penstock_config_last_reload_successful",
            "0 while the last configuration offered is one that was rejected.",
            merge=Merge.MIN,
        ).labels()
        self.config_applied_timestamp_seconds: Gauge = meters.gauge(
            "penstock_config_applied_timestamp_seconds",
            "When the configuration in force was applied, Unix time.",
            merge=Merge.MAX,
        ).labels()
        self.config_swap_seconds: Histogram = meters.histogram(
            "penstock_config_swap_seconds",
            "Time in which a new configuration took the old one's place: the loop did nothing else.",
            OVERHEAD_BUCKETS_S,
        ).labels()
        self.loop_lag_seconds: Histogram = process.histogram(
            "penstock_loop_lag_seconds", "How late the event loop ran a timer.", OVERHEAD_BUCKETS_S
        ).labels()
        self.bytes_out_total: Counter = process.counter(
            "penstock_bytes_out_total", "Bytes of answers handed to clients."
        ).labels()
        self.open_streams: Gauge = process.gauge("penstock_open_streams", "Answers being streamed right now.").labels()
