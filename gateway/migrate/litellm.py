"""Reads the config.yaml of the LiteLLM proxy, and converts those deployments that are engines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gateway.migrate import litellm_settings, option_values
from gateway.migrate.config_draft import Draft, MigrationError, pool_name, with_references


class Provider(msgspec.Struct, frozen=True):
    """A provider of models that LiteLLM knows.

    engine  the engine kind that gateway.yaml uses for this provider
    url     the provider's address
    key     name of the environment variable with the provider's API key; "" if none is needed
    """

    engine: str
    url: str
    key: str = ""


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
"""LiteLLM providers whose deployments are engines that serve the OpenAI API at api_base."""

_OLLAMA = "http://localhost:11434"
PROVIDERS: Mapping[str, Provider] = {
    "deepseek": Provider("openai", "https://api.deepseek.com", "DEEPSEEK_API_KEY"),
    "fireworks_ai": Provider("openai", "https://api.fireworks.ai/inference", "FIREWORKS_API_KEY"),
    "groq": Provider("openai", "https://api.groq.com/openai", "GROQ_API_KEY"),
    "mistral": Provider("openai", "https://api.mistral.ai", "MISTRAL_API_KEY"),
    "ollama": Provider("ollama", _OLLAMA),
    "ollama_chat": Provider("ollama", _OLLAMA),
    "openai": Provider("openai", "https://api.openai.com", "OPENAI_API_KEY"),
    "openrouter": Provider("openai", "https://openrouter.ai/api", "OPENROUTER_API_KEY"),
    "together_ai": Provider("openai", "https://api.together.xyz", "TOGETHERAI_API_KEY"),
    "xai": Provider("openai", "https://api.x.ai", "XAI_API_KEY"),
}
"""Providers with a fixed address, under which they serve /v1/chat/completions."""

SELF_HOSTED: Mapping[str, str] = {
    "docker_model_runner": "openai",
    "huggingface": "tgi",
    "nvidia_nim": "openai",
    "xinference": "openai",
}
"""Providers whose servers one runs oneself, at api_base, and their kind of engine."""
_OPENAI_MODELS = re.compile(r"(?:gpt-|chatgpt-|o[0-9]|text-embedding-|omni-moderation)[^/]*$")
"""Names of models that LiteLLM takes for OpenAI's without a provider before them."""
_PLACEHOLDERS = frozenset({"", "dummy", "empty", "fake", "fake-key", "none", "not-needed", "null"})
_PARAMETERS: Mapping[str, str] = {
    "rpm": "rates are limited per tenant (tenants[].limits)",
    "tpm": "rates are limited per tenant (tenants[].limits)",
    "weight": "endpoints are weighed by their load",
    "order": "models[].overflow orders models, not endpoints",
    "timeout": "the gateway's timeouts are the same for all endpoints",
    "stream_timeout": "the gateway's timeouts are the same for all endpoints",
    "max_retries": "the gateway's retries are the same for all endpoints",
    "input_cost_per_token": "set the endpoint's token_price, in dollars per million tokens",
    "output_cost_per_token": "set the endpoint's token_price, in dollars per million tokens",
}
_FORWARDED = "requests are forwarded as clients send them, without defaults"


class Deployment(msgspec.Struct):
    """One entry of LiteLLM's model_list that becomes an endpoint.

    served  the engine's name of the model
    extra   further settings of the endpoint in gateway.yaml
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
        raise MigrationError(
            "model_list contains no deployment of an inference engine (hosted_vllm/ or openai/)"
        )
    litellm_settings.convert(config, draft)


def _deployments(config: Mapping[str, Any], draft: Draft) -> Iterator[Deployment]:
    entries = config.get("model_list")
    if not isinstance(entries, list):
        raise MigrationError("the file has no model_list, so it is not a LiteLLM configuration")
    for index, entry in enumerate(entries):
        parameters = entry.get("litellm_params") if isinstance(entry, dict) else None
        if not isinstance(parameters, dict) or not isinstance(entry.get("model_name"), str):
            raise MigrationError(f"model_list[{index}] must have model_name and litellm_params")
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
    if _OPENAI_MODELS.match(model):
        explicit = explicit or "openai"
    base = parameters.get("api_base") or parameters.get("base_url")
    if "*" in group or "*" in model:
        draft.drop(item, "names with a pattern are not served")
        return None
    known = PROVIDERS.get(explicit or provider)
    if (explicit or provider) in SELF_HOSTED and base:
        known = Provider(SELF_HOSTED[explicit or provider], str(base))
    if (explicit or provider) not in ENGINE_PROVIDERS and known is None:
        draft.drop(item, f"{explicit or provider} is not a provider with OpenAI's API")
        return None
    if not base and known is None:
        draft.drop(item, f"{explicit or provider} without an engine's api_base is not an endpoint")
        return None
    url = option_values.engine_url(
        str(base or known.url if known else base), f"{item}: api_base", draft
    )
    if url is None:
        return None
    extra = _extra(parameters, item, draft)
    is_own = (explicit or provider) in SELF_HOSTED
    if known is not None and (is_own or not base or known.engine != "openai"):
        extra = {"engine": known.engine, **extra}
        if known.key and not base and "api_key" not in extra:
            extra["api_key"] = draft.refer(f"os.environ/{known.key}", known.key, item)
    prefixes = ENGINE_PROVIDERS | PROVIDERS.keys() | SELF_HOSTED.keys()
    served = rest if provider in prefixes and rest else model
    if known is not None and known.engine == "ollama" and ":" not in served:
        served += ":latest"  # the form in which Ollama lists such a model
    return Deployment(group, url, served, extra)


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
