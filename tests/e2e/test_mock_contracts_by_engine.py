"""Tests of how mocks of each kind of engine handle split requests: push mode, roles, refusals.

vLLM's pull mode is tested in test_mock_contracts.py.
"""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from kvtransfer.dialects import get_dialect, standalone_members
from mockgpu.mock_tokenizer import expected_text, token_bytes, token_ids
from tests.duration_limits import PATIENCE_S, at_most, pace
from tests.e2e.mock_pair import DIALECTS, PROMPT, mock_pair, rooms

BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24}
GIVE = {"do_remote_decode": True, "do_remote_prefill": False}


async def test_push_reports_its_mode_and_needs_no_ticket() -> None:
    async with mock_pair("vllm_push") as groups:
        prefill = BODY | {"max_tokens": 1, "min_tokens": 1, "kv_transfer_params": GIVE}
        status, answer = await groups.post(groups.prefill, prefill, "abc")
        assert status == 200, answer
        params = answer["kv_transfer_params"]
        assert params["transfer_mode"] == "push"
        assert "penstock_ticket" not in params


@pytest.mark.parametrize("field", ["remote_engine_id", "remote_host", "remote_port", "tp_size"])
async def test_a_push_that_does_not_name_its_source_crashes_the_engine(field: str) -> None:
    async with mock_pair("vllm_push") as groups:
        _, take = groups.legs(BODY, 7)
        del take["kv_transfer_params"][field]
        assert (await groups.post(groups.decode, take, "r7"))[0] == 500
        assert await groups.metric(groups.decode, "mock:malformed_handoff_total") == 1


@pytest.mark.parametrize("dialect", ["vllm_push", "mooncake", "sglang"])
async def test_decode_times_out_when_prefill_never_comes(dialect: str) -> None:
    async with mock_pair(dialect, kv={"wait_s": 0.4 * pace()}) as groups:
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
    async with mock_pair(dialect) as groups:
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


async def test_the_mooncake_bootstrap_server_identifies_the_prefill_engine_until_it_restarts() -> (
    None
):
    async with mock_pair("mooncake", kv={"wait_s": 1.0}) as groups:
        assert groups.prefill.pd_role is not None
        async with groups.http.get(groups.prefill.pd_role.bootstrap_url + "/query") as response:
            page = await response.json()
        assert page["0"]["engine_id"] == groups.prefill.pd_role.identity.engine_id
        assert page["0"]["worker_addr"]["0"]["0"] == groups.prefill.pd_role.identity.address
        number = next(rooms)
        _, stale = groups.legs(BODY, number)
        groups.prefill.group.fail_rank(0)
        async with groups.http.delete(groups.prefill.url + "/mock/fault") as response:
            assert response.status == 200
        assert (await groups.post(groups.decode, stale))[0] == 500
        assert (await groups.split(BODY))[0] == 200
        await groups.at_rest()


async def test_mooncake_roles_are_not_interchangeable() -> None:
    for wrong in ("prefill", "decode"):
        async with mock_pair("mooncake") as groups:
            give, take = groups.legs(BODY, 1)
            member, body = (groups.prefill, take) if wrong == "prefill" else (groups.decode, give)
            assert (await groups.post(member, body))[0] == 500
            assert (await groups.state(member))["malformed_handoffs"] == 1
            assert member.group.is_dead

            # SGLang


async def test_sglang_errors_are_flat_and_a_missing_or_used_room_is_refused() -> None:
    async with mock_pair("sglang") as groups:
        status, answer = await groups.post(groups.prefill, BODY)
        assert (status, answer["object"], answer["code"]) == (400, "error", 400)
        assert "room" in answer["message"]
        number = next(rooms)
        give, take = groups.legs(BODY, number)
        legs = await asyncio.gather(
            groups.post(groups.prefill, give), groups.post(groups.decode, take)
        )
        assert [status for status, _ in legs] == [200, 200]
        assert (await groups.post(groups.prefill, give))[0] == 400
        assert (await groups.state(groups.prefill))["malformed_handoffs"] == 2


async def test_sglang_prefill_stops_after_one_token_and_answers_after_the_transfer() -> None:
    async with mock_pair("sglang") as groups:
        number = next(rooms)
        give, take = groups.legs(BODY, number)
        leg = asyncio.create_task(groups.post(groups.prefill, give))
        done, _ = await asyncio.wait([leg], timeout=0.1)
        assert not done
        assert (await groups.post(groups.decode, take))[0] == 200
        status, answer = await leg
        assert (status, answer["usage"]["completion_tokens"]) == (200, 1)


async def test_the_sglang_bootstrap_server_reports_the_route() -> None:
    async with mock_pair("sglang", (2, 1)) as groups:
        assert groups.prefill.pd_role is not None
        url = groups.prefill.pd_role.bootstrap_url
        async with groups.http.get(
            f"{url}/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1"
        ) as response:
            assert (await response.json())["attn_tp_size"] == 2
        async with groups.http.get(f"{url}/health") as response:
            assert response.status == 200


