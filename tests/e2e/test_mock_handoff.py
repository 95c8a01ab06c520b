"""Tests of split requests between mock engines, with the KV handoff protocol of each kind of
engine.

The answer proves the transfer, because the decode engine computes it from the KV that it has.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvtransfer.transports.tls_links import TlsLink
from mockgpu.mock_tokenizer import expected_text
from tests.contract.kvtransfer.links import tls_files
from tests.e2e.mock_pair import DIALECTS, PROMPT, MockPair, mock_pair

BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24}


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    words: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return words


async def assert_split_answer_is_right(groups: MockPair, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = await groups.split(body)
    assert status == 200, answer
    assert text_of(answer) == expected_text(body, body["max_tokens"])
    return answer


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_split_request_returns_the_text_of_one_group_alone(dialect: str) -> None:
    async with mock_pair(dialect) as groups:
        for n, words in ((1, 1), (7, 20), (40, 50)):
            await assert_split_answer_is_right(
                groups, {"prompt": f"{n} " + PROMPT * n, "max_tokens": words}
            )
        await groups.at_rest()
        connector = "vllm:mooncake" if dialect == "mooncake" else "vllm:nixl"
        assert await groups.metric(groups.decode, f"{connector}_xfer_time_seconds_count") == 3
        assert await groups.metric(groups.decode, f"{connector}_bytes_transferred_sum") > 100_000
        assert await groups.metric(groups.decode, "mock:tainted_answers_total") == 0


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_concurrent_requests_with_a_common_prefix_get_their_own_text(dialect: str) -> None:
    async with mock_pair(dialect, (2, 4), kv={"transport": "tcp"}) as groups:
        bodies = [
            {"prompt": PROMPT + f"Question {i}? " * (i % 7 + 1), "max_tokens": 5 + i % 9}
            for i in range(40)
        ]
        await asyncio.gather(*(assert_split_answer_is_right(groups, body) for body in bodies))
        await groups.at_rest()


async def test_groups_with_certificates_transfer_kv_over_tls() -> None:
    async with mock_pair(
        "vllm_nixl", (4, 2), kv={"transport": "tcp", "tls": tls_files()}
    ) as groups:
        await assert_split_answer_is_right(groups, {"prompt": PROMPT * 30, "max_tokens": 24})
        await groups.at_rest()
        agent = groups.decode.pd_role and groups.decode.pd_role.agent
        assert agent is not None
        assert [type(line) for line in agent._link_manager._peer_links] == [TlsLink]
        assert await groups.metric(groups.decode, "mock:tainted_answers_total") == 0


@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm", "auto"])
async def test_every_transport_delivers_the_same_kv(transport: str) -> None:
    async with mock_pair("vllm_push", (4, 2), kv={"transport": transport}) as groups:
        await assert_split_answer_is_right(groups, {"prompt": PROMPT * 30, "max_tokens": 24})
        await groups.at_rest()
        assert groups.decode.pd_role is not None
        assert groups.decode.pd_role.agent is not None
        ((_, used),) = groups.decode.pd_role.agent.stats()["moved_bytes"]
        assert used == ("shm" if transport == "auto" else transport)


@pytest.mark.parametrize("model", ["demo-8b", "deepseek-v3"])
@pytest.mark.parametrize("tps", [(4, 2), (2, 4), (8, 8), (1, 16)])
async def test_groups_of_different_tp_sizes_reshard_the_kv(
    tps: tuple[int, int], model: str
) -> None:
    async with mock_pair("vllm_nixl", tps, model=model) as groups:
        await assert_split_answer_is_right(groups, BODY)
        await assert_split_answer_is_right(groups, BODY | {"prompt": PROMPT * 9 + "!"})
        await groups.at_rest()


async def test_the_next_turn_of_a_split_chat_transfers_only_its_new_tokens() -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 40}
    async with mock_pair("vllm_nixl") as groups:
        status, answer = await groups.split(chat, "/v1/chat/completions")
        assert status == 200
        assert text_of(answer) == expected_text(chat, 40)
        assistant_turn = {"role": "assistant", "content": text_of(answer)}
        turn = chat | {
            "messages": [
                *chat["messages"],
                assistant_turn,
                {"role": "user", "content": "And then?"},
            ]
        }
        before = await groups.metric(groups.decode, "vllm:nixl_bytes_transferred_sum")
        status, answer = await groups.split(turn, "/v1/chat/completions")
        assert text_of(answer) == expected_text(turn, 40)
        # The decode group already has the first turn and its response, so it fetches the rest only.
        moved = await groups.metric(groups.decode, "vllm:nixl_bytes_transferred_sum") - before
        assert 0 < moved < before / 4
        await groups.at_rest()
