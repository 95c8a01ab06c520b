"""Tests that the files of deploy/ are consistent: file names, commands, limits and times.

These tests are fast and need no tool. tests/deploy (`make deploy-check`) uses the real tools.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from command_line import parse_command
from gateway.cli.commands import command_function
from gateway.config import Config, load_with_warnings
from gateway.metrics.catalogue import Metrics
from gateway.protocol.api_table import APIS
from gateway.reload.reloader import BOUND_AT_START
from gateway.util.durations_and_sizes import parse_duration

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "penstock"
CONFIGS = (
    DEPLOY / "config/gateway.yaml",
    DEPLOY / "compose/config/gateway.yaml",
    DEPLOY / "kubernetes/gateway.yaml",
)
KEY = {"PENSTOCK_FLEET_KEY": "only-for-a-test-and-long"}
SHUTDOWN_AND_S = 30.0
"""Minimum seconds between the end of timeouts.shutdown and the container's SIGKILL."""


def read_yaml(path: Path) -> Any:
    return YAML(typ="safe").load(path.read_text())


def config_of(path: Path) -> Config:
    return load_with_warnings(path, os.environ | KEY).config


COMPOSE = read_yaml(DEPLOY / "compose" / "compose.yaml")
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text()
UNIT = (DEPLOY / "systemd" / "penstock.service").read_text()
POD = read_yaml(DEPLOY / "kubernetes" / "deployment.yaml")["spec"]["template"]["spec"]


def parsed(arguments: list[str]) -> str:
    # Return the name of the penstock command in `arguments`, after its options were checked.
    #
    # Raises a usage error for unknown options.
    name = arguments[0]
    parse_command(command_function(name), arguments[1:], name, {})
    return name


def unit_settings(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.parent.name)
def test_every_shipped_configuration_passes_the_check(path: Path) -> None:
    env = os.environ | KEY | {"TEAM_A_KEY": "sk-a-key-for-the-test"}
    doubts = {problem.path for problem in load_with_warnings(path, env).warnings}
    assert doubts <= {
        "listeners.admin.host"
    }  # in a container other hosts may connect: compose and network policies limit them


def test_the_image_copies_files_that_exist_and_that_are_not_left_out() -> None:
    ignored = {
        line[1:]
        for line in (DEPLOY / "docker/Dockerfile.dockerignore").read_text().split()
        if line[0] == "!"
    }
    copied = [
        line.split()[1:-1] for line in DOCKERFILE.splitlines() if re.match(r"COPY (?!--from)", line)
    ]
    sources = [source for line in copied for source in line]
    assert sources
    assert all((ROOT / source).exists() for source in sources)
    assert ignored == set(sources)
    assert {"command_line", "gateway", "kvtransfer", "mockgpu", "planner", "policies"} <= ignored


def test_the_image_runs_a_command_that_exists_as_an_account_without_rights() -> None:
    (command,) = re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert re.search(r'^ENTRYPOINT \["penstock"\]$', DOCKERFILE, re.MULTILINE)
    assert parsed(YAML(typ="safe").load(command)) == "serve"
    assert re.search(r"^USER 10001:10001$", DOCKERFILE, re.MULTILINE)
    assert re.search(r"^STOPSIGNAL SIGTERM$", DOCKERFILE, re.MULTILINE)
    assert POD["securityContext"]["runAsUser"] == 10001


def test_the_image_asks_itself_for_its_health_in_python_that_compiles() -> None:
    (command,) = re.findall(r"HEALTHCHECK.*\\\n +CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    python, flag, program = YAML(typ="safe").load(command)
    assert (python, flag) == ("python", "-c")
    compile(program, "healthcheck", "exec")
    assert "/healthz" in program


def images() -> Iterator[str]:
    yield from re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    yield from (service["image"] for service in COMPOSE["services"].values())
    yield read_yaml(CHART / "values.yaml")["image"]["repository"]
    yield from (container["image"] for container in POD["containers"])


def test_images_are_named_without_a_registry() -> None:
    for image in images():
        first, slash, _ = image.partition("/")
        assert not (slash and ("." in first or ":" in first)), image


def test_compose_publishes_on_this_machine_alone_and_no_port_twice() -> None:
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    assert len(ports) == 6
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert len({port.split(":")[1] for port in ports}) == len(ports)


def test_compose_mounts_what_exists() -> None:
    for name, service in COMPOSE["services"].items():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / "compose" / source).exists(), f"{name} mounts {source}"
            else:
                assert source in COMPOSE["volumes"]


