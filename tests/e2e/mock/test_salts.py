"""Cache salts of the mock: requests with other ones share no cached block, in the member that each engine reads."""

from __future__ import annotations

from typing import Any

import pytest

from mockgpu.group import GroupSpec
from mockgpu.handoff_options import TransferSpec
from tests.e2e.mock_group import CHAT, SPEC, Mock, mock

PROMPT = {"messages": [{"role": "user", "content": "word " * 200}], "max_tokens": 2}


async def cached(group: Mock, **members: Any) -> int:
    status, answer = await group.answer("/v1/chat/completions", CHAT | PROMPT | members)
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_blocks_are_shared_by_requests_with_the_same_salt_alone(engine: str) -> None:
    member = {"vllm": "cache_salt", "sglang": "extra_key"}[engine]
    async with mock(spec_of(engine)) as group:
        assert await cached(group) == 0
        hit = await cached(group)
        assert hit > 100
        assert [await cached(group, **{member: value}) for value in ("a", "b", "a", "b")] == [0, 0, hit, hit]
        _, page = await page_of(group)
        requests = page["components"]["schemas"]
        assert all(member in each["properties"] for each in requests.values())


async def test_vllm_knows_no_extra_key_and_sglang_takes_both_together() -> None:
    async with mock(spec_of("vllm")) as group:
        await cached(group)
        assert await cached(group, extra_key="a") > 100
        _, page = await page_of(group)
        assert "extra_key" not in page["components"]["schemas"]["CompletionRequest"]["properties"]
    async with mock(spec_of("sglang")) as group:
        await cached(group, cache_salt="a", extra_key="b")
        assert await cached(group, cache_salt="a") == 0
        assert await cached(group, cache_salt="a", extra_key="b") > 100


async def page_of(group: Mock) -> tuple[int, Any]:
    async with group.http.get(f"{group.member.url}/openapi.json") as response:
        return response.status, await response.json()


def spec_of(engine: str) -> GroupSpec:
    transfer = None if engine == "vllm" else TransferSpec(engine)
    return GroupSpec("demo-8b", SPEC.model, SPEC.gpu, speed=SPEC.speed, transfer=transfer)
