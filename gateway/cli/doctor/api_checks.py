"""Checks which APIs an engine serves, and whether it stores responses for later requests."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.cli.doctor.engine_probe import ProbeResult, listed_paths
from gateway.cli.doctor.findings import CheckFinding, pass_finding, unknown_finding
from gateway.protocol.api_table import APIS, RESPONSES
from gateway.protocol.response_store_probe import shows_store


def check_apis(responses: ProbeResult, name: str) -> Iterator[CheckFinding]:
    """Yield findings about the APIs that the engine lists, and about its store of responses."""
    paths = listed_paths(responses)
    if not paths:
        fix = "send each request that your clients use with curl"
        yield unknown_finding(name, "APIs", "the engine has no /openapi.json that lists paths", fix)
        return
    served = [api.path for api in APIS if api.path in paths]
    missing = [api.path for api in APIS if api.path not in paths]
    others = f"; requests to others get its 404: {', '.join(missing)}" if missing else ""
    yield pass_finding(name, "APIs", f"it lists {', '.join(served) or 'none'}{others}")
    if RESPONSES.path in paths and responses.store is not None:
        yield _store(responses.store.status, responses.store.text, name)


def _store(status: int, text: bytes, name: str) -> CheckFinding:
    check = "stored responses"
    keeps = shows_store(status, text)
    if keeps:
        return pass_finding(
            name, check, "the engine keeps responses: previous_response_id can be used"
        )
    if keeps is False:
        seen = (
            "the engine keeps no responses, so previous_response_id gets 400 (vLLM keeps them with "
            "VLLM_ENABLE_RESPONSES_API_STORE=1)"
        )
        return pass_finding(name, check, seen)
    fix = "send a response and read it with GET /v1/responses/ID"
    return unknown_finding(name, check, f"it answers status {status}", fix)
