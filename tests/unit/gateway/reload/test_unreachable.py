"""Tests of changes that make a pool unreachable, and of files that differ from what is running."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from gateway.reload import reachability
from tests.ports import free_port
from tests.unit.gateway.reload.running import Running, running
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME


def closed_url() -> str:
    return f"http://127.0.0.1:{free_port()}"


def with_urls(harness: Running, *urls: str) -> str:
    text = harness.text(0)
    line = f"      - {{name: group-0, url: {harness.members[0].url}}}"
    assert line in text
    return text.replace(line, "\n".join(f"      - {{url: {url}}}" for url in urls))


async def test_a_change_to_endpoints_that_all_refuse_connections_is_refused_with_its_place(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as harness:
        before = harness.app.gateway.snapshot
        status, answer = await harness.put(with_urls(harness, closed_url(), closed_url()))
        assert (status, answer["result"]) == (400, "rejected")
        (problem,) = answer["problems"]
        # Line 10 is the first line of the pool.
        assert (problem["path"], problem["line"]) == ("pools.chat", 10)
        assert "none of its endpoints accepts a connection" in problem["message"]
        assert harness.app.gateway.snapshot is before
        assert await harness.ask() == "ok"


async def test_without_descriptors_nothing_is_known_of_whether_endpoints_are_reachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def open_connection(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    assert not await reachability._any_reachable([closed_url()])
    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    assert await reachability._any_reachable([closed_url()])


async def test_one_reachable_endpoint_is_enough(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        text = with_urls(harness, closed_url(), harness.members[1].url, closed_url())
        assert (await harness.put(text))[0] == 200


@pytest.mark.parametrize("path", ["/config", "/config/reload"])
async def test_force_applies_unreachable_endpoints(tmp_path: Path, path: str) -> None:
    async with running(tmp_path, poll_s=60) as harness:
        text = with_urls(harness, closed_url())
        harness.write(text)
        method = "PUT" if path == "/config" else "POST"
        body = text.encode() if method == "PUT" else None
        status, _, answer = await harness.asked(method, path, params={"force": "1"}, data=body)
        assert (status, answer["result"]) == (200, "applied")


async def test_another_policy_for_endpoints_that_are_all_down_is_not_refused(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as harness:
        down = with_urls(harness, closed_url())
        assert (await harness.put(down, params={"force": "1"}))[0] == 200
        assert (await harness.put(down.replace("prefix_aware", "least_loaded")))[0] == 200


async def test_a_dry_run_shows_the_changes_of_unreachable_endpoints(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        status, answer = await harness.put(
            with_urls(harness, closed_url()), params={"dry_run": "1"}
        )
        assert (status, answer["result"]) == (200, "dry_run")


async def test_the_state_shows_that_the_file_differs_from_the_running_configuration(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as harness:

        async def differs() -> bool:
            return bool((await harness.asked("GET", "/config"))[2]["file_differs"])

        assert not await differs()
        harness.write(harness.text().replace("prefix_aware", "least_loaded"))
        await harness.hears("reloaded")
        assert not await differs()
        assert (await harness.asked("POST", "/config/rollback"))[0] == 200
        assert await differs()


@pytest.mark.parametrize("detour", [False, True])
async def test_a_rollback_survives_a_touch_of_the_file(tmp_path: Path, detour: bool) -> None:
    async with running(tmp_path) as harness:
        edited = harness.text().replace("prefix_aware", "least_loaded")
        harness.write(edited)
        await harness.hears("reloaded")
        if detour:
            harness.write(edited + "pools: {}\n")
            await harness.hears("rejected")
            harness.write(edited)
            await asyncio.sleep(0.2)
        assert (await harness.asked("POST", "/config/rollback"))[0] == 200
        for _ in range(3):
            os.utime(harness.file)
            await asyncio.sleep(0.15)
        harness.write(edited)
        await asyncio.sleep(0.15)
        assert harness.app.gateway.snapshot.policies["chat"].name == "prefix_aware"


async def test_a_rollback_to_before_a_put_survives_a_touch_of_the_file(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        edited = harness.text().replace("prefix_aware", "least_loaded")
        harness.write(edited)
        await harness.hears("reloaded")
        assert (await harness.put(harness.text().replace("prefix_aware", "round_robin")))[0] == 200
        assert (await harness.asked("POST", "/config/rollback", params={"to": "1"}))[0] == 200
        os.utime(harness.file)
        await asyncio.sleep(0.3)
        assert harness.app.gateway.snapshot.policies["chat"].name == "prefix_aware"
