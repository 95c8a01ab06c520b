"""Prometheus' files: recording rules, alerts, and promtool's tests of them, as YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from types import MappingProxyType

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from gateway.observe.alerts import ALERTS, Series
from gateway.observe.slos import BURNS, OBJECTIVES, WINDOWS, Objective

RUNBOOKS = "docs/runbooks"
RULES_FILE = "penstock.rules.yml"
_MADE = "# Written by `make docs` from gateway/observe; do not edit.\n"
_MINUTES = 240
TRIED_AT = "30m"

OF: Mapping[str, str] = MappingProxyType({"job": "penstock", "namespace": "llm", "model": "m", "pool": "chat"})
"""The labels of the model whose budget burns in the tests."""

Rule = Mapping[str, object]


def rules(runbooks: str = RUNBOOKS) -> str:
    """The rules' file. Alerts point to their page below `runbooks`, a folder's path or URL."""
    groups = [
        {"name": "penstock-slo", "rules": [*_recordings(), *_burns(runbooks)]},
        {"name": "penstock-causes", "rules": _causes(runbooks)},
    ]
    return _MADE + _yaml({"groups": groups})


def trials(runbooks: str = RUNBOOKS) -> str:
    """What promtool tries: each alert fires on what it is for, and not on what it is not for."""
    tests = [trial for objective in OBJECTIVES for trial in _burn_trials(objective, runbooks)]
    for alert in ALERTS:
        labels = dict(alert.labels) | {"severity": alert.severity}
        fired = [_expected(alert.summary, labels, alert.name, runbooks)]
        tests.append(_trial(f"{alert.name} fires", alert.fires, TRIED_AT, alert.name, fired))
        tests.append(_trial(f"{alert.name} stays quiet", alert.quiet, TRIED_AT, alert.name, []))
    return _MADE + _yaml({"rule_files": [RULES_FILE], "evaluation_interval": "1m", "tests": tests})


def names() -> tuple[str, ...]:
    """Of all alerts, each once; each has a runbook."""
    return (*(objective.alert for objective in OBJECTIVES), *(alert.name for alert in ALERTS))


def queries() -> Mapping[str, str]:
    """What every rule asks for, by where it stands; of alerts without the comparison, so that there is an answer.
    """
    found = {f"record {window} {slo.slo}": slo.bad_share(window) for slo in OBJECTIVES for window in WINDOWS}
    for slo in OBJECTIVES:
        for burn in BURNS:
            found[f"{slo.alert} {burn.long}"] = slo.recorded(burn.long)
            found[f"{slo.alert} {burn.short}"] = slo.recorded(burn.short)
    found |= {alert.name: alert.value for alert in ALERTS}
    return found | {f"{alert.name} besides": alert.besides for alert in ALERTS if alert.besides}


def recorded() -> frozenset[str]:
    """Names that the recording rules make."""
    return frozenset(slo.recorded(window).partition("{")[0] for slo in OBJECTIVES for window in WINDOWS)


def _recordings() -> list[Rule]:
    return [
        {
            "record": slo.recorded(window).partition("{")[0],
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


def _burn_trials(slo: Objective, runbooks: str) -> list[Rule]:
    """Errors at twenty, three and half times the speed that the budget allows, after three hours.
    """
    found = []
    for speed in (20.0, 3.0, 0.5):
        bad = round(speed * (1 - slo.goal) * 10_000)
        if slo.slo == "availability":
            series = (
                (
                    'penstock_requests_total{model="m", pool="chat", code="200", reason="served"}',
                    f"0+{10_000 - bad}x{_MINUTES}",
                ),
                (
                    'penstock_requests_total{model="m", pool="chat", code="502", reason="upstream_failed"}',
                    f"0+{bad}x{_MINUTES}",
                ),
            )
        else:
            series = (
                (
                    'penstock_goodput_total{model="m", pool="chat", class="standard", kept="met"}',
                    f"0+{10_000 - bad}x{_MINUTES}",
                ),
                (
                    f'penstock_goodput_total{{model="m", pool="chat", class="standard", kept="{slo.slo}_missed"}}',
                    f"0+{bad}x{_MINUTES}",
                ),
            )
        fired = [
            _expected(
                slo.summary,
                dict(OF) | {"severity": burn.severity, "window": burn.long, "slo": slo.slo},
                slo.alert,
                runbooks,
            )
            for burn in BURNS
            if speed > burn.factor
        ]
        found.append(_trial(f"{slo.alert} at {speed:g} times the budget's speed", series, "3h", slo.alert, fired))
    return found


def _expected(summary: str, labels: Mapping[str, str], alert: str, runbooks: str) -> Rule:
    return {"exp_labels": dict(labels), "exp_annotations": _annotations(summary, alert, runbooks)}


def _trial(name: str, series: Series, at: str, alert: str, fired: Sequence[Rule]) -> Rule:
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": _placed(each), "values": values} for each, values in series],
        "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": list(fired)}],
    }


def _placed(series: str) -> str:
    """The series with the labels of a scrape, and with a pool where its endpoint or class implies one.
    """
    name, _, labels = series.partition("{")
    more = [] if 'job="' in labels else ['job="penstock"']
    more += [] if 'namespace="' in labels else ['namespace="llm"']
    has_pool = any(f'{label}="' in labels for label in ("endpoint", "prefill", "class"))
    more += ['pool="chat"'] if has_pool and 'pool="' not in labels else []
    return f"{name}{{{', '.join((*more, labels))}" if labels else f"{name}{{{', '.join(more)}}}"


def _yaml(tree: object) -> str:
    writer = YAML()
    writer.width = 4096
    writer.indent(mapping=2, sequence=4, offset=2)
    out = StringIO()
    writer.dump(tree, out)
    return out.getvalue()
