"""Tests of faults at every stage of split requests: the client gets the right text or an error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.duration_limits import at_most, pace
from tests.e2e.split_fleet import SENTENCE, split_fleet

DIALECTS = ("vllm_nixl", "vllm_push", "penstock", "mooncake", "sglang", "trtllm")
SOON_S = 0.6 * pace()
FAST = {"wait_s": SOON_S, "lease_s": SOON_S}
SPLIT = {"transfer_timeout": f"{SOON_S:.1f}s"}


def long_prompt(number: int, **members: Any) -> dict[str, Any]:
    return {"prompt": f"{number} " + SENTENCE * 20, "max_tokens": 12} | members


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("role", "what"),
    [
        ("prefill", "die-in-prefill"),
        ("prefill", "die-in-transfer"),
        ("prefill", "kv-lost"),
        ("prefill", "5xx:status=500"),
        ("prefill", "refuse"),
        ("decode", "die-in-pull"),
        ("decode", "die-mid-decode:after=3"),
        ("decode", "5xx:status=503"),
        ("decode", "refuse"),
    ],
)
async def test_one_failing_endpoint_changes_no_response_and_leaves_nothing_held(
    dialect: str, role: str, what: str
) -> None:
    async with split_fleet(dialect, kv=FAST, split=SPLIT) as fleet:
        await fleet.assert_right_answer(long_prompt(0))
        member = (fleet.prefill if role == "prefill" else fleet.decode)[0]
        member.faults.apply(what)
        await asyncio.gather(
            *(fleet.assert_right_answer(long_prompt(number)) for number in range(1, 9))
        )
        member.faults.clear()
        # A decoder keeps polling the bootstrap server of a dead engine for 5 s.
        await fleet.at_rest(within_s=7 + SOON_S)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_stream_that_breaks_after_its_first_tokens_ends_with_an_error(dialect: str) -> None:
    async with split_fleet(dialect, kv=FAST) as fleet:
        for member in fleet.decode:
            member.faults.apply("die-mid-decode:after=3")
        body = {"model": "m", "stream": True} | long_prompt(1)
        async with fleet.http.post(f"{fleet.app.url}/v1/completions", json=body) as answer:
            raw = await answer.read()
        assert b'data: {"error"' in raw or b'"code":500' in raw
        for member in fleet.members:
            member.faults.clear()
        await fleet.at_rest(within_s=4 + SOON_S)


@pytest.mark.parametrize(
    "fault_spec", ["wire-corrupt:after=300", "wire-cut:after=300", "wire-replay:after=0"]
)
async def test_a_damaged_transfer_never_changes_the_text(fault_spec: str) -> None:
    kv = FAST | {"transport": "tcp", "wire_faults": True}
    async with split_fleet("vllm_nixl", kv=kv, split=SPLIT) as fleet:
        fleet.prefill[0].faults.apply(fault_spec)
        await asyncio.gather(
            *(fleet.assert_right_answer(long_prompt(number)) for number in range(8))
        )
        fleet.prefill[0].faults.clear()
        await fleet.at_rest(within_s=4 + SOON_S)


async def test_stalled_transfers_are_detected_and_the_request_is_recomputed() -> None:
    kv = FAST | {"transport": "tcp", "wire_faults": True}
    async with split_fleet("vllm_nixl", kv=kv, split=SPLIT) as fleet:
        for number in range(4):
            await fleet.assert_right_answer(long_prompt(number))
        fleet.prefill[0].faults.apply("wire-stall")
        fleet.prefill[1].faults.apply("wire-stall")
        async with at_most(2.0 + SOON_S):
            await fleet.assert_right_answer(long_prompt(10))
        for member in fleet.prefill:
            member.faults.clear()
        await fleet.at_rest(within_s=4 + SOON_S)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_many_clients_that_disconnect_at_the_first_byte_leave_nothing_held(
    dialect: str,
) -> None:
    async with split_fleet(dialect, speed=50.0) as fleet:

        async def leave_at_first_byte(number: int) -> None:
            body = {"model": "m", "stream": True} | long_prompt(number, max_tokens=200)
            async with fleet.http.post(f"{fleet.app.url}/v1/completions", json=body) as answer:
                await answer.content.readany()
                answer.close()

        staying = [fleet.assert_right_answer(long_prompt(number)) for number in range(0, 60, 10)]
        leaving = [leave_at_first_byte(number) for number in range(60) if number % 10]
        await asyncio.gather(*staying, *leaving)
        await fleet.at_rest(within_s=10)
