"""A board as Grafana's JSON.

Ids and places follow from the order of panels, so files change only where boards do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gateway.meters import Spec
from gateway.observe.boards import BOARDS, Board, Panel, completed, family_of
from gateway.observe.promql import VARIABLES, filtered
from gateway.observe.rules import recorded

SCHEMA_VERSION = 39
COLUMNS, WIDTH, HEIGHT = 24, 8, 7
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def board(spec: Board, catalogue: Sequence[Spec]) -> str:
    """The file of one board."""
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
        "links": [{"title": "Penstock", "type": "dashboards", "tags": ["penstock"], "asDropdown": True}],
        "panels": _panels(spec, catalogue),
    }
    return json.dumps(tree, indent=1) + "\n"


def queries(catalogue: Sequence[Spec]) -> dict[str, str]:
    """Every query of every panel, by board and title."""
    return {
        f"{spec.uid} / {row} / {panel.title} / {number}": query.expr
        for spec in BOARDS
        for row, panels in completed(spec, catalogue).items()
        for panel in panels
        for number, query in enumerate(panel.queries)
    }


def limited(expr: str, catalogue: Sequence[Spec]) -> str:
    """The query as a panel sends it: of the jobs, namespaces, pools and models that are chosen."""
    labels = {spec.name: {"job", "namespace", *spec.exposed} for spec in catalogue}
    labels |= {name: set(VARIABLES) for name in recorded()}
    return filtered(expr, lambda name: labels.get(family_of(name), {"job", "namespace"}))


def _variables() -> list[dict[str, Any]]:
    """The data source, and a variable for each label that panels are limited by."""
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}
    among = 'job=~"$job", namespace=~"$namespace"'
    return [
        source,
        _variable("job", "Job", "penstock_config_version_info", everything=None),
        _variable("namespace", "Namespace", 'penstock_config_version_info{job=~"$job"}'),
        _variable("pool", "Pool", f"penstock_endpoint_up{{{among}}}"),
        _variable("model", "Model", f"penstock_requests_total{{{among}}}"),
    ]


def _variable(name: str, label: str, series: str, everything: str | None = ".*") -> dict[str, Any]:
    """A choice among the values of a label.

    `everything` matches series without the label as well; None: only values that were found, for
    names of series that other programs have too.
    """
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


def _panels(spec: Board, catalogue: Sequence[Spec]) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = []
    y = 0
    for row, panels in completed(spec, catalogue).items():
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        shown.append({"id": len(shown) + 1, "type": "row", "title": str(row), "collapsed": False, "gridPos": place})
        y += 1
        for number, panel in enumerate(panels):
            across, down = number % (COLUMNS // WIDTH), number // (COLUMNS // WIDTH)
            place = {"x": across * WIDTH, "y": y + down * HEIGHT, "w": WIDTH, "h": HEIGHT}
            shown.append(_panel(len(shown) + 1, panel, place, catalogue))
        y += -(-len(panels) // (COLUMNS // WIDTH)) * HEIGHT
    return shown


def _panel(number: int, panel: Panel, place: dict[str, int], catalogue: Sequence[Spec]) -> dict[str, Any]:
    custom = {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never"} if panel.kind == "timeseries" else {}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}} if panel.kind == "timeseries" else {},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": SOURCE,
                "expr": limited(query.expr, catalogue),
                "legendFormat": query.legend or "__auto",
                "exemplar": "_bucket" in query.expr,
            }
            for at, query in enumerate(panel.queries)
        ],
    }


def _reloads(catalogue: Sequence[Spec]) -> dict[str, Any]:
    """Marks where another configuration came into force."""
    return {
        "name": "Configuration changes",
        "datasource": SOURCE,
        "enable": True,
        "iconColor": "blue",
        "expr": limited("changes(penstock_config_applied_timestamp_seconds[1m]) > 0", catalogue),
        "titleFormat": "new configuration",
    }
