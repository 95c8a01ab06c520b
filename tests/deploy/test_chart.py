"""Tests of the Helm chart, rendered by Helm: all Kubernetes objects and configurations are
valid.
"""

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
from tests.certificate_authority import Authority
from tools.monitoring.alerts import ALERTS

ROOT = Path(__file__).parents[2]
PATH = ROOT / "deploy" / "helm" / "penstock"
EXTRA = {
    "ScaledObject": ScaledObject,
    "ServiceMonitor": ServiceMonitor,
    "PrometheusRule": PrometheusRule,
}
UNKNOWN = {"HTTPRoute"}
"""Kinds of Kubernetes objects for which no schema is available here (Gateway API); a test compares
each of their keys."""
KUBERNETES = "1.33"
FULL = json.loads((Path(__file__).parent / "full.values.json").read_text())
SECRETS = {
    "team-a": "sk-team-a-of-the-test",
    "fleet": "sixteen-characters-and-more",
    "redis": "r",
    "admin": "adm",
}
ENGINES = [{"url": f"http://vllm-{n}.vllm:8000", "name": f"vllm-{n}"} for n in range(2)]
LEAST: dict[str, Any] = {
    "config": {"pools": {"chat": {"policy": "prefix_aware", "endpoints": ENGINES}}}
}
TLS = {**LEAST, "tls": {"secret": "gateway-tls", "clientCa": "ca.crt", "admin": True}}
CASES = {"least": LEAST, "full": FULL}


def objects(values: dict[str, Any]) -> list[dict[str, Any]]:
    with Chart.load(PATH) as loaded:
        loaded.validate_schema(values)
        texts = loaded.render(values, name="gw", namespace="llm")
    rendered = [text for name, text in texts.items() if not name.endswith("NOTES.txt")]
    return [each for text in rendered for each in yaml.safe_load_all(text) if each]


def one(kind: str, values: dict[str, Any], suffix: str = "") -> dict[str, Any]:
    (found,) = [
        each
        for each in objects(values)
        if each["kind"] == kind and each["metadata"]["name"].endswith(suffix)
    ]
    return found


def paths(value: Any, at: str = "") -> set[str]:
    # Return the dotted path of every mapping key anywhere in `value`.
    #
    # List indices are not part of a path.
    if isinstance(value, dict):
        return {f"{at}.{key}" for key in value}.union(
            *(paths(each, f"{at}.{key}") for key, each in value.items())
        )
    return set().union(*(paths(each, at) for each in value)) if isinstance(value, list) else set()


def gateway_yaml(values: dict[str, Any], folder: Path) -> Config:
    # Return the configuration that the pods would use for these chart values.
    #
    # The files of its Secrets are written to `folder`, as in the pods' volume.
    (folder / "secrets").mkdir(exist_ok=True)
    for name, text in SECRETS.items():
        (folder / "secrets" / name).write_text(text)
    file = folder / "gateway.yaml"
    file.write_text(
        one("ConfigMap", {**values, "dashboards": {"enabled": False}})["data"]["gateway.yaml"]
    )
    return load_with_warnings(file, os.environ).config


def test_helm_lints_it_without_a_warning() -> None:
    report = chart.lint(PATH, LEAST, strict=True)
    assert report["errors"] == []
    assert [each for each in report["messages"] if each["severity"] > 1] == []


@pytest.mark.parametrize("values", [*CASES.values(), TLS], ids=[*CASES, "tls"])
def test_every_object_is_one_that_kubernetes_takes(values: dict[str, Any]) -> None:
    rendered = objects(values)
    assert {"Deployment", "Service", "ConfigMap", "NetworkPolicy", "PodDisruptionBudget"} <= {
        each["kind"] for each in rendered
    }
    for each in rendered:
        if each["kind"] not in EXTRA and each["kind"] not in UNKNOWN:
            kubernetes_validate.validate(each, KUBERNETES, strict=True)


