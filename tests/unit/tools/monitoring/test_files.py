"""Tests that dashboards, alerts and runbooks match the list of metrics, and are complete."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from gateway.metrics.catalogue import Metrics
from gateway.metrics.labels import Row
from gateway.metrics.metric_types import Label
from tools.monitoring import rules
from tools.monitoring.__main__ import main
from tools.monitoring.alerts import ALERTS
from tools.monitoring.dashboards import BOARDS, ROUTING, complete_rows, family_name
from tools.monitoring.files import files, queries
from tools.monitoring.promql import (
    add_variables,
    fill_variables,
    find_selectors,
    grouping_labels,
    selector,
)
from tools.monitoring.titles import TITLES

ROOT = Path(__file__).parents[4]
RUNBOOKS = ROOT / "docs" / "runbooks"
BOARD_FILES = [path for path in files() if path.endswith(".json")]
PARTS = ("## What it means", "## First look", "## Causes", "## What to do")


def families() -> set[str]:
    return {spec.name for spec in Metrics().catalogue()}


def test_every_row_is_on_one_board_and_every_family_in_some_query() -> None:
    rows = [row for board in BOARDS for row in board.rows]
    assert sorted(rows) == sorted(Row)
    used = {
        family_name(each.name) for query in queries().values() for each in find_selectors(query)
    }
    assert families() <= used


def test_every_series_of_a_query_is_in_the_catalogue() -> None:
    labels = {spec.name: set(spec.exposed_labels) for spec in Metrics().catalogue()}
    process = {"up", *(name for name in known() if name.startswith("process_"))}
    for where, query in queries().items():
        allowed: set[str] = {"instance", "job", "namespace"}
        for each in find_selectors(query):
            if each.name in rules.recorded_names():
                allowed |= {"slo", "pool", "model"}
            elif each.name not in process:
                assert family_name(each.name) in labels, f"{where}: {each.name}"
                allowed |= labels[family_name(each.name)]
            assert each.labels <= allowed, f"{where}: {each}"
        assert grouping_labels(query) <= allowed, where


def known() -> set[str]:
    page = Metrics().render().decode()
    return {line.split("{")[0].split()[0] for line in page.splitlines() if not line.startswith("#")}


@pytest.mark.parametrize("path", BOARD_FILES)
def test_a_board_has_the_shape_that_grafana_reads(path: str) -> None:
    board: dict[str, Any] = json.loads(files()[path])
    assert Path(path).stem == board["uid"]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    occupied: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (column, y)
            for column in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & occupied, f"{panel['title']} lies over another panel"
        assert place["x"] + place["w"] <= 24
        occupied |= cells
        if panel["type"] != "row":
            assert panel["type"] in ("timeseries", "stat")
            assert [target["refId"] for target in panel["targets"]] == list(
                "ABCDEFG"[: len(panel["targets"])]
            )
            assert all(
                target["expr"] and target["datasource"] == panel["datasource"]
                for target in panel["targets"]
            )


@pytest.mark.parametrize("alert", rules.alert_names())
def test_every_alert_has_a_runbook(alert: str) -> None:
    text = (RUNBOOKS / f"{alert}.md").read_text()
    assert text.startswith(f"# {alert}\n")
    places = [text.index(part) for part in PARTS]
    assert places == sorted(places)
    assert all(len(part.split()) >= 15 for part in text.split("## ")[1:]), "half a page, not a line"


def test_every_runbook_belongs_to_an_alert_and_names_existing_metrics() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"} == set(rules.alert_names())
    for path in RUNBOOKS.glob("*.md"):
        for alert in find_selectors(
            " ".join(
                part for part in path.read_text().split("`")[1::2] if part.startswith("penstock_")
            )
        ):
            if alert.name.startswith("penstock_"):
                assert family_name(alert.name) in families() | known(), f"{path.name}: {alert.name}"


def test_the_rules_pair_every_burn_with_its_short_window_and_point_to_the_runbook() -> None:
    result = YAML(typ="safe").load(rules.rules_yaml("https://runbooks.example/penstock"))
    alerts = [rule for group in result["groups"] for rule in group["rules"] if "alert" in rule]
    assert {rule["alert"] for rule in alerts} == set(rules.alert_names())
    assert len([rule for rule in alerts if "window" in rule["labels"]]) == 9
    for rule in alerts:
        assert (
            rule["annotations"]["runbook_url"]
            == f"https://runbooks.example/penstock/{rule['alert']}.md"
        )
        assert rule["labels"]["severity"] in ("page", "ticket")
    ttft = next(rule for rule in alerts if rule["alert"] == "PenstockTtftBurn")
    assert ttft["expr"] == (
        'penstock:slo_errors:ratio_rate1h{slo="ttft"} > 0.144 and '
        'penstock:slo_errors:ratio_rate5m{slo="ttft"} > 0.144'
    )


def test_every_alert_has_a_test_that_fires_and_one_that_does_not() -> None:
    tests = YAML(typ="safe").load(rules.promtool_tests())["tests"]
    fired = {test["alert_rule_test"][0]["alertname"]: [] for test in tests}
    for test in tests:
        fired[test["alert_rule_test"][0]["alertname"]].append(
            bool(test["alert_rule_test"][0]["exp_alerts"])
        )
    assert set(fired) == set(rules.alert_names())
    assert all({True, False} == set(both) for both in fired.values())
    assert len({alert.name for alert in ALERTS}) == len(ALERTS)


def test_the_command_writes_all_files_with_the_given_runbook_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["observe", "--into", str(tmp_path), "--runbooks", "https://wiki.example"]
    )
    main()
    written = {
        path.relative_to(tmp_path).as_posix(): path.read_text()
        for path in tmp_path.rglob("*.*")
        if path.is_file()
    }
    assert written == dict(files("https://wiki.example"))


NAMES = st.from_regex(r"[a-z_:][a-z0-9_:]{0,8}", fullmatch=True).filter(
    lambda name: name not in ("and", "or", "unless", "bool", "offset", "inf", "nan", "vector")
)
LABELS = st.dictionaries(
    st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True),
    st.text(alphabet="ab ~|{}(),=", max_size=6),
)


@given(NAMES, LABELS)
def test_the_selectors_of_a_query_are_parsed(name: str, matchers: dict[str, str]) -> None:
    query = (
        f"sum by (x, y) (rate({selector(name, matchers)}[5m])) / on (z) count({name}) or vector(0)"
    )
    assert set(find_selectors(query)) == {
        type(find_selectors(query)[0])(name, frozenset(matchers)),
        type(find_selectors(query)[0])(name, frozenset()),
    }
    assert grouping_labels(query) == {"x", "y", "z"}


def variables(query: str) -> dict[str, set[str]]:
    result = {}
    for name, matchers in re.findall(r"\b((?:penstock|process)[_:]\w[\w:]*)\{([^}]*)\}", query):
        result[name] = set(re.findall(r'(\w+)=~"\$\1"', matchers))
    return result


@pytest.mark.parametrize("path", BOARD_FILES)
def test_every_series_of_a_board_is_filtered_by_its_variables(path: str) -> None:
    board: dict[str, Any] = json.loads(files()[path])
    exposed = {spec.name: set(spec.exposed_labels) for spec in Metrics().catalogue()}
    chosen = {"job", "namespace", "pool", "model"}
    assert {metric["name"] for metric in board["templating"]["list"]} == {"datasource", *chosen}
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            found = variables(target["expr"])
            assert found.keys() == {each.name for each in find_selectors(target["expr"])}, target[
                "expr"
            ]
            for name, limits in found.items():
                labels = (
                    chosen
                    if name in rules.recorded_names()
                    else exposed.get(family_name(name), set())
                )
                assert limits == {"job", "namespace"} | (labels & chosen), target["expr"]


def test_a_query_with_every_variable_set_to_all_matches_series_without_the_label_too() -> None:
    query = add_variables(
        'sum (rate(penstock_x{a="b"}[$__rate_interval])) + penstock_y', lambda name: {"job", "pool"}
    )
    assert query == (
        'sum (rate(penstock_x{a="b", job=~"$job", pool=~"$pool"}[$__rate_interval])) '
        '+ penstock_y{job=~"$job", pool=~"$pool"}'
    )
    assert fill_variables(query, "10s") == (
        'sum (rate(penstock_x{a="b", job=~".*", pool=~".*"}[10s])) + '
        'penstock_y{job=~".*", pool=~".*"}'
    )


def test_panels_have_titles_and_a_family_has_at_most_one_generated_panel() -> None:
    titles = [
        panel.title
        for spec in BOARDS
        for row in complete_rows(spec, Metrics().catalogue()).values()
        for panel in row
    ]
    assert all(re.fullmatch(r"[A-Z][A-Za-z0-9 ,:'()/-]+", title) for title in titles)
    assert not [
        title for title in titles if re.search(r"_|\b(P > D|leg|regret|blind|itl|e2e)\b", title)
    ]
    assert len(set(TITLES.values())) == len(TITLES)
    assert TITLES.keys() <= families()


def test_requests_in_flight_are_shown_of_ten_endpoints_and_the_mean() -> None:
    (panel,) = (
        panel
        for panel in ROUTING.rows[Row.ENDPOINTS]
        if panel.title.startswith("Requests in flight by endpoint")
    )
    busiest, mean = (fill_variables(query.expr, "10s") for query in panel.queries)
    assert busiest == (
        "sum by (endpoint) (penstock_inflight) and on (endpoint) topk(10, sum by (endpoint) "
        "(avg_over_time(penstock_inflight[10s] @ end())))"
    )
    assert mean == "avg(sum by (endpoint) (penstock_inflight))"


def test_every_alert_has_a_job_and_a_namespace() -> None:
    everywhere = {
        "PenstockAbsent",
        "PenstockDown",
        "PenstockRedisDegraded",
    }  # no target; labels of the series itself
    for alert in ALERTS:
        if alert.name not in everywhere:
            assert {"job", "namespace"} <= grouping_labels(alert.value), alert.name
            assert {("job", "penstock"), ("namespace", "llm")} <= set(alert.labels), alert.name


def test_every_recorded_error_ratio_is_one_of_a_job_namespace_model_and_pool() -> None:
    result = YAML(typ="safe").load(rules.rules_yaml("https://runbooks.example"))
    recorded = [rule for group in result["groups"] for rule in group["rules"] if "record" in rule]
    assert {rule["record"] for rule in recorded} == rules.recorded_names()
    for rule in recorded:
        grouped = re.findall(r"\bsum by \(([^)]*)\)", rule["expr"])
        assert len(grouped) == rule["expr"].count("sum") > 0
        assert {tuple(labels.split(", ")) for labels in grouped} == {
            ("job", "namespace", "model", "pool")
        }, rule["record"]


def test_the_alert_about_a_missing_target_has_a_value_where_there_is_no_series() -> None:
    (alert,) = [each for each in ALERTS if each.name == "PenstockAbsent"]
    assert re.fullmatch(r"\(count\(up\{job=~\S+\}\) or vector\(0\)\)", alert.value)
    assert alert.rule == f"{alert.value} == 0"


def test_labels_of_the_catalogue_do_not_clash_with_those_that_prometheus_adds() -> None:
    for spec in Metrics().catalogue():
        assert not {label.name for label in spec.labels} & {
            "instance",
            "job",
            "namespace",
            "le",
            "quantile",
            "__name__",
        }
        assert all(isinstance(label, Label) for label in spec.labels)


def test_the_retry_budget_alert_needs_requests() -> None:
    (alert,) = [each for each in ALERTS if each.name == "PenstockRetryBudgetExhausted"]
    assert alert.rule.endswith(
        " == 0 and sum by (job, namespace, instance) (penstock_open_streams) > 0"
    )
    assert alert.condition in queries().values()


def test_endpoints_are_paired_with_their_states_one_to_one_however_often_they_are_scraped() -> None:
    each_one = "(job, namespace, instance, pool, endpoint)"
    paired = [metric.value for metric in ALERTS if f" * on {each_one} " in metric.value]
    assert len(paired) == 2
    for value in paired:
        left, right = value.split(f" * on {each_one} ")
        assert left.endswith(f"(min by {each_one} (penstock_endpoint_up)")
        assert right.startswith(f"sum by {each_one} (")
