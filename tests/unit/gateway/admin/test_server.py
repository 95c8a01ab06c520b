"""The admin listener and the access log: they tell the state, and no secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.telemetry.accounting import AccessLine
from tests.chaos.gateway_fleet import GatewayFleet, gateway_fleet
from tests.unit.gateway.disagg.scripted_engines import never_answers, split_gateway

CANARY = "canary-5f2e9c"


async def everything(home: GatewayFleet) -> str:
    """All that the admin listener says."""
    said = ""
    for path in ("/healthz", "/readyz", "/metrics", "/endpoints", "/config"):
        async with home.http.get(home.app.admin_url + path) as answer:
            assert answer.status == 200, path
            said += await answer.text()
    return said


async def test_no_key_is_told_by_any_page_or_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "access.log"
    tenants = [{"name": "acme", "key": f"tenant-{CANARY}"}]
    async with gateway_fleet(1, tenants=tenants, observability={"access_log": str(log)}) as home:
        home.http.headers["Authorization"] = f"Bearer tenant-{CANARY}"
        assert (await home.ask(prompt=f"prompt-{CANARY}")).fate == "ok"
        home.http.headers["Authorization"] = f"Bearer wrong-{CANARY}"
        assert (await home.ask()).status == 401
        del home.http.headers["Authorization"]
        assert CANARY not in await everything(home)
    assert "acme" in log.read_text()
    assert CANARY not in log.read_text() + caplog.text


async def test_every_request_leaves_one_line_that_reads_back(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    async with gateway_fleet(2, observability={"access_log": str(log)}) as home:
        home.groups[0].faults.set("5xx")
        for _ in range(4):
            await home.ask(stream=False)
    lines = [msgspec.json.decode(line, type=AccessLine, strict=True) for line in log.read_bytes().splitlines()]
    assert len(lines) == 4
    assert len({line.id for line in lines}) == 4
    assert any(line.retries for line in lines)
    for line in lines:
        assert (line.status, line.outcome, line.completion_tokens, line.finish_reason) == (200, "served", 8, "length")
        stamps = [line.received_us, line.parsed_us, line.admitted_us, line.picked_us, line.sent_us]
        stamps += [line.first_byte_us, line.first_token_us, line.last_us, line.done_us]
        known: list[Any] = [stamp for stamp in stamps if stamp is not None]
        assert known == sorted(known)
        assert len(known) == 9


async def ready(home: GatewayFleet) -> tuple[int, str]:
    async with home.http.get(home.app.admin_url + "/readyz") as answer:
        return answer.status, await answer.text()


async def test_a_gateway_is_ready_while_one_endpoint_serves_and_not_once_it_drains() -> None:
    async with gateway_fleet(2) as home:
        endpoints = home.app.gateway.endpoints
        first, second = endpoints.all()
        endpoints.drain(first, wanted=True)
        assert await ready(home) == (200, "ready\n")
        endpoints.drain(second, wanted=True)
        status, why = await ready(home)
        assert (status, "no endpoint is available" in why) == (503, True)
        endpoints.drain(second, wanted=False)
        assert await ready(home) == (200, "ready\n")
        home.app.draining = True
        assert await ready(home) == (503, "draining\n")
        home.app.draining = False


@pytest.mark.parametrize(("role", "out"), [("prefill", slice(0, 2)), ("decode", slice(2, 4))])
async def test_a_gateway_is_not_ready_while_every_endpoint_of_a_role_is_out(role: str, out: slice) -> None:
    async with split_gateway("sglang", [never_answers] * 2, [never_answers] * 2, engine="sglang", bootstrap="10.0.0.7:8998") as running:
        endpoints = running.app.gateway.endpoints
        one, other = endpoints.all()[out]
        url = running.app.admin_url + "/readyz"
        endpoints.wedged(one)
        async with running.http.get(url) as answer:
            assert answer.status == 200
        endpoints.wedged(other)
        async with running.http.get(url) as answer:
            assert (answer.status, await answer.text()) == (503, f"model 'demo': no {role} endpoint is available\n")
        assert (await running.ask()).status == 503


async def test_the_endpoints_page_tells_loads_and_health() -> None:
    async with gateway_fleet(2) as home, home.http.get(home.app.admin_url + "/endpoints") as answer:
        found = (await answer.json())["endpoints"]
        assert [each["available"] for each in found] == [True, True]
        assert {each["state"] for each in found} == {"up"}
        assert all(each["in_flight"] == 0 and each["running"] == 0 for each in found)


async def test_the_admin_listener_changes_nothing_and_the_api_listener_tells_nothing() -> None:
    async with gateway_fleet(1) as home:
        for path in ("/config", "/endpoints", "/metrics"):
            async with home.http.post(home.app.admin_url + path) as answer:
                assert answer.status == 405
            async with home.http.get(home.app.url + path) as answer:
                assert answer.status == 404
