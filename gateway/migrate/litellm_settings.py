"""Converts the settings of a LiteLLM config.yaml: routing, retries, fallbacks, keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from gateway.migrate import option_values
from gateway.migrate.config_draft import Draft, MigrationError
from gateway.migrate.policy_names import LITELLM

_SECTIONS = ("router_settings", "litellm_settings", "general_settings")
_AFFINITY = frozenset({"deployment_affinity", "session_affinity", "responses_api_deployment_check"})
_CACHE = "the gateway does not cache answers; engines cache prompts"
_DATABASE = "the gateway has no database; list clients' keys as tenants"
_CALLBACK = "the gateway has no callbacks; the access log, /metrics and traces have every request"

_REASONS: Mapping[str, str] = MappingProxyType(
    {
        "alerting": "alert rules for Prometheus are in deploy/",
        "background_health_checks": "every endpoint is probed once a second (health.interval)",
        "cache": _CACHE,
        "callbacks": _CALLBACK,
        "failure_callback": _CALLBACK,
        "service_callback": _CALLBACK,
        "success_callback": _CALLBACK,
        "content_policy_fallbacks": "a refusal by the model is an answer like any other",
        "context_window_fallbacks": "a prompt that is too long is refused with 400",
        "database_": _DATABASE,
        "default_fallbacks": "models[].overflow is set for each model",
        "drop_params": "requests are forwarded as clients send them",
        "enable_pre_call_checks": "endpoints that cannot take a request are never picked",
        "guardrails": "the gateway does not inspect answers",
        "health_check_": "every endpoint is probed once a second (health.interval)",
        "json_logs": "set observability.log.format to json",
        "max_budget": "the gateway limits requests and tokens, not costs",
        "max_parallel_requests": "requests are limited per endpoint (max_concurrency)",
        "modify_params": "requests are forwarded as clients send them",
        "redis_": "several gateways share their state through the section `shared`",
        "retry_after": "a retry goes to another endpoint at once, without a pause",
        "retry_policy": "whether a request is retried does not depend on the kind of error",
        "routing_strategy_args": "routing policies have parameters of their own",
        "set_verbose": "set observability.log.level to debug",
        "store_": _DATABASE,
        "stream_timeout": "timeouts.first_byte is for all requests",
    }
)


def convert(config: Mapping[str, Any], draft: Draft) -> None:
    """Write every LiteLLM setting outside model_list into the draft of a gateway.yaml.

    Raises MigrationError for a setting that LiteLLM could not read either.
    """
    for section in config:
        if section == "environment_variables":
            draft.do(section, "set these environment variables for the gateway's process")
        elif section not in (*_SECTIONS, "model_list"):
            draft.drop(section, "this section has no counterpart in gateway.yaml")
    for section in _SECTIONS:
        settings = config.get(section)
        for key, value in (settings if isinstance(settings, dict) else {}).items():
            reader = _READERS.get(key)
            try:
                if reader is not None:
                    reader(value, f"{section}.{key}", draft)
                    continue
            except (MigrationError, AttributeError, TypeError) as error:
                raise MigrationError(f"{section}.{key}: {error}") from None
            prefixes = [prefix for prefix in _REASONS if key.startswith(prefix)]
            reason = (
                _REASONS[max(prefixes, key=len)] if prefixes else "the gateway has no such setting"
            )
            draft.drop(f"{section}.{key}", reason)


def _models(draft: Draft) -> Iterator[dict[str, Any]]:
    yield from draft.data.get("models", ())


def _set_policy(draft: Draft, policy: str) -> None:
    for pool in draft.data["pools"].values():
        pool["policy"] = policy


def _strategy(value: Any, item: str, draft: Draft) -> None:
    counterpart = LITELLM.get(str(value))
    if counterpart is None:
        draft.drop(f"{item} {value}", "this strategy is not known; the policy is round_robin")
        return
    if counterpart.differs:
        draft.differ(f"{item} {value}", f"{counterpart.policy}: {counterpart.differs}")
    if not any(pool["policy"] == "consistent_hash" for pool in draft.data["pools"].values()):
        _set_policy(draft, counterpart.policy)


def _checks(value: Any, item: str, draft: Draft) -> None:
    for check in value or ():
        if check in _AFFINITY:
            _set_policy(draft, "consistent_hash")
            draft.differ(f"{item} {check}", "consistent_hash, by x-session-id or prompt_cache_key")
        elif check == "prompt_caching":
            _set_policy(draft, "prefix_aware")
            draft.differ(f"{item} {check}", "prefix_aware follows the prompt's own prefix")
        else:
            draft.drop(f"{item} {check}", "the gateway has no such check")


def _retries(value: Any, item: str, draft: Draft) -> None:
    draft.set(option_values.attempts(str(value)), "retries", "attempts")
    draft.differ(item, "each attempt goes to another endpoint and counts towards retries.budget")


def _timeout(value: Any, item: str, draft: Draft) -> None:
    if (duration := option_values.seconds(str(value))) is not None:
        draft.set(duration, "timeouts", "first_byte")
        draft.differ(item, "timeouts.first_byte ends at the first byte; a stream may last longer")
    else:
        draft.drop(item, "only a value above zero has a counterpart")


def _failures(value: Any, item: str, draft: Draft) -> None:
    draft.set(max(1, int(value)), "health", "failures")
    draft.differ(item, "health.failures counts consecutive failures, of probes and requests")


def _cooldown(value: Any, item: str, draft: Draft) -> None:
    if (duration := option_values.seconds(str(value))) is None:
        draft.drop(item, "an endpoint that fails is always ejected for a while")
        return
    draft.set(duration, "health", "backoff")
    if float(value) > 60:
        draft.set(duration, "health", "backoff_max")
    draft.differ(item, "the time doubles whenever an endpoint fails again after its return")


def _fallbacks(value: Any, item: str, draft: Draft) -> None:
    names = {model["name"] for model in _models(draft)}
    pairs = [(str(name), targets) for entry in value or () for name, targets in entry.items()]
    for name, targets in pairs:
        known = [target for target in targets if target in names and target != name]
        for target in targets:
            if target not in known or name not in names:
                draft.drop(
                    f"{item} {name}: {target}",
                    "one of the two models is not served by the engines of this configuration",
                )
        for model in _models(draft):
            if model["name"] == name and known:
                model["overflow"] = [
                    {"model": target, "penalty": min(0.9, round(0.1 * index, 1))}
                    for index, target in enumerate(dict.fromkeys(known), start=1)
                ][:8]
    draft.differ(
        item, "overflow serves requests that the model's own pool would refuse, not those that fail"
    )


def _aliases(value: Any, item: str, draft: Draft) -> None:
    for alias, target in (value or {}).items():
        group = target.get("model") if isinstance(target, dict) else target
        names = [model["name"] for model in _models(draft)]
        matches = [model for model in _models(draft) if model["name"] == group]
        if alias in names:
            draft.drop(f"{item} {alias}", "a model already has this name")
            continue
        for model in matches:
            model.setdefault("aliases", []).append(str(alias))
        if not matches:
            draft.drop(f"{item} {alias}", f"{group} is not among the converted models")


def _master_key(value: Any, item: str, draft: Draft) -> None:
    key = draft.refer(str(value), "LITELLM_MASTER_KEY", item)
    draft.set([{"name": "litellm", "key": key}], "tenants")
    draft.do(item, "keys that LiteLLM has created are in its database: list them as tenants")


_READERS: Mapping[str, Callable[[Any, str, Draft], None]] = MappingProxyType(
    {
        "routing_strategy": _strategy,
        "optional_pre_call_checks": _checks,
        "num_retries": _retries,
        "timeout": _timeout,
        "request_timeout": _timeout,
        "allowed_fails": _failures,
        "cooldown_time": _cooldown,
        "fallbacks": _fallbacks,
        "model_group_alias": _aliases,
        "master_key": _master_key,
    }
)
