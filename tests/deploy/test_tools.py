"""Checks each file of deploy/ with the linter, schema or parser of its format."""

from __future__ import annotations

import copy
import importlib
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from compose_spec import PyCompose

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted(
    set((DEPLOY / "kubernetes").glob("*.yaml")) - {DEPLOY / "kubernetes" / "gateway.yaml"}
)
ENVOY_TYPES = (
    "envoy.extensions.filters.network.http_connection_manager.v3",
    "envoy.extensions.filters.http.router.v3",
    "envoy.extensions.transport_sockets.tls.v3",
    "envoy.extensions.upstreams.http.v3",
)
"""Python modules with the message types that envoy.yaml names by @type."""

# The library of Envoy's messages emits deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
Tool = Callable[..., tuple[int, str]]


def run(*command: str) -> tuple[int, str]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_hadolint_has_nothing_to_say_about_the_image(tool: Tool) -> None:
    assert tool("hadolint", "deploy/docker/Dockerfile") == (0, "")


def test_yamllint_has_nothing_to_say_about_any_yaml(tool: Tool) -> None:
    rules = (
        "{extends: default, rules: {line-length: {max: 140}, document-start: disable, comments: disable, "
        + (
            "braces: {max-spaces-inside: 1}, comments-indentation: disable, truthy: {check-keys: false}}}"
        )
    )
    ours = (
        "compose",
        "config",
        "kubernetes",
        "proxies",
        "helm/penstock/Chart.yaml",
        "helm/penstock/values.yaml",
    )
    assert tool("yamllint", "--strict", "-d", rules, *(f"deploy/{each}" for each in ours)) == (
        0,
        "",
    )


def test_gixy_finds_nothing_unsafe_in_nginx(tool: Tool, tmp_path: Path) -> None:
    whole = tmp_path / "nginx.conf"
    whole.write_text(f"events {{}}\nhttp {{ include {DEPLOY}/proxies/nginx.conf; }}\n")
    status, said = tool("gixy", str(whole))
    assert (status, "No issues found" in said) == (0, True), said


def compose() -> Any:
    return yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())


def test_compose_follows_its_specification() -> None:
    names = PyCompose.from_yaml(yaml.safe_dump(compose())).service_names()
    assert set(names) == {"gateway-1", "gateway-2", "fleet", "redis", "prometheus", "grafana"}


@pytest.mark.parametrize(
    ("key", "value"), [("nonsense", 1), ("stop_grace_period", "1 minute"), ("ports", ["x:y:z"])]
)
def test_the_specification_would_refuse_what_it_does_not_know(key: str, value: object) -> None:
    wrong = compose()
    wrong["services"]["redis"][key] = value
    with pytest.raises(ValueError, match=r"."):
        PyCompose.from_yaml(yaml.safe_dump(wrong))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_takes_every_plain_manifest(path: Path) -> None:
    found = [each for each in yaml.safe_load_all(path.read_text()) if each]
    assert found
    for each in found:
        if each["kind"] != "Kustomization":
            kubernetes_validate.validate(each, "1.33", strict=True)


@pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl brings kustomize, and no registry has it"
)
def test_kustomize_builds_the_base() -> None:
    status, said = run("kubectl", "kustomize", "deploy/kubernetes")
    assert status == 0, said
    built = list(yaml.safe_load_all(said))
    assert {each["kind"] for each in built} >= {
        "Deployment",
        "ConfigMap",
        "Namespace",
        "NetworkPolicy",
    }
    assert {each["metadata"].get("namespace", "penstock") for each in built} == {"penstock"}


def envoy_yaml() -> Any:
    return yaml.safe_load((DEPLOY / "proxies" / "envoy.yaml").read_text())


def parsed_by_envoy(written: Any) -> Any:
    # Parse an Envoy configuration with Envoy's own messages, and return the result.
    #
    # They are imported here, because they are thousands of classes that emit warnings.
    for name in ENVOY_TYPES:
        importlib.import_module(f"envoy_data_plane.{name}")
    bootstrap = importlib.import_module("envoy_data_plane.envoy.config.bootstrap.v3").Bootstrap
    return bootstrap.from_dict(written).to_dict()


def test_envoys_own_messages_take_its_file() -> None:
    listeners = parsed_by_envoy(envoy_yaml())["staticResources"]["listeners"]
    manager = listeners[0]["filterChains"][0]["filters"][0]["typedConfig"]
    assert manager["streamIdleTimeout"] == "660s"


@pytest.mark.parametrize("at", ["clusters", "listeners"])
def test_envoys_messages_would_refuse_what_they_do_not_know(at: str) -> None:
    wrong = copy.deepcopy(envoy_yaml())
    wrong["static_resources"][at][0]["nonsense"] = 1
    with pytest.raises(KeyError, match="nonsense"):
        parsed_by_envoy(wrong)


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "penstock.service").read_text()
    unit = tmp_path / "penstock.service"
    # systemd-analyze requires that the program exists.
    unit.write_text(text.replace("/opt/penstock/bin/penstock", "/bin/true"))
    assert run("systemd-analyze", "verify", "--man=no", str(unit)) == (0, "")


def test_systemd_finds_the_unit_well_shut_off() -> None:
    path = "deploy/systemd/penstock.service"
    status, said = run(
        "systemd-analyze", "security", "--offline=true", "--threshold=15", "--no-pager", path
    )
    assert status == 0, said
    (level,) = re.findall(r"exposure level for penstock.service: ([0-9.]+) OK", said)
    assert float(level) <= 1.5


def test_prometheus_takes_the_scrape_of_compose(tmp_path: Path) -> None:
    text = (DEPLOY / "compose" / "prometheus.yml").read_text()
    folder = "/etc/prometheus/penstock"  # where compose.yaml mounts deploy/prometheus
    assert folder in text
    file = tmp_path / "prometheus.yml"
    file.write_text(text.replace(folder, str(DEPLOY / "prometheus")))
    status, said = run("promtool", "check", "config", str(file))
    assert status == 0, said
    assert "1 rule files found" in said
