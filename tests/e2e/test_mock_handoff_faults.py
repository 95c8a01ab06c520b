"""Tests of split requests that fail between mock engines: no wrong text, and no resource is
kept.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from mockgpu.fleet import FleetGroup
from mockgpu.mock_tokenizer import expected_text
from tests.duration_limits import PATIENCE_S, Stopwatch, at_most, pace
from tests.e2e.mock_pair import DIALECTS, PROMPT, MockPair, mock_pair, rooms
from tests.e2e.processes import ENV
from tests.ports import free_port

LONG: dict[str, Any] = {"prompt": PROMPT * 20, "max_tokens": 12}
WORDS = expected_text(LONG, 12)
PUSHES = ("vllm_push", "mooncake", "sglang")


async def fault(groups: MockPair, member: FleetGroup, what: str) -> None:
    async with groups.http.post(member.url + "/mock/fault", json={"spec": what}) as response:
        assert response.status == 200, await response.text()


async def attempt(groups: MockPair, body: dict[str, Any] = LONG) -> str | None:
    try:
        status, answer = await groups.split(body)
    except (AssertionError, aiohttp.ClientError):
        return None
    return answer["choices"][0]["text"] if status == 200 else None


@asynccontextmanager
async def fault_prone_pair(dialect: str = "vllm_nixl", **kv: Any) -> AsyncIterator[MockPair]:
    async with mock_pair(
        dialect, kv={"transport": "tcp", "wire_faults": True, "wait_s": 2.0, "lease_s": 2.0} | kv
    ) as groups:
        yield groups

        # The text proves the transfer


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_one_flipped_bit_of_kv_changes_the_text_but_not_its_length(dialect: str) -> None:
    async with mock_pair(dialect) as groups:
        await fault(groups, groups.prefill, "kv-corrupt")
        words = await attempt(groups)
        assert words is not None
        assert words != WORDS
        assert len(words) == len(WORDS)
        assert await groups.metric(groups.decode, "mock:tainted_answers_total") == 1


async def test_corrupted_kv_affects_every_request_that_shares_it() -> None:
    async with mock_pair() as groups:
        await fault(groups, groups.prefill, "kv-corrupt")
        assert await attempt(groups) != WORDS
        await fault(groups, groups.prefill, "")
        assert await attempt(groups) != WORDS
        _, answer = await groups.post(groups.decode, LONG)
        assert answer["choices"][0]["text"] != WORDS

        # The engine's port


async def test_an_engine_whose_port_is_taken_does_not_serve_until_it_restarts() -> None:
    port = free_port()
    async with mock_pair(kv={"transport": "tcp"}, prefill={"port": port}) as groups:
        assert await attempt(groups) == WORDS
        half = groups.prefill.pd_role
        assert half is not None
        groups.prefill.faults.apply("lost-rank")
        await half.wait_applied()
        with socket.create_server(("127.0.0.1", port)):
            groups.prefill.faults.apply("")
            await half.wait_applied()
            assert (half.agent, groups.prefill.group.kv_handoff) == (None, None)
            assert await attempt(groups) is None
        for spec in ("lost-rank", ""):
            groups.prefill.faults.apply(spec)
            await half.wait_applied()
        # A request fails while the decode engine has not noticed yet that the old link has ended.
        async with asyncio.timeout(PATIENCE_S):
            while await attempt(groups) != WORDS:
                await asyncio.sleep(0.05)

        # Faults on the connection between the groups


@pytest.mark.parametrize(
    "fault_spec", ["wire-corrupt:after=20", "wire-corrupt:after=700", "wire-cut:after=300"]
)
async def test_a_damaged_transfer_fails_the_request_or_is_recomputed(fault_spec: str) -> None:
    for recompute in (False, True):
        async with fault_prone_pair(recompute=recompute) as groups:
            await fault(groups, groups.prefill, fault_spec)
            assert await attempt(groups) == (WORDS if recompute else None)
            await fault(groups, groups.prefill, "")
            assert await attempt(groups) == WORDS
            await groups.at_rest()


async def test_replayed_bytes_end_the_link_and_no_text_is_wrong() -> None:
    async with fault_prone_pair() as groups:
        await fault(groups, groups.prefill, "wire-replay:after=0")
        for n in range(4):
            body = LONG | {"prompt": f"{n} " + PROMPT * 20}
            assert await attempt(groups, body) in (None, expected_text(body, 12))
        await fault(groups, groups.prefill, "")
        assert await attempt(groups) == WORDS
        await groups.at_rest()


async def test_a_stalled_prefill_group_is_detected_and_its_late_bytes_change_nothing() -> None:
    async with fault_prone_pair(recompute=True) as groups:
        assert await attempt(groups) == WORDS
        body = LONG | {"prompt": "fresh " + PROMPT * 20}
        await fault(groups, groups.prefill, "wire-stall")
        async with at_most(1.5):
            assert await attempt(groups, body) == expected_text(body, 12)
            # The delayed bytes arrive now, when their blocks may belong to another request.
        await fault(groups, groups.prefill, "")
        bodies = [LONG | {"prompt": f"{n} " + PROMPT * 20} for n in range(6)]
        assert await asyncio.gather(*(attempt(groups, b) for b in bodies)) == [
            expected_text(b, 12) for b in bodies
        ]
        await groups.at_rest()


async def test_a_frozen_prefill_group_is_detected_and_recovers() -> None:
    async with mock_pair(kv={"recompute": True, "lease_s": 2.0}) as groups:
        assert await attempt(groups) == WORDS
        body = LONG | {"prompt": "fresh " + PROMPT * 20}
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        one = body | {"max_tokens": 1, "min_tokens": 1, "kv_transfer_params": params}
        _, first = await groups.post(groups.prefill, one)
        await fault(groups, groups.prefill, "freeze")
        loop = asyncio.get_running_loop()
        began = loop.time()
        take = body | {"kv_transfer_params": first["kv_transfer_params"]}
        async with at_most(2.5):
            _, answer = await groups.post(groups.decode, take)
        assert answer["choices"][0]["text"] == expected_text(body, 12)
        assert loop.time() - began > 0.4
        await fault(groups, groups.prefill, "")
        assert await attempt(groups, LONG | {"prompt": "later " + PROMPT * 20}) is not None
        await groups.at_rest()


async def test_connection_faults_are_refused_without_wire_faults_enabled() -> None:
    async with (
        mock_pair() as groups,
        groups.http.post(groups.prefill.url + "/mock/fault", json={"spec": "wire-cut"}) as response,
    ):
        assert response.status == 400

        # Dying engines


async def recovers(groups: MockPair) -> bool:
    # Return whether one of six attempts gives the right response.
    #
    # A decode engine in push mode may still use the address of the dead engine, and an attempt may
    # time out on a busy machine.
    for _ in range(6):
        if await attempt(groups) == WORDS:
            return True
    return False


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("prefill", "die-in-prefill"),
        ("prefill", "die-in-transfer"),
        ("decode", "die-in-pull"),
        ("decode", "die-mid-decode:after=3"),
        ("prefill", "kv-lost"),
    ],
)
async def test_a_death_at_any_stage_leaves_nothing_held_and_the_groups_recover(
    dialect: str, where: str, what: str
) -> None:
    soon_s = 1.0 * pace()
    async with mock_pair(
        dialect, kv={"transport": "tcp", "wait_s": soon_s, "lease_s": soon_s}, speed=200.0
    ) as groups:
        victim = groups.prefill if where == "prefill" else groups.decode
        await fault(groups, victim, what)
        assert await attempt(groups) in (None, WORDS)
        if what != "kv-lost" and "transfer" not in what and "pull" not in what:
            assert victim.group.is_dead
        async with groups.http.delete(victim.url + "/mock/fault") as response:
            assert response.status == 200
        await groups.at_rest()
        assert await recovers(groups)
        await groups.at_rest()

        # Disconnecting clients


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.006, 0.012, 0.025, 0.05])
async def test_a_client_that_disconnects_at_any_time_frees_both_groups_at_once(
    dialect: str, after_s: float
) -> None:
    body = LONG | {"max_tokens": 400}
    async with mock_pair(
        dialect, kv={"transport": "tcp", "wait_s": 0.4, "lease_s": 0.4}, speed=4.0
    ) as groups:
        request = asyncio.create_task(groups.split(body))
        await asyncio.sleep(after_s)
        request.cancel()
        await groups.at_rest(within_s=2)


@pytest.mark.parametrize("dialect", PUSHES)
async def test_a_decode_leg_closed_while_it_waits_frees_its_blocks_within_a_quarter_second(
    dialect: str,
) -> None:
    async with mock_pair(dialect, kv={"transport": "tcp"}) as groups:
        number = next(rooms)
        _, take = groups.legs(LONG, number)
        leg = asyncio.create_task(groups.post(groups.decode, take, f"r{number}"))
        while not groups.decode.group.scheduler.fetching:
            await asyncio.sleep(0)
        leg.cancel()
        async with at_most(0.25):
            while groups.decode.group.scheduler.pool.usage:
                await asyncio.sleep(0)


async def test_many_disconnecting_clients_do_not_affect_the_others() -> None:
    async with mock_pair(
        "vllm_nixl", kv={"transport": "tcp", "lease_s": 3.0}, speed=20.0
    ) as groups:
        bodies = [{"prompt": f"{n} " + PROMPT * (n % 9 + 1), "max_tokens": 30} for n in range(60)]
        tasks = [asyncio.create_task(attempt(groups, body)) for body in bodies]
        for n, task in enumerate(tasks):
            if n % 10:
                await asyncio.sleep(0.001)
                task.cancel()
        for n in range(0, 60, 10):
            assert await tasks[n] == expected_text(bodies[n], 30)
        await groups.at_rest(10.0)

        # Real processes


class Process:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        ready_line = json.loads(process.stdout.readline())
        self.url: str = ready_line["ready"]


@asynccontextmanager
async def processes(*options: str) -> AsyncIterator[tuple[Process, Process]]:
    command = [
        sys.executable,
        "-m",
        "mockgpu",
        "--port",
        "0",
        "--speed",
        "0",
        "--json",
        "--kv-tokens",
        "16384",
    ]
    command += ["--dialect", "vllm_nixl", *options]
    running = [
        subprocess.Popen([*command, "--role", role], stdout=subprocess.PIPE, text=True, env=ENV)
        for role in ("prefill", "decode")
    ]
    try:
        yield Process(running[0]), Process(running[1])
    finally:
        for process in running:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


async def post(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    async with http.post(url + "/v1/completions", json=body) as response:
        return response.status, await response.json()


GIVE = {
    "max_tokens": 1,
    "min_tokens": 1,
    "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
}


async def test_separate_processes_detect_a_stopped_or_killed_prefill_group() -> None:
    async with (
        processes("--kv-load-failure-policy", "recompute") as (prefill, decode),
        aiohttp.ClientSession() as http,
    ):
        for number in (signal.SIGCONT, signal.SIGSTOP, signal.SIGKILL):
            body = LONG | {"prompt": f"{number} " + PROMPT * 20}
            _, first = await post(http, prefill.url, body | GIVE)
            prefill.process.send_signal(number)
            took = Stopwatch(prefill.process.pid, decode.process.pid)
            status, answer = await post(
                http, decode.url, body | {"kv_transfer_params": first["kv_transfer_params"]}
            )
            assert (status, answer["choices"][0]["text"]) == (200, expected_text(body, 12))
            assert took.fair_s < 4 * pace()
            prefill.process.send_signal(signal.SIGCONT)
        async with http.get(decode.url + "/mock/state") as response:
            state = await response.json()
        assert (state["blocks_in_use"], state["transfers"]) == (0, 0)
