"""Every file that is made from the catalogue for the tools around: path -> text, and every query in them.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.metrics import Metrics
from gateway.observe import grafana, rules
from gateway.observe.boards import BOARDS

RULES = f"deploy/prometheus/{rules.RULES_FILE}"
TRIALS = "deploy/prometheus/tests.yml"


def files(runbooks: str = rules.RUNBOOKS) -> Mapping[str, str]:
    """Paths count from the root of the project; alerts point to pages below `runbooks`."""
    catalogue = Metrics().catalogue()
    boards = {f"deploy/grafana/{spec.uid}.json": grafana.board(spec, catalogue) for spec in BOARDS}
    return {RULES: rules.rules(runbooks), TRIALS: rules.trials(runbooks)} | boards


def queries() -> Mapping[str, str]:
    """Everything that any of them asks Prometheus for, by where it stands."""
    return {**rules.queries(), **grafana.queries(Metrics().catalogue())}
