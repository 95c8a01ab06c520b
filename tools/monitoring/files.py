"""The files that are generated from the catalogue of metrics, by path, and all queries in these
files.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.metrics.catalogue import Metrics
from tools.monitoring import grafana, rules
from tools.monitoring.dashboards import BOARDS

RULES = f"deploy/prometheus/{rules.RULES_FILE}"
PROMTOOL_TESTS = "deploy/prometheus/tests.yml"


def files(runbooks: str = rules.RUNBOOKS) -> Mapping[str, str]:
    """Return the text of each generated monitoring file by path.

    Alerts link to pages below `runbooks`, a folder or URL.
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
