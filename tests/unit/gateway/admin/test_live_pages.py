"""The live view of a whole gateway: the page and its walls, the value, the stream, and draining by hand."""

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
from tests.fair_time import PATIENCE_S

OWN = [name for name in FILES if name.endswith((".html", ".css", ".js")) and not name.startswith("uplot")]
SINKS = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|srcdoc|\beval\(|new Function"


async def get(home: GatewayFleet, path: str, **headers: str) -> tuple[int, str, aiohttp.typedefs.LooseHeaders]:
    async with home.http.get(home.app.admin_url + path, headers=headers) as answer:
        return answer.status, await answer.text(), answer.headers


async def live(home: GatewayFleet) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((await get(home, "/live"))[1])
    return found


@asynccontextmanager
async def watching(home: GatewayFleet) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    async with home.http.get(home.app.admin_url + "/live/stream") as answer:
        assert answer.status == 200

        async def frames() -> AsyncIterator[dict[str, Any]]:
            async for line in answer.content:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])

        yield frames()


async def test_the_page_and_its_parts_come_with_their_walls_and_nothing_else_is_served() -> None:
    async with gateway_fleet(1) as home:
        for path in ("/", *(f"/web/{name}" for name in FILES)):
            status, _, headers = await get(home, path)
            assert status == 200, path
            policy = headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert (headers["X-Content-Type-Options"], headers["X-Frame-Options"]) == ("nosniff", "DENY")
        for path in ("/web/live.py", "/web/..%2fadmin.py", "/web/%2e%2e/admin.py", "/web/"):
            assert (await get(home, path))[0] == 404, path
        assert (await get(home, "/", Host="evil.example"))[0] == 403
        assert (await get(home, "/live/stream", Host="evil.example"))[0] == 403


async def test_the_page_has_no_inline_script_and_asks_nobody_else() -> None:
    async with gateway_fleet(1) as home:
        text = (await get(home, "/"))[1]
        assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|style=", text)
        for name in OWN:
            assert "//" not in re.sub(
                r"http://www\.w3\.org/2000/svg|^\s*//.*$|; // .*$", "", (await get(home, f"/web/{name}"))[1], flags=re.M
            ), name


@pytest.mark.parametrize("name", [name for name in OWN if name.endswith(".js")])
def test_scripts_set_text_as_text_and_import_only_what_is_served(name: str) -> None:
    script = (files("gateway.admin") / "web" / name).read_text()
    assert not re.search(SINKS, script)
    assert {path.removeprefix("./") for path in re.findall(r'from "([^"]+)"', script)} <= set(FILES)


async def test_the_value_tells_of_requests_endpoints_and_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "FRESH_S", -1.0)  # asked again at once, the gateway would show what it showed
    async with gateway_fleet(2, pool={"policy": "prefix_aware"}) as home:
        before = await live(home)
        assert before["totals"]["goodput"] == []
        for _ in range(6):
            assert (await home.ask(prompt="the same long prompt " * 60)).fate == "ok"
        seen = await live(home)
    totals = seen["totals"]
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
    assert sum(each["served"] for each in seen["endpoints"]) == 6
    assert {each["state"] for each in seen["endpoints"]} == {"up"}
    assert all(len(each["spark"]) == 60 for each in seen["endpoints"])
    assert seen["pools"][0] | {"models": 0} == {
        "name": "main",
        "policy": "prefix_aware",
        "admission": seen["pools"][0]["admission"],
        "models": 0,
        "in_flight": 0,
        "waiting": 0,
        "price": 0.0,
    }
    assert seen["config"]["versions"][0]["version"] == 1


async def test_a_group_that_is_killed_is_seen_within_two_seconds() -> None:
    loop = asyncio.get_running_loop()
    async with gateway_fleet(3) as home, watching(home) as frames:
        victim = home.app.gateway.endpoints.all()[1].endpoint.name
        assert (await anext(frames))["why"] == []
        home.groups[1].faults.set("refuse")
        killed = loop.time()
        async with asyncio.timeout(PATIENCE_S):
            async for frame in frames:
                if frame["endpoints"][1]["state"] == "ejected":
                    break
        assert loop.time() - killed < 2.0
        assert frame["why"][0]["text"].startswith(f"{victim} is out for ")
        assert frame["endpoints"][1]["cause"] == "connect_failed"
        assert not frame["endpoints"][1]["available"]
        assert [each["severity"] for each in frame["endpoints"]] == [0, 5, 0]


async def test_streams_end_with_the_gateway_and_hold_its_end_up_no_longer_than_a_frame() -> None:
    loop = asyncio.get_running_loop()
    async with gateway_fleet(1) as home, watching(home) as frames:
        await anext(frames)
        began = loop.time()
        await home.app.stop()
        assert loop.time() - began < 2.0


async def test_more_watchers_than_there_is_room_for_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "MOST_WATCHERS", 1)
    async with gateway_fleet(1) as home:
        async with watching(home) as frames:
            await anext(frames)
            status, _, headers = await get(home, "/live/stream")
            assert (status, headers["Retry-After"]) == (503, "5")
        async with asyncio.timeout(PATIENCE_S):  # the one who left is noticed at the next frame
            while (await get_status(home)) == 503:
                await asyncio.sleep(0.05)


async def get_status(home: GatewayFleet) -> int:
    async with home.http.get(home.app.admin_url + "/live/stream") as answer:
        return answer.status


async def test_a_drained_endpoint_gets_nothing_new_until_it_is_brought_back() -> None:
    async with gateway_fleet(2) as home:
        names = [each.endpoint.name for each in home.app.gateway.endpoints.all()]
        post = home.http.post
        async with post(f"{home.app.admin_url}/endpoints/{names[0]}/drain") as answer:
            assert await answer.json() == {"result": "applied", "endpoint": names[0], "drained": True, "in_flight": 0}
        for _ in range(4):
            assert (await home.ask()).headers["x-penstock-endpoint"] == names[1]
        seen = (await live(home))["endpoints"]
        assert [(each["state"], each["severity"]) for each in seen] == [("drained", 2), ("up", 0)]
        async with post(f"{home.app.admin_url}/endpoints/{names[0]}/undrain") as answer:
            assert answer.status == 200
        assert {(await home.ask()).headers["x-penstock-endpoint"] for _ in range(4)} == set(names)
        async with post(f"{home.app.admin_url}/endpoints/nobody/drain") as answer:
            assert answer.status == 404


async def test_draining_needs_the_admin_key_and_no_other_sites_page_may_ask_for_it() -> None:
    async with gateway_fleet(1, admin={"key": "an-admin-key"}) as home:
        path = f"{home.app.admin_url}/endpoints/{home.app.gateway.endpoints.all()[0].endpoint.name}/drain"
        key = {"Authorization": "Bearer an-admin-key"}
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            (key | {"Origin": "http://evil.example"}, 403),
            (key, 200),
        ):
            async with home.http.post(path, headers=headers) as answer:
                assert answer.status == status
