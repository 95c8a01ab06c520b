"""Converts llm-d's EndpointPickerConfig: plugins, profiles, and prefill/decode disaggregation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from gateway.migrate.config_draft import Draft, MigrationError

POOL = "engines"

_FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "prefix-cache-scorer": "prefix",
        "precise-prefix-cache-scorer": "prefix",
        "queue-scorer": "queue",
        "queue-depth-scorer": "queue",
        "load-aware-scorer": "queue",
        "active-request-scorer": "queue",
        "running-requests-size-scorer": "queue",
        "token-load-scorer": "queue",
        "kv-cache-utilization-scorer": "kv",
        "no-hit-lru-scorer": "no_hit",
        "session-affinity-scorer": "session",
        "latency-scorer": "latency",
        "predicted-latency-scorer": "latency",
        "slo-aware-profile-handler": "latency",
        "decision-tree-filter": "queue",
        "least-queue-filter": "queue",
        "low-queue-filter": "queue",
        "least-kv-cache-filter": "kv",
    }
)
"""llm-d's scorers, and the property of an endpoint that each of them scores."""

_EARLIER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "kv-cache": "kv-cache-utilization-scorer",
        "kv-cache-scorer": "kv-cache-utilization-scorer",
        "load-aware": "load-aware-scorer",
        "max-score": "max-score-picker",
        "prefix-cache": "prefix-cache-scorer",
        "queue": "queue-scorer",
        "random": "random-picker",
        "session-affinity": "session-affinity-scorer",
        "single-profile": "single-profile-handler",
    }
)
"""Plugins by their names in earlier versions of llm-d, with their names today."""

_SPLITTERS = frozenset({"pd-profile-handler", "disagg-profile-handler"})
_INHERENT = frozenset(
    {
        "approx-prefix-cache-producer",
        "decode-filter",
        "endpoint-notification-source",
        "max-score-picker",
        "prefill-filter",
        "prefill-header-handler",
        "single-profile-handler",
    }
)
"""llm-d's plugins that need no counterpart, because the gateway always does what they do."""

_REASONS: Mapping[str, str] = MappingProxyType(
    {
        "by-label": "put endpoints with other labels into another pool",
        "core-metrics-extractor": "engines' metrics are scraped (scrape)",
        "header-based-testing-filter": "clients cannot choose an endpoint",
        "lora-affinity": "an endpoint serves an adapter if its /v1/models lists it",
        "metrics-data-source": "engines' metrics are scraped (scrape)",
        "models-": "every endpoint's /v1/models is read",
        "precise-prefix-cache-producer": "cached prompts are learned from picks and reported usage",
        "random-picker": "the endpoint with the best score is picked",
        "token": "prompts are not tokenized by the gateway",
        "weighted-random-picker": "the endpoint with the best score is picked",
    }
)


class Target(msgspec.Struct, frozen=True):
    """The pods among which llm-d's endpoint picker chooses.

    labels     labels that select the pods; empty if llm-d's configuration has none
    port       port of the engines in the pods
    engine     kind of engine in the pods
    namespace  Kubernetes namespace of the pods; None: the gateway's own namespace
    """

    labels: Mapping[str, str] = {}
    port: int = 8000
    engine: str = "vllm"
    namespace: str | None = None


class Plugin(msgspec.Struct, frozen=True):
    """A plugin of llm-d's EndpointPickerConfig. Its parameters are plain data."""

    kind: str
    parameters: Mapping[str, Any]


