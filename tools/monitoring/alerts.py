"""Prometheus alerts on problems that may not affect users yet, such as an engine that has failed.

Each alert contains sample values with which it fires, and others with which it does not. They
become its test with promtool. The runbook of an alert is docs/runbooks/NAME.md.
"""

from __future__ import annotations

import msgspec

from tools.monitoring.promql import quantile, rate, share

_EXPIRY = 'penstock_tls_certificate_not_after_timestamp_seconds{instance="g", listener="api"}'
_FLEET = (("job", "penstock"), ("namespace", "llm"))
_GATEWAY = (*_FLEET, ("instance", "g"))
_POOL = (*_FLEET, ("pool", "chat"))

Series = tuple[tuple[str, str], ...]
"""An input series of a promtool test, as pairs of two texts.

The first text is the series, the second its values per minute in promtool's notation.
"""


class Alert(msgspec.Struct, frozen=True):
    """A Prometheus alert: when it fires, and sample data with which a test checks that.

    It fires once `value` has met the comparison `compare` for the time `hold`.

    value      PromQL query
    compare    comparison with a limit, such as "> 0.1"
    hold       duration in Prometheus notation, such as "5m"
    fires      sample series with which the alert fires within 30 minutes
    quiet      sample series with which it does not fire
    labels     labels of the alert that fires in the test
    condition  second query that must also be above 0, with the same labels as `value`; "" for none
    """

    name: str
    value: str
    compare: str
    hold: str
    severity: str
    summary: str
    fires: Series
    quiet: Series
    labels: tuple[tuple[str, str], ...] = ()
    condition: str = ""

    @property
    def rule(self) -> str:
        condition = f" and {self.condition} > 0" if self.condition else ""
        return f"{self.value} {self.compare}{condition}"


def _bucket(name: str, low: str, high: str, inside: str) -> Series:
    return (
        (f'{name}_bucket{{instance="g", le="{low}"}}', "0x60"),
        (f'{name}_bucket{{instance="g", le="{high}"}}', inside),
        (f'{name}_bucket{{instance="g", le="+Inf"}}', inside),
    )


GATEWAY = "job, namespace, instance"
POOL = "job, namespace, pool"
FLEET = "job, namespace"
"""Sets of labels by which alerts are grouped.

With GATEWAY, there is one alert per gateway process; with POOL, one per pool, for all gateways of a
fleet; with FLEET, one per fleet.
"""

SPLITS = rate("penstock_split_decisions_total", FLEET, "5m", decision="split")
LOST_KV = " + ".join(
    (
        f"({rate('penstock_split_leases_given_up_total', FLEET, '5m')} or 0 * {SPLITS})",
        f"({rate('penstock_upstream_errors_total', FLEET, '5m', kind='transfer_timeout')} or 0 * "
        f"{SPLITS})",
    )
)

JUDGED = rate("penstock_goodput_total", f"{POOL}, class", "5m", **{"class": "!batch"})
SHED = rate(
    "penstock_goodput_total", f"{POOL}, class", "5m", **{"class": "!batch", "slo_outcome": "shed"}
)
SHED_SHARE = f"({SHED} or 0 * {JUDGED}) / {JUDGED}"

# penstock_endpoint_up is 1 for half of a pool even if all its endpoints have failed. An endpoint
# counts as serving only if its health state is up or returning as well.
SERVING = (
    f"min by ({GATEWAY}, pool, endpoint) (penstock_endpoint_up) * on ({GATEWAY}, pool, endpoint) "
    f'sum by ({GATEWAY}, pool, endpoint) (penstock_endpoint_state{{state=~"up|returning"}})'
)


def _endpoint(name: str, up: str, serving: str) -> Series:
    return (
        (f'penstock_endpoint_up{{instance="g", endpoint="{name}"}}', up),
        (f'penstock_endpoint_state{{instance="g", endpoint="{name}", state="up"}}', serving),
        (f'penstock_endpoint_state{{instance="g", endpoint="{name}", state="returning"}}', "0x60"),
    )