async def test_a_prefill_leg_that_is_aborted_frees_its_kv_and_fails_decode() -> None:
    async with mock_pair("sglang", kv={"wait_s": 0.5}) as groups:
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

        # TensorRT-LLM


async def test_trtllm_refuses_unknown_fields() -> None:
    async with mock_pair("trtllm") as groups:
        for field in ("kv_transfer_params", "store", "return_token_ids"):
            status, answer = await groups.post(groups.prefill, BODY | {field: None})
            assert (status, answer["object"], answer["param"]) == (400, "error", field)


async def test_the_first_token_of_trtllm_comes_from_the_context_server() -> None:
    async with mock_pair("trtllm") as groups:
        context_params = {"request_type": "context_only", "disagg_request_id": next(rooms)}
        _, first = await groups.post(
            groups.prefill, BODY | {"disaggregated_params": context_params}
        )
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
async def test_trtllm_refuses_first_tokens_that_no_context_server_computed(
    wrong: dict[str, Any],
) -> None:
    async with mock_pair("trtllm") as groups:
        context_params = {"request_type": "context_only", "disagg_request_id": next(rooms)}
        _, first = await groups.post(
            groups.prefill, BODY | {"disaggregated_params": context_params}
        )
        params = first["choices"][0]["disaggregated_params"] | {"request_type": "generation_only"}
        status, _ = await groups.post(
            groups.decode, BODY | {"disaggregated_params": params | wrong}
        )
        assert status == 400


async def test_trtllm_requires_new_ids_and_another_server() -> None:
    async with mock_pair("trtllm") as groups:
        number = next(rooms)
        context_params = {"request_type": "context_only", "disagg_request_id": number}
        _, first = await groups.post(
            groups.prefill, BODY | {"disaggregated_params": context_params}
        )
        params = first["choices"][0]["disaggregated_params"] | {"request_type": "generation_only"}
        for body in (
            context_params,
            {"request_type": "context_only", "disagg_request_id": 5},
            {"request_type": "context_only"},
            {"request_type": "nothing"},
            params | {"first_gen_tokens": None},
            params | {"encoded_opaque_state": "?"},
        ):
            assert (await groups.post(groups.prefill, BODY | {"disaggregated_params": body}))[
                0
            ] == 400
        assert (await groups.post(groups.prefill, BODY | {"disaggregated_params": params}))[
            0
        ] == 400
        assert (await groups.state(groups.prefill))["malformed_handoffs"] == 7


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_request_without_handoff_fields_is_served_by_one_group(dialect: str) -> None:
    async with mock_pair(dialect) as groups:
        status, answer = await groups.post(groups.decode, BODY)
        if dialect == "sglang":
            assert status == 400
        else:
            assert answer["choices"][0]["text"] == expected_text(BODY, 24)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_either_group_alone_answers_repeated_probes(dialect: str) -> None:
    probe = {"prompt": "1", "max_tokens": 1} | standalone_members(get_dialect(dialect).engine)
    async with mock_pair(dialect) as groups:
        for group in (groups.prefill, groups.decode) * 2:
            status, answer = await groups.post(group, probe)
            assert (status, answer["usage"]["completion_tokens"]) == (200, 1)
        await groups.at_rest()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_fields_of_another_dialect_are_counted_as_malformed(dialect: str) -> None:
    foreign = (
        {"kv_transfer_params": GIVE} if dialect in ("sglang", "trtllm") else {"bootstrap_room": 5}
    )
    async with mock_pair(dialect) as groups:
        assert (await groups.post(groups.decode, BODY | foreign))[0] in (400, 500)
        if dialect != "trtllm":
            assert (await groups.state(groups.decode))["malformed_handoffs"] == 1


async def test_groups_of_another_fleet_version_or_model_get_no_kv() -> None:
    for other in ({"key": "another fleet"}, {"version": (0, 30)}, {"scale": 1 / 64}):
        async with mock_pair(decode=other) as groups:
            status, answer = await groups.split(BODY)
            assert status == 500
            assert answer["error"]["message"].startswith("KV load failed")


async def test_links_have_the_configured_bandwidth() -> None:
    # The KV of 640 tokens of an 8B model is 84 MB: 0.2 s at 3.4 Gbit/s.
    loop = asyncio.get_running_loop()
    body = {"prompt": "word" * 640, "max_tokens": 1}
    async with mock_pair(kv={"gbps": 3.4}, speed=1.0) as groups:
        began = loop.time()
        async with at_most(0.5 * pace()):
            assert (await groups.split(body))[0] == 200
        assert loop.time() - began > 0.18
        await groups.at_rest()