@pytest.mark.parametrize("kind", EXTRA)
def test_operators_objects_have_no_key_that_their_operators_do_not_know(kind: str) -> None:
    written = one(kind, FULL)
    known = (
        EXTRA[kind]
        .model_validate(written)
        .model_dump(by_alias=True, exclude_unset=True, mode="json")
    )
    assert paths(written) - paths(known) == set()


def test_a_key_that_kubernetes_does_not_know_would_be_seen() -> None:
    wrong = copy.deepcopy(one("Deployment", LEAST))
    wrong["spec"]["template"]["spec"]["nonsense"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


@pytest.mark.parametrize("case", CASES)
def test_the_gateways_take_the_configuration_that_values_become(case: str, tmp_path: Path) -> None:
    config = gateway_yaml(CASES[case], tmp_path)
    values = yaml.safe_load((PATH / "values.yaml").read_text())
    assert config.listeners.api.port == values["ports"]["api"]
    assert config.timeouts.shutdown == values["drainSeconds"]
    assert "gw-penstock-admin.llm" in config.admin.hosts
    assert config.pools.keys() == CASES[case]["config"]["pools"].keys()


def test_what_the_chart_adds_does_not_take_away_what_values_say(tmp_path: Path) -> None:
    config = gateway_yaml(FULL, tmp_path)
    assert config.timeouts.stall == 90.0
    assert "ops.internal" in config.admin.hosts
    assert config.admin.key is not None
    assert config.admin.key.reveal() == SECRETS["admin"]
    assert config.tenants[0].key.reveal() == SECRETS["team-a"]
    assert config.pools["chat"].endpoints[0].kv_tokens == 2_000_000


def test_no_secret_is_in_an_object_that_the_chart_makes() -> None:
    assert "Secret" not in {each["kind"] for each in objects(FULL)}
    pod = one("Deployment", FULL)["spec"]["template"]["spec"]
    sources = pod["volumes"][0]["projected"]["sources"]
    assert {
        item["path"] for each in sources if "secret" in each for item in each["secret"]["items"]
    } == {f"secrets/{name}" for name in SECRETS}


def tls_values(**tls: Any) -> dict[str, Any]:
    return {**LEAST, "tls": {"secret": "gateway-tls", **tls}, "serviceMonitor": {"enabled": True}}


def test_a_tls_secret_encrypts_the_api_and_is_mounted_beside_the_configuration(
    tmp_path: Path,
) -> None:
    values = tls_values(clientCa="ca.crt")
    Authority(tmp_path / "tls").issue("tls", "gw-penstock.llm.svc")
    for made, mounted in (("tls.pem", "tls.crt"), ("ca.pem", "client-ca.crt")):
        (tmp_path / "tls" / made).rename(tmp_path / "tls" / mounted)
    listeners = gateway_yaml(values, tmp_path).listeners
    assert listeners.api.tls is not None
    assert listeners.api.tls.client_ca == str(tmp_path / "tls" / "client-ca.crt")
    assert listeners.admin.tls is None
    sources = one("Deployment", values)["spec"]["template"]["spec"]["volumes"][0]["projected"][
        "sources"
    ]
    (secret,) = [each["secret"] for each in sources if "secret" in each]
    assert secret["name"] == "gateway-tls"
    assert {each["key"]: each["path"] for each in secret["items"]} == {
        "tls.crt": "tls/tls.crt",
        "tls.key": "tls/tls.key",
        "ca.crt": "tls/client-ca.crt",
    }


def test_probes_commands_and_scrapes_use_https_where_the_admin_server_has_tls(
    tmp_path: Path,
) -> None:
    values = tls_values(admin=True)
    (container,) = one("Deployment", values)["spec"]["template"]["spec"]["containers"]
    probes = [container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]
    assert [each["scheme"] for each in probes] == ["HTTPS"] * 3
    env = {each["name"]: each["value"] for each in container["env"]}
    assert env == {"PENSTOCK_ADMIN": "https://127.0.0.1:8081", "PENSTOCK_ADMIN_INSECURE": "1"}
    assert one("ServiceMonitor", values)["spec"]["endpoints"][0]["scheme"] == "https"
    protocols = [
        one("Service", values, suffix)["spec"]["ports"][0]["appProtocol"]
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
def test_pods_are_given_every_wait_of_their_drain_and_half_a_minute(
    timeouts: dict[str, Any], seconds: int
) -> None:
    config = {**LEAST["config"], "timeouts": timeouts}
    pod = one("Deployment", {"config": config, "drainSeconds": 600, "preStopSeconds": 7})["spec"][
        "template"
    ]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 7 + seconds + 600 + 30
    assert pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"] == 7


def container(values: dict[str, Any]) -> dict[str, Any]:
    (found,) = one("Deployment", values)["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_a_pod_asks_for_as_much_for_every_worker_and_something_for_their_supervisor() -> None:
    config = LEAST["config"]
    assert container(LEAST)["resources"] == {
        "requests": {"cpu": "1000m", "memory": "1024Mi"},
        "limits": {"memory": "2048Mi"},
    }
    assert container({"config": config | {"workers": 4}})["resources"] == {
        "requests": {"cpu": "4000m", "memory": f"{4 * 1024 + 128}Mi"},
        "limits": {"memory": f"{4 * 2048 + 128}Mi"},
    }
    each = {"cpuMillis": 500, "memoryRequestMi": 600, "memoryLimitMi": 700}
    own = {"limits": {"cpu": "2", "memory": "3Gi"}}
    values = {
        "config": config | {"workers": 2},
        "resourcesPerWorker": each,
        "supervisorMemoryMi": 50,
    }
    assert container(values | {"resources": own})["resources"] == {
        "requests": {"cpu": "1000m", "memory": "1250Mi"},
        "limits": {"cpu": "2", "memory": "3Gi"},
    }


def test_ways_in_from_outside_are_off_and_lead_to_the_api_alone() -> None:
    assert not {"Ingress", "HTTPRoute"} & {each["kind"] for each in objects(LEAST)}
    (api,) = one("Service", FULL, "penstock")["spec"]["ports"]
    ingress, route = one("Ingress", FULL), one("HTTPRoute", FULL)
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


def test_annotations_stand_on_the_objects_that_they_are_for() -> None:
    wanted = {"x": "y"}
    for found in (
        one("Deployment", FULL)["metadata"],
        one("Deployment", FULL)["spec"]["template"]["metadata"],
        one("Service", FULL, "penstock")["metadata"],
        one("Service", FULL, "-admin")["metadata"],
        one("ServiceAccount", FULL)["metadata"],
        one("HTTPRoute", FULL)["metadata"],
    ):
        assert wanted.items() <= found["annotations"].items()
    assert one("Ingress", FULL)["metadata"]["annotations"] == FULL["ingress"]["annotations"]


def test_volumes_of_values_are_mounted_beside_the_charts_own() -> None:
    pod = one("Deployment", FULL)["spec"]["template"]["spec"]
    assert [each["name"] for each in pod["volumes"]] == ["config", "state", "tmp", "ca"]
    assert pod["volumes"][-1] == FULL["extraVolumes"][0]
    assert pod["containers"][0]["volumeMounts"][-1] == FULL["extraVolumeMounts"][0]


def restarts(**config: Any) -> str:
    values = {"config": {**LEAST["config"], **config}}
    return str(
        one("Deployment", values)["spec"]["template"]["metadata"]["annotations"][
            "penstock/restarts"
        ]
    )


def test_pods_are_replaced_only_by_a_change_that_no_reload_can_make() -> None:
    assert restarts() == restarts(retries={"budget": 0.1}) == restarts(timeouts={"stall": "10s"})
    assert restarts() == restarts(
        observability={"traces": {"endpoint": "http://127.0.0.1:4318/v1/traces"}}
    )
    assert restarts() != restarts(observability={"access_log": "off"})
    assert restarts() != restarts(prefix={"index": "1GiB"})
    assert restarts() != restarts(workers=2)


@pytest.mark.parametrize(
    "values",
    [
        {"config": {"pools": {}}},
        {**LEAST, "replicas": 3},
        {"config": {"pools": {"a": {}}, "listeners": {}}},
        {**LEAST, "drainSeconds": "2m"},
        {"config": {"pools": {"a": {}}, "timeouts": {"grace": "20"}}},
        {"config": {"pools": {"a": {}}, "workers": "${WORKERS}"}},
        {**LEAST, "ingress": {"enabled": True}},
        {**LEAST, "httpRoute": {"enabled": True}},
        {**LEAST, "keda": {"enabled": True}},
        {**LEAST, "networkPolicy": {"adminFrom": []}},
        {"config": {"pools": {"a": {}}, "admin": {"key": "in clear"}}},
        {**LEAST, "discovery": {"enabled": "yes"}},
        {**LEAST, "tls": {"admin": True}},
        {**LEAST, "tls": {"clientCa": "ca.crt"}},
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_refused(values: dict[str, Any]) -> None:
    with Chart.load(PATH) as loaded:
        loaded.validate_schema(LEAST)
        with pytest.raises(helm_python.HelmValuesError):
            loaded.validate_schema(values)


def test_every_value_is_described_and_every_description_has_a_value() -> None:
    values = yaml.safe_load((PATH / "values.yaml").read_text())
    described = json.loads((PATH / "values.schema.json").read_text())["properties"].keys()
    assert described - {"global", "nameOverride", "fullnameOverride"} == values.keys()


def test_the_manifests_without_helm_are_the_charts_defaults() -> None:
    plain = yaml.safe_load((ROOT / "deploy/kubernetes/deployment.yaml").read_text())["spec"]
    ours = one("Deployment", {**LEAST, "fullnameOverride": "penstock"})["spec"]
    for spec in (plain, ours):
        spec["template"]["metadata"].pop("annotations", None)
        spec["template"]["metadata"]["labels"] = spec["selector"] = {}
        spec["template"]["spec"]["containers"][0]["image"] = "penstock"
        for spread in spec["template"]["spec"]["topologySpreadConstraints"]:
            spread["labelSelector"] = {}
    assert plain == ours


def role_rules(values: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    # Return the rules of the gateways' Role in each namespace that has one.
    #
    # Asserts that it is bound to the gateways' account.
    made = {(each["kind"], each["metadata"].get("namespace")): each for each in objects(values)}
    roles = {space: each["rules"] for (kind, space), each in made.items() if kind == "Role"}
    for space in roles:
        bound = made["RoleBinding", space]
        assert bound["roleRef"]["name"] == made["Role", space]["metadata"]["name"]
        assert bound["subjects"] == [
            {"kind": "ServiceAccount", "name": "gw-penstock", "namespace": "llm"}
        ]
    return roles


def test_who_discovers_engines_may_list_and_watch_their_slices_and_everybody_else_nothing() -> None:
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
    assert role_rules(LEAST) == role_rules({"config": {"pools": pools}}) == {}
    for each, token in ((values, True), (LEAST, False)):
        assert (
            one("Deployment", each)["spec"]["template"]["spec"]["automountServiceAccountToken"]
            is token
        )


def test_releases_that_discover_engines_in_one_namespace_do_not_take_each_others_rights() -> None:
    pools = {"chat": {"discover": {"kubernetes": {"service": "vllm", "namespace": "models"}}}}
    values = {"config": {"pools": pools}, "discovery": {"enabled": True}}
    with Chart.load(PATH) as loaded:
        loaded.validate_schema(values)
        made = [loaded.render(values, name="gw", namespace=space) for space in ("a", "b")]
    names = [
        {
            (each["kind"], each["metadata"]["name"])
            for name, text in texts.items()
            if not name.endswith("NOTES.txt")
            for each in yaml.safe_load_all(text)
            if each and each["metadata"].get("namespace") == "models"
        }
        for texts in made
    ]
    assert [len(each) for each in names] == [2, 2]
    assert names[0].isdisjoint(names[1])


def test_who_is_told_to_set_discovery_has_a_pool_that_discovers_by_kubernetes() -> None:
    found = {"discover": {"kubernetes": {"service": "vllm"}}}
    others = {
        "discover": None,
        "endpoints": [{"url": "http://kubernetes:8000", "name": "kubernetes: the engine"}],
    }
    told = []
    for pool in (found, others):
        with Chart.load(PATH) as loaded:
            texts = loaded.render({"config": {"pools": {"chat": pool}}}, name="gw", namespace="llm")
        (notes,) = [text for name, text in texts.items() if name.endswith("NOTES.txt")]
        told.append("set discovery.enabled" in notes)
    assert told == [True, False]


def test_a_pool_may_say_that_it_discovers_nobody() -> None:
    values = {
        "config": {"pools": {"chat": {"discover": None, "endpoints": ENGINES}}},
        "discovery": {"enabled": True},
    }
    assert role_rules(values).keys() == {"llm"}


def test_what_is_scraped_has_the_name_and_the_labels_that_the_alerts_ask_for() -> None:
    # This holds for any release name.
    #
    # The operator's own label `endpoint` would hide the engine's name.
    monitor = one("ServiceMonitor", FULL)["spec"]
    (service,) = [
        each
        for each in objects(FULL)
        if each["kind"] == "Service"
        and monitor["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items()
    ]
    (down,) = [each for each in ALERTS if each.name == "PenstockDown"]
    (wanted,) = re.findall(r'job=~"(.*?)"', down.value)
    assert re.fullmatch(wanted, service["metadata"]["labels"][monitor["jobLabel"]])
    assert [each["honorLabels"] for each in monitor["endpoints"]] == [True]


def test_keda_counts_the_prompts_of_a_pool_by_the_models_that_it_serves() -> None:
    values = copy.deepcopy(FULL)
    values["config"]["pools"]["code"] = {"endpoints": ENGINES}
    values["config"]["models"] += [
        {"name": "meta/llama-3.1", "pool": "chat"},
        {"name": "coder", "pool": "code"},
    ]
    _, ttft = one("ScaledObject", values)["spec"]["triggers"]
    of = r'{model=~"llama|meta/llama-3\\.1"}'
    for counter in ("penstock_prompt_tokens_total", "penstock_cached_tokens_total"):
        assert f"rate({counter}{of}[2m])" in ttft["metadata"]["query"]
    del values["config"]["models"]
    _, ttft = one("ScaledObject", values)["spec"]["triggers"]
    assert "rate(penstock_prompt_tokens_total[2m])" in ttft["metadata"]["query"]


def test_what_keda_asks_prometheus_is_understood(tmp_path: Path) -> None:
    triggers = one("ScaledObject", FULL)["spec"]["triggers"]
    rules = [
        {"record": f"trigger:{n}", "expr": each["metadata"]["query"]}
        for n, each in enumerate(triggers)
    ]
    assert len(rules) == 2
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "keda", "rules": rules}]}))
    said = subprocess.run(
        ["promtool", "check", "rules", str(file)], capture_output=True, text=True, timeout=30
    )
    assert said.returncode == 0, said.stdout + said.stderr


def test_boards_and_rules_are_those_of_the_project() -> None:
    rules = one("PrometheusRule", FULL)["spec"]["groups"]
    assert (
        rules
        == yaml.safe_load((ROOT / "deploy/prometheus/penstock.rules.yml").read_text())["groups"]
    )
    boards = {
        key: text
        for each in objects(FULL)
        if each["kind"] == "ConfigMap"
        for key, text in each["data"].items()
    }
    for path in (ROOT / "deploy" / "grafana").glob("*.json"):
        assert json.loads(boards[path.name]) == json.loads(path.read_text())
    assert not re.search(r"\{\{ *\.", json.dumps(rules))
