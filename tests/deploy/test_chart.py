"""The Helm chart as rendered by Helm: valid Kubernetes objects and valid gateway.yaml files."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import PrometheusRule, ServiceMonitor
from helm_python import Chart, chart

from gateway.config import Config, load_with_warnings
from tests.authority import Authority
from tools.monitoring.alerts import ALERTS

ROOT = Path(__file__).parents[2]
PATH = ROOT / "deploy" / "helm" / "penstock"
EXTRA = {
    "ScaledObject": ScaledObject,
    "ServiceMonitor": ServiceMonitor,
    "PrometheusRule": PrometheusRule,
}
UNKNOWN = {"HTTPRoute"}
"""Kinds without an available model; a test compares all their keys."""
KUBERNETES = "1.33"
FULL = json.loads((Path(__file__).parent / "full.values.json").read_text())
SECRETS = {
    "team-a": "sk-team-a-of-the-test",
    "fleet": "sixteen-characters-and-more",
    "redis": "r",
    "admin": "adm",
}
ENGINES = [{"url": f"http://vllm-{n}.vllm:8000", "name": f"vllm-{n}"} for n in range(2)]
MINIMAL: dict[str, Any] = {
    "config": {"pools": {"chat": {"policy": "prefix_aware", "endpoints": ENGINES}}}
}
TLS = {**MINIMAL, "tls": {"secret": "gateway-tls", "clientCa": "ca.crt", "admin": True}}
CASES = {"least": MINIMAL, "full": FULL}


def objects(values: dict[str, Any]) -> list[dict[str, Any]]:
    with Chart.load(PATH) as loaded:
        loaded.validate_schema(values)
        texts = loaded.render(values, name="gw", namespace="llm")
    rendered = [text for name, text in texts.items() if not name.endswith("NOTES.txt")]
    return [item for text in rendered for item in yaml.safe_load_all(text) if item]


def find_object(kind: str, values: dict[str, Any], suffix: str = "") -> dict[str, Any]:
    (match,) = [
        item
        for item in objects(values)
        if item["kind"] == kind and item["metadata"]["name"].endswith(suffix)
    ]
    return match


def paths(value: Any, prefix: str = "") -> set[str]:
    """Return the paths of all keys in `value`, without list indices."""
    if isinstance(value, dict):
        return {f"{prefix}.{key}" for key in value}.union(
            *(paths(inner, f"{prefix}.{key}") for key, inner in value.items())
        )
    return (
        set().union(*(paths(item, prefix) for item in value)) if isinstance(value, list) else set()
    )


def gateway_yaml(values: dict[str, Any], folder: Path) -> Config:
    """Return the configuration of the pods, with its Secrets' files where the volume has them."""
    (folder / "secrets").mkdir(exist_ok=True)
    for name, text in SECRETS.items():
        (folder / "secrets" / name).write_text(text)
    file = folder / "gateway.yaml"
    file.write_text(
        find_object("ConfigMap", {**values, "dashboards": {"enabled": False}})["data"][
            "gateway.yaml"
        ]
    )
    return examine(file, os.environ).config


def test_helm_lint_reports_no_warning() -> None:
    report = chart.lint(PATH, MINIMAL, strict=True)
    assert report["errors"] == []
    assert [item for item in report["messages"] if item["severity"] > 1] == []


@pytest.mark.parametrize("values", [*CASES.values(), TLS], ids=[*CASES, "tls"])
def test_kubernetes_accepts_every_object(values: dict[str, Any]) -> None:
    rendered = objects(values)
    assert {"Deployment", "Service", "ConfigMap", "NetworkPolicy", "PodDisruptionBudget"} <= {
        item["kind"] for item in rendered
    }
    for item in rendered:
        if item["kind"] not in EXTRA and item["kind"] not in UNKNOWN:
            kubernetes_validate.validate(item, KUBERNETES, strict=True)


@pytest.mark.parametrize("kind", EXTRA)
def test_objects_of_operators_have_only_known_keys(kind: str) -> None:
    written = find_object(kind, FULL)
    known = (
        EXTRA[kind]
        .model_validate(written)
        .model_dump(by_alias=True, exclude_unset=True, mode="json")
    )
    assert paths(written) - paths(known) == set()


