"""Tests that discovered endpoints are added and removed, and survive configuration reloads."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.config import Config
from gateway.config.discovery_sections import Discover
from gateway.config.endpoint_sections import EndpointSpec
from gateway.fleet.discovery.file_list import FileSource
from gateway.fleet.discovery.source_interface import specs_for
from gateway.fleet.endpoint_from_config import to_endpoint
from gateway.fleet.endpoint_registry import EndpointRegistry
from gateway.http.write_queue import WriteQueue
from tests.duration_limits import PATIENCE_S
from tests.unit.gateway.reload.running import Running, running

HEAD = "    endpoints:\n"


def listing(harness: Running, file: Path, *numbers: int) -> None:
    fresh = file.with_suffix(".tmp")
    fresh.write_text(
        "".join(f"- {{url: {harness.members[n].url}, name: found-{n}}}\n" for n in numbers)
    )
    fresh.replace(file)


async def wait_for_endpoints(harness: Running, *names: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while sorted(
            live.endpoint.name
            for live in harness.app.gateway.endpoints.all()
            if not live.is_leaving and live.load.is_available
        ) != sorted(names):
            await asyncio.sleep(0.02)


async def test_endpoints_of_a_file_are_added_and_removed_under_load(tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    async with running(tmp_path, groups=3, more="health: {interval: 100ms}\n") as harness:
        listing(harness, file, 1)
        text = (
            harness.text(0).replace(HEAD, f"    discover: {{file: {file}}}\n{HEAD}")
            + "health: {interval: 100ms}\n"
        )
        async with harness.load(4):
            status, reply = await harness.put(text)
            assert status == 200, reply
            await wait_for_endpoints(harness, "group-0", "found-1")
            listing(harness, file, 1, 2)
            await wait_for_endpoints(harness, "group-0", "found-1", "found-2")
            listing(harness, file, 2)
            await wait_for_endpoints(harness, "group-0", "found-2")
        first = harness.app.gateway.endpoints.discovered["chat"]
        assert (await harness.put(text + "retries: {floor: 5}\n"))[0] == 200
        assert harness.app.gateway.endpoints.discovered["chat"] is first
        await wait_for_endpoints(harness, "group-0", "found-2")
        assert (await harness.put(harness.text(0)))[0] == 200
        await wait_for_endpoints(harness, "group-0")
        assert harness.app.gateway.endpoints.discovered == {}


async def test_a_pool_may_consist_of_discovered_endpoints_only(tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    async with running(tmp_path, more="health: {interval: 100ms}\n") as harness:
        only = (
            harness.text(0).split(HEAD)[0]
            + f"    discover: {{file: {file}, endpoint: {{max_concurrency: 5}}}}\n"
        )
        status, reply = await harness.put(only)
        assert status == 200, reply
        assert (await harness.ask()).startswith("503")
        listing(harness, file, 0, 1)
        await wait_for_endpoints(harness, "found-0", "found-1")
        assert await harness.ask() == "ok"
        assert {
            live.endpoint.max_concurrency
            for live in harness.app.gateway.endpoints.all()
            if not live.is_leaving
        } == {5}


async def test_the_path_of_an_endpoint_file_is_relative_to_the_configuration(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, groups=2, more="health: {interval: 100ms}\n") as harness:
        listing(harness, harness.file.parent / "engines.yaml", 1)
        harness.write(
            harness.text(0).replace(HEAD, f"    discover: {{file: engines.yaml}}\n{HEAD}")
        )
        await wait_for_endpoints(harness, "group-0", "found-1")


async def test_an_invalid_discovery_section_is_rejected_with_its_place(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        for part, words in (
            ("{}", "one of dns, file and kubernetes"),
            ("{dns: 'a:1', file: b}", "one of dns, file and kubernetes"),
            ("{dns: nowhere}", "host:port"),
            ("{kubernetes: {service: UPPER}}", "service"),
            ("{dns: 'a:1', endpoint: {bootstrap: 'a:8998'}}", "write ':8998' to use this port"),
            (
                "{kubernetes: {service: a}, endpoint: {bootstrap: 'a:8998'}}",
                "write ':8998' to use this port",
            ),
            ("{file: a, endpoint: {bootstrap: ':port'}}", "host:port"),
        ):
            status, reply = await harness.put(
                harness.text().replace(HEAD, f"    discover: {part}\n{HEAD}")
            )
            assert status == 400, part
            assert any(
                words in spec["text"] and "discover" in spec["path"] for spec in reply["problems"]
            ), reply


def test_each_discovered_endpoint_has_its_bootstrap_server_on_its_own_host(tmp_path: Path) -> None:
    like = Discover.model_validate(
        {"dns": "engines:8000", "endpoint": {"bootstrap": ":8998"}}
    ).endpoint
    result = specs_for([("10.0.0.1", 8000), ("10.0.0.2", 8000), ("fd00::1", 8000)], like)
    assert [to_endpoint("p", spec).bootstrap for spec in result] == [
        "10.0.0.1:8998",
        "10.0.0.2:8998",
        "[fd00::1]:8998",
    ]
    listed = FileSource(tmp_path, like)._parse(
        b"- http://h:1\n- {url: http://h:2, bootstrap: 'other:9000'}\n"
    )
    assert listed is not None
    assert [to_endpoint("p", spec).bootstrap for spec in listed] == ["h:8998", "other:9000"]


def names(roster: EndpointRegistry, config: Config) -> list[tuple[str, str]]:
    adoption = roster.plan(config)
    roster.apply(adoption)
    return [(member.endpoint.name, member.endpoint.url) for member in adoption.members]


async def test_a_discovered_endpoint_is_ignored_while_another_has_its_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    roster = EndpointRegistry(WriteQueue(asyncio.get_running_loop()))
    result = {"discover": {"file": "engines.yaml"}, "endpoints": []}
    named = {"endpoints": [{"url": "http://h:1", "name": "a"}]}
    config = Config.model_validate({"version": 1, "pools": {"x": result, "y": result, "z": named}})
    one, two, three = (
        EndpointSpec(url=f"http://h:{port}", name=name)
        for port, name in ((2, "a"), (3, "b"), (4, "b"))
    )
    roster.discovered = {"x": (one, two), "y": (three,)}
    for _ in range(2):
        assert names(roster, config) == [("b", "http://h:3"), ("a", "http://h:1")]
    assert [spec.getMessage() for spec in caplog.records] == [
        "service discovery: pool x: the endpoint http://h:2 is ignored, because another endpoint is already named a",
        "service discovery: pool y: the endpoint http://h:4 is ignored, because another endpoint is already named b",
    ]
    roster.discovered["x"] = (one,)
    assert names(roster, config) == [("b", "http://h:4"), ("a", "http://h:1")], (
        "its source does not tell of it again"
    )
