"""Tests that no secret appears in any output of the gateway.

Each secret is a unique text that is searched for.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import aiohttp
import pytest

from gateway.telemetry import span_exporter
from tests.chaos.gateway_fleet import GatewayFleet, gateway_fleet
from tests.duration_limits import PATIENCE_S
from tests.unit.gateway.telemetry.otlp_collector import collector

LOOK_S = 0.3
ENGINES = "an engine's key"
CANARIES = {
    "a tenant's key": "canary-tenant-1f2e3d4c",
    "a key that nobody has": "canary-wrong-5b6a7980",
    "the admin's key": "canary-admin-0a1b2c3d",
    "the collector's key": "canary-collector-9c8d7e6f",
    ENGINES: "canary-engine-4f5e6d7c",
    "a prompt": "canary-prompt-8e9f0a1b",
    "a cookie": "canary-cookie-2c3d4e5f",
    "a key in an offered configuration": "canary-offered-6d7c8b9a",
    "a session's name": "canary-session-7e6f5d4c",
}
OFFERED = """\
version: 1
tenants: [{{name: acme, key: "{key}"}}]
pools: {{main: {{endpoints: [{{url: "http://127.0.0.1:1", api_key: "{key}", max_concurrency: "{key}"}}]}}}}
"""


TAKEN = """\
version: 1
tenants: [{{name: acme, key: "{tenant}"}}]
admin: {{key: "{admin}"}}
observability: {{tenants: true, traces: {{endpoint: "{traces}", ratio: 1.0, key: "{collector}"}}}}
pools: {{main: {{endpoints: [{{url: "{url}", api_key: "{engine}"}}]}}}}
"""


def config_with_secrets(fleet: GatewayFleet, traces: str) -> str:
    keys = {name: CANARIES[f"{what} key"] for name, what in WHOSE.items()}
    return TAKEN.format(url=fleet.groups[0].url, traces=traces, **keys)


WHOSE = {
    "tenant": "a tenant's",
    "admin": "the admin's",
    "collector": "the collector's",
    "engine": "an engine's",
}


async def page_text(http: aiohttp.ClientSession, url: str, accept: str) -> str:
    # Return the whole text of a page, or what a stream of events says in LOOK_S seconds.
    text, loop = "", asyncio.get_running_loop()
    try:
        async with (
            asyncio.timeout(PATIENCE_S) as limit,
            http.get(url, headers={"Accept": accept}) as answer,
        ):
            async for piece in answer.content.iter_any():
                if not text and answer.content_type == "text/event-stream":
                    limit.reschedule(loop.time() + LOOK_S)
                text += piece.decode(errors="replace")
    except TimeoutError:
        assert text, f"{url} said nothing"
    return text


async def every_page(fleet: GatewayFleet) -> dict[str, str]:
    runners = fleet.app._listeners._runners
    server = next(each.app for each in runners if _paths(each.app) & {"/metrics"})  # type: ignore[attr-defined]
    pages = {
        f"{path} as {accept}": path
        for path in _paths(server)
        for accept in ("*/*", "application/openmetrics-text")
    }
    return {
        name: await page_text(fleet.http, fleet.app.admin_url + path, name.split(" as ")[1])
        for name, path in pages.items()
    }


def _paths(app: aiohttp.web.Application) -> set[str]:
    return {
        route.resource.canonical
        for route in app.router.routes()
        if route.method == "GET"
        and route.resource is not None
        and "{" not in route.resource.canonical
    }


async def ask(fleet: GatewayFleet, key: str, **headers: str) -> tuple[str, str]:
    # Send a request; return its id and the whole response.
    body = {
        "model": "demo-8b",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": CANARIES["a prompt"]}],
    }
    sent = {"Authorization": f"Bearer {key}", "Cookie": f"a={CANARIES['a cookie']}"} | headers
    async with fleet.http.post(
        f"{fleet.app.url}/v1/chat/completions", json=body, headers=sent
    ) as answer:
        return answer.headers.get(
            "x-request-id", ""
        ), f"{dict(answer.headers)} {await answer.text()}"


async def test_no_secret_appears_in_any_output_of_the_gateway(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_exporter, "FLUSH_S", 0.01)
    caplog.set_level(logging.DEBUG)
    log, heard = tmp_path / "access.log", {}
    async with collector() as there:
        observability = {"access_log": str(log), "access_blocks": True, "tenants": True}
        observability["traces"] = {
            "endpoint": there.url,
            "ratio": 1.0,
            "key": CANARIES["the collector's key"],
        }
        async with gateway_fleet(
            1,
            tenants=[{"name": "acme", "key": CANARIES["a tenant's key"]}],
            observability=observability,
            admin={"key": CANARIES["the admin's key"]},
        ) as fleet:
            session = {"x-session-id": CANARIES["a session's name"]}
            served, heard["an answer"] = await ask(fleet, CANARIES["a tenant's key"], **session)
            _, heard["a refusal"] = await ask(fleet, CANARIES["a key that nobody has"])
            offered = OFFERED.format(key=CANARIES["a key in an offered configuration"]).encode()
            right = CANARIES["the admin's key"]
            admin = {"Authorization": f"Bearer {right}"}
            for authorization in (
                admin,
                {"Authorization": f"Bearer {CANARIES['a key that nobody has']}"},
                {},
            ):
                async with fleet.http.put(
                    fleet.app.admin_url + "/config", data=offered, headers=authorization
                ) as answer:
                    heard[f"an offered configuration, {answer.status}"] = await answer.text()
            async with fleet.http.put(
                fleet.app.admin_url + "/config",
                data=config_with_secrets(fleet, there.url),
                headers=admin,
            ) as answer:
                heard["a configuration that was taken over"] = await answer.text()
                assert answer.status == 200, heard["a configuration that was taken over"]
            assert fleet.app.gateway.endpoints.all()[0].key_header == {
                "Authorization": f"Bearer {CANARIES[ENGINES]}"
            }
            served, heard["another answer"] = await ask(fleet, CANARIES["a tenant's key"])
            await there.heard(15)
            heard |= await every_page(fleet)
            heard["/explain"] = await page_text(
                fleet.http, f"{fleet.app.admin_url}/explain/{served}", "*/*"
            )
        heard["traces"] = "".join(there.bodies)
    heard["the access log"], heard["the log"] = log.read_text(), caplog.text
    assert "acme" in heard["the access log"], "it looked at the right file"
    assert "acme" in heard["traces"]
    assert "acme" in heard["/explain"]
    assert len(heard) > 20
    for what, canary in CANARIES.items():
        assert [where for where, text in heard.items() if canary in text] == [], f"{what} got out"
