"""Collects the generated Prometheus and Grafana files, and the PromQL queries in them."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.metrics.catalogue import Metrics
from tools.monitoring import grafana, rules
from tools.monitoring.dashboards import BOARDS

RULES = f"deploy/prometheus/{rules.RULES_FILE}"
PROMTOOL_TESTS = "deploy/prometheus/tests.yml"


def files(runbooks: str = rules.RUNBOOKS) -> Mapping[str, str]:
    """Return the text of every generated Prometheus and Grafana file, by its path.

    runbooks  URL or folder of the runbooks that the alerts link to
    """
    catalogue = Metrics().catalogue()
    boards = {
        f"deploy/grafana/{spec.uid}.json": grafana.dashboard_json(spec, catalogue)
        for spec in BOARDS
    }
    return {
        RULES: rules.rules_yaml(runbooks),
        PROMTOOL_TESTS: rules.promtool_tests(runbooks),
    } | boards


def queries() -> Mapping[str, str]:
    return {**rules.queries(), **grafana.queries(Metrics().catalogue())}