def test_compose_gives_every_service_a_root_that_is_only_read_and_no_rights() -> None:
    for service in COMPOSE["services"].values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_compose_waits_for_services_that_tell_their_health() -> None:
    services = COMPOSE["services"]
    for service in services.values():
        for needed, how in service.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}
            assert "healthcheck" in services[needed]


def test_compose_starts_a_fleet_that_has_the_gateways_endpoints() -> None:
    command = COMPOSE["services"]["fleet"]["command"]
    assert parsed(command) == "mock"
    first, groups = (
        int(command[command.index("--port") + 1]),
        int(command[command.index("--groups") + 1]),
    )
    urls = {endpoint.url for endpoint in config_of(CONFIGS[1]).pools["chat"].endpoints}
    assert urls == {f"http://fleet:{port}" for port in range(first, first + groups)}


def test_compose_scrapes_both_gateways_by_names_that_they_answer_to() -> None:
    jobs = read_yaml(DEPLOY / "compose" / "prometheus.yml")["scrape_configs"]
    hosts = {target.split(":")[0] for target in jobs[0]["static_configs"][0]["targets"]}
    assert hosts == set(config_of(CONFIGS[1]).admin.hosts) == {"gateway-1", "gateway-2"}
    assert hosts <= COMPOSE["services"].keys()


def test_kustomize_names_every_manifest_and_nothing_else() -> None:
    folder = DEPLOY / "kubernetes"
    base = read_yaml(folder / "kustomization.yaml")
    named = {*base["resources"], *base["configMapGenerator"][0]["files"], "kustomization.yaml"}
    assert named == {path.name for path in folder.iterdir()}


