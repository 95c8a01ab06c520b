"""Tests of how mocks of vLLM handle split requests in pull mode: handoffs, leases, refusals."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mockgpu.mock_tokenizer import expected_text, token_bytes
from tests.duration_limits import PATIENCE_S, pace
from tests.e2e.mock_pair import PROMPT, MockPair, mock_pair, rooms

BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24}
GIVE = {"do_remote_decode": True, "do_remote_prefill": False}
ONE = {"max_tokens": 1, "min_tokens": 1}


async def prefill_params(groups: MockPair, body: dict[str, Any] = BODY) -> dict[str, Any]:
    # Send a vLLM prefill request; return the kv_transfer_params of its response.
    status, answer = await groups.post(
        groups.prefill, body | ONE | {"kv_transfer_params": GIVE}, "abc"
    )
    assert status == 200, answer
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params

    # vLLM, pull


async def test_the_handoff_has_all_fields_of_its_version() -> None:
    async with mock_pair() as groups:
        new = await prefill_params(groups)
        assert groups.prefill.pd_role is not None
        here = groups.prefill.pd_role.identity
        assert isinstance(new["remote_block_ids"][0], list)
        assert new["remote_request_id"].startswith("cmpl-abc-")
        identity = {
            key: new[key]
            for key in ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size")
        }
        assert identity == {
            "remote_engine_id": here.engine_id,
            "remote_host": here.host,
            "remote_port": here.port,
            "tp_size": 1,
            "pp_size": 1,
        }
        assert (new["do_remote_prefill"], new["do_remote_decode"], new["transfer_mode"]) == (
            True,
            False,
            "pull",
        )
        assert new["remote_num_tokens"] == len(token_bytes(PROMPT)) // 4
        assert new["remote_prefill_cached_tokens"] == 0
    async with mock_pair(kv={"version": (0, 20)}) as groups:
        old = await prefill_params(groups)
        assert old.keys() == new.keys() - {
            "remote_num_tokens",
            "remote_blocks_expiry_time",
            "transfer_mode",
            "dcp_size",
            "pp_size",
            "remote_registration_generation",
            "remote_prefill_cached_tokens",
        }
    async with mock_pair(kv={"version": (0, 15)}) as groups:
        assert isinstance((await prefill_params(groups))["remote_block_ids"][0], int)


async def test_cached_tokens_are_those_of_prefill_since_033_and_the_whole_transfer_before() -> None:
    prompt_tokens = len(token_bytes(PROMPT)) // 4
    for version, first, second in (
        ((0, 33), 0, (prompt_tokens - 1) // 16 * 16),
        ((0, 20), prompt_tokens - 1, None),
    ):
        async with mock_pair(kv={"version": version}) as groups:
            _, answer = await groups.split(BODY)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == first
            if second is not None:
                _, again = await groups.split(BODY)
                assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == second


async def test_blocks_stay_pinned_until_they_are_fetched_or_the_lease_ends() -> None:
    async with mock_pair(kv={"lease_s": 0.3 * pace()}) as groups:
        await prefill_params(groups)
        state = await groups.state(groups.prefill)
        assert state["blocks_kept"] == state["blocks_in_use"] == -(-len(token_bytes(PROMPT)) // 64)
        assert state["leases"]["offered"] == 1
        await groups.at_rest()
        assert await groups.metric(groups.prefill, "vllm:nixl_num_kv_expired_reqs_total") == 1


async def test_pinned_blocks_reduce_the_memory_for_other_requests() -> None:
    tokens = len(token_bytes(PROMPT)) // 4
    async with mock_pair(kv={"lease_s": 0.5 * pace()}, kv_tokens=2 * tokens) as groups:
        await prefill_params(groups, BODY | {"prompt": "first " + PROMPT})
        waiting = asyncio.create_task(prefill_params(groups, BODY | {"prompt": "second " + PROMPT}))
        async with asyncio.timeout(PATIENCE_S):
            while await groups.metric(groups.prefill, "vllm:num_requests_waiting{") != 1:
                await asyncio.sleep(0.002)
        await waiting
        assert await groups.metric(groups.prefill, "vllm:nixl_num_kv_expired_reqs_total") == 1


@pytest.mark.parametrize(("recompute", "status"), [(False, 500), (True, 200)])
async def test_a_decode_leg_after_the_lease_fails_or_is_recomputed(
    recompute: bool, status: int
) -> None:
    async with mock_pair(prefill={"lease_s": 0.05}, decode={"recompute": recompute}) as groups:
        params = await prefill_params(groups)
        await groups.at_rest()
        for stream in (False, True):
            body = BODY | {"kv_transfer_params": params, "stream": stream}
            async with groups.http.post(
                groups.decode.url + "/v1/completions", json=body
            ) as response:
                text = await response.text()
                assert response.status == (200 if stream else status)
                if status == 500:
                    assert '"code":500' in text
                elif not stream:
                    assert json.loads(text)["choices"][0]["text"] == expected_text(BODY, 24)
        assert await groups.metric(groups.decode, "vllm:nixl_num_failed_transfers_total") >= 1
        await groups.at_rest()


async def test_a_ticket_can_be_used_once() -> None:
    async with mock_pair() as groups:
        params = await prefill_params(groups, BODY)
        take = BODY | {"kv_transfer_params": params}
        assert (await groups.post(groups.decode, take))[0] == 200
        assert (await groups.post(groups.decode, take | {"prompt": PROMPT, "cache_salt": "else"}))[
            0
        ] == 500
        await groups.at_rest()


async def test_a_decode_group_with_the_prompt_cached_frees_the_prefill_group() -> None:
    async with mock_pair() as groups:
        body = {"prompt": list(range(1, 50)), "max_tokens": 4}
        await groups.split(body)
        moved = await groups.metric(groups.decode, "vllm:nixl_bytes_transferred_sum")
        status, answer = await groups.split(body)
        assert status == 200
        assert answer["choices"][0]["text"] == expected_text(body, 4)
        assert await groups.metric(groups.decode, "vllm:nixl_bytes_transferred_sum") == moved
        await groups.at_rest(within_s=2)


async def test_a_decode_leg_refused_before_admission_frees_the_prefill_group() -> None:
    async with mock_pair() as groups:
        for wrong in ({"priority": 1}, {"max_tokens": 10**7}):
            params = await prefill_params(groups)
            status, _ = await groups.post(
                groups.decode, BODY | {"kv_transfer_params": params} | wrong
            )
            assert status == 400
            await groups.at_rest(within_s=2)


async def test_a_decode_leg_closed_at_once_frees_the_prefill_group() -> None:
    async with mock_pair(speed=1.0) as groups:
        for _ in range(5):
            params = await prefill_params(groups)
            leg = asyncio.create_task(
                groups.post(groups.decode, BODY | {"kv_transfer_params": params})
            )
            while not groups.decode.group.in_flight:
                await asyncio.sleep(0)
            leg.cancel()
            await groups.at_rest(within_s=2)


@pytest.mark.parametrize(
    "field", ["remote_engine_id", "remote_request_id", "remote_host", "remote_port"]
)
async def test_a_pull_with_an_incomplete_source_waits_until_it_is_aborted(field: str) -> None:
    async with mock_pair() as groups:
        params = await prefill_params(groups)
        body = BODY | {"kv_transfer_params": {**params, field: None}}
        leg = asyncio.create_task(groups.post(groups.decode, body))
        done, _ = await asyncio.wait([leg], timeout=0.1)
        assert not done
        state = await groups.state(groups.decode)
        assert state["malformed_handoffs"] == 1
        assert state["blocks_in_use"] > 0
        leg.cancel()
        async with asyncio.timeout(PATIENCE_S):
            while (await groups.state(groups.decode))["blocks_in_use"]:
                await asyncio.sleep(0.002)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"prompt_token_ids": 5}, 400),
        ({"prompt_token_ids": {"a": 1}}, 400),
        ({"remote_prefill_cached_tokens": "many"}, 500),
        ({"remote_prefill_cached_tokens": -1}, 500),
    ],
)
async def test_a_pull_with_values_of_the_wrong_type_is_refused_and_the_engine_survives(
    wrong: dict[str, Any], expected: int
) -> None:
    async with mock_pair() as groups:
        chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
        one = chat | ONE | {"kv_transfer_params": GIVE}
        _, first = await groups.post(groups.prefill, one, path="/v1/chat/completions")
        take = chat | {"kv_transfer_params": first["kv_transfer_params"] | wrong}
        status, answer = await groups.post(groups.decode, take, path="/v1/chat/completions")
        assert (status, answer["error"]["code"]) == (expected, expected)
        assert not groups.decode.group.is_dead


@pytest.mark.parametrize("blocks", [None, [], [[]], 5, {"a": 1}])
async def test_a_pull_without_blocks_crashes_the_engine(blocks: Any) -> None:
    async with mock_pair() as groups:
        params = await prefill_params(groups) | {"remote_block_ids": blocks}
        assert (await groups.post(groups.decode, BODY | {"kv_transfer_params": params}))[0] == 500
        async with groups.http.get(groups.decode.url + "/health") as response:
            assert response.status == 503
        assert await groups.metric(groups.decode, "mock:malformed_handoff_total") == 1
        async with groups.http.delete(groups.decode.url + "/mock/fault") as response:
            assert response.status == 200
        assert (await groups.split(BODY))[0] == 200


async def test_several_sequences_cannot_share_one_transfer() -> None:
    async with mock_pair() as groups:
        params = await prefill_params(groups)
        assert (await groups.post(groups.decode, BODY | {"kv_transfer_params": params, "n": 2}))[
            0
        ] == 500
        assert (await groups.state(groups.decode))["malformed_handoffs"] == 1


async def test_a_response_that_ends_with_its_first_token_keeps_its_kv_since_022_only() -> None:
    prompt = list(range(15))
    result = 0
    for seed in range(40):
        body = {"prompt": [seed, *prompt[1:]], "max_tokens": 1, "kv_transfer_params": GIVE}
        async with mock_pair(kv={"version": (0, 20)}) as old:
            _, answer = await old.post(old.prefill, body)
        if answer["choices"][0]["finish_reason"] == "stop":
            result += 1
            assert answer["kv_transfer_params"] is None
            async with mock_pair() as new:
                _, answer = await new.post(new.prefill, body)
                assert answer["kv_transfer_params"]["remote_block_ids"]
            async with mock_pair(kv={"version": (0, 20)}) as old:
                _, answer = await old.post(old.prefill, body | ONE)
                assert answer["choices"][0]["finish_reason"] == "length"
                assert answer["kv_transfer_params"]["remote_block_ids"]
            break
    assert result


async def test_the_prompt_of_a_chat_is_rendered_only_once() -> None:
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 9}
    path = "/v1/chat/completions"
    async with mock_pair() as groups:
        give = chat | ONE | {"kv_transfer_params": GIVE, "return_token_ids": True}
        _, first = await groups.post(groups.prefill, give, "x", path)
        params = first["kv_transfer_params"] | {"prompt_token_ids": first["prompt_token_ids"]}
        other = chat | {
            "messages": [{"role": "user", "content": "never read"}],
            "kv_transfer_params": params,
        }
        status, answer = await groups.post(groups.decode, other, "x", path)
        assert status == 200
        assert answer["choices"][0]["message"]["content"] == expected_text(chat, 9)
        bad = chat | {"kv_transfer_params": params | {"prompt_token_ids": [-1]}}
        assert (await groups.post(groups.decode, bad, "x", path))[0] == 400

        # KV memory of the decode group


async def test_a_decode_group_reserves_memory_for_the_whole_prompt_before_the_transfer() -> None:
    tokens = len(token_bytes(PROMPT)) // 4
    async with mock_pair("vllm_push", kv_tokens=2 * tokens, speed=1.0) as groups:
        bodies = [{"prompt": f"{name} " + PROMPT, "max_tokens": 60} for name in ("one", "two")]
        give, take = zip(*(groups.legs(body, next(rooms)) for body in bodies), strict=True)
        ids = [leg["kv_transfer_params"]["remote_request_id"] for leg in take]
        legs = [
            asyncio.create_task(groups.post(groups.decode, t, i))
            for t, i in zip(take, ids, strict=True)
        ]
        async with asyncio.timeout(PATIENCE_S):
            while await groups.metric(groups.decode, "vllm:num_requests_waiting{") != 2:
                await asyncio.sleep(0.002)
        stage = "vllm:num_requests_kv_fetch_by_stage{"
        labels = 'model_name="m",engine="0",stage='
        assert await groups.metric(groups.decode, f'{stage}{labels}"waiting_to_start"') == 1
        assert await groups.metric(groups.decode, f'{stage}{labels}"in_progress"') == 1
        for body, request_id in zip(give, ids, strict=True):
            assert (await groups.post(groups.prefill, body, request_id))[0] == 200
        answers = await asyncio.gather(*legs)
        assert [a["choices"][0]["text"] for _, a in answers] == [
            expected_text(body, 60) for body in bodies
        ]
        await groups.at_rest()


async def test_the_lease_is_renewed_while_a_decode_leg_waits_for_memory() -> None:
    tokens = len(token_bytes(PROMPT)) // 4
    lease = {"lease_s": 0.3 * pace()}
    async with mock_pair(
        kv=lease, decode=lease, kv_tokens=2 * tokens, speed=2.0 / pace()
    ) as groups:
        fills = asyncio.create_task(groups.post(groups.decode, BODY | {"max_tokens": 170}))
        while not groups.decode.group.scheduler.running:
            await asyncio.sleep(0.001)
        status, answer = await groups.split(BODY | {"prompt": "second " + PROMPT})
        assert fills.done()
        assert (status, answer["choices"][0]["text"]) == (
            200,
            expected_text({"prompt": "second " + PROMPT}, 24),
        )
        assert await groups.metric(groups.prefill, "vllm:nixl_num_kv_expired_reqs_total") == 0
        await groups.at_rest()
