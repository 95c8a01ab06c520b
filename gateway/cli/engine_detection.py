"""Detects the kind of each engine given with `--engine`, which states only a URL."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

from gateway.cli.doctor.engine_checks import engine_kind_of
from gateway.cli.doctor.engine_probe import METRICS_PATHS, EngineConnection, ProbeResponse
from gateway.config import EndpointSpec, LoadedConfig
from gateway.http.outgoing_tls import ClientContexts
from policies.routing_types import EngineKind

TIMEOUT_S = 2.0
"""Seconds that an engine has for each response; an engine that is not up yet delays the start."""
THREADS = 16

_KINDS_BY_OWNER: Mapping[str, EngineKind] = MappingProxyType(
    {
        "vllm": EngineKind.VLLM,
        "sglang": EngineKind.SGLANG,
        "llamacpp": EngineKind.LLAMACPP,
        "library": EngineKind.OLLAMA,
    }
)
"""Kinds by the member `owned_by` of the first model at /v1/models."""


def config_with_kinds(
    urls: Sequence[str], build: Callable[[Mapping[str, str]], LoadedConfig]
) -> tuple[LoadedConfig, list[str]]:
    """Detect the kind of each engine (vLLM, SGLang, ...), and build a configuration with the kinds.

    urls   URLs of the engines
    build  function that builds a configuration from a mapping of URLs to kinds of engines

    Returns the configuration, and notes for the operator: one line of text for each engine that is
    not vLLM, or may not be. Raises ConfigError.
    """
    loaded = build({})
    specs = [spec for pool in loaded.config.pools.values() for spec in pool.endpoints]
    contexts = ClientContexts()
    with ThreadPoolExecutor(THREADS) as threads:
        found = [*threads.map(lambda spec: _detect(spec, contexts), specs)]
    kinds: dict[str, str] = {}
    notes = []
    for url, (kind, doubt) in zip(urls, found, strict=True):
        if kind is not EngineKind.VLLM:
            kinds[url] = kind
            notes.append(f"{url} is an engine of the kind {kind}")
        elif doubt:
            notes.append(f"{url} {doubt}; it is taken for vllm")
    return build(kinds) if kinds else loaded, notes


def _detect(spec: EndpointSpec, contexts: ClientContexts) -> tuple[EngineKind, str]:
    # Return an engine's kind, vLLM by default, and why it is in doubt ("" if it is not).
    key = None if spec.api_key is None else spec.api_key.reveal()
    encryption = contexts.encryption_for(spec)
    connection = EngineConnection(spec.url, key, timeout_s=TIMEOUT_S, encryption=encryption)
    try:
        for kind in _signs(connection):
            if kind is not None:
                return kind, ""
    except (OSError, http.client.HTTPException) as error:
        return EngineKind.VLLM, f"does not answer ({error or type(error).__name__})"
    finally:
        connection.close()
    return EngineKind.VLLM, "has no list of models"


def _signs(connection: EngineConnection) -> Iterator[EngineKind | None]:
    # Yield the kind that each response points to, the surest first; None if it shows nothing.
    for path in METRICS_PATHS:
        metrics = connection.request("GET", path)
        yield engine_kind_of(metrics.text) if metrics.status == 200 else None
    models = connection.request("GET", "/v1/models")
    yield _KINDS_BY_OWNER.get(_owner(models))
    version = connection.request("GET", "/api/version")
    yield EngineKind.OLLAMA if _has_version(version) else None
    yield EngineKind.OPENAI if models.status == 200 else None  # any other engine, or a provider


def _owner(models: ProbeResponse) -> str:
    listed = models.json.get("data") if isinstance(models.json, dict) else None
    first = listed[0] if isinstance(listed, list) and listed else None
    owner = first.get("owned_by") if isinstance(first, dict) else None
    return owner if isinstance(owner, str) else ""


def _has_version(response: ProbeResponse) -> bool:
    return response.status == 200 and isinstance(response.json, dict) and "version" in response.json