def test_a_key_unknown_to_kubernetes_is_rejected() -> None:
    wrong = copy.deepcopy(find_object("Deployment", MINIMAL))
    wrong["spec"]["template"]["spec"]["nonsense"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


@pytest.mark.parametrize("case", CASES)
def test_the_gateway_accepts_the_configuration_from_values(case: str, tmp_path: Path) -> None:
    config = gateway_yaml(CASES[case], tmp_path)
    values = yaml.safe_load((PATH / "values.yaml").read_text())
    assert config.listeners.api.port == values["ports"]["api"]
    assert config.timeouts.shutdown == values["drainSeconds"]
    assert "gw-penstock-admin.llm" in config.admin.hosts
    assert config.pools.keys() == CASES[case]["config"]["pools"].keys()


def test_values_win_over_the_charts_own_configuration(tmp_path: Path) -> None:
    config = gateway_yaml(FULL, tmp_path)
    assert config.timeouts.stall == 90.0
    assert "ops.internal" in config.admin.hosts
    assert config.admin.key is not None
    assert config.admin.key.reveal() == SECRETS["admin"]
    assert config.tenants[0].key.reveal() == SECRETS["team-a"]
    assert config.pools["chat"].endpoints[0].kv_tokens == 2_000_000


def test_no_object_of_the_chart_contains_a_secret() -> None:
    assert "Secret" not in {item["kind"] for item in objects(FULL)}
    pod = find_object("Deployment", FULL)["spec"]["template"]["spec"]
    sources = pod["volumes"][0]["projected"]["sources"]
    assert {
        item["path"] for item in sources if "secret" in item for item in item["secret"]["items"]
    } == {f"secrets/{name}" for name in SECRETS}


def tls_values(**tls: Any) -> dict[str, Any]:
    return {**MINIMAL, "tls": {"secret": "gateway-tls", **tls}, "serviceMonitor": {"enabled": True}}


def test_a_tls_secret_enables_tls_and_is_mounted_next_to_the_configuration(
    tmp_path: Path,
) -> None:
    values = tls_values(clientCa="ca.crt")
    Authority(tmp_path / "tls").issue("tls", "gw-penstock.llm.svc")
    for issued, mounted in (("tls.pem", "tls.crt"), ("ca.pem", "client-ca.crt")):
        (tmp_path / "tls" / issued).rename(tmp_path / "tls" / mounted)
    listeners = gateway_yaml(values, tmp_path).listeners
    assert listeners.api.tls is not None
    assert listeners.api.tls.client_ca == str(tmp_path / "tls" / "client-ca.crt")
    assert listeners.admin.tls is None
    sources = find_object("Deployment", values)["spec"]["template"]["spec"]["volumes"][0][
        "projected"
    ]["sources"]
    (secret,) = [item["secret"] for item in sources if "secret" in item]
    assert secret["name"] == "gateway-tls"
    assert {item["key"]: item["path"] for item in secret["items"]} == {
        "tls.crt": "tls/tls.crt",
        "tls.key": "tls/tls.key",
        "ca.crt": "tls/client-ca.crt",
    }


def test_probes_commands_and_scrapes_use_https_where_the_admin_server_has_tls(
    tmp_path: Path,
) -> None:
    values = tls_values(admin=True)
    (container,) = find_object("Deployment", values)["spec"]["template"]["spec"]["containers"]
    probes = [container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]
    assert [item["scheme"] for item in probes] == ["HTTPS"] * 3
    env = {item["name"]: item["value"] for item in container["env"]}
    assert env == {"PENSTOCK_ADMIN": "https://127.0.0.1:8081", "PENSTOCK_ADMIN_INSECURE": "1"}
    assert find_object("ServiceMonitor", values)["spec"]["endpoints"][0]["scheme"] == "https"
    protocols = [
        find_object("Service", values, suffix)["spec"]["ports"][0]["appProtocol"]
        for suffix in ("penstock", "admin")
    ]
    assert protocols == ["https", "https"]


@pytest.mark.parametrize(
    ("timeouts", "seconds"),
    [
        ({}, 0),
        ({"grace": None}, 0),
        ({"grace": "20s"}, 20),
        ({"grace": "1m30s"}, 90),
        ({"grace": "1500ms"}, 2),
    ],
)
def test_the_grace_period_of_pods_covers_all_waits_and_half_a_minute(
    timeouts: dict[str, Any], seconds: int
) -> None:
    config = {**MINIMAL["config"], "timeouts": timeouts}
    pod = find_object("Deployment", {"config": config, "drainSeconds": 600, "preStopSeconds": 7})[
        "spec"
    ]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 7 + seconds + 600 + 30
    assert pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"] == 7


def container(values: dict[str, Any]) -> dict[str, Any]:
    (found,) = find_object("Deployment", values)["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_resources_of_a_pod_grow_with_its_workers_and_include_the_supervisor() -> None:
    config = MINIMAL["config"]
    assert container(MINIMAL)["resources"] == {
        "requests": {"cpu": "1000m", "memory": "1024Mi"},
        "limits": {"memory": "2048Mi"},
    }
    assert container({"config": config | {"workers": 4}})["resources"] == {
        "requests": {"cpu": "4000m", "memory": f"{4 * 1024 + 128}Mi"},
        "limits": {"memory": f"{4 * 2048 + 128}Mi"},
    }
    item = {"cpuMillis": 500, "memoryRequestMi": 600, "memoryLimitMi": 700}
    own = {"limits": {"cpu": "2", "memory": "3Gi"}}
    values = {
        "config": config | {"workers": 2},
        "resourcesPerWorker": item,
        "supervisorMemoryMi": 50,
    }
    assert container(values | {"resources": own})["resources"] == {
        "requests": {"cpu": "1000m", "memory": "1250Mi"},
        "limits": {"cpu": "2", "memory": "3Gi"},
    }


def test_ingress_and_route_are_off_by_default_and_lead_to_the_api_only() -> None:
    assert not {"Ingress", "HTTPRoute"} & {item["kind"] for item in objects(MINIMAL)}
    (api,) = find_object("Service", FULL, "penstock")["spec"]["ports"]
    ingress, route = find_object("Ingress", FULL), find_object("HTTPRoute", FULL)
    assert [rule["host"] for rule in ingress["spec"]["rules"]] == FULL["ingress"]["hosts"]
    for rule in ingress["spec"]["rules"]:
        (path,) = rule["http"]["paths"]
        assert path["backend"] == {
            "service": {"name": "gw-penstock", "port": {"name": api["name"]}}
        }
    assert ingress["spec"]["ingressClassName"] == "nginx"
    assert ingress["spec"]["tls"] == FULL["ingress"]["tls"]
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "gw-penstock", "port": api["port"]}]
    assert (rule["matches"], rule["timeouts"]) == (
        [{"path": {"type": "PathPrefix", "value": "/"}}],
        {"request": "0s"},
    )
    assert (route["apiVersion"], route["spec"]["hostnames"]) == (
        "gateway.networking.k8s.io/v1",
        ["llm.example.com"],
    )
    assert route["spec"].keys() == {"parentRefs", "hostnames", "rules"}


