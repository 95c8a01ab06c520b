"""Converts the dashboards to the JSON format of Grafana.

The identifiers and positions of panels follow from their order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gateway.metrics.metric_types import FamilySpec
from tools.monitoring.dashboards import BOARDS, Board, Panel, complete_rows, family_name
from tools.monitoring.promql import VARIABLES, add_variables
from tools.monitoring.rules import recorded_names

SCHEMA_VERSION = 39
COLUMNS, WIDTH, HEIGHT = 24, 8, 7
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard_json(spec: Board, catalogue: Sequence[FamilySpec]) -> str:
    tree = {
        "uid": spec.uid,
        "title": spec.title,
        "tags": ["penstock"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "annotations": {"list": [_reloads(catalogue)]},
        "links": [
            {"title": "Penstock", "type": "dashboards", "tags": ["penstock"], "asDropdown": True}
        ],
        "panels": _panels(spec, catalogue),
    }
    return json.dumps(tree, indent=1) + "\n"


def queries(catalogue: Sequence[FamilySpec]) -> dict[str, str]:
    return {
        f"{spec.uid} / {row} / {panel.title} / {number}": query.expr
        for spec in BOARDS
        for row, panels in complete_rows(spec, catalogue).items()
        for panel in panels
        for number, query in enumerate(panel.queries)
    }


def filter_by_variables(expr: str, catalogue: Sequence[FamilySpec]) -> str:
    """Return a query that selects only the values chosen in the dashboard's menus.

    The menus are those for job, namespace, pool and model. A series is filtered by the labels that
    its metric has.
    """
    labels = {spec.name: {"job", "namespace", *spec.exposed_labels} for spec in catalogue}
    labels |= {name: set(VARIABLES) for name in recorded_names()}
    return add_variables(expr, lambda name: labels.get(family_name(name), {"job", "namespace"}))


def _variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}
    selected = 'job=~"$job", namespace=~"$namespace"'
    return [
        source,
        _variable("job", "Job", "penstock_config_version_info", everything=None),
        _variable("namespace", "Namespace", 'penstock_config_version_info{job=~"$job"}'),
        _variable("pool", "Pool", f"penstock_endpoint_up{{{selected}}}"),
        _variable("model", "Model", f"penstock_requests_total{{{selected}}}"),
    ]


def _variable(name: str, label: str, series: str, everything: str | None = ".*") -> dict[str, Any]:
    # Return a Grafana variable that selects among the values of a label.
    #
    # everything  pattern for "All"; the default also matches series without the label. None: "All"
    #             matches existing values only, so that series of other programs do not match
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": f"label_values({series}, {name})", "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": everything,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _panels(spec: Board, catalogue: Sequence[FamilySpec]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    y = 0
    for row, panels in complete_rows(spec, catalogue).items():
        grid_position = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        header = {"type": "row", "title": str(row), "collapsed": False, "gridPos": grid_position}
        items.append({"id": len(items) + 1, **header})
        y += 1
        for number, panel in enumerate(panels):
            across, down = number % (COLUMNS // WIDTH), number // (COLUMNS // WIDTH)
            grid_position = {"x": across * WIDTH, "y": y + down * HEIGHT, "w": WIDTH, "h": HEIGHT}
            items.append(_panel(len(items) + 1, panel, grid_position, catalogue))
        y += -(-len(panels) // (COLUMNS // WIDTH)) * HEIGHT
    return items


def _panel(
    number: int, panel: Panel, grid_position: dict[str, int], catalogue: Sequence[FamilySpec]
) -> dict[str, Any]:
    is_timeseries = panel.kind == "timeseries"
    style = {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never"} if is_timeseries else {}
    legend = {"legend": {"displayMode": "list", "placement": "bottom"}} if is_timeseries else {}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": grid_position,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": style}, "overrides": []},
        "options": legend,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": filter_by_variables(query.expr, catalogue),
                "legendFormat": query.legend or "__auto",
                "exemplar": "_bucket" in query.expr,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def _reloads(catalogue: Sequence[FamilySpec]) -> dict[str, Any]:
    return {
        "name": "Configuration changes",
        "datasource": SOURCE,
        "enable": True,
        "iconColor": "blue",
        "expr": filter_by_variables(
            "changes(penstock_config_applied_timestamp_seconds[1m]) > 0", catalogue
        ),
        "titleFormat": "new configuration",
    }
