"""Reads the config.yaml of the LiteLLM proxy, as far as its deployments are engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gateway.migrate import litellm_settings, values
from gateway.migrate.draft import Draft, MigrationError, pool_name, with_references

ENGINE_PROVIDERS = frozenset(
    {
        "custom_openai",
        "hosted_vllm",
        "llamafile",
        "lm_studio",
        "openai",
        "openai_like",
        "text-completion-openai",
        "vllm",
    }
)
"""Providers whose deployments speak the OpenAI API at api_base."""

_PLACEHOLDERS = frozenset({"", "dummy", "empty", "fake", "fake-key", "none", "not-needed", "null"})
_PARAMETERS: Mapping[str, str] = {
    "rpm": "rates are limited per tenant (tenants[].limits)",
    "tpm": "rates are limited per tenant (tenants[].limits)",
    "weight": "endpoints are weighed by their load",
    "order": "models[].overflow orders models, not endpoints",
    "timeout": "the gateway's timeouts are the same for all endpoints",
    "stream_timeout": "the gateway's timeouts are the same for all endpoints",
    "max_retries": "the gateway's retries are the same for all endpoints",
    "input_cost_per_token": "endpoints have no costs in the gateway",
    "output_cost_per_token": "endpoints have no costs in the gateway",
}
_FORWARDED = "requests are forwarded as clients send them, without defaults"


class Deployment(msgspec.Struct):
    """One entry of LiteLLM's model_list that becomes an endpoint.

    served  the engine's name of the model
    extra   further settings of the endpoint
    """

    group: str
    url: str
    served: str
    extra: dict[str, object]


def convert(config: Mapping[str, Any], draft: Draft) -> None:
    """Write a configuration of the LiteLLM proxy into the draft of a gateway.yaml.

    Raises MigrationError if it cannot be converted.
    """
    draft.set("0.0.0.0", "listeners", "api", "host")
    draft.set(4000, "listeners", "api", "port")
    _pools(list(_deployments(config, draft)), draft)
    if not draft.data["pools"]:
        raise MigrationError("model_list has no deployment of an engine (hosted_vllm/ or openai/)")
    litellm_settings.convert(config, draft)


def _deployments(config: Mapping[str, Any], draft: Draft) -> Iterator[Deployment]:
    entries = config.get("model_list")
    if not isinstance(entries, list):
        raise MigrationError("the file has no model_list, so it is no LiteLLM configuration")
    for index, entry in enumerate(entries):
        parameters = entry.get("litellm_params") if isinstance(entry, dict) else None
        if not isinstance(parameters, dict) or not isinstance(entry.get("model_name"), str):
            raise MigrationError(f"model_list[{index}] needs model_name and litellm_params")
        item = f"model_list[{index}] {entry['model_name']}"
        for key in entry.keys() - {"model_name", "litellm_params"}:
            draft.drop(
                f"{item}: {key}",
                _PARAMETERS.get(key, "this setting only describes the model to LiteLLM"),
            )
        deployment = _deployment(entry["model_name"], parameters, item, draft)
        if deployment is not None:
            yield deployment


def _deployment(
    group: str, parameters: Mapping[str, Any], item: str, draft: Draft
) -> Deployment | None:
    model = with_references(str(parameters.get("model", "")))
    provider, _, rest = model.partition("/")
    explicit = parameters.get("custom_llm_provider")
    base = parameters.get("api_base") or parameters.get("base_url")
    if "*" in group or "*" in model:
        draft.drop(item, "names with a pattern are not served")
        return None
    if not base or (explicit or provider) not in ENGINE_PROVIDERS:
        draft.drop(item, f"{explicit or provider} without an engine's api_base is not an endpoint")
        return None
    url = values.engine_url(str(base), f"{item}: api_base", draft)
    if url is None:
        return None
    served = rest if provider in ENGINE_PROVIDERS and rest else model
    return Deployment(group, url, served, _extra(parameters, item, draft))


def _extra(parameters: Mapping[str, Any], item: str, draft: Draft) -> dict[str, object]:
    # Return the endpoint's key and concurrency limit; add a note for every other parameter.
    extra: dict[str, object] = {}
    for key, value in parameters.items():
        if key in ("model", "api_base", "base_url", "custom_llm_provider"):
            continue
        if key == "api_key":
            if str(value).lower() in _PLACEHOLDERS:
                draft.differ(
                    f"{item}: api_key", "this key is a placeholder; the engine gets no key"
                )
            else:
                extra["api_key"] = draft.refer(str(value), "ENGINE_API_KEY", f"{item}: api_key")
        elif key == "max_parallel_requests" and isinstance(value, int) and value > 0:
            extra["max_concurrency"] = value
        else:
            draft.drop(f"{item}: {key}", _PARAMETERS.get(key, _FORWARDED))
    return extra


def _pools(deployments: list[Deployment], draft: Draft) -> None:
    groups: dict[str, list[Deployment]] = {}
    for deployment in deployments:
        groups.setdefault(deployment.group, []).append(deployment)
    pools: dict[frozenset[str], str] = {}
    taken: set[str] = set()
    for name, members in groups.items():
        urls = frozenset(member.url for member in members)
        served = {member.served for member in members}
        if urls in pools and len(served) == 1:
            model = {"name": name, "pool": pools[urls], "served_model": served.pop()}
            draft.data.setdefault("models", []).append(model)
            continue
        endpoints = _endpoints(name, members, taken, draft)
        if not endpoints:
            continue
        pools[urls] = pool = pool_name(name, draft.data["pools"])
        draft.set({"policy": "round_robin", "endpoints": endpoints}, "pools", pool)
        model = {"name": name, "pool": pool}
        if len(served) == 1:
            model |= {"served_model": served.pop()}
        draft.data.setdefault("models", []).append(model)


def _endpoints(
    name: str, members: list[Deployment], taken: set[str], draft: Draft
) -> list[dict[str, object]]:
    # Return the endpoints of a group, without those that another pool or group member has.
    served = {member.served for member in members}
    endpoints = []
    for member in members:
        if member.url in taken:
            draft.drop(f"{name}: {member.url}", "the engine is in another pool already")
            continue
        taken.add(member.url)
        own = {"served_model": member.served} if len(served) > 1 else {}
        endpoints.append({"url": member.url, **own, **member.extra})
    return endpoints
