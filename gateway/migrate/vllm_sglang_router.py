"""Converts the command lines of vllm-router, and of sglang-router and its successor SMG.

These routers have a common code base and share most of their options.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from gateway.migrate import option_values
from gateway.migrate.command_options import CommandOptions
from gateway.migrate.config_draft import Draft, MigrationError
from gateway.migrate.option_rules import Rule, apply_rules, drop_unread
from gateway.migrate.option_values import Converter
from gateway.migrate.policy_names import ROUTERS

POOL = "engines"
DEFAULT_BOOTSTRAP_PORT = "8998"


class RouterKind(msgspec.Struct, frozen=True):
    """The differences between vllm-router and sglang-router that matter for a migration.

    host          default address to listen on
    engine        default kind of engine
    split_option  the option that turns prefill/decode disaggregation on
    """

    name: str
    host: str
    engine: str
    split_option: str


VLLM_ROUTER = RouterKind("vllm-router", "127.0.0.1", "vllm", "vllm-pd-disaggregation")
SGLANG_ROUTER = RouterKind("sglang-router or SMG", "0.0.0.0", "sglang", "pd-disaggregation")

_BACKENDS: Mapping[str, str] = MappingProxyType(
    {"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm"}
)
_CONNECTORS: Mapping[str, str] = MappingProxyType({"nixl": "vllm_nixl", "mooncake": "mooncake"})

_POOL = ("pools", POOL)

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


def convert(options: CommandOptions, draft: Draft, kind: RouterKind) -> None:
    """Write the command line of vllm-router or sglang-router into the draft of a gateway.yaml.

    Raises MigrationError if it cannot be converted.
    """
    draft.set(option_values.text(options.last("host") or kind.host), "listeners", "api", "host")
    draft.set(option_values.number(options.last("port") or "30000"), "listeners", "api", "port")
    draft.set({"policy": _policy(options, draft)}, "pools", POOL)
    _engines(options, draft, kind)
    _unset_tls_of_plain_engines(draft)
    apply_rules(options, draft, RULES)
    _health(options, draft)
    _listeners(options, draft)
    _traces(options, draft)
    if options.flag("log-json"):
        draft.set("json", "observability", "log", "format")
    if options.flag("enable-program-scheduling"):
        draft.set("session_pause", "pools", POOL, "admission")
        draft.differ("--enable-program-scheduling", "admission session_pause, by its own defaults")
    drop_unread(options, draft, REASONS)


def _policy(options: CommandOptions, draft: Draft) -> object:
    default = options.last("policy") or "cache_aware"
    name = options.last("prefill-policy") or default
    counterpart = ROUTERS.get(name)
    if counterpart is None:
        raise MigrationError(f"--policy: {name!r} is unknown; known are {', '.join(ROUTERS)}")
    if counterpart.differs:
        draft.differ(f"--policy {name}", f"{counterpart.policy}: {counterpart.differs}")
    if (decode := options.last("decode-policy")) is not None:
        draft.drop(f"--decode-policy {decode}", "the least decode load, near the prefill endpoint")
    thresholds = {
        key.replace("-", "_"): convert_one(given)
        for key, convert_one in THRESHOLDS.items()
        if (given := options.last(key)) is not None
    }
    if counterpart.policy == "sglang_cache_aware" and thresholds:
        return {"name": counterpart.policy, "parameters": thresholds}
    for key in thresholds if counterpart.policy != "sglang_cache_aware" else ():
        draft.drop(f"--{key.replace('_', '-')}", "only cache_aware reads it")
    return counterpart.policy


def _engines(options: CommandOptions, draft: Draft, kind: RouterKind) -> None:
    traits = _traits(options, draft, kind)
    is_split = options.flag(kind.split_option) or "prefill" in options
    if options.flag("service-discovery"):
        _discovered(options, draft, traits, is_split=is_split)
    elif is_split:
        _pairs(options, draft, traits)
    else:
        given = [*options.values("worker-urls"), *draft.additions.engines]
        urls = [option_values.engine_url(url, "--worker-urls", draft) for url in given]
        endpoints = [{"url": url, **traits} for url in urls if url]
        if not endpoints:
            raise MigrationError(
                "the command line names no engines; add --worker-urls to it, "
                "or give --engine URL to penstock migrate"
            )
        draft.set(option_values.distinct(endpoints), "pools", POOL, "endpoints")
    if is_split:
        _split(options, draft, str(traits.get("engine", "vllm")))
    elif draft.additions.model is not None:
        draft.set([{"name": draft.additions.model, "pool": POOL}], "models")


def _traits(options: CommandOptions, draft: Draft, kind: RouterKind) -> dict[str, object]:
    backend = options.last("backend") or options.last("runtime") or kind.engine
    options.values_by_occurrence("runtime")
    if backend not in _BACKENDS:
        draft.drop(f"--backend {backend}", "endpoints are engines that speak the OpenAI API")
    traits: dict[str, object] = {}
    engine = _BACKENDS.get(backend, kind.engine)
    if engine != "vllm":
        traits["engine"] = engine
    if (key := options.last("api-key")) is not None:
        traits["api_key"] = draft.refer(key, "ENGINE_API_KEY", "--api-key")
    ranks = options.last("intra-node-data-parallel-size")
    if ranks not in (None, "1"):
        traits["layout"] = {"dp": option_values.number(str(ranks))}
    return traits | _engine_tls(options, draft)


def _engine_tls(options: CommandOptions, draft: Draft) -> dict[str, object]:
    # Return the section tls of endpoints, with a client certificate only if its key is known.
    names = {"certificate": "client-cert-path", "key": "client-key-path", "ca": "ca-cert-paths"}
    given = {key: options.values(name) for key, name in names.items()}
    section = {key: option_values.text(paths[0]) for key, paths in given.items() if paths}
    if len(section.keys() & {"certificate", "key"}) == 1:
        draft.drop("--client-cert-path, --client-key-path", "TLS needs both of them")
        section = {key: path for key, path in section.items() if key == "ca"}
    for path in given["ca"][1:]:
        draft.do(f"--ca-cert-paths {path}", "append it to the first file; tls.ca is one file")
    return {"tls": section} if section else {}


def _unset_tls_of_plain_engines(draft: Draft) -> None:
    for endpoint in draft.get("pools", POOL, "endpoints") or ():
        if "tls" in endpoint and not str(endpoint["url"]).startswith("https://"):
            draft.drop(f"--ca-cert-paths for {endpoint['url']}", "only https:// URLs use TLS")
            del endpoint["tls"]


def _pairs(options: CommandOptions, draft: Draft, traits: Mapping[str, object]) -> None:
    endpoints = []
    for given, *port in options.values_by_occurrence("prefill"):
        url = _without_zmq(given, "--prefill", draft)
        if (address := option_values.engine_url(url, "--prefill", draft)) is not None:
            endpoint = {"url": address, "role": "prefill", **traits}
            if port and port[0].lower() != "none":
                endpoint["bootstrap"] = f"{option_values.host_of(address)}:{port[0]}"
            endpoints.append(endpoint)
    endpoints += [
        {"url": address, "role": "decode", **traits}
        for given in options.values("decode")
        if (url := _without_zmq(given, "--decode", draft))
        and (address := option_values.engine_url(url, "--decode", draft)) is not None
    ]
    if len({endpoint["role"] for endpoint in endpoints}) < 2:
        raise MigrationError("prefill/decode disaggregation needs --prefill and --decode URLs")
    draft.set(option_values.distinct(endpoints), "pools", POOL, "endpoints")


def _without_zmq(value: str, option: str, draft: Draft) -> str:
    # Return an engine's URL without the address at which its P2pNcclConnector listens.
    url, zmq, _ = value.partition(":zmq://")
    if zmq:
        draft.differ(f"{option} {value}", "KV moves by NIXL: start the engines with NixlConnector")
    return url


def _split(options: CommandOptions, draft: Draft, engine: str) -> None:
    connector = options.last("kv-connector") or "nixl"
    dialect = {"sglang": "sglang", "trtllm": "trtllm"}.get(engine) or _CONNECTORS.get(connector)
    endpoints = draft.get("pools", POOL, "endpoints") or []
    if dialect is None:
        draft.drop(f"--kv-connector {connector}", "decode endpoints serve whole requests instead")
        decoders = [item for item in endpoints if item["role"] == "decode"]
        for item in decoders:
            del item["role"]
        draft.set(decoders, "pools", POOL, "endpoints")
        return
    for item in endpoints:
        if item["role"] == "prefill" and dialect in ("sglang", "mooncake"):
            host = option_values.host_of(str(item["url"]))
            item.setdefault("bootstrap", f"{host}:{DEFAULT_BOOTSTRAP_PORT}")
        elif "bootstrap" in item and dialect not in ("sglang", "mooncake"):
            draft.drop(f"bootstrap port of {item['url']}", f"{dialect} does not use one")
            del item["bootstrap"]
    model = draft.additions.model
    if model is None:
        raise MigrationError(
            "prefill/decode disaggregation is set per model: give --model NAME, as the engines "
            "list it at /v1/models"
        )
    draft.set([{"name": model, "pool": POOL, "split": {"dialect": dialect}}], "models")


def _discovered(
    options: CommandOptions, draft: Draft, traits: Mapping[str, object], *, is_split: bool
) -> None:
    namespace, port = (
        options.last("service-discovery-namespace"),
        options.last("service-discovery-port"),
    )
    number = option_values.number(port or "80")
    service = draft.additions.service or POOL
    if not is_split:
        _select(draft, options, "selector", service, namespace, number)
        target = {"service": service} | ({"namespace": namespace} if namespace else {})
        target["port"] = str(number)
        discover = {"kubernetes": target} | ({"endpoint": dict(traits)} if traits else {})
        draft.set(discover, "pools", POOL, "discover")
        return
    endpoints = []
    for role in ("prefill", "decode"):
        name = f"{service}-{role}"
        _select(draft, options, f"{role}-selector", name, namespace, number)
        host = f"{name}.{namespace}.svc" if namespace else name
        endpoints.append({"url": f"http://{host}:{number}", "role": role, **traits})
    draft.do("several pods per role", "list each in a file for discover.file, with its role")
    draft.set(endpoints, "pools", POOL, "endpoints")


def _select(
    draft: Draft,
    options: CommandOptions,
    name: str,
    service: str,
    namespace: str | None,
    port: object,
) -> None:
    pairs = [word.partition("=") for word in options.values(name)]
    selector = {key: value for key, _, value in pairs}
    if not selector:
        raise MigrationError(f"service discovery needs --{name} key=value")
    draft.add_service(service, namespace, selector, port)


def _health(options: CommandOptions, draft: Draft) -> None:
    if options.flag("disable-retries"):
        draft.set({"attempts": 1, "hedge": 0.0}, "retries")
    counts = [
        count
        for name in ("health-failure-threshold", "cb-failure-threshold")
        if (given := options.last(name)) is not None and (count := option_values.positive(given))
    ]
    if counts:
        fewest = min(counts, key=lambda count: (isinstance(count, str), count))
        draft.set(fewest, "health", "failures")
        draft.differ("failure thresholds", "health.failures counts probes and requests together")
    given = options.last("cb-timeout-duration-secs")
    if given is not None and (backoff := option_values.seconds(given)) is not None:
        draft.set(backoff, "health", "backoff")
        if "$" in backoff or float(given) > 60:
            draft.set(backoff, "health", "backoff_max")
        text = "the time doubles whenever an endpoint fails again after its return"
        draft.differ("--cb-timeout-duration-secs", text)


def _listeners(options: CommandOptions, draft: Draft) -> None:
    if origins := options.values("cors-allowed-origins"):
        allowed = [option_values.text(origin).rstrip("/") for origin in origins]
        draft.set(allowed, "listeners", "api", "cors_origins")
    port = options.last("prometheus-port")
    draft.set(option_values.number(port or "29000"), "listeners", "admin", "port")
    host = options.last("prometheus-host")
    if host not in (None, "127.0.0.1", "localhost", "::1"):
        draft.differ(
            f"--prometheus-host {host}",
            "the admin server can also change the configuration and stays on 127.0.0.1; "
            "set listeners.admin.host, and admin.key",
        )
    pair = options.last("server-cert-path"), options.last("server-key-path")
    if all(pair):
        files = {
            "certificate": option_values.text(str(pair[0])),
            "key": option_values.text(str(pair[1])),
        }
        draft.set(files, "listeners", "api", "tls")
    elif any(pair):
        draft.drop("--server-cert-path, --server-key-path", "TLS needs both of them")
    if draft.get("listeners", "api", "port") == draft.get("listeners", "admin", "port"):
        draft.set(0, "listeners", "admin", "port")
        draft.do("--prometheus-port", "it is the port of the API too; choose another")


def _traces(options: CommandOptions, draft: Draft) -> None:
    address = options.last("otlp-traces-endpoint")
    if options.flag("enable-trace"):
        host = (address or "localhost:4317").partition("://")[2] or address or "localhost:4317"
        host = host.rpartition(":")[0] or host
        draft.set(f"http://{host}:4318/v1/traces", "observability", "traces", "endpoint")
        draft.differ("--enable-trace", "traces go by OTLP over HTTP, port 4318, and 1 % are traced")
    elif address is not None:
        draft.drop("--otlp-traces-endpoint", "tracing was off: --enable-trace is missing")