def test_nobody_loses_patience_before_running_answers_had_their_time() -> None:
    compose, pods = config_of(CONFIGS[1]).timeouts.shutdown, config_of(CONFIGS[2]).timeouts.shutdown
    gateways = [COMPOSE["services"][name] for name in ("gateway-1", "gateway-2")]
    assert {parse_duration(text["stop_grace_period"]) for text in gateways} == {
        compose + SHUTDOWN_AND_S
    }
    values = read_yaml(CHART / "values.yaml")
    assert POD["terminationGracePeriodSeconds"] == values["preStopSeconds"] + pods + SHUTDOWN_AND_S
    assert values["drainSeconds"] == pods
    assert [float(text) for text in unit_settings("TimeoutStopSec")] == [pods + SHUTDOWN_AND_S]
    assert (
        values["preStopSeconds"]
        == POD["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        == 5
    )


def test_probes_tell_alive_from_ready_and_only_the_dead_are_restarted() -> None:
    container = POD["containers"][0]
    probes = {
        kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")
    }
    assert {kind: get["path"] for kind, get in probes.items()} == {
        "startup": "/healthz",
        "readiness": "/readyz",
        "liveness": "/healthz",
    }
    assert {get["port"] for get in probes.values()} == {"admin"}
    patience_s = {
        kind: container[f"{kind}Probe"]["periodSeconds"]
        * container[f"{kind}Probe"]["failureThreshold"]
        for kind in probes
    }
    assert patience_s["readiness"] < patience_s["liveness"] < patience_s["startup"]


def test_the_chart_rolls_its_pods_for_every_key_that_needs_a_restart_and_for_no_other() -> None:
    text = (CHART / "templates/_helpers.tpl").read_text()
    (sections,) = re.findall(r"pick \$config (.*?) -}}", text)
    parts = re.findall(r"pick \(default dict \$config\.(\w+)\) (.*?) -}}", text)
    picked = {
        *re.findall(r'"(\w+)"', sections),
        *(f"{part}.{key}" for part, keys in parts for key in re.findall(r'"(\w+)"', keys)),
    }
    assert picked == set(BOUND_AT_START) - {
        "reload.state_dir"
    }  # that one is the chart's own and never changes


def test_scaling_asks_for_metrics_that_exist() -> None:
    text = (CHART / "templates/scaledobject.yaml").read_text() + (CHART / "values.yaml").read_text()
    metrics = set(re.findall(r"penstock_[a-z_]+", text))
    known = set(re.findall(r"penstock_[a-z_]+", Metrics().render().decode()))
    assert {"penstock_inflight", "penstock_queued_tokens"} <= metrics
    assert metrics <= known


def test_the_unit_runs_commands_that_exist() -> None:
    for line in (*unit_settings("ExecStartPre"), *unit_settings("ExecStart")):
        program, *arguments = shlex.split(line)
        assert program == "/opt/penstock/bin/penstock"
        assert parsed(arguments) in {"check", "serve"}


def test_logrotate_moves_the_log_of_the_unit_and_leaves_the_new_file_to_the_gateway() -> None:
    text = (DEPLOY / "logrotate" / "penstock").read_text()
    pattern, body = re.fullmatch(r"(?:#.*\n)*(\S+) \{\n(.*)\}\n", text, re.DOTALL).groups()  # type: ignore[union-attr]
    directives = [line.split() for line in body.splitlines()]
    (folder,), (account,), (group,) = map(unit_settings, ("LogsDirectory", "User", "Group"))
    (named,) = re.findall(r"observability\.access_log: (\S+),", UNIT)
    assert fnmatch(named, pattern)
    assert Path(pattern).parent == Path("/var/log") / folder
    # The folder belongs to the account, so logrotate refuses to work there as root.
    assert ["su", account, group] in directives
    # The gateway creates the file when it sees that the path names another one. A copy that is
    # truncated loses the lines in between, and a signal would reload the configuration as well.
    names = {name for name, *_ in directives}
    assert {"nocreate", "rotate", "maxsize", "missingok"} <= names
    assert names.isdisjoint({"copytruncate", "create", "postrotate", "prerotate"})


@pytest.mark.parametrize("tool", ["nginx.conf", "haproxy.cfg", "envoy.yaml"])
def test_a_proxy_is_more_patient_than_the_gateway_and_gives_up_idle_connections_first(
    tool: str,
) -> None:
    text = (DEPLOY / "proxies" / tool).read_text()
    config = config_of(DEPLOY / "config/gateway.yaml")
    settings = {
        "nginx.conf": (r"proxy_read_timeout (\S+);", r"keepalive_timeout (\S+);"),
        "haproxy.cfg": (r"timeout (?:client|server) +(\S+)", r"timeout http-keep-alive (\S+)"),
        "envoy.yaml": (
            r"(?:stream_idle_timeout|  idle_timeout): ([^\s,}]+)",
            r"HttpProtocolOptions\n.*idle_timeout: (\S+?)}",
        ),
    }
    silent, idle = (
        [parse_duration(item) for item in re.findall(pattern, text)] for pattern in settings[tool]
    )
    assert silent
    assert idle
    assert min(silent) > config.timeouts.first_byte
    assert max(idle) < config.limits.idle_timeout


def test_no_proxy_holds_tokens_back_or_takes_early_data() -> None:
    nginx, haproxy, envoy = (
        (DEPLOY / "proxies" / name).read_text()
        for name in ("nginx.conf", "haproxy.cfg", "envoy.yaml")
    )
    for line in (
        "proxy_buffering off;",
        "gzip off;",
        "ssl_early_data off;",
        "proxy_request_buffering off;",
    ):
        assert line in nginx
    assert "option http-no-delay" in haproxy
    assert not re.search(r"^[^#]*allow-0rtt", haproxy, re.MULTILINE)
    assert not re.search(r"^[^#]*(compression|http-buffer-request)", haproxy, re.MULTILINE)
    assert not re.search(r"^[^#]*filters\.http\.(buffer|compressor)", envoy, re.MULTILINE)
    assert "timeout: 0s " in envoy


def test_proxies_take_bodies_as_large_as_the_gateway_does() -> None:
    body = config_of(DEPLOY / "config/gateway.yaml").limits.body
    assert f"client_max_body_size {body >> 20}m;" in (DEPLOY / "proxies/nginx.conf").read_text()
    assert f"gt {body} }}" in (DEPLOY / "proxies/haproxy.cfg").read_text()


PROXY_FILES = ("nginx.conf", "haproxy.cfg", "envoy.yaml")


def proxied_paths(name: str) -> re.Pattern[str]:
    # Return a pattern of the paths that a proxy's sample configuration sends to the gateway.
    text = (DEPLOY / "proxies" / name).read_text()
    if name == "nginx.conf":
        return re.compile(re.search(r"location ~ (\S+) \{", text)[1] + ".*")
    if name == "envoy.yaml":
        return re.compile(re.search(r"safe_regex: \{regex: '([^']+)'", text)[1])
    beginnings = re.findall(r"acl api_path path_beg (\S+)", text)
    paths = " ".join(re.findall(r"acl api_path path (.+)", text)).split()
    patterns = [f"{re.escape(start)}.*" for start in beginnings] + list(map(re.escape, paths))
    return re.compile("|".join(patterns))


@pytest.mark.parametrize("name", PROXY_FILES)
def test_sample_proxies_forward_every_api_and_nothing_else(name: str) -> None:
    forwarded = proxied_paths(name)
    for api in APIS:
        assert forwarded.fullmatch(api.path), api.path
    for path in ("/", "/metrics", "/config", "/score/x", "/xrerank", "/v2/other", "/health"):
        assert not forwarded.fullmatch(path), path
