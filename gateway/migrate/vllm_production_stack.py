"""Converts the router of the vLLM production stack: its command line, or its file of settings."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gateway.migrate import option_values
from gateway.migrate.command_options import CommandOptions
from gateway.migrate.config_draft import Draft, MigrationError, pool_name
from gateway.migrate.option_rules import Rule, apply_rules, drop_unread
from gateway.migrate.policy_names import PRODUCTION_STACK, SESSION_HEADER

DIALECT = "vllm_nixl"
_LMCACHE = "the gateway asks engines alone, not LMCache"
_STATISTICS = "numbers are on /metrics, /live and in `penstock top`"

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "engine-stats-interval": Rule(
            ("scrape", "interval"),
            option_values.seconds,
            "loads are reserved at once; a scrape only shows requests from elsewhere",
        ),
        "backend-health-check-timeout-seconds": Rule(("health", "timeout"), option_values.seconds),
        "log-level": Rule(("observability", "log", "level"), option_values.log_level),
    }
)

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "batch-processor": "batches are not set up by this file",
        "enable-batch-api": "batches are not set up by this file",
        "file-storage-": "batches are not set up by this file",
        "callbacks": "the gateway has no callbacks; the access log has a line for each request",
        "dynamic-config-": "gateway.yaml is watched itself (reload.watch)",
        "feature-gates": "the gateway has no feature gates",
        "semantic-cache": "the gateway does not cache answers; engines cache prompts",
        "k8s-watcher-timeout-seconds": "the watch is renewed when it ends",
        "k8s-": "discovery is not by Kubernetes, so the router ignored it",
        "kv-aware-threshold": "prefix_aware weighs the prefix against the load",
        "lmcache-": _LMCACHE,
        "log-stats": _STATISTICS,
        "request-stats-window": _STATISTICS,
        "otel-secure": "write https:// in observability.traces.endpoint",
        "otel-service-name": "set OTEL_SERVICE_NAME",
        "request-rewriter": "the gateway does not rewrite requests",
        "sentry-": "errors are logged and counted, not sent to Sentry",
        "static-backend-health-checks": "every endpoint is probed, by health.path",
        "static-model-type": "an endpoint's APIs are asked, not configured",
        "static-": "discovery is by Kubernetes, so the router ignored it",
        "decode-model-labels": "the routing logic is not disaggregated_prefill",
        "prefill-model-labels": "the routing logic is not disaggregated_prefill",
        "api-key": "set the engines' key as api_key of the endpoints, by reference",
    }
)


def convert_settings(settings: Mapping[str, Any], draft: Draft) -> None:
    """Convert a settings file of the vLLM production stack's router to settings in `draft`.

    The settings file is the one that --dynamic-config-yaml or --dynamic-config-json names.
    """
    occurrences = []
    for key, value in settings.items():
        name = str(key).replace("_", "-")
        if name == "static-models" and isinstance(value, dict):
            occurrences += _nested_models(value)
        elif name == "static-aliases" and isinstance(value, dict):
            occurrences.append((name, [f"{alias}:{model}" for alias, model in value.items()]))
        elif isinstance(value, bool):
            occurrences += [(name, [])] if value else []
        elif value is not None:
            occurrences.append((name, [str(value)]))
    convert(CommandOptions(occurrences), draft)


def _nested_models(models: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    pairs = [
        (str(name), str(url))
        for name, spec in models.items()
        for url in (spec.get("static_backends") or () if isinstance(spec, dict) else ())
    ]
    others = {
        str(key).replace("_", "-")
        for spec in models.values()
        for key in (spec if isinstance(spec, dict) else ())
        if key != "static_backends"
    }
    return [
        ("static-models", [",".join(name for name, _ in pairs)]),
        ("static-backends", [",".join(url for _, url in pairs)]),
        *((name, []) for name in sorted(others)),
    ]


def convert(options: CommandOptions, draft: Draft) -> None:
    """Write the production stack router's command line into the draft of a gateway.yaml.

    Raises MigrationError if it cannot be converted.
    """
    draft.set(option_values.text(options.last("host") or "0.0.0.0"), "listeners", "api", "host")
    port = option_values.number(options.last("port") or "8001")
    draft.set(port, "listeners", "api", "port")
    if port == 8081:
        draft.set(8082, "listeners", "admin", "port")
        draft.differ("--port 8081", "the admin server moves to 8082")
    if options.last("service-discovery") == "k8s":
        _discovered(options, draft)
    else:
        _static(options, draft)
    apply_rules(options, draft, RULES)
    if (collector := options.last("otel-endpoint")) is not None:
        host = collector.partition("://")[2] or collector
        endpoint = f"http://{host.rpartition(':')[0] or host}:4318/v1/traces"
        draft.set(endpoint, "observability", "traces", "endpoint")
        draft.differ(
            "--otel-endpoint", "traces go by OTLP over HTTP, port 4318, and 1 % are traced"
        )
    drop_unread(options, draft, REASONS)


def routing_policy(options: CommandOptions, draft: Draft) -> tuple[str, bool]:
    """Return the routing policy for the router's --routing-logic.

    The second result is whether requests are split into prefill and decode.
    """
    logic = options.last("routing-logic") or "roundrobin"
    counterpart = PRODUCTION_STACK.get(logic)
    if counterpart is None:
        raise MigrationError(
            f"--routing-logic: {logic!r} is unknown; known are {', '.join(PRODUCTION_STACK)}"
        )
    if counterpart.differs:
        draft.differ(f"--routing-logic {logic}", f"{counterpart.policy}: {counterpart.differs}")
    key = options.last("session-key")
    if key is not None and key.lower() != SESSION_HEADER:
        draft.do(f"--session-key {key}", f"let clients send {SESSION_HEADER}, or rename the header")
    return counterpart.policy, logic.startswith("disaggregated_prefill")


def split_model(draft: Draft, model: dict[str, object]) -> None:
    """Configure a model of the draft so that its requests are split into prefill and decode.

    A note says what the engines need to serve split requests.
    """
    model["split"] = {"dialect": DIALECT}
    draft.do(
        "disaggregated_prefill",
        f"written as {DIALECT}: engines need vLLM's NixlConnector in place of LMCache's",
    )


def _static(options: CommandOptions, draft: Draft) -> None:
    urls = _list(options.last("static-backends"))
    names = _list(options.last("static-models"))
    if not urls or len(urls) != len(names):
        raise MigrationError(
            f"--static-backends lists {len(urls)} URLs, but --static-models lists {len(names)} "
            "models"
        )
    policy, is_split = routing_policy(options, draft)
    labels = _list(options.last("static-model-labels")) or [""] * len(urls)
    roles = _roles(options) if is_split else {}
    if not roles and "static-model-labels" in options:
        draft.drop("--static-model-labels", "they only tell prefill and decode endpoints apart")
    aliases = dict(_alias(pair) for pair in _list(options.last("static-aliases")))
    for name in dict.fromkeys(names):
        pool = pool_name(name, draft.data["pools"])
        endpoints: list[dict[str, object]] = []
        for url, model_name, label in zip(urls, names, labels, strict=False):
            address = option_values.engine_url(url, "--static-backends", draft)
            if model_name == name and address:
                role = {"role": roles[label]} if label in roles else {}
                endpoints.append({"url": address, **role})
        section = {"policy": policy, "endpoints": option_values.distinct(endpoints)}
        draft.set(section, "pools", pool)
        model: dict[str, object] = {"name": option_values.text(name), "pool": pool}
        if own := [alias for alias, target in aliases.items() if target == name]:
            model["aliases"] = own
        if {"prefill", "decode"} <= {endpoint.get("role", "") for endpoint in endpoints}:
            split_model(draft, model)
        draft.data.setdefault("models", []).append(model)


def _roles(options: CommandOptions) -> dict[str, str]:
    return {
        label: role
        for role in ("prefill", "decode")
        for label in _list(options.last(f"{role}-model-labels"))
    }


def _discovered(options: CommandOptions, draft: Draft) -> None:
    policy, is_split = routing_policy(options, draft)
    if is_split:
        raise MigrationError(
            "a prefill/decode split needs the engines' Services; convert the chart's values "
            "instead of the router's command line"
        )
    namespace, port = options.last("k8s-namespace"), options.last("k8s-port") or "8000"
    kind = options.last("k8s-service-discovery-type")
    if kind == "service-name":
        draft.differ(
            f"--k8s-service-discovery-type {kind}", "the ready pods are used, not Services"
        )
    pairs = [item.partition("=") for item in _list(options.last("k8s-label-selector"))]
    service = draft.additions.service or "engines"
    draft.add_service(service, namespace, {key: value for key, _, value in pairs}, int(port))
    target = {"service": service} | ({"namespace": namespace} if namespace else {})
    discover = {"kubernetes": {**target, "port": port}}
    draft.set({"policy": policy, "discover": discover}, "pools", "engines")
    if draft.additions.model is not None:
        draft.set([{"name": draft.additions.model, "pool": "engines"}], "models")


def _alias(pair: str) -> tuple[str, str]:
    alias, _, model = pair.partition(":")
    return alias, model


def _list(value: str | None) -> list[str]:
    return [item.strip() for item in (value or "").split(",") if item.strip()]
