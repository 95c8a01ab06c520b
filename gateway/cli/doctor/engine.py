"""Judges one engine by what it said: can it be served, and what of it will the gateway not see? Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from gateway.cli.doctor.findings import Finding, bad, doubtful, good, unknown
from gateway.cli.doctor.probe import Probed, models_of, request_members
from gateway.fleet import scrape
from gateway.fleet.health_checks import NO_LIST
from policies.model import Endpoint, EngineKind

PREFIXES: Mapping[EngineKind, bytes] = MappingProxyType(
    {EngineKind.VLLM: b"vllm:", EngineKind.SGLANG: b"sglang:", EngineKind.TRTLLM: b"trtllm_"}
)
HANDOFFS: Mapping[EngineKind, tuple[bytes, ...]] = MappingProxyType(
    {
        EngineKind.VLLM: (b"vllm:nixl_", b"vllm:kv_transfer", b"vllm:mooncake"),
        EngineKind.SGLANG: (b"sglang:kv_transfer_", b"sglang:num_prefill_bootstrap", b"sglang:num_decode_prealloc"),
        EngineKind.TRTLLM: (b"trtllm_kv_cache_transfer",),
    }
)
"""Metrics that only an engine with a KV connector shows."""

SKEW_S, FAR_S = 2.0, 30.0


def judge(
    found: Probed,
    endpoint: Endpoint,
    models: Mapping[str, str],
    *,
    split: bool,
    elsewhere: frozenset[str] = frozenset(),
) -> list[Finding]:
    """Judge an endpoint as configured.

    models     by the name that clients send, the name that the engine must list; empty: any name will do
    elsewhere  names of models that other endpoints of its pool serve
    """
    name = endpoint.name
    if found.problem is not None:
        fix = "start it, or correct its url; is a firewall between, or does it listen on 127.0.0.1 only?"
        return [bad(name, "reachable", f"{found.url}: {found.problem}", fix)]
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        lambda: _health(found, name),
        lambda: _version(found, name),
        lambda: _models(found, endpoint.name, models, elsewhere),
        lambda: _metrics(found, endpoint),
        lambda: _connector(found, endpoint, split=split),
        lambda: _cache_salt(found, endpoint),
        lambda: _token(found, name),
        lambda: _connection(found, name),
    )
    return [finding for check in checks for finding in check()]


def _health(found: Probed, name: str) -> Iterator[Finding]:
    status = None if found.health is None else found.health.status
    if status == 200:
        yield good(name, "reachable", f"{found.url} is well")
    elif status in (401, 403):
        yield bad(
            name, "reachable", f"its health check wants a key ({status})", "set api_key of the endpoint, by reference"
        )
    else:
        yield bad(name, "reachable", f"its health check says {status}", "look into its log, or set health.path")


def _version(found: Probed, name: str) -> Iterator[Finding]:
    told = found.version.json if found.version is not None and found.version.status == 200 else None
    if isinstance(told, dict) and isinstance(told.get("version"), str):
        yield good(name, "version", told["version"][:40])
    else:
        yield unknown(name, "version", "it does not tell at /version", "note the engine's version yourself")


def _models(found: Probed, name: str, models: Mapping[str, str], elsewhere: frozenset[str]) -> Iterator[Finding]:
    listed = models_of(found)
    if found.models is not None and found.models.status in NO_LIST:
        seen = f"it has no /v1/models ({found.models.status}), so every model of its pool is sent there"
        yield doubtful(name, "models", seen, "does its url end in /v1? leave that out")
        return
    if not listed:
        yield bad(
            name,
            "models",
            "it lists none at /v1/models",
            "does its url end in /v1? leave that out; does it want a key?",
        )
        return
    missing = sorted(model for model, wanted in models.items() if wanted not in listed and model not in elsewhere)
    if missing:
        known = ", ".join(sorted(listed))
        wanted = ", ".join(sorted({models[model] for model in missing}))
        seen = f"it lists no {wanted}, but {known}: requests for {', '.join(missing)} get 404"
        yield bad(name, "models", seen, _remedy(missing[0], sorted(listed.keys() - set(models.values()))))
    else:
        shown = ", ".join(f"{each} ({length} tokens)" if length else each for each, length in listed.items())
        others = sorted(model for model, wanted in models.items() if wanted not in listed)
        yield good(name, "models", f"{shown}; others serve {', '.join(others)}" if others else shown)


def _remedy(model: str, names: list[str]) -> str:
    """Return how to have an engine serve a model that it does not list; no other model has one of the `names`."""
    adapter = f"an adapter has to be loaded first (vLLM: --lora-modules {model}=PATH, or POST /v1/load_lora_adapter)"
    if not names:
        return adapter
    line = f"models: [{{name: {model}, served_model: {names[0]}}}]"
    which = "" if len(names) == 1 else " (or another name that it lists)"
    return f"if it has the model by another name, write {line}{which}; {adapter}"


def kind_of(text: bytes) -> EngineKind | None:
    """Whose metrics these are."""
    return next((kind for kind, prefix in PREFIXES.items() if prefix in text), None)


def _metrics(found: Probed, endpoint: Endpoint) -> Iterator[Finding]:
    name, said = endpoint.name, found.metrics
    if said is None or said.status != 200:
        fix = "let it show metrics (SGLang: --enable-metrics); without them only this gateway's own bookings are known"
        yield doubtful(name, "metrics", "it shows none", fix)
        return
    kind = kind_of(said.text)
    if kind is not None and kind is not endpoint.engine:
        yield bad(name, "metrics", f"they are {kind}'s, not {endpoint.engine}'s", f"set engine: {kind} of the endpoint")
        return
    reading = scrape.read(said.text, endpoint.engine)
    facts = {
        "running": reading.running,
        "waiting": reading.waiting,
        "KV usage": reading.kv_usage,
        "KV size": reading.kv_tokens,
    }
    missing = [fact for fact, value in facts.items() if value is None]
    if missing:
        fix = "is its version one that this gateway knows? KV size can be told by kv_tokens of the endpoint"
        yield doubtful(name, "metrics", f"these do not tell {', '.join(missing)}", fix)
    else:
        yield good(name, "metrics", f"{endpoint.engine}'s, {reading.kv_tokens:,} tokens of KV")


def _connector(found: Probed, endpoint: Endpoint, *, split: bool) -> Iterator[Finding]:
    text = found.metrics.text if found.metrics is not None else b""
    if any(prefix in text for prefix in HANDOFFS[endpoint.engine]):
        yield good(endpoint.name, "KV connector", "its metrics tell of one")
    elif split:
        fix = "vLLM: --kv-transfer-config; SGLang: --disaggregation-mode; send one split request and read /live"
        yield unknown(endpoint.name, "KV connector", "its metrics tell of none so far", fix)


def _cache_salt(found: Probed, endpoint: Endpoint) -> Iterator[Finding]:
    check, name, member, told = "cache salt", endpoint.name, endpoint.salt_member, request_members(found)
    fix = "cache_salt: false says so; reserve it for one tenant under tenants of the endpoint, or take a newer engine"
    if endpoint.tenants and not member:
        yield good(name, check, f"it gets none, and serves only {', '.join(sorted(endpoint.tenants))}")
    elif not member:
        seen = "it gets none, so tenants share its cached prompts"
        yield doubtful(name, check, seen, "reserve it for one tenant under tenants of the endpoint")
    elif not told:
        fix = f"send the same prompt with two values of {member} and compare cached_tokens"
        yield unknown(name, check, "it shows no /openapi.json that tells", fix)
    elif all(member in members for members in told):
        yield good(name, check, f"it takes {member}: tenants do not share cached prompts")
    else:
        yield bad(name, check, f"its requests have no member {member}, so tenants share its cached prompts", fix)


def _token(found: Probed, name: str) -> Iterator[Finding]:
    said = found.token
    if said is None:
        return
    if said.status != 200 or not isinstance(said.json, dict):
        yield bad(
            name, "one token", f"a request for one was answered {said.status}", "ask it with curl and read its log"
        )
        return
    yield good(name, "one token", f"came after {said.took_s * 1000:.0f} ms")
    usage = said.json.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    if isinstance(details, dict) and "cached_tokens" in details:
        yield good(name, "usage details", "cached tokens are told: the prefix index is corrected by them")
    else:
        fix = "vLLM: --enable-prompt-tokens-details; SGLang: --enable-cache-report"
        yield doubtful(
            name, "usage details", "cached tokens are not told: what is believed of prefixes stays a belief", fix
        )
    choices = said.json.get("choices")
    ids: Any = (
        choices[0].get("token_ids") if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None
    )
    if ids:
        yield good(name, "token ids", "told when asked for: an answer can be continued exactly")
    else:
        yield unknown(name, "token ids", "not told when asked for", "vLLM 0.11 or newer tells them")


def _connection(found: Probed, name: str) -> Iterator[Finding]:
    if found.connections > 1:
        seen = f"closed between requests: {found.connections} were opened for a few questions"
        yield doubtful(name, "keep-alive", seen, "have it, or the proxy before it, keep connections for a minute")
    else:
        yield good(name, "keep-alive", "one connection served all questions")
    if found.skew_s is None:
        yield unknown(name, "clock", "its answers carry no Date", "compare `date` there and here")
    elif abs(found.skew_s) > SKEW_S:
        verdict = bad if abs(found.skew_s) > FAR_S else doubtful
        yield verdict(
            name, "clock", f"{found.skew_s:+.0f} s from ours", "run chrony or ntpd there: logs will not match"
        )
    else:
        yield good(name, "clock", "within two seconds of ours")
