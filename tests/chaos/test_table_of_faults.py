"""Tests which answer a client receives for each fault of an engine, on real sockets.

The expected results are those of the gateway's table of errors.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.chaos.gateway_fleet import Answer, GatewayFleet, gateway_fleet
from tests.duration_limits import PATIENCE_S, at_most
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

NEVER = {"failures": 1000}  # health settings that never eject a faulty endpoint
MANY_TOKENS = 4000  # so many that no answer ends before its client leaves


async def fates(fleet: GatewayFleet, requests: int, *, stream: bool) -> Counter[str]:
    answers = await asyncio.gather(
        *(fleet.ask(stream=stream, prompt=f"p{n}") for n in range(requests))
    )
    return Counter(answer.fate for answer in answers)


async def wait_for_all_but(count: int, asking: list[asyncio.Task[Answer]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while sum(not task.done() for task in asking) > count:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "fault", ["5xx", "5xx:status=503", "5xx@0.5", "reset-before-headers", "reset-after-headers"]
)
async def test_what_fails_before_the_first_byte_is_answered_by_another_group(
    fault: str, stream: bool
) -> None:
    async with gateway_fleet(2, health=NEVER) as fleet:
        fleet.groups[0].faults.apply(fault)
        assert await fates(fleet, 20, stream=stream) == {"ok": 20}
        assert fleet.metric("penstock_retries_total") >= 3
        await fleet.at_rest()


async def test_a_group_that_refuses_connections_is_left_at_the_first_refusal() -> None:
    async with gateway_fleet(2) as fleet:
        await fates(fleet, 4, stream=True)
        fleet.groups[0].faults.apply("refuse")
        assert await fates(fleet, 20, stream=True) == {"ok": 20}
        assert [live.load.is_available for live in fleet.app.gateway.endpoints.all()] == [
            False,
            True,
        ]
        await fleet.at_rest()


@pytest.mark.parametrize("fault", ["reset-mid-stream:after=2", "cut:after=2", "stall:after=2"])
async def test_a_stream_that_breaks_ends_with_an_error_event_and_without_done(fault: str) -> None:
    async with gateway_fleet(2, health=NEVER) as fleet:
        fleet.groups[0].faults.apply(fault)
        asking = [asyncio.create_task(fleet.ask(prompt=f"p{n}")) for n in range(10)]
        if fault.startswith("stall"):
            await wait_for_all_but(5, asking)
            fleet.lose_patience(0)
        answers = await asyncio.gather(*asking)
        assert Counter(answer.fate for answer in answers) == {"ok": 5, "error_event": 5}
        for answer in answers:
            assert (b"[DONE]" in answer.text) == (answer.fate == "ok")
        assert fleet.metric("penstock_upstream_errors_total") == 5
        await fleet.at_rest()


@pytest.mark.parametrize("fault", ["reset-mid-stream", "cut"])
async def test_a_plain_answer_that_breaks_off_comes_whole_from_another_engine(fault: str) -> None:
    async with gateway_fleet(2, health=NEVER) as fleet:
        fleet.groups[0].faults.apply(fault)
        assert await fates(fleet, 10, stream=False) == {"ok": 10}
        assert fleet.metric("penstock_upstream_errors_total") == 5
        await fleet.at_rest()


async def test_a_silent_engine_is_left_for_another_before_the_first_byte() -> None:
    async with gateway_fleet(2, health=NEVER) as fleet:
        fleet.groups[0].faults.apply("stall:after=0")
        asking = [asyncio.create_task(fleet.ask(prompt=f"p{n}")) for n in range(6)]
        await wait_for_all_but(3, asking)
        fleet.lose_patience(0)
        assert [answer.fate for answer in await asyncio.gather(*asking)] == ["ok"] * 6
        await fleet.at_rest()


@pytest.mark.parametrize("fault", ["split", "comments"])
async def test_streams_torn_into_small_pieces_or_full_of_comments_arrive_whole(fault: str) -> None:
    async with gateway_fleet(1) as fleet:
        fleet.groups[0].faults.apply(fault)
        assert await fates(fleet, 4, stream=True) == {"ok": 4}
        await fleet.at_rest()


async def test_when_every_engine_fails_all_requests_fail_at_once_and_tries_are_bounded() -> None:
    async with gateway_fleet(4, health=NEVER) as fleet:
        for group in fleet.groups:
            group.faults.apply("5xx")
        async with at_most(3):
            answers = await asyncio.gather(*(fleet.ask(prompt=f"p{n}") for n in range(60)))
        assert {answer.status for answer in answers} == {502}
        assert all(answer.error["type"] == "upstream_error" for answer in answers)
        assert fleet.metric("penstock_upstream_errors_total") <= 3 * 60
        await fleet.at_rest()


async def test_when_every_engine_is_dead_requests_are_refused_with_503_and_advice() -> None:
    async with gateway_fleet(2, health={"interval": "50ms"}) as fleet:
        for group in fleet.groups:
            group.faults.apply("lost-rank")
        async with asyncio.timeout(PATIENCE_S):
            while any(live.load.is_available for live in fleet.app.gateway.endpoints.all()):
                await asyncio.sleep(0.02)
        answer = await fleet.ask()
        assert (answer.status, answer.error["code"]) == (503, "no_capacity")
        assert int(answer.headers["retry-after-ms"]) > 0
        await fleet.at_rest()


async def test_over_capacity_requests_wait_in_turn_and_the_rest_is_shed_with_advice() -> None:
    room = {"waiting_room": {"size": 3, "timeout": "20s"}}
    async with gateway_fleet(1, speed=2.0, concurrency=2, pool=room) as fleet:
        ended: list[int] = []
        fleet.groups[0].group.fail_rank(0, hang=True)  # until all have arrived

        async def one(number: int) -> str:
            answer = await fleet.ask(
                tokens=20 * (2 + number), prompt=f"p{number}"
            )  # staggered ends
            ended.append(number)
            return answer.fate

        tasks = []
        for number in range(5):
            tasks.append(asyncio.create_task(one(number)))
            async with asyncio.timeout(PATIENCE_S):
                while (
                    sum(
                        (
                            fleet.app.gateway.gate.active_requests,
                            fleet.app.gateway.gate.pool_queues()[0].queue_length,
                        )
                    )
                    <= number
                ):
                    await asyncio.sleep(0.005)
        shed = await fleet.ask()
        assert (shed.status, shed.error["code"]) == (429, "overloaded")
        assert "2 of at most 2 requests running" in shed.error["message"]
        fleet.groups[0].group.restore()
        assert await asyncio.gather(*tasks) == ["ok"] * 5
        assert ended == sorted(ended)
        again = await fleet.ask()
        assert again.fate == "ok"
        await fleet.at_rest()


async def test_a_request_that_waits_too_long_is_shed_with_the_measured_wait() -> None:
    room = {"waiting_room": {"size": 3, "timeout": "200ms"}}
    async with gateway_fleet(1, speed=1.0, concurrency=1, pool=room) as fleet:
        await fleet.ask(tokens=1)
        await fleet.ask(tokens=1)
        running = asyncio.create_task(fleet.ask(tokens=120))
        while not fleet.app.gateway.gate.active_requests:
            await asyncio.sleep(0.005)
        shed = await fleet.ask()
        assert (shed.status, shed.error["code"]) == (429, "queue_timeout")
        assert int(shed.headers["retry-after-ms"]) > 0
        assert (await running).fate == "ok"
        await fleet.at_rest()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_while_waiting_or_served_leaves_nothing_behind(
    stream: bool,
) -> None:
    async with gateway_fleet(2, speed=1.0, concurrency=2, pool={"policy": "prefix_aware"}) as fleet:
        tasks = [
            asyncio.create_task(fleet.ask(stream=stream, tokens=MANY_TOKENS, prompt=f"p{n}"))
            for n in range(12)
        ]
        gate = fleet.app.gateway.gate
        async with asyncio.timeout(PATIENCE_S):
            while gate.active_requests < 4 or gate.pool_queues()[0].queue_length < 8:
                await asyncio.sleep(0.005)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await fleet.at_rest()
        assert fleet.metric("penstock_client_disconnects_total") == 12
        assert (await fleet.ask()).fate == "ok"


async def test_an_abort_storm_leaves_the_fleet_empty_and_answering() -> None:
    async with gateway_fleet(3, speed=1.0, health=NEVER) as fleet:
        fleet.groups[0].faults.apply("5xx@0.3,reset-before-headers@0.3")
        tasks = [asyncio.create_task(fleet.ask(tokens=200, prompt=f"p{n}")) for n in range(60)]
        for number, task in enumerate(tasks):
            await asyncio.sleep(0.002 * (number % 7))
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await fleet.at_rest()
        assert (await fates(fleet, 6, stream=True)) == {"ok": 6}
