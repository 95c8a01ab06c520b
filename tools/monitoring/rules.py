"""Generates the Prometheus files as YAML: recording rules, alerts, and their tests for promtool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from types import MappingProxyType

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from tools.monitoring.alerts import ALERTS, Series
from tools.monitoring.slos import BURNS, OBJECTIVES, WINDOWS, Objective

RUNBOOKS = "docs/runbooks"
RULES_FILE = "penstock.rules.yml"
_GENERATED = "# Written by `make docs` from tools/monitoring; do not edit.\n"
_MINUTES = 240
EVALUATED_AT = "30m"

BURN_LABELS: Mapping[str, str] = MappingProxyType(
    {"job": "penstock", "namespace": "llm", "model": "m", "pool": "chat"}
)
"""The labels of the input series in the tests of burn-rate alerts."""

Rule = Mapping[str, object]


def rules_yaml(runbooks: str = RUNBOOKS) -> str:
    """Return the text of the Prometheus rules file.

    runbooks  URL or folder of the runbooks that the alerts link to
    """
    groups = [
        {"name": "penstock-slo", "rules": [*_recordings(), *_burns(runbooks)]},
        {"name": "penstock-causes", "rules": _causes(runbooks)},
    ]
    return _GENERATED + _yaml({"groups": groups})


def promtool_tests(runbooks: str = RUNBOOKS) -> str:
    """Return the text of the promtool tests, as YAML.

    They check that each alert fires with its sample of a problem, and does not fire with its sample
    of normal operation.
    """
    tests = [test for objective in OBJECTIVES for test in _burn_tests(objective, runbooks)]
    for alert in ALERTS:
        labels = dict(alert.labels) | {"severity": alert.severity}
        fired = [_expected(alert.summary, labels, alert.name, runbooks)]
        tests.append(
            _promtool_test(f"{alert.name} fires", alert.fires, EVALUATED_AT, alert.name, fired)
        )
        tests.append(
            _promtool_test(f"{alert.name} stays quiet", alert.quiet, EVALUATED_AT, alert.name, [])
        )
    return _GENERATED + _yaml(
        {"rule_files": [RULES_FILE], "evaluation_interval": "1m", "tests": tests}
    )


def alert_names() -> tuple[str, ...]:
    return (*(objective.alert for objective in OBJECTIVES), *(alert.name for alert in ALERTS))


def queries() -> Mapping[str, str]:
    """Return the PromQL query of every recording rule and alert, by the rule's name.

    Alerts are returned without the comparison with their limit, so that every query has a result.
    """
    by_place = {
        f"record {window} {slo.slo}": slo.bad_share(window)
        for slo in OBJECTIVES
        for window in WINDOWS
    }
    for slo in OBJECTIVES:
        for burn in BURNS:
            by_place[f"{slo.alert} {burn.long}"] = slo.recorded_series(burn.long)
            by_place[f"{slo.alert} {burn.short}"] = slo.recorded_series(burn.short)
    by_place |= {alert.name: alert.value for alert in ALERTS}
    return by_place | {
        f"{alert.name} condition": alert.condition for alert in ALERTS if alert.condition
    }


def recorded_names() -> frozenset[str]:
    return frozenset(
        slo.recorded_series(window).partition("{")[0] for slo in OBJECTIVES for window in WINDOWS
    )


def _recordings() -> list[Rule]:
    return [
        {
            "record": slo.recorded_series(window).partition("{")[0],
            "expr": LiteralScalarString(slo.bad_share(window)),
            "labels": {"slo": slo.slo},
        }
        for slo in OBJECTIVES
        for window in WINDOWS
    ]


def _burns(runbooks: str) -> list[Rule]:
    return [
        {
            "alert": slo.alert,
            "expr": LiteralScalarString(burn.rule(slo)),
            "for": burn.hold,
            "labels": {"severity": burn.severity, "window": burn.long},
            "annotations": _annotations(slo.summary, slo.alert, runbooks),
        }
        for slo in OBJECTIVES
        for burn in BURNS
    ]


def _causes(runbooks: str) -> list[Rule]:
    return [
        {
            "alert": alert.name,
            "expr": LiteralScalarString(alert.rule),
            "for": alert.hold,
            "labels": {"severity": alert.severity},
            "annotations": _annotations(alert.summary, alert.name, runbooks),
        }
        for alert in ALERTS
    ]


def _annotations(summary: str, alert: str, runbooks: str) -> Mapping[str, str]:
    return {"summary": summary, "runbook_url": f"{runbooks}/{alert}.md"}


def _burn_tests(slo: Objective, runbooks: str) -> list[Rule]:
    # Return tests with errors at 20, 3 and 0.5 times the rate that the error budget allows.
    tests = []
    for speed in (20.0, 3.0, 0.5):
        fired = [
            _expected(
                slo.summary,
                dict(BURN_LABELS)
                | {"severity": burn.severity, "window": burn.long, "slo": slo.slo},
                slo.alert,
                runbooks,
            )
            for burn in BURNS
            if speed > burn.factor
        ]
        name = f"{slo.alert} at {speed:g} times the budget's rate"
        tests.append(_promtool_test(name, _burn_series(slo, speed), "3h", slo.alert, fired))
    return tests


def _burn_series(slo: Objective, speed: float) -> Series:
    # Return the counters of good and bad requests whose errors use up the budget at this speed.
    bad = round(speed * (1 - slo.goal) * 10_000)
    labels = 'model="m", pool="chat"'
    good_values, bad_values = f"0+{10_000 - bad}x{_MINUTES}", f"0+{bad}x{_MINUTES}"
    if slo.slo == "availability":
        name = f"penstock_requests_total{{{labels}, "
        return (
            (name + 'code="200", reason="served"}', good_values),
            (name + 'code="502", reason="upstream_failed"}', bad_values),
        )
    name = f'penstock_goodput_total{{{labels}, class="standard", '
    return (
        (name + 'slo_outcome="met"}', good_values),
        (name + f'slo_outcome="{slo.slo}_missed"}}', bad_values),
    )


def _expected(summary: str, labels: Mapping[str, str], alert: str, runbooks: str) -> Rule:
    return {"exp_labels": dict(labels), "exp_annotations": _annotations(summary, alert, runbooks)}


def _promtool_test(
    title: str, series: Series, eval_time: str, alert: str, fired: Sequence[Rule]
) -> Rule:
    return {
        "name": title,
        "interval": "1m",
        "input_series": [
            {"series": _with_target_labels(name), "values": values} for name, values in series
        ],
        "alert_rule_test": [
            {"eval_time": eval_time, "alertname": alert, "exp_alerts": list(fired)}
        ],
    }


def _with_target_labels(series: str) -> str:
    name, _, labels = series.partition("{")
    added = [] if 'job="' in labels else ['job="penstock"']
    added += [] if 'namespace="' in labels else ['namespace="llm"']
    has_pool = any(f'{label}="' in labels for label in ("endpoint", "prefill", "class"))
    added += ['pool="chat"'] if has_pool and 'pool="' not in labels else []
    if labels:
        return f"{name}{{{', '.join((*added, labels))}"
    return f"{name}{{{', '.join(added)}}}"


def _yaml(tree: object) -> str:
    writer = YAML()
    writer.width = 4096
    writer.indent(mapping=2, sequence=4, offset=2)
    out = StringIO()
    writer.dump(tree, out)
    return out.getvalue()