def test_annotations_are_on_the_objects_they_are_for() -> None:
    wanted = {"x": "y"}
    for metadata in (
        find_object("Deployment", FULL)["metadata"],
        find_object("Deployment", FULL)["spec"]["template"]["metadata"],
        find_object("Service", FULL, "penstock")["metadata"],
        find_object("Service", FULL, "-admin")["metadata"],
        find_object("ServiceAccount", FULL)["metadata"],
        find_object("HTTPRoute", FULL)["metadata"],
    ):
        assert wanted.items() <= metadata["annotations"].items()
    assert find_object("Ingress", FULL)["metadata"]["annotations"] == FULL["ingress"]["annotations"]


def test_volumes_of_values_are_mounted_in_addition_to_the_charts_own() -> None:
    pod = find_object("Deployment", FULL)["spec"]["template"]["spec"]
    assert [item["name"] for item in pod["volumes"]] == ["config", "state", "tmp", "ca"]
    assert pod["volumes"][-1] == FULL["extraVolumes"][0]
    assert pod["containers"][0]["volumeMounts"][-1] == FULL["extraVolumeMounts"][0]


def restart_annotation(**config: Any) -> str:
    values = {"config": {**MINIMAL["config"], **config}}
    return str(
        find_object("Deployment", values)["spec"]["template"]["metadata"]["annotations"][
            "penstock/restarts"
        ]
    )


