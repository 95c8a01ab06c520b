"""Tests that prompts of one tenant never hit cached prompts of another, by a real engine's
counters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import GatewayProcess
from tests.real.engine_requests import prompt
from tests.real.engines import BLOCK_TOKENS, MODEL, REAL, Engine, free_ports
from tests.real.gateway_process import gateway
from tests.real.replies import send

CONFIG = """
models: [{{name: tiny, pool: main}}]
pools: {{main: {{endpoints: [{{url: '{0}', max_concurrency: 8}}]}}}}
cache: {{isolate: required, secret: a-secret-of-this-test}}
tenants: [{{name: acme, key: sk-acme}}, {{name: zeta, key: sk-zeta}}]
health: {{timeout: 5s, progress: 60s, interval: 500ms}}
scrape: {{timeout: 5s, interval: 500ms}}
"""
LONG = prompt(400, seed=1)
GENERATED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2},
    "/v1/completions": {"prompt": LONG, "max_tokens": 2},
    "/v1/responses": {"input": LONG, "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2},
}
POOLED: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": LONG},
    "/pooling": {"input": LONG, "task": "embed"},
    "/v1/rerank": {"query": LONG, "documents": ["a dam", "a zoo"]},
    "/v1/score": {"text_1": LONG, "text_2": ["a dam"]},
}


@contextmanager
def _house(folder: Path, options: tuple[str, ...]) -> Iterator[tuple[Engine, GatewayProcess]]:
    if not (REAL / "installed").exists():
        pytest.fail("the real engines are not installed; `make real` does it")
    engine = Engine("tenants", *free_ports(2), 1, None, options=options)
    engine.start()
    try:
        asyncio.run(engine.ready())
        with gateway(folder, CONFIG.format(engine.url)) as front:
            yield engine, front
    finally:
        engine.kill()


@pytest.mark.parametrize(
    ("asked", "options"),
    [(GENERATED, ()), (POOLED, ("--runner", "pooling", "--enable-prefix-caching"))],
    ids=["generated", "pooled"],
)
def test_only_the_tenant_itself_finds_its_prompts_in_the_engine_s_cache(
    tmp_path: Path, asked: dict[str, dict[str, Any]], options: tuple[str, ...]
) -> None:
    with _house(tmp_path, options) as (engine, front):
        found = {path: asyncio.run(_hits(engine, front, path, asked[path])) for path in asked}
    assert {path: hits[:2] for path, hits in found.items()} == dict.fromkeys(asked, (0, 0)), found
    assert all(hits[2] >= BLOCK_TOKENS for hits in found.values()), found


async def _hits(
    engine: Engine, front: GatewayProcess, path: str, body: dict[str, Any]
) -> tuple[int, ...]:
    # Return the engine's cache hits in tokens: for acme, for zeta with the same prompt, and for
    # acme once more.
    found = []
    for tenant in ("acme", "zeta", "acme"):
        before = (await engine.numbers())["prefix_cache_hits_total"]
        headers = {"authorization": f"Bearer sk-{tenant}"}
        reply = await send(front.url, path, {"model": MODEL, **_own(path, body)}, headers=headers)
        assert reply.status == 200, reply
        found.append(round((await engine.numbers())["prefix_cache_hits_total"] - before))
    return tuple(found)


def _own(path: str, body: dict[str, Any]) -> dict[str, Any]:
    # Return the body with the path at the start of its prompt, so that APIs share no prompt.
    def changed(value: Any) -> Any:
        if isinstance(value, str):
            return f"{path} {value}" if value == LONG else value
        if isinstance(value, list):
            return [changed(each) for each in value]
        if isinstance(value, dict):
            return {name: changed(each) for name, each in value.items()}
        return value

    return {name: changed(value) for name, value in body.items()}
