"""Tests that requests to the mock engine with different cache salts share no cached blocks.

vLLM reads the salt from `cache_salt`, SGLang also from `extra_key`.
"""

from __future__ import annotations

from typing import Any

import pytest

from mockgpu.kv_options import TransferSpec
from mockgpu.tp_group import GroupSpec
from tests.e2e.mock_group import CHAT, SPEC, MockGroup, mock_group

PROMPT = {"messages": [{"role": "user", "content": "word " * 200}], "max_tokens": 2}


async def cached_tokens(group: MockGroup, **members: Any) -> int:
    status, answer = await group.answer("/v1/chat/completions", CHAT | PROMPT | members)
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_only_requests_with_the_same_salt_share_blocks(engine: str) -> None:
    member = {"vllm": "cache_salt", "sglang": "extra_key"}[engine]
    async with mock_group(group_spec_of(engine)) as group:
        assert await cached_tokens(group) == 0
        hit = await cached_tokens(group)
        assert hit > 100
        assert [
            await cached_tokens(group, **{member: value}) for value in ("a", "b", "a", "b")
        ] == [0, 0, hit, hit]
        _, page = await openapi_schema(group)
        requests = page["components"]["schemas"]
        assert all(member in request["properties"] for request in requests.values())


async def test_vllm_ignores_extra_key_and_sglang_combines_it_with_the_salt() -> None:
    async with mock_group(group_spec_of("vllm")) as group:
        await cached_tokens(group)
        assert await cached_tokens(group, extra_key="a") > 100
        _, page = await openapi_schema(group)
        assert "extra_key" not in page["components"]["schemas"]["CompletionRequest"]["properties"]
    async with mock_group(group_spec_of("sglang")) as group:
        await cached_tokens(group, cache_salt="a", extra_key="b")
        assert await cached_tokens(group, cache_salt="a") == 0
        assert await cached_tokens(group, cache_salt="a", extra_key="b") > 100


async def openapi_schema(group: MockGroup) -> tuple[int, Any]:
    async with group.http.get(f"{group.member.url}/openapi.json") as response:
        return response.status, await response.json()


def group_spec_of(engine: str) -> GroupSpec:
    transfer = None if engine == "vllm" else TransferSpec(engine)
    return GroupSpec("demo-8b", SPEC.model, SPEC.gpu, speed=SPEC.speed, transfer=transfer)