def convert(config: Mapping[str, Any], draft: Draft, target: Target) -> None:
    """Write the configuration of llm-d's endpoint picker into the draft of a gateway.yaml.

    Raises MigrationError if it cannot be converted.
    """
    plugins = _plugins(config)
    profiles = _profiles(config, plugins)
    is_split = any(plugin.kind in _SPLITTERS for plugin in plugins.values())
    name = "prefill" if is_split and "prefill" in profiles else next(iter(profiles))
    draft.set({"policy": _policy(profiles[name], plugins, draft)}, "pools", POOL)
    for other, weights in profiles.items():
        if weights != profiles[name]:
            draft.drop(f"schedulingProfiles {other}", "the decode endpoint has the least load")
    _set_target(draft, target, is_split=is_split)
    if is_split:
        _split(plugins, draft, target)
    elif draft.additions.model is not None:
        draft.set([{"name": draft.additions.model, "pool": POOL}], "models")
    _note_plugins(plugins, draft)
    _others(config, draft)


def _plugins(config: Mapping[str, Any]) -> dict[str, Plugin]:
    entries = config.get("plugins")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise MigrationError(
            "the EndpointPickerConfig contains no plugins, so there is nothing to convert"
        )
    return {
        str(entry.get("name") or entry.get("type")): Plugin(
            _EARLIER_NAMES.get(str(entry.get("type")), str(entry.get("type"))),
            entry.get("parameters") or {},
        )
        for entry in entries
    }


def _profiles(
    config: Mapping[str, Any], plugins: Mapping[str, Plugin]
) -> dict[str, dict[str, float]]:
    # Return the weight of each plugin, by profile and plugin name.
    #
    # Without profiles, return one profile that has all plugins.
    entries = config.get("schedulingProfiles")
    if not isinstance(entries, list) or not entries:
        return {"default": dict.fromkeys(plugins, 1.0)}
    profiles = {}
    for entry in entries:
        references = entry.get("plugins") or ()
        profiles[str(entry.get("name"))] = {
            str(item.get("pluginRef")): float(item.get("weight") or 1.0) for item in references
        }
    return profiles


def _policy(weights: Mapping[str, float], plugins: Mapping[str, Plugin], draft: Draft) -> object:
    families: dict[str, float] = {}
    for name, weight in weights.items():
        plugin = plugins.get(name)
        if plugin is None:
            raise MigrationError(
                f"schedulingProfiles refers to the plugin {name!r}, which the list of plugins "
                "does not contain"
            )
        if (family := _FAMILIES.get(plugin.kind)) is not None:
            families[family] = families.get(family, 0.0) + weight
    if "latency" in families:
        draft.differ("latency scorer", "llmd_predictor, with the gateway's own model of latency")
        return "llmd_predictor"
    session = families.pop("session", 0.0)
    if session and session >= max(families.values(), default=0.0):
        draft.differ("session-affinity-scorer", "consistent_hash, by x-session-id")
        return "consistent_hash"
    if session:
        draft.drop("session-affinity-scorer", "its weight is below the others'")
    if "prefix" not in families:
        return "least_loaded" if families else "round_robin"
    return {
        "name": "llmd_blend",
        "parameters": {
            f"{family}_weight": families.get(family, 0.0)
            for family in ("prefix", "queue", "kv", "no_hit")
        },
    }


def _set_endpoints_by_role(
    draft: Draft, target: Target, service: str, traits: Mapping[str, str]
) -> None:
    endpoints = []
    for role in ("prefill", "decode"):
        labels = {**target.labels, "llm-d.ai/role": role}
        name = f"{service}-{role}"
        draft.add_service(name, target.namespace, labels, target.port)
        host = f"{name}.{target.namespace}.svc" if target.namespace else name
        endpoints.append({"url": f"http://{host}:{target.port}", "role": role, **traits})
    draft.do("several pods per role", "list each in a file for discover.file, with its role")
    draft.do("routing sidecar", "the URLs must be the engines' own, not those of the sidecar")
    draft.set(endpoints, "pools", POOL, "endpoints")


