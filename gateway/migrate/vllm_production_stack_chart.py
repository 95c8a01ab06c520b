"""Converts the Helm values of the vLLM production stack, whose chart still deploys the engines."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gateway.migrate import option_values
from gateway.migrate.command_options import CommandOptions
from gateway.migrate.config_draft import Draft, MigrationError, pool_name
from gateway.migrate.option_rules import apply_rules, drop_unread
from gateway.migrate.vllm_production_stack import (
    REASONS,
    RULES,
    convert,
    routing_policy,
    split_model,
)

_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "containerPort": "port",
        "serviceDiscovery": "service-discovery",
        "routingLogic": "routing-logic",
        "sessionKey": "session-key",
        "engineScrapeInterval": "engine-stats-interval",
        "requestStatsWindow": "request-stats-window",
        "lmcacheControllerPort": "lmcache-controller-port",
        "staticBackends": "static-backends",
        "staticModels": "static-models",
    }
)
"""Keys of routerSpec, each with the router option that the chart makes of it."""

_LAYOUT: Mapping[str, str] = MappingProxyType(
    {"tensorParallelSize": "tp", "pipelineParallelSize": "pp", "dataParallelSize": "dp"}
)


def convert_values(chart: Mapping[str, Any], draft: Draft) -> None:
    """Write a chart's router and the Services of its engines into the draft of a gateway.yaml.

    Raises MigrationError if they cannot be converted.
    """
    router = _mapping(chart.get("routerSpec"))
    options = _router_options(router, draft)
    for key in chart:
        if key not in ("routerSpec", "servingEngineSpec"):
            draft.drop(key, "the production stack keeps it, or another chart takes its place")
    if options.last("service-discovery") == "static":
        convert(options, draft)
        return
    specs = _mapping(chart.get("servingEngineSpec")).get("modelSpec")
    if not isinstance(specs, list) or not specs:
        raise MigrationError("servingEngineSpec.modelSpec must list at least one engine")
    draft.set("0.0.0.0", "listeners", "api", "host")
    draft.set(option_values.number(options.last("port") or "8000"), "listeners", "api", "port")
    draft.do("routerSpec", "set routerSpec.enableRouter to false once clients use the gateway")
    draft.differ(
        "Services", f"taken from release {draft.additions.release!r}; for another, give --release"
    )
    _engines(_mapping(chart.get("servingEngineSpec")), options, draft)
    apply_rules(options, draft, RULES)
    drop_unread(options, draft, REASONS)


def _router_options(router: Mapping[str, Any], draft: Draft) -> CommandOptions:
    # Return the router's command line; add notes for the keys that concern its deployment.
    words: list[str] = []
    for key, value in router.items():
        if key in _OPTIONS:
            words += [f"--{_OPTIONS[key]}", str(value)]
        elif key == "extraArgs":
            words += [str(word) for word in value or ()]
        elif key == "vllmApiKey":
            draft.do(f"routerSpec.{key}", "set the engines' key as api_key, by reference")
        elif key == "enableRouter" or key.startswith("enable"):
            draft.drop(f"routerSpec.{key}", "the gateway is installed by its own chart")
        elif key.startswith(("nixl", "lmcache")):
            draft.drop(f"routerSpec.{key}", "engines hand KV over between themselves")
        else:
            draft.drop(f"routerSpec.{key}", "the gateway's own chart sets its deployment")
    return CommandOptions.parse(words)


def _engines(spec: Mapping[str, Any], options: CommandOptions, draft: Draft) -> None:
    policy, is_split = routing_policy(options, draft)
    port = spec.get("containerPort") or 8000
    models: dict[str, list[Mapping[str, Any]]] = {}
    for item in spec["modelSpec"]:
        if not isinstance(item, dict) or not item.get("name") or not item.get("modelURL"):
            raise MigrationError("each item of modelSpec must have name and modelURL")
        models.setdefault(_served_name(item), []).append(item)
    roles = {
        str(label): role
        for role in ("prefill", "decode")
        for label in (options.last(f"{role}-model-labels") or "").split(",")
        if label
    }
    key = spec.get("vllmApiKey")
    traits = {"api_key": draft.refer(_secret(key), "VLLM_API_KEY", "vllmApiKey")} if key else {}
    for name, items in models.items():
        pool = pool_name(name, draft.data["pools"])
        model = _model(name, pool, items)
        section = _pool(items, port, traits, roles if is_split else {}, draft)
        draft.set({"policy": policy, **section}, "pools", pool)
        if is_split:
            split_model(draft, model)
        draft.data.setdefault("models", []).append(model)
    draft.differ("servingEngineSpec", "this chart continues to deploy the engines")


def _pool(
    items: list[Mapping[str, Any]],
    port: object,
    traits: Mapping[str, object],
    roles: Mapping[str, str],
    draft: Draft,
) -> dict[str, object]:
    traits = {**traits, **_layout(items[0])}
    if len(items) == 1:
        target = {"service": _service(items[0], draft), "port": str(port)}
        return {"discover": {"kubernetes": target} | ({"endpoint": traits} if traits else {})}
    endpoints = []
    for item in items:
        labels = _mapping(item.get("labels"))
        role = roles.get(str(labels.get("model", item["name"])))
        address = {"url": f"http://{_service(item, draft)}:{port}"}
        endpoints.append(address | ({"role": role} if role else {}) | traits)
        if item.get("replicaCount", 1) not in (0, 1):
            draft.do(
                f"modelSpec {item['name']}",
                "its pods are behind one address; list each in a file for discover.file",
            )
    return {"endpoints": endpoints}


def _model(name: str, pool: str, items: list[Mapping[str, Any]]) -> dict[str, object]:
    model: dict[str, object] = {"name": name, "pool": pool}
    longest = _mapping(items[0].get("vllmConfig")).get("maxModelLen")
    return model | ({"context_tokens": longest} if isinstance(longest, int) else {})


def _layout(item: Mapping[str, Any]) -> dict[str, object]:
    config = _mapping(item.get("vllmConfig"))
    sizes = {
        key: config[name] for name, key in _LAYOUT.items() if isinstance(config.get(name), int)
    }
    return {"layout": sizes} if any(size > 1 for size in sizes.values()) else {}


def _service(item: Mapping[str, Any], draft: Draft) -> str:
    return f"{draft.additions.release}-{item['name']}-engine-service"


def _served_name(item: Mapping[str, Any]) -> str:
    arguments = _mapping(item.get("vllmConfig")).get("extraArgs")
    options = CommandOptions.parse([str(word) for word in arguments or ()])
    return options.last("served-model-name") or str(item["modelURL"])


def _secret(key: object) -> str:
    return key if isinstance(key, str) else ""


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
