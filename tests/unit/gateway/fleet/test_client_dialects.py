"""Tests of what real clients send: Anthropic's headers, patterns of model names, model lists."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gateway.fleet.test_served_models import CHAT, Engine, models, running

ANTHROPIC = {"anthropic-version": "2023-06-01"}
TENANTS = [
    {
        "name": "acme",
        "key": "sk-acme",
        "keys": ["sk-acme-new"],
        "scoped_keys": [{"key": "sk-agents", "models": ["claude-haiku-*"]}],
    },
    {"name": "lab", "key": "sk-lab", "models": ["qwen"]},
]
BODY = {"max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}


def patterned() -> list[dict[str, Any]]:
    llama, qwen = models("llama", "qwen")
    return [llama | {"aliases": ["claude-*", "gpt-*"]}, qwen | {"aliases": ["claude-haiku-*"]}]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_name_that_matches_a_pattern_is_served_and_stands_in_the_answer(
    stream: bool,
) -> None:
    engine = Engine("llama", "qwen")
    async with running([engine], patterned()) as gateway:
        for name in ("claude-opus-4-8", "claude-haiku-4-5", "gpt-5", "qwen"):
            assert await gateway.ask(name, stream=stream) == (200, name)
        assert engine.asked == ["llama", "qwen", "llama", "qwen"]
        assert (await gateway.ask("mistral"))[0] == 404
        assert await gateway.names() == ["llama", "qwen"]
        async with gateway.http.get(f"{gateway.app.url}/v1/models/gpt-5") as answer:
            assert (await answer.json())["id"] == "gpt-5"


async def test_a_pattern_of_a_model_that_no_endpoint_lists_is_not_served_by_another() -> None:
    async with running([Engine("llama")], patterned()) as gateway:
        status, message = await gateway.ask("claude-haiku-4-5")
        assert (status, "lists 'qwen'" in message) == (404, True)
        assert await gateway.ask("claude-opus-4-8") == (200, "claude-opus-4-8")


@pytest.mark.parametrize("endpoint", [{}, {"api_key": "sk-engine"}])
async def test_either_header_carries_the_key_and_neither_reaches_the_engine(
    endpoint: dict[str, Any],
) -> None:
    engine = Engine("llama", "qwen")
    async with running([engine], patterned(), endpoint, tenants=TENANTS) as gateway:
        statuses = []
        for headers in (
            {"x-api-key": "sk-acme"},
            bearer("sk-acme-new"),
            {"x-api-key": "sk-acme", **bearer("sk-acme")},
            {"x-api-key": "sk-acme", **bearer("sk-lab")},
            {"x-api-key": "sk-other"},
            {},
        ):
            url = gateway.app.url + CHAT
            async with gateway.http.post(
                url, json=BODY | {"model": "qwen"}, headers=headers
            ) as got:
                statuses.append(got.status)
        assert statuses == [200, 200, 200, 401, 401, 401]
        for seen in engine.headers:
            assert "x-api-key" not in seen
            assert seen.get("authorization", "Bearer sk-engine") == "Bearer sk-engine"


async def test_a_key_sees_and_uses_only_its_models() -> None:
    engine = Engine("llama", "qwen")
    async with running([engine], patterned(), tenants=TENANTS) as gateway:

        async def status(key: str, model: str) -> int:
            url, body = gateway.app.url + CHAT, BODY | {"model": model}
            async with gateway.http.post(url, json=body, headers=bearer(key)) as answer:
                return answer.status

        async def listed(key: str) -> list[str]:
            url = gateway.app.url + "/v1/models"
            async with gateway.http.get(url, headers=bearer(key)) as answer:
                return [card["id"] for card in (await answer.json())["data"]]

        assert [await status("sk-lab", name) for name in ("qwen", "llama", "gpt-5")] == [
            200,
            404,
            404,
        ]
        assert [
            await status("sk-agents", name) for name in ("claude-haiku-4", "claude-opus", "qwen")
        ] == [200, 404, 404]
        assert [await status("sk-acme", name) for name in ("llama", "claude-opus")] == [200, 200]
        assert await listed("sk-lab") == ["qwen"]
        assert await listed("sk-agents") == []
        assert await listed("sk-acme") == ["llama", "qwen"]
        url = gateway.app.url + "/v1/models/"
        for name, expected in (("claude-haiku-4", 200), ("qwen", 404)):
            async with gateway.http.get(url + name, headers=bearer("sk-agents")) as answer:
                assert answer.status == expected


async def test_the_dialect_of_a_request_reaches_the_engine() -> None:
    engine = Engine("llama", "qwen")
    async with running([engine], patterned()) as gateway:
        headers = ANTHROPIC | {"anthropic-beta": "tools-1,cache-2", "x-claude-code-session-id": "s"}
        url = f"{gateway.app.url}{CHAT}?beta=true"
        async with gateway.http.post(
            url, json=BODY | {"model": "gpt-5"}, headers=headers
        ) as answer:
            assert answer.status == 200
        (seen,) = engine.headers
        assert seen["anthropic-version"] == "2023-06-01"
        assert seen["anthropic-beta"] == "tools-1,cache-2"
        assert "x-claude-code-session-id" not in seen


async def test_models_are_listed_in_anthropics_shape_for_its_clients() -> None:
    async with running([Engine("llama", "qwen")], patterned(), tenants=TENANTS) as gateway:
        url, headers = gateway.app.url + "/v1/models", ANTHROPIC | {"x-api-key": "sk-acme"}
        async with gateway.http.get(url, headers=headers) as answer:
            page = await answer.json()
        assert [card["id"] for card in page["data"]] == ["llama", "qwen"]
        assert (page["data"][0]["type"], page["has_more"]) == ("model", False)
        async with gateway.http.get(url + "/claude-opus-4-8", headers=headers) as answer:
            assert (await answer.json())["id"] == "claude-opus-4-8"
        async with gateway.http.get(url + "/mistral", headers=headers) as answer:
            error = await answer.json()
            assert (answer.status, error["error"]["type"]) == (404, "not_found_error")
            assert error["request_id"] == answer.headers["x-request-id"]
        async with gateway.http.get(url, headers=ANTHROPIC) as answer:
            assert (answer.status, (await answer.json())["type"]) == (401, "error")