def _set_target(draft: Draft, target: Target, *, is_split: bool) -> None:
    traits = {} if target.engine == "vllm" else {"engine": target.engine}
    service = draft.additions.service or POOL
    if is_split:
        _set_endpoints_by_role(draft, target, service, traits)
    elif draft.additions.engines:
        endpoints = [{"url": url, **traits} for url in draft.additions.engines]
        draft.set(endpoints, "pools", POOL, "endpoints")
    else:
        place = {"namespace": target.namespace} if target.namespace else {}
        kubernetes = {"service": service, **place, "port": str(target.port)}
        discover = {"kubernetes": kubernetes} | ({"endpoint": traits} if traits else {})
        draft.add_service(service, target.namespace, dict(target.labels), target.port)
        draft.set(discover, "pools", POOL, "discover")


def _split(plugins: Mapping[str, Plugin], draft: Draft, target: Target) -> None:
    if draft.additions.model is None:
        raise MigrationError(
            "prefill/decode disaggregation is set per model: give --model NAME, as the engines "
            "list it at /v1/models"
        )
    dialect = {"sglang": "sglang", "trtllm": "trtllm"}.get(target.engine, "vllm_nixl")
    for endpoint in draft.get("pools", POOL, "endpoints") if dialect == "sglang" else ():
        if endpoint["role"] == "prefill":
            host = endpoint["url"].partition("://")[2].rpartition(":")[0]
            endpoint["bootstrap"] = f"{host}:8998"
    threshold = min(_thresholds(plugins), default=1)
    split = {"dialect": dialect, "threshold_tokens": max(1, threshold)}
    draft.set([{"name": draft.additions.model, "pool": POOL, "split": split}], "models")


def _thresholds(plugins: Mapping[str, Plugin]) -> Iterator[int]:
    for plugin in plugins.values():
        for key in ("threshold", "nonCachedTokens"):
            if isinstance(value := plugin.parameters.get(key), int):
                yield value


def _note_plugins(plugins: Mapping[str, Plugin], draft: Draft) -> None:
    for name, plugin in plugins.items():
        if plugin.kind in _FAMILIES:
            if plugin.kind.endswith("-filter"):
                draft.differ(f"plugin {name}", "endpoints with more load are not excluded")
            for key in plugin.parameters:
                draft.drop(f"{name}: {key}", "the policy has parameters of its own")
        elif plugin.kind in _SPLITTERS or plugin.kind.endswith("pd-decider"):
            for key in plugin.parameters.keys() - {"threshold", "nonCachedTokens", "deciders"}:
                draft.drop(f"{name}: {key}", "split has only a threshold")
        elif plugin.kind in _INHERENT:
            for key in plugin.parameters:
                draft.drop(f"{name}: {key}", "the prefix index has settings of its own (prefix)")
        else:
            prefixes = [prefix for prefix in _REASONS if plugin.kind.startswith(prefix)]
            reason = _REASONS[max(prefixes, key=len)] if prefixes else "the plugin is not known"
            draft.drop(f"plugin {plugin.kind}", reason)


def _others(config: Mapping[str, Any], draft: Draft) -> None:
    # Convert the sections other than plugins and profiles, among them the saturation detector.
    #
    # Sections without a counterpart get a note.
    for key, value in config.items():
        if key == "saturationDetector" and isinstance(value, dict):
            _saturation(value, draft)
        elif key == "featureGates":
            for gate in value or ():
                draft.drop(f"featureGates {gate}", "requests always wait in the gateway if needed")
        elif key not in ("apiVersion", "kind", "metadata", "plugins", "schedulingProfiles"):
            draft.drop(key, "waiting_room, admission and tenants order requests that wait")


def _saturation(value: Mapping[str, Any], draft: Draft) -> None:
    names = {"queueDepthThreshold": "queue_depth", "kvCacheUtilThreshold": "kv_usage"}
    parameters = {names[key]: number for key, number in value.items() if key in names}
    admission = {"name": "gie_saturation", "parameters": parameters}
    draft.set(admission if parameters else "gie_saturation", "pools", POOL, "admission")
    for key in value.keys() - names.keys():
        draft.drop(f"saturationDetector.{key}", "scrape.stale is for all scrapes")
