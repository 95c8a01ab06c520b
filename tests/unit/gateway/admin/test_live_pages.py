"""Tests of the live page's URLs: files with security headers, JSON, event stream."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

import aiohttp
import pytest

from gateway.admin import live_stream as hubs
from gateway.admin.live_pages import FILES
from tests.chaos.gateway_fleet import GatewayFleet, gateway_fleet
from tests.duration_limits import PATIENCE_S, Stopwatch
from tests.virtual_time import VIRTUAL_TIME

OWN = [
    name
    for name in FILES
    if name.endswith((".html", ".css", ".js")) and not name.startswith("uplot")
]
SINKS = (
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|"
    r"srcdoc|\beval\(|new Function"
)


async def get(
    fleet: GatewayFleet, path: str, **headers: str
) -> tuple[int, str, aiohttp.typedefs.LooseHeaders]:
    async with fleet.http.get(fleet.app.admin_url + path, headers=headers) as response:
        return response.status, await response.text(), response.headers


async def live(fleet: GatewayFleet) -> dict[str, Any]:
    view: dict[str, Any] = json.loads((await get(fleet, "/live"))[1])
    return view


@asynccontextmanager
async def watching(fleet: GatewayFleet) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    async with fleet.http.get(fleet.app.admin_url + "/live/stream") as response:
        assert response.status == 200

        async def frames() -> AsyncIterator[dict[str, Any]]:
            async for line in response.content:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])

        yield frames()


async def test_page_files_have_security_headers_and_other_paths_return_404() -> None:
    async with gateway_fleet(1) as fleet:
        for path in ("/", *(f"/web/{name}" for name in FILES)):
            status, _, headers = await get(fleet, path)
            assert status == 200, path
            policy = headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert (headers["X-Content-Type-Options"], headers["X-Frame-Options"]) == (
                "nosniff",
                "DENY",
            )
        for path in ("/web/live.py", "/web/..%2fadmin.py", "/web/%2e%2e/admin.py", "/web/"):
            assert (await get(fleet, path))[0] == 404, path
        assert (await get(fleet, "/", Host="evil.example"))[0] == 403
        assert (await get(fleet, "/live/stream", Host="evil.example"))[0] == 403


async def test_the_page_has_no_inline_script_and_no_external_url() -> None:
    async with gateway_fleet(1) as fleet:
        text = (await get(fleet, "/"))[1]
        assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|style=", text)
        for name in OWN:
            assert "//" not in re.sub(
                r"http://www\.w3\.org/2000/svg|^\s*//.*$|; // .*$",
                "",
                (await get(fleet, f"/web/{name}"))[1],
                flags=re.M,
            ), name


@pytest.mark.parametrize("name", [name for name in OWN if name.endswith(".js")])
def test_scripts_use_no_html_sinks_and_import_only_served_files(name: str) -> None:
    script = (files("gateway.admin") / "web" / name).read_text()
    assert not re.search(SINKS, script)
    assert {path.removeprefix("./") for path in re.findall(r'from "([^"]+)"', script)} <= set(FILES)


@VIRTUAL_TIME
async def test_the_view_contains_requests_endpoints_and_pools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hubs, "FRESH_S", -1.0)  # no cached frame
    async with gateway_fleet(2, 10, pool={"policy": "prefix_aware"}) as fleet:
        before = await live(fleet)
        assert before["totals"]["goodput"] == []
        for _ in range(6):
            assert (await fleet.ask(prompt="the same long prompt " * 60)).fate == "ok"
        view = await live(fleet)
    totals = view["totals"]
    assert totals["requests_per_s"] > 0
    assert totals["ttft"]["count"] == 6
    assert totals["ttft"]["p50_s"] <= totals["ttft"]["p95_s"] <= totals["ttft"]["p99_s"]
    assert totals["goodput"][0] | {"outcomes": 0} == {
        "class": "standard",
        "ratio": 1.0,
        "outcomes": 0,
        "ttft_s": 5.0,
        "tpot_s": 0.1,
    }
    assert 0.5 < totals["prefix_hit"] < 1.0
    assert sum(row["served"] for row in view["endpoints"]) == 6
    assert {row["state"] for row in view["endpoints"]} == {"up"}
    assert all(len(row["spark"]) == 60 for row in view["endpoints"])
    assert view["pools"][0] | {"models": 0} == {
        "name": "main",
        "policy": "prefix_aware",
        "admission": view["pools"][0]["admission"],
        "models": 0,
        "in_flight": 0,
        "waiting": 0,
        "price": 0.0,
    }
    assert view["config"]["versions"][0]["version"] == 1


async def test_a_killed_group_shows_within_two_seconds() -> None:
    async with gateway_fleet(3) as fleet, watching(fleet) as frames:
        victim = fleet.app.gateway.endpoints.all()[1].endpoint.name
        assert (await anext(frames))["why"] == []
        fleet.groups[1].faults.apply("refuse")
        took = Stopwatch()
        async with asyncio.timeout(PATIENCE_S):
            async for frame in frames:
                if frame["endpoints"][1]["state"] == "ejected":
                    break
        assert took.fair_s < 2.0
        assert frame["why"][0]["text"].startswith(f"{victim} is out of rotation for ")
        assert frame["endpoints"][1]["cause"] == "connect_failed"
        assert not frame["endpoints"][1]["available"]
        assert [row["severity"] for row in frame["endpoints"]] == [0, 5, 0]


async def test_streams_end_when_the_gateway_stops() -> None:
    async with gateway_fleet(1) as fleet, watching(fleet) as frames:
        await anext(frames)
        took = Stopwatch()
        await fleet.app.stop()
        assert took.fair_s < 2.0


async def test_too_many_watchers_are_refused_with_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "MAX_WATCHERS", 1)
    async with gateway_fleet(1) as fleet:
        async with watching(fleet) as frames:
            await anext(frames)
            status, _, headers = await get(fleet, "/live/stream")
            assert (status, headers["Retry-After"]) == (503, "5")
        async with asyncio.timeout(PATIENCE_S):  # a closed stream is noticed at the next frame
            while (await get_status(fleet)) == 503:
                await asyncio.sleep(0.05)


async def get_status(fleet: GatewayFleet) -> int:
    async with fleet.http.get(fleet.app.admin_url + "/live/stream") as response:
        return response.status
