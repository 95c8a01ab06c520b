"""Evaluates an engine's responses for `penstock doctor`: what works, fails or is unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from gateway.cli.doctor.api_checks import check_apis
from gateway.cli.doctor.engine_probe import ProbeResult, listed_models, request_members
from gateway.cli.doctor.findings import (
    CheckFinding,
    fail_finding,
    pass_finding,
    unknown_finding,
    warn_finding,
)
from gateway.fleet import engine_metrics
from gateway.fleet.probe_requests import NO_PAGE
from policies.engine_kinds import ENGINE_TRAITS
from policies.routing_types import Endpoint, EngineKind

CONNECTOR_METRICS: Mapping[EngineKind, tuple[bytes, ...]] = MappingProxyType(
    {
        EngineKind.VLLM: (b"vllm:nixl_", b"vllm:kv_transfer", b"vllm:mooncake"),
        EngineKind.SGLANG: (
            b"sglang:kv_transfer_",
            b"sglang:num_prefill_bootstrap",
            b"sglang:num_decode_prealloc",
        ),
        EngineKind.TRTLLM: (b"trtllm_kv_cache_transfer",),
    }
)
"""Names of metrics that an engine exposes only if it has a KV connector."""

SKEW_S, MAX_SKEW_S = 2.0, 30.0


def check_engine(
    responses: ProbeResult,
    endpoint: Endpoint,
    models: Mapping[str, str],
    *,
    split: bool,
    elsewhere: frozenset[str] = frozenset(),
) -> list[CheckFinding]:
    """Return the findings of `penstock doctor` about one endpoint, from its engine's responses.

    models     by the name that clients send, the name that the engine must list; empty if any model
               suffices
    split      whether requests for these models are split between prefill and decode endpoints
    elsewhere  names of models that other endpoints of the engine's pool serve
    """
    name = endpoint.name
    if responses.problem is not None:
        fix = (
            "start it, or correct its url; is there a firewall, "
            "or does it listen only on 127.0.0.1?"
        )
        return [fail_finding(name, "reachable", f"{responses.url}: {responses.problem}", fix)]
    checks: tuple[Callable[[], Iterator[CheckFinding]], ...] = (
        lambda: _health(responses, name),
        lambda: _version(responses, name),
        lambda: _models(responses, endpoint.name, models, elsewhere),
        lambda: _metrics(responses, endpoint),
        lambda: _connector(responses, endpoint, split=split),
        lambda: _cache_salt(responses, endpoint),
        lambda: _token(responses, name),
        lambda: check_apis(responses, name),
        lambda: _connection(responses, name),
    )
    return [finding for check in checks for finding in check()]


def _health(responses: ProbeResult, name: str) -> Iterator[CheckFinding]:
    status = None if responses.health is None else responses.health.status
    if status == 200:
        yield pass_finding(name, "reachable", f"{responses.url} is healthy")
    elif status in NO_PAGE and listed_models(responses):
        text = f"{responses.url} has no health page; its list of models is probed instead"
        yield pass_finding(name, "reachable", text)
    elif status in (401, 403):
        fix = "set the endpoint's api_key to a reference to the key"
        yield fail_finding(
            name, "reachable", f"its health check requires a key (status {status})", fix
        )
    else:
        fix = "check the engine's log, or set health.path"
        yield fail_finding(name, "reachable", f"its health check returns status {status}", fix)


def _version(responses: ProbeResult, name: str) -> Iterator[CheckFinding]:
    body = (
        responses.version.json
        if responses.version is not None and responses.version.status == 200
        else None
    )
    if isinstance(body, dict) and isinstance(body.get("version"), str):
        yield pass_finding(name, "version", body["version"][:40])
    else:
        yield unknown_finding(
            name,
            "version",
            "the engine's /version does not report a version",
            "check the engine's version yourself",
        )


def _models(
    responses: ProbeResult, name: str, models: Mapping[str, str], elsewhere: frozenset[str]
) -> Iterator[CheckFinding]:
    listed = listed_models(responses)
    if responses.models is not None and responses.models.status in NO_PAGE:
        status = responses.models.status
        text = f"/v1/models returns status {status}, so it receives every model of its pool"
        yield warn_finding(name, "models", text, "does its url end in /v1? remove that")
        return
    if not listed:
        fix = "does its url end in /v1? remove that; does it require a key?"
        yield fail_finding(name, "models", "/v1/models lists none", fix)
        return
    unlisted = sorted(model for model, served in models.items() if served not in listed)
    missing = [model for model in unlisted if model not in elsewhere]
    if missing:
        known = ", ".join(sorted(listed))
        required = ", ".join(sorted({models[model] for model in missing}))
        text = f"it lists {known}, not {required}: requests for {', '.join(missing)} get 404"
        fix = _remedy(missing[0], sorted(listed.keys() - set(models.values())))
        yield fail_finding(name, "models", text, fix)
    else:
        text = ", ".join(
            f"{model} ({length} tokens)" if length else model for model, length in listed.items()
        )
        others = f"; other endpoints serve {', '.join(unlisted)}" if unlisted else ""
        yield pass_finding(name, "models", text + others)


def _remedy(model: str, names: list[str]) -> str:
    # Return how to make an engine serve a model that it does not list, as a text.
    #
    # `names` are the listed names that belong to no other configured model.
    adapter = f"load an adapter (vLLM: --lora-modules {model}=PATH, or POST /v1/load_lora_adapter)"
    if not names:
        return adapter
    line = f"models: [{{name: {model}, served_model: {names[0]}}}]"
    choice = "" if len(names) == 1 else " (or another name that it lists)"
    return f"if it has the model under another name, write {line}{choice}; otherwise {adapter}"


def engine_kind_of(text: bytes) -> EngineKind | None:
    """Return the kind of engine, such as vllm, to which the metric names in a text belong.

    Returns None if they belong to no known kind.
    """
    kinds = ((kind, ENGINE_TRAITS[kind].metric_prefix) for kind in EngineKind)
    return next((kind for kind, prefix in kinds if prefix and prefix in text), None)


def _metrics(responses: ProbeResult, endpoint: Endpoint) -> Iterator[CheckFinding]:
    name, response = endpoint.name, responses.metrics
    kind = engine_kind_of(b"" if response is None else response.text)
    if kind is None and not ENGINE_TRAITS[endpoint.engine].metrics_path:
        text = f"{endpoint.engine} has none: the gateway knows only its own requests there"
        yield pass_finding(name, "metrics", text)
        return
    if response is None or response.status != 200:
        fix = (
            "enable them (SGLang: --enable-metrics, llama-server: --metrics), or set the "
            "endpoint's engine: ollama, transformers or openai; without them, the gateway knows "
            "only its own requests"
        )
        yield warn_finding(name, "metrics", "it exposes none", fix)
        return
    if kind is not None and kind is not endpoint.engine:
        seen = f"they are those of {kind}, not {endpoint.engine}"
        yield fail_finding(name, "metrics", seen, f"set the endpoint's engine: {kind}")
        return
    reading = engine_metrics.parse_scrape(response.text, endpoint.engine)
    facts = {
        "running": reading.running,
        "waiting": reading.waiting,
        "KV usage": reading.kv_usage,
        "KV size": reading.kv_tokens,
    }
    missing = [fact for fact, value in facts.items() if value is None]
    if missing:
        fix = (
            "does the gateway support this engine version? "
            "the KV size can be set with the endpoint's kv_tokens"
        )
        yield warn_finding(name, "metrics", f"they do not include {', '.join(missing)}", fix)
    else:
        yield pass_finding(
            name, "metrics", f"{endpoint.engine}, {reading.kv_tokens:,} tokens of KV"
        )


def _connector(
    responses: ProbeResult, endpoint: Endpoint, *, split: bool
) -> Iterator[CheckFinding]:
    text = responses.metrics.text if responses.metrics is not None else b""
    if any(prefix in text for prefix in CONNECTOR_METRICS.get(endpoint.engine, ())):
        yield pass_finding(
            endpoint.name, "KV connector", "the engine's metrics show a KV connector"
        )
    elif split:
        fix = (
            "vLLM: --kv-transfer-config; SGLang: --disaggregation-mode; "
            "send one split request and check /live"
        )
        yield unknown_finding(
            endpoint.name, "KV connector", "the engine's metrics show no KV connector so far", fix
        )


def _cache_salt(responses: ProbeResult, endpoint: Endpoint) -> Iterator[CheckFinding]:
    check = "cache salt"
    name = endpoint.name
    member = endpoint.salt_member
    schemas = request_members(responses)
    fix = (
        "declare this with cache_salt: false, reserve the endpoint for one tenant "
        "with its tenants, or upgrade the engine"
    )
    if endpoint.tenants and not member:
        yield pass_finding(
            name, check, f"it receives none, but serves only {', '.join(sorted(endpoint.tenants))}"
        )
    elif not member:
        text = "the engine receives no cache salt, so tenants share its cached prompts"
        yield warn_finding(
            name, check, text, "reserve the endpoint for one tenant with its tenants"
        )
    elif not schemas:
        fix = f"send the same prompt with two values of {member} and compare cached_tokens"
        yield unknown_finding(
            name, check, "the engine has no /openapi.json that lists request members", fix
        )
    elif all(member in members for members in schemas):
        yield pass_finding(
            name, check, f"it accepts {member}, so tenants do not share cached prompts"
        )
    else:
        yield fail_finding(
            name,
            check,
            f"requests to it cannot have the member {member}, so tenants share its cached prompts",
            fix,
        )


def _token(responses: ProbeResult, name: str) -> Iterator[CheckFinding]:
    response = responses.token
    if response is None:
        return
    if response.status != 200 or not isinstance(response.json, dict):
        seen = f"a request for one token returned status {response.status}"
        yield fail_finding(
            name, "one token", seen, "send the request with curl and check the engine's log"
        )
        return
    yield pass_finding(name, "one token", f"generated in {response.took_s * 1000:.0f} ms")
    yield _usage_details(response.json, name)
    yield _token_ids(response.json, name)


def _usage_details(body: Mapping[str, Any], name: str) -> CheckFinding:
    usage = body.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    if isinstance(details, dict) and "cached_tokens" in details:
        return pass_finding(
            name,
            "usage details",
            "the engine reports cached tokens, which correct the prefix index",
        )
    fix = "vLLM: --enable-prompt-tokens-details; SGLang: --enable-cache-report"
    seen = "the engine does not report cached tokens, so the prefix index stays a prediction"
    return warn_finding(name, "usage details", seen, fix)


def _token_ids(body: Mapping[str, Any], name: str) -> CheckFinding:
    choices = body.get("choices")
    ids: Any = (
        choices[0].get("token_ids")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict)
        else None
    )
    if ids:
        return pass_finding(
            name,
            "token ids",
            "the engine returns token ids, so a broken stream can be continued exactly",
        )
    return unknown_finding(
        name,
        "token ids",
        "the engine does not return token ids",
        "vLLM returns token ids since version 0.11",
    )


def _connection(responses: ProbeResult, name: str) -> Iterator[CheckFinding]:
    if responses.connection_count > 1:
        text = f"it closes connections: {responses.connection_count} were opened for a few requests"
        fix = "let the engine, or the proxy before it, keep idle connections for a minute"
        yield warn_finding(name, "keep-alive", text, fix)
    else:
        yield pass_finding(name, "keep-alive", "one connection served all requests")
    if responses.skew_s is None:
        yield unknown_finding(
            name,
            "clock",
            "the engine's responses have no Date header",
            "compare the output of `date` there and here",
        )
    elif abs(responses.skew_s) > SKEW_S:
        verdict = fail_finding if abs(responses.skew_s) > MAX_SKEW_S else warn_finding
        yield verdict(
            name,
            "clock",
            f"{responses.skew_s:+.0f} s from ours",
            "run chrony or ntpd there, so that log times match",
        )
    else:
        yield pass_finding(name, "clock", "the engine's clock is within 2 s of the gateway's")
