"""Tests that the admin server and the access log show the gateway's state, but no secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.telemetry.access_line import AccessLine
from tests.chaos.gateway_fleet import GatewayFleet, gateway_fleet
from tests.unit.gateway.disagg.scripted_engines import never_answers, split_gateway

CANARY = "canary-5f2e9c"


async def everything(fleet: GatewayFleet) -> str:
    text = ""
    for path in ("/healthz", "/readyz", "/metrics", "/endpoints", "/config"):
        async with fleet.http.get(fleet.app.admin_url + path) as response:
            assert response.status == 200, path
            text += await response.text()
    return text


async def test_no_page_or_log_line_contains_a_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "access.log"
    tenants = [{"name": "acme", "key": f"tenant-{CANARY}"}]
    async with gateway_fleet(1, tenants=tenants, observability={"access_log": str(log)}) as fleet:
        fleet.http.headers["Authorization"] = f"Bearer tenant-{CANARY}"
        assert (await fleet.ask(prompt=f"prompt-{CANARY}")).fate == "ok"
        fleet.http.headers["Authorization"] = f"Bearer wrong-{CANARY}"
        assert (await fleet.ask()).status == 401
        del fleet.http.headers["Authorization"]
        assert CANARY not in await everything(fleet)
    assert "acme" in log.read_text()
    assert CANARY not in log.read_text() + caplog.text


async def test_every_request_has_one_access_log_line_of_valid_json(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    async with gateway_fleet(2, observability={"access_log": str(log)}) as fleet:
        fleet.groups[0].faults.apply("5xx")
        for _ in range(4):
            await fleet.ask(stream=False)
    lines = [
        msgspec.json.decode(line, type=AccessLine, strict=True)
        for line in log.read_bytes().splitlines()
    ]
    assert len(lines) == 4
    assert len({line.id for line in lines}) == 4
    assert any(line.retries for line in lines)
    for line in lines:
        assert (line.status, line.outcome, line.completion_tokens, line.finish_reason) == (
            200,
            "served",
            8,
            "length",
        )
        stamps = [line.received_us, line.parsed_us, line.admitted_us, line.picked_us, line.sent_us]
        stamps += [line.first_byte_us, line.first_token_us, line.last_us, line.done_us]
        known: list[Any] = [stamp for stamp in stamps if stamp is not None]
        assert known == sorted(known)
        assert len(known) == 9


async def ready(fleet: GatewayFleet) -> tuple[int, str]:
    async with fleet.http.get(fleet.app.admin_url + "/readyz") as response:
        return response.status, await response.text()


async def test_a_gateway_is_ready_while_one_endpoint_serves_and_not_once_it_drains() -> None:
    async with gateway_fleet(2) as fleet:
        endpoints = fleet.app.gateway.endpoints
        first, second = endpoints.all()
        endpoints.set_drained(first, is_drained=True)
        assert await ready(fleet) == (200, "ready\n")
        endpoints.set_drained(second, is_drained=True)
        status, why = await ready(fleet)
        assert (status, "no endpoint is available" in why) == (503, True)
        endpoints.set_drained(second, is_drained=False)
        assert await ready(fleet) == (200, "ready\n")
        fleet.app.is_draining = True
        assert await ready(fleet) == (503, "draining\n")
        fleet.app.is_draining = False


@pytest.mark.parametrize(("role", "out"), [("prefill", slice(0, 2)), ("decode", slice(2, 4))])
async def test_a_gateway_is_not_ready_while_every_endpoint_of_a_role_is_out(
    role: str, out: slice
) -> None:
    async with split_gateway(
        "sglang",
        [never_answers] * 2,
        [never_answers] * 2,
        engine="sglang",
        bootstrap="10.0.0.7:8998",
    ) as running:
        endpoints = running.app.gateway.endpoints
        one, other = endpoints.all()[out]
        url = running.app.admin_url + "/readyz"
        endpoints.on_stall(one)
        async with running.http.get(url) as response:
            assert response.status == 200
        endpoints.on_stall(other)
        async with running.http.get(url) as response:
            assert (response.status, await response.text()) == (
                503,
                f"model 'demo': no {role} endpoint is available\n",
            )
        assert (await running.ask()).status == 503


async def test_admin_pages_are_read_only_and_not_on_the_api_listener() -> None:
    async with gateway_fleet(1) as fleet:
        for path in ("/config", "/endpoints", "/metrics"):
            async with fleet.http.post(fleet.app.admin_url + path) as response:
                assert response.status == 405
            async with fleet.http.get(fleet.app.url + path) as response:
                assert response.status == 404