def test_pods_are_replaced_only_by_changes_that_need_a_restart() -> None:
    assert (
        restart_annotation()
        == restart_annotation(retries={"budget": 0.1})
        == restart_annotation(timeouts={"stall": "10s"})
    )
    assert restart_annotation() == restart_annotation(
        observability={"traces": {"endpoint": "http://127.0.0.1:4318/v1/traces"}}
    )
    assert restart_annotation() != restart_annotation(observability={"access_log": "off"})
    assert restart_annotation() != restart_annotation(prefix={"index": "1GiB"})
    assert restart_annotation() != restart_annotation(workers=2)


@pytest.mark.parametrize(
    "values",
    [
        {"config": {"pools": {}}},
        {**MINIMAL, "replicas": 3},
        {"config": {"pools": {"a": {}}, "listeners": {}}},
        {**MINIMAL, "drainSeconds": "2m"},
        {"config": {"pools": {"a": {}}, "timeouts": {"grace": "20"}}},
        {"config": {"pools": {"a": {}}, "workers": "${WORKERS}"}},
        {**MINIMAL, "ingress": {"enabled": True}},
        {**MINIMAL, "httpRoute": {"enabled": True}},
        {**MINIMAL, "keda": {"enabled": True}},
        {**MINIMAL, "networkPolicy": {"adminFrom": []}},
        {"config": {"pools": {"a": {}}, "admin": {"key": "in clear"}}},
        {**MINIMAL, "discovery": {"enabled": "yes"}},
        {**MINIMAL, "tls": {"admin": True}},
        {**MINIMAL, "tls": {"clientCa": "ca.crt"}},
    ],
    ids=str,
)
def test_invalid_values_are_rejected(values: dict[str, Any]) -> None:
    with Chart.load(PATH) as loaded:
        loaded.validate_schema(MINIMAL)
        with pytest.raises(helm_python.HelmValuesError):
            loaded.validate_schema(values)


def test_the_schema_of_values_describes_exactly_the_values() -> None:
    values = yaml.safe_load((PATH / "values.yaml").read_text())
    described = json.loads((PATH / "values.schema.json").read_text())["properties"].keys()
    assert described - {"global", "nameOverride", "fullnameOverride"} == values.keys()


def test_the_plain_manifests_equal_the_charts_defaults() -> None:
    plain = yaml.safe_load((ROOT / "deploy/kubernetes/deployment.yaml").read_text())["spec"]
    ours = find_object("Deployment", {**MINIMAL, "fullnameOverride": "penstock"})["spec"]
    for spec in (plain, ours):
        spec["template"]["metadata"].pop("annotations", None)
        spec["template"]["metadata"]["labels"] = spec["selector"] = {}
        spec["template"]["spec"]["containers"][0]["image"] = "penstock"
        for spread in spec["template"]["spec"]["topologySpreadConstraints"]:
            spread["labelSelector"] = {}
    assert plain == ours


def role_rules(values: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the rules of the Roles by namespace, which must be bound to the gateways' account."""
    objects_by_key = {
        (item["kind"], item["metadata"].get("namespace")): item for item in objects(values)
    }
    roles = {
        space: item["rules"] for (kind, space), item in objects_by_key.items() if kind == "Role"
    }
    for space in roles:
        bound = objects_by_key["RoleBinding", space]
        assert bound["roleRef"]["name"] == objects_by_key["Role", space]["metadata"]["name"]
        assert bound["subjects"] == [
            {"kind": "ServiceAccount", "name": "gw-penstock", "namespace": "llm"}
        ]
    return roles


def test_only_releases_with_discovery_may_list_and_watch_endpoint_slices() -> None:
    pools = {
        "chat": {"discover": {"kubernetes": {"service": "vllm", "namespace": "models"}}},
        "code": {"discover": {"kubernetes": {"service": "sglang"}}},
        "rest": {"endpoints": ENGINES},
    }
    values = {"config": {"pools": pools}, "discovery": {"enabled": True}}
    may = [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["list", "watch"],
        }
    ]
    assert role_rules(values) == {"models": may, "llm": may}
    assert role_rules(MINIMAL) == role_rules({"config": {"pools": pools}}) == {}
    for item, token in ((values, True), (MINIMAL, False)):
        assert (
            find_object("Deployment", item)["spec"]["template"]["spec"][
                "automountServiceAccountToken"
            ]
            is token
        )


