"""Checks for `penstock doctor` whether an engine publishes KV events.

KV events report every change of an engine's prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator

from gateway.cli.doctor.engine_probe import ProbeResult, listed_paths
from gateway.cli.doctor.findings import CheckFinding, pass_finding, unknown_finding, warn_finding
from gateway.config.kv_event_sections import KvEvents
from gateway.fleet.kv_events.tokenization import TOKENIZE_PATH
from gateway.fleet.kv_events.zmq_addresses import (
    SGLANG_PATH,
    VLLM_PATH,
    SourceError,
    configured_addresses,
    described_by_sglang,
    described_by_vllm,
)
from policies.routing_types import Endpoint, EngineKind

_CHECK = "KV events"


def description_path(engine: EngineKind, spec: KvEvents | None) -> str:
    """Return the URL path at which the engine says where it publishes KV events.

    `spec` is the endpoint's setting `kv_events`. Without it, KV events are not used, and the result
    is "".
    """
    if spec is None:
        return ""
    return SGLANG_PATH if engine is EngineKind.SGLANG else VLLM_PATH


def check_kv_events(
    responses: ProbeResult, endpoint: Endpoint, spec: KvEvents | None
) -> Iterator[CheckFinding]:
    """Yield findings about an engine's KV events: what the gateway can read, what is missing."""
    name, response = endpoint.name, responses.events
    if spec is None or response is None:
        return
    try:
        if spec.publisher is not None:
            addresses = configured_addresses(spec, endpoint.url, endpoint.layout.dp)
        elif endpoint.engine is EngineKind.SGLANG:
            addresses = described_by_sglang(response.status, response.text, endpoint.url)
        else:
            addresses = described_by_vllm(response.status, response.text, endpoint.url)
    except SourceError as error:
        fix = "start the engine with --kv-events-config, or remove kv_events"
        yield warn_finding(name, _CHECK, f"{error}; its prefix cache can only be estimated", fix)
        return
    first = addresses[0]
    ranks = "" if len(addresses) == 1 else f" (the first of {len(addresses)} ranks)"
    if first.replay:
        yield pass_finding(name, _CHECK, f"at {first.events}{ranks}, replayed at {first.replay}")
    else:
        text = f"at {first.events}{ranks}, without replays: a lost message empties the index"
        yield warn_finding(name, _CHECK, text, "set replay_endpoint in --kv-events-config")
    paths = listed_paths(responses)
    if not paths:
        text = f"it has no /openapi.json that lists {TOKENIZE_PATH}"
        yield unknown_finding(name, "tokens of prompts", text, f"POST to {TOKENIZE_PATH} yourself")
    elif TOKENIZE_PATH not in paths:
        text = f"it has no {TOKENIZE_PATH}, so events cannot be matched with prompts"
        yield warn_finding(name, "tokens of prompts", text, "use an engine version that has it")
