"""What each engine does with the legs of split requests: objects, usage, leases, waiting, refusals, by contract."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest

from kvtransfer.dialects import get_dialect, standalone_members
from mockgpu.text import expected_text, token_bytes, token_ids
from tests.e2e.mock_pair import DIALECTS, PROMPT, Pair, pair, rooms
from tests.fair_time import PATIENCE_S, at_most, pace

BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24}
GIVE = {"do_remote_decode": True, "do_remote_prefill": False}
ONE = {"max_tokens": 1, "min_tokens": 1}


async def prefilled(groups: Pair, body: dict[str, Any] = BODY) -> dict[str, Any]:
    """The object a vLLM prefill leg answers with."""
    status, answer = await groups.post(groups.prefill, body | ONE | {"kv_transfer_params": GIVE}, "abc")
    assert status == 200, answer
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params


# --- vLLM, pull


async def test_the_object_has_all_fields_of_its_version() -> None:
    async with pair() as groups:
        new = await prefilled(groups)
        assert groups.prefill.pd_role is not None
        here = groups.prefill.pd_role.identity
        assert isinstance(new["remote_block_ids"][0], list)
        assert new["remote_request_id"].startswith("cmpl-abc-")
        told = {key: new[key] for key in ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size")}
        assert told == {
            "remote_engine_id": here.engine_id,
            "remote_host": here.host,
            "remote_port": here.port,
            "tp_size": 1,
            "pp_size": 1,
        }
        assert (new["do_remote_prefill"], new["do_remote_decode"], new["transfer_mode"]) == (True, False, "pull")
        assert new["remote_num_tokens"] == len(token_bytes(PROMPT)) // 4
        assert new["remote_prefill_cached_tokens"] == 0
    async with pair(kv={"version": (0, 20)}) as groups:
        old = await prefilled(groups)
        assert old.keys() == new.keys() - {
            "remote_num_tokens",
            "remote_blocks_expiry_time",
            "transfer_mode",
            "dcp_size",
            "pp_size",
            "remote_registration_generation",
            "remote_prefill_cached_tokens",
        }
    async with pair(kv={"version": (0, 15)}) as groups:
        assert isinstance((await prefilled(groups))["remote_block_ids"][0], int)


async def test_cached_tokens_are_prefill_s_own_since_033_and_the_whole_transfer_before() -> None:
    prompt_tokens = len(token_bytes(PROMPT)) // 4
    for version, first, second in (((0, 33), 0, (prompt_tokens - 1) // 16 * 16), ((0, 20), prompt_tokens - 1, None)):
        async with pair(kv={"version": version}) as groups:
            _, answer = await groups.split(BODY)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == first
            if second is not None:
                _, again = await groups.split(BODY)
                assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == second


async def test_blocks_stay_pinned_until_they_are_fetched_or_the_lease_ends() -> None:
    async with pair(kv={"lease_s": 0.3 * pace()}) as groups:
        await prefilled(groups)
        state = await groups.state(groups.prefill)
        assert state["blocks_kept"] == state["blocks_in_use"] == -(-len(token_bytes(PROMPT)) // 64)
        assert state["leases"]["offered"] == 1
        await groups.at_rest()
        assert await groups.metric(groups.prefill, "vllm:nixl_num_kv_expired_reqs_total") == 1


async def test_what_is_pinned_takes_room_from_others() -> None:
    tokens = len(token_bytes(PROMPT)) // 4
    async with pair(kv={"lease_s": 0.5 * pace()}, kv_tokens=2 * tokens) as groups:
        await prefilled(groups, BODY | {"prompt": "first " + PROMPT})
        waiting = asyncio.create_task(prefilled(groups, BODY | {"prompt": "second " + PROMPT}))
        async with asyncio.timeout(PATIENCE_S):
            while await groups.metric(groups.prefill, "vllm:num_requests_waiting{") != 1:
                await asyncio.sleep(0.002)
        await waiting
        assert await groups.metric(groups.prefill, "vllm:nixl_num_kv_expired_reqs_total") == 1


@pytest.mark.parametrize(("recompute", "status"), [(False, 500), (True, 200)])
async def test_a_decode_leg_after_the_lease_fails_or_is_computed_there(recompute: bool, status: int) -> None:
    async with pair(prefill={"lease_s": 0.05}, decode={"recompute": recompute}) as groups:
        params = await prefilled(groups)
        await groups.at_rest()
        for stream in (False, True):
            body = BODY | {"kv_transfer_params": params, "stream": stream}
            async with groups.http.post(groups.decode.url + "/v1/completions", json=body) as response:
                told = await response.text()
                assert response.status == (200 if stream else status)
                if status == 500:
                    assert '"code":500' in told
                elif not stream:
                    assert json.loads(told)["choices"][0]["text"] == expected_text(BODY, 24)
        assert await groups.metric(groups.decode, "vllm:nixl_num_failed_transfers_total") >= 1
        await groups.at_rest()


async def test_a_ticket_serves_once() -> None:
    async with pair() as groups:
        params = await prefilled(groups, BODY)
        take = BODY | {"kv_transfer_params": params}
        assert (await groups.post(groups.decode, take))[0] == 200
        assert (await groups.post(groups.decode, take | {"prompt": PROMPT, "cache_salt": "else"}))[0] == 500
        await groups.at_rest()


async def test_a_decode_group_that_has_the_prompt_fetches_nothing_and_lets_the_giver_go() -> None:
    async with pair() as groups:
        body = {"prompt": list(range(1, 50)), "max_tokens": 4}
        await groups.split(body)
        moved = await groups.metric(groups.decode, "vllm:nixl_bytes_transferred_sum")
        status, answer = await groups.split(body)
        assert status == 200
        assert answer["choices"][0]["text"] == expected_text(body, 4)
        assert await groups.metric(groups.decode, "vllm:nixl_bytes_transferred_sum") == moved
        await groups.at_rest(within_s=2)


async def test_a_decode_leg_refused_before_admission_lets_the_giver_go() -> None:
    async with pair() as groups:
        for wrong in ({"priority": 1}, {"max_tokens": 10**7}):
            params = await prefilled(groups)
            status, _ = await groups.post(groups.decode, BODY | {"kv_transfer_params": params} | wrong)
            assert status == 400
            await groups.at_rest(within_s=2)


async def test_a_decode_leg_sent_and_closed_at_once_frees_the_giver() -> None:
    async with pair(speed=1.0) as groups:
        for _ in range(5):
            params = await prefilled(groups)
            leg = asyncio.create_task(groups.post(groups.decode, BODY | {"kv_transfer_params": params}))
            while not groups.decode.group.in_flight:
                await asyncio.sleep(0)
            leg.cancel()
            await groups.at_rest(within_s=2)


@pytest.mark.parametrize("field", ["remote_engine_id", "remote_request_id", "remote_host", "remote_port"])
async def test_a_pull_without_all_of_its_source_is_parked_until_aborted(field: str) -> None:
    async with pair() as groups:
        params = await prefilled(groups)
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
async def test_a_pull_whose_object_has_values_of_the_wrong_kind_is_refused_and_the_engine_lives(
    wrong: dict[str, Any], expected: int
) -> None:
    async with pair() as groups:
        chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
        one = chat | ONE | {"kv_transfer_params": GIVE}
        _, first = await groups.post(groups.prefill, one, path="/v1/chat/completions")
        take = chat | {"kv_transfer_params": first["kv_transfer_params"] | wrong}
        status, answer = await groups.post(groups.decode, take, path="/v1/chat/completions")
        assert (status, answer["error"]["code"]) == (expected, expected)
        assert not groups.decode.group.is_dead


@pytest.mark.parametrize("blocks", [None, [], [[]], 5, {"a": 1}])
async def test_a_pull_without_blocks_takes_the_engine_down(blocks: Any) -> None:
    async with pair() as groups:
        params = await prefilled(groups) | {"remote_block_ids": blocks}
        assert (await groups.post(groups.decode, BODY | {"kv_transfer_params": params}))[0] == 500
        async with groups.http.get(groups.decode.url + "/health") as response:
            assert response.status == 503
        assert await groups.metric(groups.decode, "mock:malformed_handoff_total") == 1
        async with groups.http.delete(groups.decode.url + "/mock/fault") as response:
            assert response.status == 200
        assert (await groups.split(BODY))[0] == 200


async def test_several_sequences_cannot_share_one_transfer() -> None:
    async with pair() as groups:
        params = await prefilled(groups)
        assert (await groups.post(groups.decode, BODY | {"kv_transfer_params": params, "n": 2}))[0] == 500
        assert (await groups.state(groups.decode))["malformed_handoffs"] == 1


async def test_an_answer_that_ends_at_once_keeps_its_kv_since_022_only() -> None:
    prompt = list(range(15))
    found = 0
    for seed in range(40):
        body = {"prompt": [seed, *prompt[1:]], "max_tokens": 1, "kv_transfer_params": GIVE}
        async with pair(kv={"version": (0, 20)}) as old:
            _, answer = await old.post(old.prefill, body)
        if answer["choices"][0]["finish_reason"] == "stop":
            found += 1
            assert answer["kv_transfer_params"] is None
            async with pair() as new:
                _, answer = await new.post(new.prefill, body)
                assert answer["kv_transfer_params"]["remote_block_ids"]
            async with pair(kv={"version": (0, 20)}) as old:
                _, answer = await old.post(old.prefill, body | ONE)
                assert answer["choices"][0]["finish_reason"] == "length"
                assert answer["kv_transfer_params"]["remote_block_ids"]
            break
    assert found


async def test_a_chat_s_prompt_need_be_rendered_only_once() -> None:
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 9}
    path = "/v1/chat/completions"
    async with pair() as groups:
        give = chat | ONE | {"kv_transfer_params": GIVE, "return_token_ids": True}
        _, first = await groups.post(groups.prefill, give, "x", path)
        params = first["kv_transfer_params"] | {"prompt_token_ids": first["prompt_token_ids"]}
        other = chat | {"messages": [{"role": "user", "content": "never read"}], "kv_transfer_params": params}
        status, answer = await groups.post(groups.decode, other, "x", path)
        assert status == 200
        assert answer["choices"][0]["message"]["content"] == expected_text(chat, 9)
        bad = chat | {"kv_transfer_params": params | {"prompt_token_ids": [-1]}}
        assert (await groups.post(groups.decode, bad, "x", path))[0] == 400


# --- decode's room


async def test_a_decode_group_takes_the_whole_prompt_s_room_before_a_byte_moves() -> None:
    """Two prompts, room for one: the second waits in the queue, and its KV with the giver."""
    tokens = len(token_bytes(PROMPT)) // 4
    async with pair("vllm_push", kv_tokens=2 * tokens, speed=1.0) as groups:
        bodies = [{"prompt": f"{name} " + PROMPT, "max_tokens": 60} for name in ("one", "two")]
        give, take = zip(*(groups.legs(body, next(rooms)) for body in bodies), strict=True)
        ids = [leg["kv_transfer_params"]["remote_request_id"] for leg in take]
        legs = [asyncio.create_task(groups.post(groups.decode, t, i)) for t, i in zip(take, ids, strict=True)]
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
        assert [a["choices"][0]["text"] for _, a in answers] == [expected_text(body, 60) for body in bodies]
        await groups.at_rest()


async def test_the_lease_is_renewed_while_a_decode_leg_waits_for_room() -> None:
    tokens = len(token_bytes(PROMPT)) // 4
    lease = {"lease_s": 0.3 * pace()}
    async with pair(kv=lease, decode=lease, kv_tokens=2 * tokens, speed=2.0 / pace()) as groups:
        fills = asyncio.create_task(groups.post(groups.decode, BODY | {"max_tokens": 170}))
        while not groups.decode.group.scheduler.running:
            await asyncio.sleep(0.001)
        status, answer = await groups.split(BODY | {"prompt": "second " + PROMPT})
        assert fills.done()
        assert (status, answer["choices"][0]["text"]) == (200, expected_text({"prompt": "second " + PROMPT}, 24))
        assert await groups.metric(groups.prefill, "vllm:nixl_num_kv_expired_reqs_total") == 0
        await groups.at_rest()


# --- vLLM, push, and Mooncake


async def test_push_tells_its_mode_and_needs_no_ticket() -> None:
    async with pair("vllm_push") as groups:
        params = await prefilled(groups)
        assert params["transfer_mode"] == "push"
        assert "penstock_ticket" not in params


@pytest.mark.parametrize("field", ["remote_engine_id", "remote_host", "remote_port", "tp_size"])
async def test_a_push_that_does_not_name_its_source_takes_the_engine_down(field: str) -> None:
    async with pair("vllm_push") as groups:
        _, take = groups.legs(BODY, 7)
        del take["kv_transfer_params"][field]
        assert (await groups.post(groups.decode, take, "r7"))[0] == 500
        assert await groups.metric(groups.decode, "mock:malformed_handoff_total") == 1


@pytest.mark.parametrize("dialect", ["vllm_push", "mooncake", "sglang"])
async def test_decode_waits_its_time_out_when_prefill_never_comes(dialect: str) -> None:
    async with pair(dialect, kv={"wait_s": 0.4 * pace()}) as groups:
        number = next(rooms)
        _, take = groups.legs(BODY, number)
        leg = asyncio.create_task(groups.post(groups.decode, take, f"r{number}"))
        done, _ = await asyncio.wait([leg], timeout=0.15)
        assert not done
        assert (await leg)[0] == 500
        await groups.at_rest()


@pytest.mark.parametrize("dialect", ["vllm_push", "mooncake", "sglang"])
@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_either_leg_may_be_first(dialect: str, first: str) -> None:
    async with pair(dialect) as groups:
        number = next(rooms)
        bodies = dict(zip(("prefill", "decode"), groups.legs(BODY, number), strict=True))
        members = {"prefill": groups.prefill, "decode": groups.decode}
        legs = {}
        for role in (first, *members.keys() - {first}):
            legs[role] = asyncio.create_task(groups.post(members[role], bodies[role], f"r{number}"))
            await asyncio.sleep(0.05)
        assert (await legs["prefill"])[0] == 200
        status, answer = await legs["decode"]
        assert (status, answer["choices"][0]["text"]) == (200, expected_text(BODY, 24))
        await groups.at_rest()


async def test_mooncake_s_bootstrap_tells_who_prefill_is_until_it_restarts() -> None:
    async with pair("mooncake", kv={"wait_s": 1.0}) as groups:
        assert groups.prefill.pd_role is not None
        async with groups.http.get(groups.prefill.pd_role.bootstrap_url + "/query") as response:
            page = await response.json()
        assert page["0"]["engine_id"] == groups.prefill.pd_role.identity.engine_id
        assert page["0"]["worker_addr"]["0"]["0"] == groups.prefill.pd_role.identity.address
        number = next(rooms)
        _, stale = groups.legs(BODY, number)
        groups.prefill.group.lose_rank(0)
        async with groups.http.delete(groups.prefill.url + "/mock/fault") as response:
            assert response.status == 200
        assert (await groups.post(groups.decode, stale))[0] == 500
        assert (await groups.split(BODY))[0] == 200
        await groups.at_rest()


async def test_mooncake_s_roles_are_not_interchangeable() -> None:
    for wrong in ("prefill", "decode"):
        async with pair("mooncake") as groups:
            give, take = groups.legs(BODY, 1)
            member, body = (groups.prefill, take) if wrong == "prefill" else (groups.decode, give)
            assert (await groups.post(member, body))[0] == 500
            assert (await groups.state(member))["malformed_handoffs"] == 1
            assert member.group.is_dead


# --- SGLang


async def test_sglang_s_errors_are_flat_and_a_missing_or_used_room_is_refused() -> None:
    async with pair("sglang") as groups:
        status, answer = await groups.post(groups.prefill, BODY)
        assert (status, answer["object"], answer["code"]) == (400, "error", 400)
        assert "room" in answer["message"]
        number = next(rooms)
        give, take = groups.legs(BODY, number)
        legs = await asyncio.gather(groups.post(groups.prefill, give), groups.post(groups.decode, take))
        assert [status for status, _ in legs] == [200, 200]
        assert (await groups.post(groups.prefill, give))[0] == 400
        assert (await groups.state(groups.prefill))["malformed_handoffs"] == 2


async def test_sglang_s_prefill_stops_after_one_token_and_answers_when_its_kv_is_taken() -> None:
    async with pair("sglang") as groups:
        number = next(rooms)
        give, take = groups.legs(BODY, number)
        leg = asyncio.create_task(groups.post(groups.prefill, give))
        done, _ = await asyncio.wait([leg], timeout=0.1)
        assert not done
        assert (await groups.post(groups.decode, take))[0] == 200
        status, answer = await leg
        assert (status, answer["usage"]["completion_tokens"]) == (200, 1)


async def test_sglang_s_bootstrap_tells_the_route() -> None:
    async with pair("sglang", (2, 1)) as groups:
        assert groups.prefill.pd_role is not None
        url = groups.prefill.pd_role.bootstrap_url
        async with groups.http.get(f"{url}/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1") as response:
            assert (await response.json())["attn_tp_size"] == 2
        async with groups.http.get(f"{url}/health") as response:
            assert response.status == 200


async def test_a_prefill_leg_that_is_aborted_frees_its_kv_and_fails_decode() -> None:
    async with pair("sglang", kv={"wait_s": 0.5}) as groups:
        give, take = groups.legs(BODY, next(rooms))
        leg = asyncio.create_task(groups.post(groups.prefill, give))
        await asyncio.sleep(0.05)
        leg.cancel()
        async with asyncio.timeout(PATIENCE_S):
            while (await groups.state(groups.prefill))["blocks_in_use"]:
                await asyncio.sleep(0.002)
        status, answer = await groups.post(groups.decode, take)
        assert (status, answer["object"]) == (500, "error")
        await groups.at_rest()


# --- TensorRT-LLM


async def test_trtllm_refuses_what_it_does_not_know() -> None:
    async with pair("trtllm") as groups:
        for field in ("kv_transfer_params", "store", "return_token_ids"):
            status, answer = await groups.post(groups.prefill, BODY | {field: None})
            assert (status, answer["object"], answer["param"]) == (400, "error", field)


async def test_trtllm_s_first_token_is_the_context_server_s() -> None:
    async with pair("trtllm") as groups:
        asked = {"request_type": "context_only", "disagg_request_id": next(rooms)}
        _, first = await groups.post(groups.prefill, BODY | {"disaggregated_params": asked})
        choice = first["choices"][0]
        params = choice["disaggregated_params"]
        assert choice["finish_reason"] == "not_finished"
        assert params["first_gen_tokens"] == token_ids(token_bytes(choice["text"]))
        assert first["prompt_token_ids"] == token_ids(token_bytes(PROMPT))
        base64.b64decode(params["encoded_opaque_state"], validate=True)
        odd = params | {"request_type": "generation_only", "first_gen_tokens": token_ids(b" zoo")}
        _, answer = await groups.post(groups.decode, BODY | {"disaggregated_params": odd})
        assert answer["choices"][0]["text"].startswith(" zoo")
        assert answer["usage"]["completion_tokens"] == 24
        await groups.at_rest()


@pytest.mark.parametrize(
    "wrong",
    [
        {"first_gen_tokens": [-1]},
        {"first_gen_tokens": [(1 << 32) - 1]},
        {"first_gen_tokens": token_ids(b" zoo" * 25)},
        {"first_gen_tokens": [1 << 40]},
    ],
)
async def test_trtllm_refuses_first_tokens_that_no_context_server_made(wrong: dict[str, Any]) -> None:
    async with pair("trtllm") as groups:
        asked = {"request_type": "context_only", "disagg_request_id": next(rooms)}
        _, first = await groups.post(groups.prefill, BODY | {"disaggregated_params": asked})
        params = first["choices"][0]["disaggregated_params"] | {"request_type": "generation_only"}
        status, _ = await groups.post(groups.decode, BODY | {"disaggregated_params": params | wrong})
        assert status == 400


async def test_trtllm_wants_new_ids_and_another_server() -> None:
    async with pair("trtllm") as groups:
        number = next(rooms)
        asked = {"request_type": "context_only", "disagg_request_id": number}
        _, first = await groups.post(groups.prefill, BODY | {"disaggregated_params": asked})
        params = first["choices"][0]["disaggregated_params"] | {"request_type": "generation_only"}
        for body in (
            asked,
            {"request_type": "context_only", "disagg_request_id": 5},
            {"request_type": "context_only"},
            {"request_type": "nothing"},
            params | {"first_gen_tokens": None},
            params | {"encoded_opaque_state": "?"},
        ):
            assert (await groups.post(groups.prefill, BODY | {"disaggregated_params": body}))[0] == 400
        assert (await groups.post(groups.prefill, BODY | {"disaggregated_params": params}))[0] == 400
        assert (await groups.state(groups.prefill))["malformed_handoffs"] == 7


# --- all of them


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_request_that_is_no_leg_is_served_whole(dialect: str) -> None:
    async with pair(dialect) as groups:
        status, answer = await groups.post(groups.decode, BODY)
        if dialect == "sglang":
            assert status == 400
        else:
            assert answer["choices"][0]["text"] == expected_text(BODY, 24)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_probe_is_answered_by_either_half_alone_and_as_often_as_it_comes(dialect: str) -> None:
    probe = {"prompt": "1", "max_tokens": 1} | standalone_members(get_dialect(dialect).engine)
    async with pair(dialect) as groups:
        for group in (groups.prefill, groups.decode) * 2:
            status, answer = await groups.post(group, probe)
            assert (status, answer["usage"]["completion_tokens"]) == (200, 1)
        await groups.at_rest()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_another_dialect_s_fields_are_counted_as_malformed(dialect: str) -> None:
    foreign = {"kv_transfer_params": GIVE} if dialect in ("sglang", "trtllm") else {"bootstrap_room": 5}
    async with pair(dialect) as groups:
        assert (await groups.post(groups.decode, BODY | foreign))[0] in (400, 500)
        if dialect != "trtllm":
            assert (await groups.state(groups.decode))["malformed_handoffs"] == 1


async def test_groups_of_another_fleet_version_or_model_get_nothing() -> None:
    for other in ({"key": "another fleet"}, {"version": (0, 30)}, {"scale": 1 / 64}):
        async with pair(decode=other) as groups:
            status, answer = await groups.split(BODY)
            assert status == 500
            assert answer["error"]["message"].startswith("KV load failed")


async def test_links_are_as_fast_as_they_are_said_to_be() -> None:
    """640 tokens of an 8B model are 84 MB: a fifth of a second at 3.4 gigabits per second."""
    loop = asyncio.get_running_loop()
    body = {"prompt": "word" * 640, "max_tokens": 1}
    async with pair(kv={"gbps": 3.4}, speed=1.0) as groups:
        began = loop.time()
        async with at_most(0.5 * pace()):
            assert (await groups.split(body))[0] == 200
        assert loop.time() - began > 0.18
        await groups.at_rest()