def test_releases_with_discovery_in_one_namespace_have_separate_roles() -> None:
    pools = {"chat": {"discover": {"kubernetes": {"service": "vllm", "namespace": "models"}}}}
    values = {"config": {"pools": pools}, "discovery": {"enabled": True}}
    with Chart.load(PATH) as loaded:
        loaded.validate_schema(values)
        objects_by_key = [loaded.render(values, name="gw", namespace=space) for space in ("a", "b")]
    names = [
        {
            (item["kind"], item["metadata"]["name"])
            for name, text in texts.items()
            if not name.endswith("NOTES.txt")
            for item in yaml.safe_load_all(text)
            if item and item["metadata"].get("namespace") == "models"
        }
        for texts in objects_by_key
    ]
    assert [len(item) for item in names] == [2, 2]
    assert names[0].isdisjoint(names[1])


def test_only_notes_of_a_release_with_discovery_ask_for_its_role() -> None:
    discovering = {"discover": {"kubernetes": {"service": "vllm"}}}
    others = {
        "discover": None,
        "endpoints": [{"url": "http://kubernetes:8000", "name": "kubernetes: the engine"}],
    }
    mentions = []
    for pool in (discovering, others):
        with Chart.load(PATH) as loaded:
            texts = loaded.render({"config": {"pools": {"chat": pool}}}, name="gw", namespace="llm")
        (notes,) = [text for name, text in texts.items() if name.endswith("NOTES.txt")]
        mentions.append("set discovery.enabled" in notes)
    assert mentions == [True, False]


def test_a_pool_with_discover_null_needs_no_role() -> None:
    values = {
        "config": {"pools": {"chat": {"discover": None, "endpoints": ENGINES}}},
        "discovery": {"enabled": True},
    }
    assert role_rules(values).keys() == {"llm"}


def test_scraped_series_have_the_job_and_labels_that_the_alerts_need() -> None:
    """The job does not depend on the release's name, and no target label hides `endpoint`."""
    monitor = find_object("ServiceMonitor", FULL)["spec"]
    (service,) = [
        item
        for item in objects(FULL)
        if item["kind"] == "Service"
        and monitor["selector"]["matchLabels"].items() <= item["metadata"]["labels"].items()
    ]
    (down,) = [item for item in ALERTS if item.name == "PenstockDown"]
    (wanted,) = re.findall(r'job=~"(.*?)"', down.value)
    assert re.fullmatch(wanted, service["metadata"]["labels"][monitor["jobLabel"]])
    assert [item["honorLabels"] for item in monitor["endpoints"]] == [True]


def test_keda_counts_the_prompts_of_a_pool_by_the_models_that_it_serves() -> None:
    values = copy.deepcopy(FULL)
    values["config"]["pools"]["code"] = {"endpoints": ENGINES}
    values["config"]["models"] += [
        {"name": "meta/llama-3.1", "pool": "chat"},
        {"name": "coder", "pool": "code"},
    ]
    _, ttft = find_object("ScaledObject", values)["spec"]["triggers"]
    of = r'{model=~"llama|meta/llama-3\\.1"}'
    for counter in ("penstock_prompt_tokens_total", "penstock_cached_tokens_total"):
        assert f"rate({counter}{of}[2m])" in ttft["metadata"]["query"]
    del values["config"]["models"]
    _, ttft = find_object("ScaledObject", values)["spec"]["triggers"]
    assert "rate(penstock_prompt_tokens_total[2m])" in ttft["metadata"]["query"]


def test_what_keda_asks_prometheus_is_understood(tmp_path: Path) -> None:
    triggers = find_object("ScaledObject", FULL)["spec"]["triggers"]
    rules = [
        {"record": f"trigger:{n}", "expr": item["metadata"]["query"]}
        for n, item in enumerate(triggers)
    ]
    assert len(rules) == 2
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "keda", "rules": rules}]}))
    result = subprocess.run(
        ["promtool", "check", "rules", str(file)], capture_output=True, text=True, timeout=30
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_boards_and_rules_are_those_of_the_project() -> None:
    rules = find_object("PrometheusRule", FULL)["spec"]["groups"]
    assert (
        rules
        == yaml.safe_load((ROOT / "deploy/prometheus/penstock.rules.yml").read_text())["groups"]
    )
    boards = {
        key: text
        for item in objects(FULL)
        if item["kind"] == "ConfigMap"
        for key, text in item["data"].items()
    }
    for path in (ROOT / "deploy" / "grafana").glob("*.json"):
        assert json.loads(boards[path.name]) == json.loads(path.read_text())
    assert not re.search(r"\{\{ *\.", json.dumps(rules))
