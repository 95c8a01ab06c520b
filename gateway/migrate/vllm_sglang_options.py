"""The options of vllm-router, sglang-router and SMG, with their equivalents in gateway.yaml.

An option without an equivalent has the reason instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from gateway.migrate import option_values
from gateway.migrate.option_values import Converter

_POOL = ("pools", "engines")


class Rule(msgspec.Struct, frozen=True):
    """How a router's option is migrated.

    path     path of the equivalent in gateway.yaml
    convert  function that converts the option's value
    differs  how the equivalent behaves differently; "" if it does not
    """

    path: tuple[str, ...]
    convert: Converter
    differs: str = ""


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "max-payload-size": Rule(("limits", "body"), option_values.size),
        "request-timeout-secs": Rule(
            ("timeouts", "first_byte"),
            option_values.seconds,
            "timeouts.first_byte ends at the first byte; a stream may last longer",
        ),
        "queue-size": Rule((*_POOL, "waiting_room", "size"), option_values.number),
        "queue-timeout-secs": Rule((*_POOL, "waiting_room", "timeout"), option_values.seconds),
        "retry-max-retries": Rule(
            ("retries", "attempts"),
            option_values.attempts,
            "each attempt goes to another endpoint, 16 at most, and counts towards retries.budget",
        ),
        "health-check-timeout-secs": Rule(("health", "timeout"), option_values.seconds),
        "health-check-interval-secs": Rule(("health", "interval"), option_values.seconds),
        "health-check-endpoint": Rule(("health", "path"), option_values.text),
        "log-level": Rule(("observability", "log", "level"), option_values.log_level),
        "shutdown-grace-period-secs": Rule(("timeouts", "shutdown"), option_values.seconds),
    }
)

THRESHOLDS: Mapping[str, Converter] = MappingProxyType(
    {
        "cache-threshold": option_values.ratio,
        "balance-abs-threshold": option_values.number,
        "balance-rel-threshold": option_values.ratio,
    }
)
"""Parameters of the router policy cache_aware."""

_NOT_STORED = "answers and conversations are not stored by the gateway"
_NOT_TOKENIZED = "prompts are not tokenized by the gateway"
_ENGINES_OWN = "this is an option of the engine itself"
_AGING = "the prefix index ages like the engines' caches; its memory is prefix.index"
_BACKOFF = "a retry goes to another endpoint at once, without a pause"
_NO_REGISTRATION = "engines do not register themselves; list them, or use discover"
_STARTUP = "the gateway starts without engines and uses each one as soon as a probe succeeds"
_CONTROL = "changes need admin.key; there are no users or roles"
_EJECTION = "an endpoint returns after one successful probe, with few requests at first"

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "bootstrap-port-annotation": "discover.endpoint.bootstrap sets the port of all endpoints",
        "bucket-": "the policy least_loaded has no buckets of loads",
        "assignment-mode": "a hash assigns sessions",
        "max-idle-secs": "sessions are assigned by a hash, so they do not expire",
        "cb-success-threshold": _EJECTION,
        "cb-window-duration-secs": "consecutive failures are counted, not those of a window",
        "disable-circuit-breaker": "the ejection of failing endpoints cannot be turned off",
        "disable-health-check": "health probes of endpoints cannot be turned off",
        "health-success-threshold": _EJECTION,
        "chat-template": _NOT_TOKENIZED,
        "model-path": _NOT_TOKENIZED,
        "tokenizer-": _NOT_TOKENIZED,
        "served-model-name": "models are named as engines list them; models[].aliases adds names",
        "control-plane-": _CONTROL,
        "jwt-": _CONTROL,
        "cors-": "a proxy in front of the gateway adds CORS headers",
        "decode-selector": "discovery was off: --service-discovery is missing",
        "prefill-selector": "discovery was off: --service-discovery is missing",
        "selector": "discovery was off: --service-discovery is missing",
        "service-discovery-": "discovery was off: --service-discovery is missing",
        "decode": "disaggregation was off",
        "dp-aware": "an engine with data parallelism is one endpoint and balances its own ranks",
        "enable-igw": "several models need one pool each, with a model that names it",
        "eviction-interval": _AGING,
        "max-tree-size": _AGING,
        "history-backend": _NOT_STORED,
        "oracle-": _NOT_STORED,
        "postgres-": _NOT_STORED,
        "redis-": _NOT_STORED,
        "storage-hook": _NOT_STORED,
        "kv-connector": "disaggregation was off",
        "load-monitor-interval": "loads are reserved at once, and scrape.interval is 1 s",
        "log-dir": "the log goes to stderr; observability.access_log may be a file",
        "max-concurrent-requests": "requests are limited per endpoint (max_concurrency) and tenant",
        "rate-limit-tokens-per-second": "rates are limited per tenant (tenants[].limits)",
        "mcp-config-path": "the client calls tools, not the gateway",
        "mini-lb": "the gateway has no separate balancer for these requests",
        "profile": "engines are profiled through their own API",
        "program-scheduling-config-json": "session_pause has parameters of its own",
        "prometheus-duration-buckets": "the buckets of the gateway's histograms are fixed",
        "reasoning-parser": _ENGINES_OWN,
        "tool-call-parser": _ENGINES_OWN,
        "request-id-headers": "x-request-id is read from trusted proxies; traceparent is passed on",
        "retry-": _BACKOFF,
        "vllm-discovery-address": _NO_REGISTRATION,
        "worker-startup-": _STARTUP,
        "worker-urls": "disaggregation or discovery was on, so the router ignored them",
    }
)
"""Why options have no counterpart, by prefix of the option's name."""