ALERTS = (
    Alert(
        "PenstockDown",
        'up{job=~"penstock.*"}',
        "== 0",
        "1m",
        "page",
        "Prometheus cannot scrape a gateway.",
        (('up{job="penstock", instance="g"}', "0x60"),),
        (('up{job="penstock", instance="g"}', "1x60"),),
        _GATEWAY,
    ),
    Alert(
        "PenstockAbsent",
        '(count(up{job=~"penstock.*"}) or vector(0))',
        "== 0",
        "5m",
        "page",
        "Prometheus has no target in a job whose name begins with penstock.",
        (('up{job="node", instance="n"}', "1x60"),),
        (('up{job="penstock", instance="g"}', "0x60"),),
    ),
    Alert(
        "PenstockAllEndpointsEjected",
        f"sum by ({GATEWAY}, pool) ({SERVING})",
        "== 0",
        "30s",
        "page",
        "A pool has no healthy endpoint.",
        (
            *_endpoint("a", "0x60", "0x60"),
            *_endpoint("b", "1x60", "0x60"),
            *_endpoint("c", "0x60", "1x60"),
        ),
        (*_endpoint("a", "0x60", "0x60"), *_endpoint("b", "1x60", "1x60")),
        (*_GATEWAY, ("pool", "chat")),
    ),
    Alert(
        "PenstockEndpointEjected",
        f"min by ({POOL}, endpoint) ({SERVING})",
        "== 0",
        "5m",
        "ticket",
        "An endpoint has been out of rotation for minutes.",
        _endpoint("a", "1x60", "0x60"),
        _endpoint("a", "1 1 0 0 1 1 0 1x60", "1x60"),
        (*_POOL, ("endpoint", "a")),
    ),
    Alert(
        "PenstockEndpointSlow",
        f"max by ({POOL}, endpoint) (penstock_endpoint_slowness_ratio)",
        "> 0",
        "2m",
        "ticket",
        "An endpoint is much slower than its peers and gets few or no requests.",
        (('penstock_endpoint_slowness_ratio{instance="g", endpoint="a"}', "0 0 4.2x60"),),
        (('penstock_endpoint_slowness_ratio{instance="g", endpoint="a"}', "0 2.6 0 0 2.8 0x60"),),
        (*_POOL, ("endpoint", "a")),
    ),
    Alert(
        "PenstockEndpointNoProgress",
        f"max by ({POOL}, endpoint) (penstock_endpoint_progress_age_seconds)",
        "> 20",
        "30s",
        "page",
        "An endpoint with requests has not sent a byte for 20 seconds.",
        (('penstock_endpoint_progress_age_seconds{instance="g", endpoint="a"}', "0+60x60"),),
        (('penstock_endpoint_progress_age_seconds{instance="g", endpoint="a"}', "3x60"),),
        (*_POOL, ("endpoint", "a")),
    ),
    Alert(
        "PenstockPrefillBacklog",
        f"sum by ({POOL}, endpoint) (penstock_endpoint_prefill_backlog_tokens)",
        "> 100000",
        "2m",
        "ticket",
        "More prompt tokens wait at an endpoint than it computes in about ten seconds.",
        (('penstock_endpoint_prefill_backlog_tokens{instance="g", endpoint="a"}', "200000x60"),),
        (('penstock_endpoint_prefill_backlog_tokens{instance="g", endpoint="a"}', "8000x60"),),
        (*_POOL, ("endpoint", "a")),
    ),
    Alert(
        "PenstockScrapeStale",
        f"max by ({POOL}, endpoint) (penstock_endpoint_scrape_age_seconds)",
        "> 15",
        "2m",
        "ticket",
        "An engine no longer reports its load; routing relies on the gateway's own counts.",
        (('penstock_endpoint_scrape_age_seconds{instance="g", endpoint="a"}', "0+60x60"),),
        (('penstock_endpoint_scrape_age_seconds{instance="g", endpoint="a"}', "1x60"),),
        (*_POOL, ("endpoint", "a")),
    ),
    Alert(
        "PenstockRetryBudgetExhausted",
        f"min by ({GATEWAY}) (penstock_retry_budget_remaining)",
        "== 0",
        "1m",
        "page",
        "The retry budget is exhausted: failed requests are not retried.",
        (
            ('penstock_retry_budget_remaining{instance="g"}', "0x60"),
            ('penstock_open_streams{instance="g"}', "4x60"),
        ),
        (
            ('penstock_retry_budget_remaining{instance="g"}', "3x60"),
            ('penstock_open_streams{instance="g"}', "4x60"),
            # An idle gateway with `retries.floor` 0: its budget is 0, a share of no requests.
            ('penstock_retry_budget_remaining{instance="idle"}', "0x60"),
            ('penstock_open_streams{instance="idle"}', "0x60"),
        ),
        _GATEWAY,
        condition=f"sum by ({GATEWAY}) (penstock_open_streams)",
    ),
    Alert(
        "PenstockShedHighClass",
        SHED_SHARE,
        "> 0.05",
        "5m",
        "page",
        "One in twenty requests of a class with latency targets is refused.",
        (
            ('penstock_goodput_total{class="interactive", slo_outcome="met"}', "0+80x60"),
            ('penstock_goodput_total{class="interactive", slo_outcome="shed"}', "0+20x60"),
        ),
        (
            ('penstock_goodput_total{class="interactive", slo_outcome="met"}', "0+99x60"),
            ('penstock_goodput_total{class="interactive", slo_outcome="shed"}', "0+1x60"),
            ('penstock_goodput_total{class="batch", slo_outcome="shed"}', "0+50x60"),
        ),
        (*_POOL, ("class", "interactive")),
    ),
    Alert(
        "PenstockKvLeaseExpiring",
        f"({LOST_KV}) / {SPLITS}",
        "> 0.02",
        "5m",
        "ticket",
        "Prefilled KV is lost: one split request in fifty times out in its KV transfer or has its "
        "KV freed unread.",
        (
            ('penstock_split_decisions_total{decision="split", reason="long"}', "0+100x60"),
            ('penstock_upstream_errors_total{endpoint="d", kind="transfer_timeout"}', "0+5x60"),
        ),
        (
            ('penstock_split_decisions_total{decision="split", reason="long"}', "0+100x60"),
            ('penstock_upstream_errors_total{endpoint="d", kind="reset"}', "0+5x60"),
        ),
        _FLEET,
    ),
    Alert(
        "PenstockPairFailing",
        share("penstock_split_pairs_total", f"{POOL}, prefill, decode", "5m", result="failed"),
        "> 0.1",
        "5m",
        "ticket",
        "One particular pair of a prefill and a decode endpoint fails.",
        (
            ('penstock_split_pairs_total{prefill="p", decode="d", result="served"}', "0+50x60"),
            ('penstock_split_pairs_total{prefill="p", decode="d", result="failed"}', "0+50x60"),
        ),
        (
            ('penstock_split_pairs_total{prefill="p", decode="d", result="served"}', "0+99x60"),
            ('penstock_split_pairs_total{prefill="p", decode="d", result="failed"}', "0+1x60"),
        ),
        (*_POOL, ("prefill", "p"), ("decode", "d")),
    ),
    Alert(
        "PenstockIndexStale",
        f"{rate('penstock_prefill_tokens_total', FLEET, '15m', cause='evicted')}"
        f" / {rate('penstock_prefix_hit_tokens_total', FLEET, '15m')}",
        "> 0.3",
        "10m",
        "ticket",
        "A third of the prompt tokens that the prefix index believes to be cached are not.",
        (
            ('penstock_prefill_tokens_total{cause="evicted"}', "0+600x60"),
            ("penstock_prefix_hit_tokens_total", "0+1000x60"),
        ),
        (
            ('penstock_prefill_tokens_total{cause="evicted"}', "0+20x60"),
            ('penstock_prefill_tokens_total{cause="never_seen"}', "0+900x60"),
            ("penstock_prefix_hit_tokens_total", "0+1000x60"),
        ),
        _FLEET,
    ),
    Alert(
        "PenstockPredictionsOff",
        quantile(0.5, "penstock_ttft_prediction_error_ratio", GATEWAY, "15m"),
        "> 0.75",
        "10m",
        "ticket",
        "Half of the predicted times to first token are wrong by 75 % or more.",
        _bucket("penstock_ttft_prediction_error_ratio", "1.0", "2.0", "0+10x60"),
        _bucket("penstock_ttft_prediction_error_ratio", "0.1", "0.15", "0+10x60"),
        _GATEWAY,
    ),
    Alert(
        "PenstockWorkloadDrift",
        f"max by ({POOL}, measure) (penstock_drift_alarm)",
        "> 0",
        "5m",
        "ticket",
        "The requests of a pool differ from the workload that the pool was sized for.",
        (('penstock_drift_alarm{instance="g", pool="chat", measure="prompt"}', "0 1x60"),),
        (
            ('penstock_drift_alarm{instance="g", pool="chat", measure="prompt"}', "0 1 1 0x60"),
            ('penstock_drift_rate_ratio{instance="g", pool="chat"}', "4x60"),
        ),
        (*_POOL, ("measure", "prompt")),
    ),
    Alert(
        "PenstockMirrorWorse",
        f"max by ({POOL}) (penstock_mirror_worse)",
        "> 0",
        "1m",
        "ticket",
        "The candidate engines of a mirror answer worse than chance explains.",
        (('penstock_mirror_worse{instance="g", pool="chat"}', "0 1x60"),),
        (
            ('penstock_mirror_worse{instance="g", pool="chat"}', "0x60"),
            ('penstock_mirror_loss{instance="g", pool="chat", measure="equal answers"}', "0.1x60"),
        ),
        _POOL,
    ),
    Alert(
        "PenstockBatchBehind",
        f'sum by ({FLEET}) (penstock_batches{{schedule="behind"}})',
        "> 0",
        "10m",
        "ticket",
        "Batches will probably not end in their completion windows.",
        (('penstock_batches{instance="g", schedule="behind"}', "0 1x60"),),
        (('penstock_batches{instance="g", schedule="behind"}', "0 1 1 0x60"),),
        _FLEET,
    ),
    Alert(
        "PenstockSharedViewStale",
        f"max by ({GATEWAY}) (penstock_shared_staleness_seconds)",
        "> 5",
        "1m",
        "ticket",
        "A gateway has received nothing from the other gateways for seconds and routes by its own "
        "state.",
        (('penstock_shared_staleness_seconds{instance="g"}', "0+60x60"),),
        (('penstock_shared_staleness_seconds{instance="g"}', "0 1 0 2 0x60"),),
        _GATEWAY,
    ),
    Alert(
        "PenstockRedisDegraded",
        "penstock_shared_staleness_seconds * (1 - penstock_shared_up)",
        "> 30",
        "2m",
        "page",
        "A gateway cannot reach the Redis through which it shares state.",
        (
            ('penstock_shared_up{instance="g"}', "0x60"),
            ('penstock_shared_staleness_seconds{instance="g"}', "0+60x60"),
        ),
        (
            ('penstock_shared_up{instance="g"}', "0x60"),
            ('penstock_shared_staleness_seconds{instance="g"}', "0x60"),
        ),
        _GATEWAY,
    ),
    Alert(
        "PenstockConfigRejected",
        f"min by ({GATEWAY}) (penstock_config_last_reload_successful)",
        "== 0",
        "1m",
        "ticket",
        "The last configuration change was rejected.",
        (('penstock_config_last_reload_successful{instance="g"}', "0x60"),),
        (('penstock_config_last_reload_successful{instance="g"}', "1x60"),),
        _GATEWAY,
    ),
    Alert(
        "PenstockCertificateExpires",
        f"min by ({GATEWAY}, listener) (penstock_tls_certificate_not_after_timestamp_seconds) - "
        f"time()",
        "< 604800",
        "10m",
        "ticket",
        "A listener's certificate expires within a week, or has expired.",
        (
            (
                _EXPIRY,
                "600000x60",
            ),
        ),
        (
            (
                _EXPIRY,
                "2600000x60",
            ),
        ),
        (*_GATEWAY, ("listener", "api")),
    ),
    Alert(
        "PenstockLoopLag",
        quantile(0.99, "penstock_loop_lag_seconds", GATEWAY, "5m"),
        "> 0.1",
        "5m",
        "page",
        "The gateway's event loop is delayed, and with it every stream.",
        _bucket("penstock_loop_lag_seconds", "0.25", "0.5", "0+240x60"),
        _bucket("penstock_loop_lag_seconds", "0.001", "0.002", "0+240x60"),
        _GATEWAY,
    ),
    Alert(
        "PenstockLogLinesDropped",
        rate("penstock_log_lines_dropped_total", GATEWAY, "5m"),
        "> 0",
        "5m",
        "ticket",
        "Access log lines are lost: the disk is full or the reader of the pipe is blocked.",
        (('penstock_log_lines_dropped_total{instance="g"}', "0+5x60"),),
        (('penstock_log_lines_dropped_total{instance="g"}', "7x60"),),
        _GATEWAY,
    ),
)
