"""Third-party linters, schemas and parsers accept the files of deploy/."""

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
"""The types in envoy.yaml; each has to be imported before it can be parsed."""

# Envoy's message classes cause deprecation warnings of their library.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
Tool = Callable[..., tuple[int, str]]


def run(*command: str) -> tuple[int, str]:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    return result.returncode, result.stdout + result.stderr


def test_hadolint_reports_no_problem_of_the_image(tool: Tool) -> None:
    assert tool("hadolint", "deploy/docker/Dockerfile") == (0, "")


def test_yamllint_reports_no_problem_of_any_yaml(tool: Tool) -> None:
    rules = (
        "{extends: default, rules: {line-length: {max: 140}, document-start: disable, "
        "comments: disable, braces: {max-spaces-inside: 1}, comments-indentation: disable, "
        "truthy: {check-keys: false}}}"
    )
    ours = (
        "compose",
        "config",
        "kubernetes",
        "proxies",
        "helm/penstock/Chart.yaml",
        "helm/penstock/values.yaml",
    )
    assert tool("yamllint", "--strict", "-d", rules, *(f"deploy/{path}" for path in ours)) == (
        0,
        "",
    )


def test_gixy_finds_no_unsafe_setting_of_nginx(tool: Tool, tmp_path: Path) -> None:
    config = tmp_path / "nginx.conf"
    config.write_text(f"events {{}}\nhttp {{ include {DEPLOY}/proxies/nginx.conf; }}\n")
    status, output = tool("gixy", str(config))
    assert (status, "No issues found" in output) == (0, True), output


def compose() -> Any:
    """Return compose.yaml with its anchors resolved."""
    return yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())


def test_compose_follows_its_specification() -> None:
    names = PyCompose.from_yaml(yaml.safe_dump(compose())).service_names()
    assert set(names) == {"gateway-1", "gateway-2", "fleet", "redis", "prometheus", "grafana"}


@pytest.mark.parametrize(
    ("key", "value"), [("nonsense", 1), ("stop_grace_period", "1 minute"), ("ports", ["x:y:z"])]
)
def test_the_compose_specification_rejects_unknown_and_invalid_keys(
    key: str, value: object
) -> None:
    wrong = compose()
    wrong["services"]["redis"][key] = value
    with pytest.raises(ValueError, match=r"."):
        PyCompose.from_yaml(yaml.safe_dump(wrong))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_accepts_every_plain_manifest(path: Path) -> None:
    manifests = [manifest for manifest in yaml.safe_load_all(path.read_text()) if manifest]
    assert manifests
    for manifest in manifests:
        if manifest["kind"] != "Kustomization":
            kubernetes_validate.validate(manifest, "1.33", strict=True)


@pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl, which includes kustomize, is not installed"
)
def test_kustomize_builds_the_base() -> None:
    status, output = run("kubectl", "kustomize", "deploy/kubernetes")
    assert status == 0, output
    built = list(yaml.safe_load_all(output))
    assert {item["kind"] for item in built} >= {
        "Deployment",
        "ConfigMap",
        "Namespace",
        "NetworkPolicy",
    }
    assert {item["metadata"].get("namespace", "penstock") for item in built} == {"penstock"}


def envoy_yaml() -> Any:
    return yaml.safe_load((DEPLOY / "proxies" / "envoy.yaml").read_text())


def parse_by_envoy(written: Any) -> Any:
    """Return a configuration as Envoy's message classes parse it."""
    # Imported here, since thousands of classes emit warnings on import.
    for name in ENVOY_TYPES:
        importlib.import_module(f"envoy_data_plane.{name}")
    bootstrap = importlib.import_module("envoy_data_plane.envoy.config.bootstrap.v3").Bootstrap
    return bootstrap.from_dict(written).to_dict()


def test_envoys_message_classes_accept_its_file() -> None:
    listeners = parse_by_envoy(envoy_yaml())["staticResources"]["listeners"]
    manager = listeners[0]["filterChains"][0]["filters"][0]["typedConfig"]
    assert manager["streamIdleTimeout"] == "660s"


@pytest.mark.parametrize("section", ["clusters", "listeners"])
def test_envoys_message_classes_reject_unknown_keys(section: str) -> None:
    wrong = copy.deepcopy(envoy_yaml())
    wrong["static_resources"][section][0]["nonsense"] = 1
    with pytest.raises(KeyError, match="nonsense"):
        parse_by_envoy(wrong)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "penstock.service").read_text()
    unit = tmp_path / "penstock.service"
    # systemd-analyze requires that the program exists.
    unit.write_text(text.replace("/opt/penstock/bin/penstock", "/bin/true"))
    assert run("systemd-analyze", "verify", "--man=no", str(unit)) == (0, "")


def test_systemd_reports_a_low_exposure_of_the_unit() -> None:
    path = "deploy/systemd/penstock.service"
    status, output = run(
        "systemd-analyze", "security", "--offline=true", "--threshold=15", "--no-pager", path
    )
    assert status == 0, output
    (level,) = re.findall(r"exposure level for penstock.service: ([0-9.]+) OK", output)
    assert float(level) <= 1.5


def test_promtool_accepts_the_scrape_configuration_of_compose(tmp_path: Path) -> None:
    text = (DEPLOY / "compose" / "prometheus.yml").read_text()
    folder = "/etc/prometheus/penstock"  # where compose.yaml mounts deploy/prometheus
    assert folder in text
    file = tmp_path / "prometheus.yml"
    file.write_text(text.replace(folder, str(DEPLOY / "prometheus")))
    status, output = run("promtool", "check", "config", str(file))
    assert status == 0, output
    assert "1 rule files found" in output
