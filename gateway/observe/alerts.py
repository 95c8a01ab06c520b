"""Alerts on causes: what is wrong inside, whether or not a promise is broken yet. docs/runbooks/ has their pages.

Every alert carries the series that make it fire and those that do not: its test for promtool is
made from them.
"""

from __future__ import annotations

import msgspec

from gateway.observe.promql import quantile, rate, share

_FLEET = (("job", "penstock"), ("namespace", "llm"))
_GATEWAY = (*_FLEET, ("instance", "g"))
_POOL = (*_FLEET, ("pool", "chat"))

Series = tuple[tuple[str, str], ...]
"""Of a test: (series, its values in promtool's notation), one a minute."""


class Alert(msgspec.Struct, frozen=True):
    """`value` is compared as `compare` says; `hold` is how long it must be so.

    fires, quiet   series with and without it; `labels` are those of the alert that then fires,
                   after 30 minutes
    besides        what has to be above 0 as well, with the labels of `value`; nothing unless given
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
    besides: str = ""

    @property
    def rule(self) -> str:
        return f"{self.value} {self.compare}" + (f" and {self.besides} > 0" if self.besides else "")


def _bucket(name: str, low: str, high: str, inside: str) -> Series:
    """A histogram whose observations all lie between two bounds."""
    return (
        (f'{name}_bucket{{instance="g", le="{low}"}}', "0x60"),
        (f'{name}_bucket{{instance="g", le="{high}"}}', inside),
        (f'{name}_bucket{{instance="g", le="+Inf"}}', inside),
    )


GATEWAY = "job, namespace, instance"
POOL = "job, namespace, pool"
FLEET = "job, namespace"
"""What alerts are grouped by: a gateway, a pool of a fleet, a fleet."""

SPLITS = rate("penstock_split_decisions_total", FLEET, "5m", decision="split")
LOST_KV = " + ".join(
    (
        f"({rate('penstock_split_leases_given_up_total', FLEET, '5m')} or 0 * {SPLITS})",
        f"({rate('penstock_upstream_errors_total', FLEET, '5m', kind='transfer_timeout')} or 0 * {SPLITS})",
    )
)

JUDGED = rate("penstock_goodput_total", f"{POOL}, class", "5m", **{"class": "!batch"})
SHED = rate("penstock_goodput_total", f"{POOL}, class", "5m", **{"class": "!batch", "kept": "shed"})
SHED_SHARE = f"({SHED} or 0 * {JUDGED}) / {JUDGED}"

# Half of a pool is picked however dead it is, and so is its last endpoint: who is ejected or dead serves nobody.
SERVING = (
    f"min by ({GATEWAY}, pool, endpoint) (penstock_endpoint_up) * on ({GATEWAY}, pool, endpoint) "
    f'sum by ({GATEWAY}, pool, endpoint) (penstock_endpoint_state{{state=~"up|returning"}})'
)


def _endpoint(name: str, up: str, serving: str) -> Series:
    """One endpoint: whether it may be picked, and whether it is neither ejected nor dead."""
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
        "Prometheus cannot read a gateway's metrics.",
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
        "Prometheus has no gateway to scrape: no target of a job whose name begins with penstock.",
        (('up{job="node", instance="n"}', "1x60"),),
        (('up{job="penstock", instance="g"}', "0x60"),),
    ),
    Alert(
        "PenstockAllEndpointsEjected",
        f"sum by ({GATEWAY}, pool) ({SERVING})",
        "== 0",
        "30s",
        "page",
        "A pool has no endpoint left that serves.",
        (*_endpoint("a", "0x60", "0x60"), *_endpoint("b", "1x60", "0x60"), *_endpoint("c", "0x60", "1x60")),
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
        "An endpoint takes much longer than its peers for the same work, and gets little or none of it.",
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
        "More prompt tokens wait at an endpoint than it computes in ten seconds or so.",
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
        "An engine no longer tells its load; picks go by the gateway's own counts.",
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
        "The fleet's retries are used up: what fails now is not tried elsewhere.",
        (('penstock_retry_budget_remaining{instance="g"}', "0x60"), ('penstock_open_streams{instance="g"}', "4x60")),
        (
            ('penstock_retry_budget_remaining{instance="g"}', "3x60"),
            ('penstock_open_streams{instance="g"}', "4x60"),
            ('penstock_retry_budget_remaining{instance="idle"}', "0x60"),  # a share of nothing, and a floor of 0
            ('penstock_open_streams{instance="idle"}', "0x60"),
        ),
        _GATEWAY,
        besides=f"sum by ({GATEWAY}) (penstock_open_streams)",
    ),
    Alert(
        "PenstockShedHighClass",
        SHED_SHARE,
        "> 0.05",
        "5m",
        "page",
        "One in twenty requests of a class with a promise is refused at the door.",
        (
            ('penstock_goodput_total{class="interactive", kept="met"}', "0+80x60"),
            ('penstock_goodput_total{class="interactive", kept="shed"}', "0+20x60"),
        ),
        (
            ('penstock_goodput_total{class="interactive", kept="met"}', "0+99x60"),
            ('penstock_goodput_total{class="interactive", kept="shed"}', "0+1x60"),
            ('penstock_goodput_total{class="batch", kept="shed"}', "0+50x60"),
        ),
        (*_POOL, ("class", "interactive")),
    ),
    Alert(
        "PenstockKvLeaseExpiring",
        f"({LOST_KV}) / {SPLITS}",
        "> 0.02",
        "5m",
        "ticket",
        "Prefilled KV is not fetched: one split request in fifty times out in transfer or has its KV given up.",
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
        "One prefill and decode endpoint in particular fail together.",
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
        "Engines have lost a third of the prompt tokens that the index believes them to hold.",
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
        "Half of all first tokens come at a time that was expected wrongly by three quarters or more.",
        _bucket("penstock_ttft_prediction_error_ratio", "1.0", "2.0", "0+10x60"),
        _bucket("penstock_ttft_prediction_error_ratio", "0.1", "0.15", "0+10x60"),
        _GATEWAY,
    ),
    Alert(
        "PenstockSharedViewStale",
        f"max by ({GATEWAY}) (penstock_shared_staleness_seconds)",
        "> 5",
        "1m",
        "ticket",
        "A gateway has not heard of the others for seconds and routes by what it knows itself.",
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
        "A gateway cannot reach what it shares its view through.",
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
        "The last configuration that was offered is not in force: it was rejected.",
        (('penstock_config_last_reload_successful{instance="g"}', "0x60"),),
        (('penstock_config_last_reload_successful{instance="g"}', "1x60"),),
        _GATEWAY,
    ),
    Alert(
        "PenstockCertificateExpires",
        f"min by ({GATEWAY}, listener) (penstock_tls_certificate_not_after_timestamp_seconds) - time()",
        "< 604800",
        "10m",
        "ticket",
        "A listener's certificate expires within a week, or has expired: clients will refuse it.",
        (('penstock_tls_certificate_not_after_timestamp_seconds{instance="g", listener="api"}', "600000x60"),),
        (('penstock_tls_certificate_not_after_timestamp_seconds{instance="g", listener="api"}', "2600000x60"),),
        (*_GATEWAY, ("listener", "api")),
    ),
    Alert(
        "PenstockLoopLag",
        quantile(0.99, "penstock_loop_lag_seconds", GATEWAY, "5m"),
        "> 0.1",
        "5m",
        "page",
        "The gateway's event loop runs late: every stream stutters.",
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
        "Access lines get lost: the disk is full or what reads them does not.",
        (('penstock_log_lines_dropped_total{instance="g"}', "0+5x60"),),
        (('penstock_log_lines_dropped_total{instance="g"}', "7x60"),),
        _GATEWAY,
    ),
)
